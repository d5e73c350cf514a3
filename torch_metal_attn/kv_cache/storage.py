"""The tensors of a cache, in blocks. A block is a page, or has the rows of one sequence."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Any, Literal

import torch
from torch import Tensor

from torch_metal_attn.call.arguments import (
    INT32_MAX,
    MAX_HEAD_DIM,
    MAX_VALUE_HEAD_DIM,
    as_bool,
    as_int,
    as_int_at_least,
    check_tensor,
    on_device,
)
from torch_metal_attn.kv_cache.windows import WindowGroups
from torch_metal_attn.ops.differentiation import check_writes
from torch_metal_attn.ops.names import ArgumentNames
from torch_metal_attn.quantisation import (
    DTYPES,
    ELEMENTS,
    FORMATS,
    check_columns,
    check_hadamard,
    sizes,
)
from torch_metal_attn.wording import value_text

Layout = Literal["NHD", "HND"]
# Options of `append`.
ROTARY = ("q", "rotary_cos", "rotary_sin", "rotary_interleaved", "rotary_first_column")
# Further options of `append_kv`, and options that it shares with attention.
_Q_ROTARY = ("rotate_q_by_token", "rotary_from_leftpad")
_BOTH = ("block_table", "cache_batch_idx", "leftpad_k", "k_scale", "v_scale", "hadamard")

# Options of attention to listed keys, which `_listed_step` runs.
LISTS = ("indices", "kv_block_size", "q_block_size")
# More layers than any model has. Each layer takes memory, and host time when a cache is created.
_MAX_LAYERS = 2**16


@dataclass(frozen=True)
class LayerCache:
    """One layer's tensors, as `flash_attn_with_kvcache` takes them.

    k_cache: (blocks, rows, Hkv, D), v_cache: the same with Dv; `torch_metal_attn.quantisation`
    describes quantised tensors and their scales. Scales are None without quantisation. With
    values_in_keys, v_cache is a view of k_cache, and v_scale is a view of k_scale. hadamard:
    columns of the blocks in which rows are rotated, or 0.
    """

    k_cache: Tensor
    v_cache: Tensor
    k_scale: Tensor | None
    v_scale: Tensor | None
    values_in_keys: bool = False
    hadamard: int = 0

    def __post_init__(self) -> None:
        if self.values_in_keys:
            for v, k in (("v_cache", "k_cache"), ("v_scale", "k_scale")):
                if (columns := getattr(self, v)) is not None:
                    self.__dict__[v] = getattr(self, k)[..., : columns.shape[-1]]

    def __setstate__(self, state: dict[str, Any]) -> None:
        # Unpickled tensors do not share memory, and only k_cache is written and copied.
        self.__dict__.update(state)
        self.__post_init__()

    def by_block(self) -> list[Tensor]:
        """The tensors that have blocks. Excludes views, and the scales per head of fp8_e4m3."""
        tensors = [self.k_cache, self.k_scale]
        if not self.values_in_keys:
            tensors += [self.v_cache, self.v_scale]
        return [t for t in tensors if t is not None and t.dim() == 4]


@dataclass
class ExportedSequence:
    """A copy of one sequence of a `PagedKVCache`. It can be pickled."""

    layout: dict[str, Any]
    namespace: Any
    tokens: list[int]
    lengths: list[int]
    accepted: int
    held: list[list[bool]]  # by group: True for each page that was in use
    pages: list[Tensor]
    recent: Any


class Storage:
    """`num_layers` caches of blocks. Layers of different groups share tensors, never pages."""

    def __init__(
        self,
        blocks: int,
        rows: int,
        num_kv_heads: int,
        head_dim: int,
        v_head_dim: int | None = None,
        num_layers: int = 1,
        dtype: torch.dtype = torch.float16,
        device: torch.device | str = "cpu",
        format: str | None = None,
        layout: Layout = "NHD",
        *,
        k_scale: Tensor | None = None,
        v_scale: Tensor | None = None,
        v_format: str | None = None,
        hadamard: int = 0,
        values_in_keys: bool = False,
        recent: int = 0,
        windows: Sequence[int] | None = None,
    ) -> None:
        num_kv_heads = as_int_at_least("num_kv_heads", num_kv_heads, 1, INT32_MAX)
        head_dim = as_int_at_least("head_dim", head_dim, 1, MAX_HEAD_DIM)
        v_head_dim = head_dim if v_head_dim is None else v_head_dim
        v_head_dim = as_int_at_least("v_head_dim", v_head_dim, 1, MAX_VALUE_HEAD_DIM)
        num_layers = as_int_at_least("num_layers", num_layers, 1, _MAX_LAYERS)
        values_in_keys = as_bool("values_in_keys", values_in_keys)
        if dtype not in ELEMENTS:
            raise ValueError(
                f"dtype is {value_text(dtype)}; it must be float32, float16 or bfloat16"
            )
        if layout not in ("NHD", "HND"):
            raise ValueError(f"layout is {value_text(layout)}; it must be NHD or HND")
        if v_format is not None and (format is None or values_in_keys):
            reason = "values_in_keys" if values_in_keys else "no format"
            raise ValueError(f"v_format is {value_text(v_format)} with {reason}; leave it out")
        for n, x in (("format", format), ("v_format", v_format)):
            if x is not None and x not in FORMATS:
                raise ValueError(f"{n} is {value_text(x)}; it must be one of {', '.join(FORMATS)}")
        hadamard = check_hadamard(hadamard, {"head_dim": head_dim, "v_head_dim": v_head_dim})
        if hadamard and format is None:
            raise ValueError(f"hadamard is {hadamard} with no format; leave it out")
        v_format = format if v_format is None else v_format
        if format is not None and v_format is not None:
            check_columns("head_dim", head_dim, format)
            check_columns("v_head_dim", v_head_dim, v_format)
        if values_in_keys:
            if v_head_dim > head_dim:
                raise ValueError(
                    f"v_head_dim is {v_head_dim} and head_dim {head_dim}; with values_in_keys it "
                    f"must be in 1..{head_dim}"
                )
            if v_scale is not None:
                raise ValueError("v_scale is given with values_in_keys; pass only k_scale")
        self.values_in_keys = values_in_keys
        recent = as_int_at_least("recent", recent, 0, INT32_MAX // 2)
        if recent and format is None:
            raise ValueError(
                f"recent is {recent} with no format, so all rows are in full precision; leave "
                "recent out"
            )
        for name, scale, kind in (("k_scale", k_scale, format), ("v_scale", v_scale, v_format)):
            if scale is not None:
                if kind != "fp8_e4m3":
                    raise ValueError(f"{name} is given and its format is {kind}; leave it out")
                _check_scale(name, scale, num_kv_heads)
        self._new_dtypes = [dtype]
        if format is None and dtype != torch.float32:
            # A half-precision cache also accepts float32 rows, which are rounded when written.
            self._new_dtypes.append(torch.float32)
        self.groups = WindowGroups(windows, num_layers)
        if recent and max(self.groups.windows) >= 0:
            raise ValueError(
                f"recent is {recent} with windows {self.groups.windows}; attention to recent rows "
                "has no windows: leave recent or windows out"
            )
        device = self.device = on_device(device)
        if device.type == "meta":
            raise ValueError("device is meta, where tensors have no values")
        self._new_shapes = {"k": (num_kv_heads, head_dim), "v": (num_kv_heads, v_head_dim)}
        self._sizes = num_kv_heads, head_dim, v_head_dim, num_layers, dtype, device
        self._rows, self._layout = rows, layout
        self._kind: dict[str, Any] = {"page_size": rows, "num_kv_heads": num_kv_heads}
        self._kind |= {"head_dim": head_dim, "v_head_dim": v_head_dim, "dtype": dtype}
        self._kind |= {"num_layers": num_layers, "windows": self.groups.windows}
        self._kind |= {"format": format, "v_format": v_format, "hadamard": hadamard}
        self._kind |= {"values_in_keys": values_in_keys, "recent": recent}

        def empty(blocks: int, columns: int, dtype: torch.dtype) -> Tensor:
            sizes = (rows, num_kv_heads) if layout == "NHD" else (num_kv_heads, rows)
            x = torch.zeros((blocks, *sizes, columns), dtype=dtype, device=device)
            return x if layout == "NHD" else x.transpose(1, 2)

        def operand(
            blocks: int, columns: int, format: str | None, scale: Tensor | None
        ) -> tuple[Tensor, Tensor | None]:
            if format is None:
                return empty(blocks, columns, dtype), None
            data_columns, scale_columns = sizes(format, columns)
            data = empty(blocks, data_columns, DTYPES[format])
            if format == "fp8_e4m3":
                ones = torch.ones(num_kv_heads, device=device)
                return data, ones if scale is None else scale
            return data, empty(blocks, scale_columns, torch.float16)

        self._stored = []
        for _ in range(max(self.groups.places) + 1):
            k, own_k_scale = operand(blocks, head_dim, format, k_scale)
            # With values_in_keys v is empty: only its number of columns is used.
            v_blocks = 0 if values_in_keys else blocks
            v, own_v_scale = operand(v_blocks, v_head_dim, v_format, v_scale)
            scales = own_k_scale, own_v_scale
            self._stored.append(LayerCache(k, v, *scales, values_in_keys, hadamard))
        self.layers = self._layers()

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.layers = self._layers()  # unpickled tensors do not share memory

    def _layers(self) -> list[LayerCache]:
        """Each layer's tensors. A cascade finds the layer by its k_cache, a distinct object."""
        layers = [self._stored[place] for place in self.groups.places]
        if len(layers) == len(self._stored):
            return layers
        return [replace(layer, k_cache=layer.k_cache.detach()) for layer in layers]

    def without_format(self, blocks: int, rows: int) -> "Storage":
        """Storage for the same rows in full precision."""
        return Storage(blocks, rows, *self._sizes, values_in_keys=self.values_in_keys)

    def check_layer(self, layer: int) -> None:
        if not 0 <= as_int("layer", layer) < len(self.layers):
            raise ValueError(f"layer is {layer}; it must be in 0..{len(self.layers) - 1}")

    def run(
        self,
        op: str,
        layer: int,
        new: tuple[Tensor, ...],
        cache_seqlens: Tensor,
        *,
        check_only: bool = False,
        **options: Any,
    ) -> Any:
        """Run `append_kv` or `decode_step` on a layer, or only the op's checks with check_only."""
        ops = torch.ops.metal_attn_explain if check_only else torch.ops.metal_attn
        caches, kept = self.operands(layer)
        if self.values_in_keys and options.get("rotary_cos") is not None:
            options = {"rotary_first_column": self._new_shapes["v"][1]} | options
        arguments, options = (*new, *caches, cache_seqlens), kept | options
        if any(name in options for name in LISTS):
            return _listed_step(arguments, options, check_only)
        result = ArgumentNames().run(getattr(ops, op), arguments, options)
        if check_only:
            check_writes(op, arguments, options)
        return result

    def operands(self, layer: int) -> tuple[tuple[Tensor, Tensor], dict[str, Any]]:
        """k_cache and v_cache, (blocks, Hkv, rows, D), and the op's options for their format."""
        cache = self.layers[layer]
        kept: dict[str, Any] = {"hadamard": cache.hadamard} if cache.hadamard else {}
        kept |= {
            name: scale.transpose(1, 2) if scale is not None and scale.dim() == 4 else scale
            for name, scale in (("k_scale", cache.k_scale), ("v_scale", cache.v_scale))
        }
        return (cache.k_cache.transpose(1, 2), cache.v_cache.transpose(1, 2)), kept

    def move_paths(
        self,
        rounds: Sequence[Sequence[Sequence[tuple[int, int]]]],
        starts: Sequence[int],
        place: Callable[[int, int], tuple[int, int]],
    ) -> None:
        """Move rows by the `trees.moves` of several trees. place(i, row): the block and row."""
        for copies in zip_longest(*rounds, fillvalue=()):
            moves = [(i, move) for i, tree in enumerate(copies) for move in tree]
            self.move_rows([[place(i, starts[i] + row) for row in move] for i, move in moves])

    def move_rows(self, moves: Sequence[Sequence[tuple[int, int]]]) -> None:
        """Copy rows (block, row) to others in all layers. No row may be both read and written."""
        if not moves:
            return
        by_row = self._layout == "NHD"  # the heads of a row are adjacent
        numbers: dict[int, list[Tensor]] = {}  # by heads: source rows and destination rows
        for tensor in self._tensors():
            heads = 1 if by_row else tensor.shape[2]
            rows = tensor.flatten(0, 1) if by_row else tensor.transpose(1, 2).flatten(0, 2)
            if heads not in numbers:
                sides = [[(b * heads, r) for b, r in side] for side in zip(*moves, strict=True)]
                numbers[heads] = [
                    self.indices([(b + h) * self._rows + r for b, r in side for h in range(heads)])
                    for side in sides
                ]
            torch.ops.metal_attn.copy_pages(rows, *numbers[heads])

    def copy(self, source: list[int], destination: list[int]) -> None:
        """Copy blocks `source` to blocks `destination` in all layers. They must not overlap."""
        if not source:
            return
        src, dst = self.indices(source), self.indices(destination)
        for tensor in self._tensors():
            torch.ops.metal_attn.copy_pages(tensor, src, dst)

    def kind(self) -> dict[str, Any]:
        """The properties that another cache must share to hold the same rows."""
        layer = self.layers[0]
        scales = (layer.k_scale, None if self.values_in_keys else layer.v_scale)
        per_head = [s.tolist() for s in scales if s is not None and s.dim() == 1]
        return self._kind | {"scales of fp8_e4m3": per_head}

    def check_kind(self, exported: Any) -> None:
        if not isinstance(exported, ExportedSequence):
            raise TypeError(
                f"exported has type {type(exported).__name__}; it must be what export_sequence "
                "returns"
            )
        for name, value in self.kind().items():
            if exported.layout[name] != value:
                raise ValueError(
                    f"exported is from a cache with {name} {exported.layout[name]}, and this cache "
                    f"has {value}; import it into a cache of the same layout"
                )

    def read(self, blocks: list[int], device: torch.device) -> list[Tensor]:
        places = self.indices(blocks)
        return [x.detach()[places].to(device) for x in self._tensors()]

    def fill(self, blocks: list[int], rows: list[Tensor]) -> None:
        """Write what `read` returned to these blocks."""
        places = self.indices(blocks)
        with torch.no_grad():
            for tensor, new in zip(self._tensors(), rows, strict=True):
                tensor[places] = new.to(tensor.device)

    def _tensors(self) -> list[Tensor]:
        return [x for layer in self._stored for x in layer.by_block()]

    def indices(self, values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=self.device)


def _listed_step(tensors: tuple[Tensor, ...], options: dict[str, Any], check_only: bool) -> Any:
    """Append, then attend to listed keys. No single kernel can write rows and read listed rows."""
    q, k, v, k_cache, v_cache, cache_seqlens = tensors
    rotary = {name: options.pop(name) for name in (*ROTARY, *_Q_ROTARY) if name in options}
    if rotary.get("rotary_cos") is not None:
        rotary["q"] = q = q.clone()
    append = (k, v, k_cache, v_cache, cache_seqlens)
    appended = {name: options[name] for name in _BOTH if name in options} | rotary
    attend = (q, k_cache, v_cache), options | {"seqused_k": cache_seqlens + k.shape[2]}
    run, explained, ops = ArgumentNames().run, torch.ops.metal_attn_explain, torch.ops.metal_attn
    # A call that attention refuses must leave the cache as it is.
    run(explained.flash_decode, *attend)
    if check_only:
        run(explained.append_kv, append, appended)
        check_writes("append_kv", append, appended)
        return None
    run(ops.append_kv, append, appended)
    return run(ops.flash_decode, *attend)


def _check_scale(name: str, scale: Tensor, heads: int) -> None:
    check_tensor(name, scale)
    if scale.shape != (heads,) or scale.dtype != torch.float32:
        raise ValueError(
            f"{name} has shape {tuple(scale.shape)} and dtype {scale.dtype}; it must be ({heads},) "
            "and float32"
        )

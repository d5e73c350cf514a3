"""The tensors of a cache, in blocks: pages, or whole sequences."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any, Literal

import torch
from torch import Tensor

from torch_metal_attn.call.arguments import (
    INT32_MAX,
    MAX_HEAD_DIM,
    MAX_VALUE_HEAD_DIM,
    check_tensor,
    flag,
    natural,
    on_device,
    whole,
)
from torch_metal_attn.kv_cache.recent import NoRecentRows, RecentRows
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

Layout = Literal["NHD", "HND"]
# Options of `append`.
ROTARY = ("q", "rotary_cos", "rotary_sin", "rotary_interleaved", "rotary_first_column")

# Options of the ops that a caller must not replace: he would read or write other rows.
_GIVEN = ("block_table", "cache_batch_idx", "cache_seqlens", "hadamard", "k_scale", "v_scale")
_ALL_OPTIONS = [x.name for x in torch.ops.metal_attn.decode_step.default._schema.arguments[5:]]
_STEP_OPTIONS = [n for n in _ALL_OPTIONS if n not in _GIVEN and "seqlen" not in n]
# More than any model has: each takes memory, and the host's time before any is used.
_MOST_LAYERS = 2**16


@dataclass(frozen=True)
class LayerCache:
    """One layer's tensors, as `flash_attn_with_kvcache` takes them.

    k_cache: (blocks, rows, Hkv, D), v_cache: the same with Dv; `torch_metal_attn.quantisation`
    describes quantised ones and their scales, which are None without quantisation. With
    values_in_keys v_cache is a view of k_cache, and v_scale of k_scale. hadamard: columns of the
    blocks in which rows are rotated, or 0.
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
        """The tensors that have blocks, each element once: not fp8_e4m3's scales per head."""
        tensors = [self.k_cache, self.k_scale]
        if not self.values_in_keys:
            tensors += [self.v_cache, self.v_scale]
        return [t for t in tensors if t is not None and t.dim() == 4]


class Storage:
    """`num_layers` caches of `blocks` blocks of `rows` rows."""

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
    ) -> None:
        num_kv_heads = natural("num_kv_heads", num_kv_heads, 1, INT32_MAX)
        head_dim = natural("head_dim", head_dim, 1, MAX_HEAD_DIM)
        v_head_dim = head_dim if v_head_dim is None else v_head_dim
        v_head_dim = natural("v_head_dim", v_head_dim, 1, MAX_VALUE_HEAD_DIM)
        num_layers = natural("num_layers", num_layers, 1, _MOST_LAYERS)
        values_in_keys = flag("values_in_keys", values_in_keys)
        if dtype not in ELEMENTS:
            raise ValueError(f"dtype is {dtype!r}; it must be float32, float16 or bfloat16")
        if layout not in ("NHD", "HND"):
            raise ValueError(f"layout is {layout!r}; it must be NHD or HND")
        if v_format is not None and (format is None or values_in_keys):
            beside = "values_in_keys" if values_in_keys else "no format"
            raise ValueError(f"v_format is {v_format!r} with {beside}; leave it out")
        for name, given in (("format", format), ("v_format", v_format)):
            if given is not None and given not in FORMATS:
                raise ValueError(f"{name} is {given!r}; it must be one of {', '.join(FORMATS)}")
        rotated = {"head_dim": head_dim, "v_head_dim": v_head_dim}
        hadamard = check_hadamard(hadamard, rotated)
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
                raise ValueError("v_scale is given with values_in_keys; k_scale is for both")
        self.values_in_keys = values_in_keys
        recent = natural("recent", recent, 0, INT32_MAX // 2)
        if recent and format is None:
            raise ValueError(
                f"recent is {recent} with no format, so that all rows are in full precision; leave "
                "it out"
            )
        for name, scale, own in (("k_scale", k_scale, format), ("v_scale", v_scale, v_format)):
            if scale is not None:
                if own != "fp8_e4m3":
                    raise ValueError(f"{name} is given and its format is {own}; leave it out")
                _check_scale(name, scale, num_kv_heads)
        self._new_dtypes = [dtype]
        if format is None and dtype != torch.float32:
            # Half precision also takes float32 rows, which are rounded as they are written.
            self._new_dtypes.append(torch.float32)
        device = self.device = on_device(device)
        if device.type == "meta":
            raise ValueError("device is meta, where tensors have no values")
        self._new_shapes = {"k": (num_kv_heads, head_dim), "v": (num_kv_heads, v_head_dim)}
        self._sizes = num_kv_heads, head_dim, v_head_dim, num_layers, dtype, device
        self._rows, self._layout = rows, layout

        def empty(blocks: int, columns: int, dtype: torch.dtype) -> Tensor:
            if layout == "NHD":
                shape = (blocks, rows, num_kv_heads, columns)
                return torch.zeros(shape, dtype=dtype, device=device)
            shape = (blocks, num_kv_heads, rows, columns)
            return torch.zeros(shape, dtype=dtype, device=device).transpose(1, 2)

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

        self.layers = []
        for _ in range(num_layers):
            k, own_k_scale = operand(blocks, head_dim, format, k_scale)
            # With values_in_keys v is empty: only its number of columns is used.
            v_blocks = 0 if values_in_keys else blocks
            v, own_v_scale = operand(v_blocks, v_head_dim, v_format, v_scale)
            self.layers.append(LayerCache(k, v, own_k_scale, own_v_scale, values_in_keys, hadamard))
        self.recent = RecentRows(self, recent) if recent else NoRecentRows()

    def plain(self, blocks: int, rows: int) -> "Storage":
        """Other blocks for the same rows, without a format."""
        return Storage(blocks, rows, *self._sizes, values_in_keys=self.values_in_keys)

    def check_layer(self, layer: int) -> None:
        """Raise ValueError if there is no such layer."""
        if not 0 <= whole("layer", layer) < len(self.layers):
            raise ValueError(f"layer is {layer}; it must be in 0..{len(self.layers) - 1}")

    def checked(
        self, op: str, given: tuple[Any, ...], batch: int, options: dict[str, Any]
    ) -> tuple[tuple[Tensor, ...], int]:
        """What the op takes before the caches, (k, v) or (q, k, v), and the number of new rows.

        given: the same, of which v may be None with values_in_keys.
        """
        *first, k, v = given
        method, takes = ("append", ROTARY) if op == "append_kv" else (op, _STEP_OPTIONS)
        for name in options:
            if name not in takes and not (op == "decode_step" and name in _ALL_OPTIONS):
                raise TypeError(f"{method} has no argument {name}; it takes {', '.join(takes)}")
        if v is None and not self.values_in_keys:
            raise ValueError("v is None; only a cache with values_in_keys takes k alone")
        check_tensor("k", k)
        length = k.shape[2] if k.dim() == 4 else -1
        v = k[..., : self._new_shapes["v"][1]] if v is None and length >= 0 else v
        for name, tensor in (("k", k), ("v", v)):
            heads, columns = self._new_shapes[name]
            wanted = f"({batch}, {heads}, {length if length >= 0 else 'L'}, {columns})"
            check_tensor(name, tensor)
            if tensor.shape != (batch, heads, length, columns):
                raise ValueError(f"{name} has shape {tuple(tensor.shape)}; it must be {wanted}")
            if tensor.dtype not in self._new_dtypes or tensor.device.type != self.device.type:
                allowed = " or ".join(map(str, self._new_dtypes))
                raise ValueError(
                    f"{name} is {tensor.dtype} on {tensor.device}; it must be {allowed} on "
                    f"{self.device}"
                )
        if op == "decode_step" and self.values_in_keys and options.get("softmax_scale") is None:
            raise ValueError(
                "softmax_scale is None; with values_in_keys it must be given, as keys have other "
                "columns than the heads whose products are scaled"
            )
        return (*first, k, v), length

    def write(
        self,
        op: str,
        layer: int,
        new: tuple[Tensor, ...],
        lengths: list[int],
        slots: list[int],
        options: dict[str, Any],
        *,
        check_only: bool = False,
        **where: Any,
    ) -> Any:
        """Run `append_kv` or `decode_step` on sequences of these lengths, and their recent rows.

        where: the op's options that tell where the sequences are. check_only: as in `run`.
        """
        for name in _GIVEN:
            if name in options:
                raise TypeError(f"{op} of a cache has no argument {name}: the cache gives it")
        given = {"check_only": check_only, **where}
        if op == "decode_step" and isinstance(self.recent, RecentRows):
            return self.recent.step(
                layer, new, lengths, slots, where, options, check_only=check_only
            )
        result = self.run(op, layer, new, self.indices(lengths), **given, **options)
        if op == "append_kv" and not check_only:
            self.recent.append(layer, new, lengths, slots, options)
        return result

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
        """Run `append_kv` or `decode_step` on a layer, which takes `new` before the caches.

        check_only: raise what the op would raise, and write nothing.
        """
        ops = torch.ops.metal_attn_explain if check_only else torch.ops.metal_attn
        caches, kept = self.operands(layer)
        if self.values_in_keys and options.get("rotary_cos") is not None:
            options = {"rotary_first_column": self._new_shapes["v"][1]} | options
        arguments, options = (*new, *caches, cache_seqlens), kept | options
        result = ArgumentNames().run(getattr(ops, op), arguments, options)
        if check_only:
            check_writes(op, arguments, options)
        return result

    def operands(self, layer: int) -> tuple[tuple[Tensor, Tensor], dict[str, Any]]:
        """k_cache and v_cache of a layer, heads second as the ops take them, and what tells how
        they are kept: scales, and the rotation of rows.
        """
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
        """Move rows of several trees: `trees.moves` of each, counted from its start.

        place: the block and row of a row of tree i.
        """
        for copies in zip_longest(*rounds, fillvalue=()):
            self.move_rows(
                [
                    [place(i, starts[i] + row) for row in move]
                    for i, of_one in enumerate(copies)
                    for move in of_one
                ]
            )

    def move_rows(self, moves: Sequence[Sequence[tuple[int, int]]]) -> None:
        """Copy rows (block, row), the first of each pair to the second, in all layers.

        No row that is written is read. One dispatch for each tensor of a layer.
        """
        if not moves:
            return
        numbers: dict[int, list[Tensor]] = {}  # by heads: of the rows read, and of those written
        for layer in self.layers:
            for tensor in layer.by_block():
                # The heads of a row lie side by side, or each by itself.
                by_row = self._layout == "NHD"
                heads = 1 if by_row else tensor.shape[2]
                rows = tensor.flatten(0, 1) if by_row else tensor.transpose(1, 2).flatten(0, 2)
                if heads not in numbers:
                    numbers[heads] = [
                        self.indices(
                            [
                                (b * heads + h) * self._rows + r
                                for b, r in side
                                for h in range(heads)
                            ]
                        )
                        for side in zip(*moves, strict=True)
                    ]
                torch.ops.metal_attn.copy_pages(rows, *numbers[heads])

    def copy(self, source: list[int], destination: list[int]) -> None:
        """Blocks `source` become blocks `destination`, of which none is a source, in all layers."""
        if not source:
            return
        src, dst = self.indices(source), self.indices(destination)
        for layer in self.layers:
            for tensor in layer.by_block():
                torch.ops.metal_attn.copy_pages(tensor, src, dst)

    def indices(self, values: list[int]) -> Tensor:
        """As int32 on the cache's device."""
        return torch.tensor(values, dtype=torch.int32, device=self.device)


def _check_scale(name: str, scale: Tensor, heads: int) -> None:
    check_tensor(name, scale)
    if scale.shape != (heads,) or scale.dtype != torch.float32:
        raise ValueError(
            f"{name} has shape {tuple(scale.shape)} and dtype {scale.dtype}; it must be ({heads},) "
            "and float32"
        )

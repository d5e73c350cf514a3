"""`enable(model, absorb=True)`: multi-head latent attention that reads the latent rows.

transformers caches one latent row per token, and expands all of them to keys and values of every
head in each step. An absorbed module does not expand them: for few queries, it multiplies the
keys' up-projection into the queries, and the values' up-projection into the result.
"""

import functools
import inspect
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, CacheLayerMixin

from torch_metal_attn.call.arguments import MAX_HEAD_DIM, MAX_VALUE_HEAD_DIM, as_int_at_least
from torch_metal_attn.integrations import copies
from torch_metal_attn.integrations.transformers.fusion import Replacement, own_class, subclass_of
from torch_metal_attn.integrations.transformers.refusals import unwrapped
from torch_metal_attn.kv_cache import LatentCache, StaticLatentCache
from torch_metal_attn.kv_cache.recent import RecentRows
from torch_metal_attn.kv_cache.writes import CacheStorage
from torch_metal_attn.ops.differentiation import forward_only
from torch_metal_attn.quantisation import dequantise
from torch_metal_attn.wording import count_text, type_text, with_article

EXPAND = "expand_kv"  # the method of modules that cache latent rows


@dataclass(frozen=True)
class HeldRows:
    """All rows of a `LatentLayer`, instead of keys and values. columns: (C, R) of each row."""

    layer: "LatentLayer"
    columns: tuple[int, int]
    dtype: torch.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """(B, 1, Lk, C + R), the shape of the keys."""
        return len(self.layer.ids), 1, self.layer.get_seq_length(), sum(self.columns)

    def attend(self, q: Tensor, options: dict[str, Any]) -> tuple[Tensor, Tensor]:
        """Attention of q (B, H, Lq, C + R) to the rows in the cache."""
        storage, where = self.layer.storage, self.layer.where()
        lengths = [self.shape[2]] * self.shape[0]
        if isinstance(storage.recent, RecentRows):
            limits = {n: x for n, x in _present(options) if torch.is_tensor(x) or x != _OFF.get(n)}
            for name in limits:
                if name not in _WITH_RECENT or (name == "window_size_right" and limits[name] != 0):
                    raise NotImplementedError(
                        f"{name} is not implemented for the recent rows of a latent cache; only "
                        "causal attention and padding are: use latent_cache without recent"
                    )
            attend = functools.partial(
                storage.recent.attend, 0, q, lengths, self.layer.slots(), where, limits
            )
            advice = "call the model under torch.no_grad()"
            out, lse = forward_only("a latent cache", advice, {"q": q, **limits}, attend)
            return out, lse
        (k, v), kept = storage.operands(0)
        if "block_table" in where:
            # Masks must have columns for whole pages. seqused_k hides the rows past the end.
            more = k.shape[2] * where["block_table"].shape[1] - lengths[0]
            for name in ("attn_mask", "attn_bias"):
                if options.get(name) is not None and options[name].shape[-1] > 1:
                    options[name] = torch.nn.functional.pad(options[name], (0, more))
            if options.get("seqused_k") is None:
                options["seqused_k"] = storage.indices(lengths)
        else:
            k, v = k[:, :, : lengths[0]], v[:, :, : lengths[0]]
            kept = {n: x[:, :, : lengths[0]] if x.dim() == 4 else x for n, x in _present(kept)}
        out, lse = torch.ops.metal_attn.flash_decode(q, k, v, **kept, **where, **options)
        return out, lse

    def parts(self) -> tuple[Tensor, ...]:
        """Latents (B, 1, Lk, C) and rotated keys (B, 1, Lk, R), in `dtype`: views or a copy."""
        storage, where = self.layer.storage, self.layer.where()
        batch, _, length, _ = self.shape

        def gathered(x: Tensor) -> Tensor:
            """The rows in order, (B, 1, Lk, ...). Scales per head are returned unchanged."""
            if x.dim() != 4:
                return x
            for places in where.values():
                x = x[places.long()].view(batch, -1, *x.shape[2:])
            return x[:, :length].transpose(1, 2)

        held = storage.layers[0]
        rows = gathered(held.k_cache)
        if held.k_scale is not None:
            rows = dequantise(rows, gathered(held.k_scale), self.dtype)
        storage.recent.fill(0, rows, [length] * batch, self.layer.slots())
        return rows.split(self.columns, -1)


def _present(options: dict[str, Any]) -> list[tuple[str, Any]]:
    return [(name, x) for name, x in options.items() if x is not None]


# The values that switch options off, and the options that attention to recent rows supports.
_OFF = {"window_size_left": -1, "window_size_right": -1, "attention_chunk": 0, "softcap": 0.0}
_WITH_RECENT = (
    *("softmax_scale", "softcap", "learnable_sink", "causal", "q_offset"),
    *("window_size_right", "leftpad_k", "seqused_k"),
)


class Latents:
    """The rows that a module would expand. `metal_attention` gets them as key and value."""

    def __init__(
        self, module: nn.Module, latents: Tensor | HeldRows, k_rotated: Tensor | HeldRows
    ) -> None:
        self._module: Any = module
        self._held = latents if isinstance(latents, HeldRows) else None
        if isinstance(latents, Tensor) and isinstance(k_rotated, Tensor):
            self.latents = latents  # (B, 1, Lk, C)
            self.k_rotated = k_rotated  # (B, 1, Lk, R)

    def expanded(self) -> tuple[Tensor, Tensor]:
        """Keys and values of all heads, made by the model's code."""
        parts = (self.latents, self.k_rotated) if self._held is None else self._held.parts()
        expand = getattr(self._module._metal_attn_original, EXPAND)
        k, v = expand(self._module, *parts)
        return k, v

    def rows(self) -> Tensor:
        return torch.cat([self.latents, self.k_rotated], -1)  # (B, 1, Lk, C + R)

    def absorbed(self, q: Tensor) -> tuple[Tensor, Tensor | HeldRows, Tensor | HeldRows]:
        """Queries (B, H, Lq, C + R), keys and values for attention to the rows."""
        first = self._module.qk_nope_head_dim
        q = torch.cat([q[..., :first] @ self._up_projections()[0], q[..., first:]], -1)
        if (held := self._held) is not None:
            blocks = held.layer.storage.layers[0].by_block()
            self._note_bytes(sum(x.shape[-1] * x.element_size() for x in blocks), q)
            return q, held, held
        rows = self.rows()
        self._note_bytes(rows.shape[-1] * rows.element_size(), q)
        return q, rows, rows[..., : self.latents.shape[-1]]

    def values(self, out: Tensor) -> Tensor:
        """The module's result (B, Lq, H, Dv), contiguous. out: that of attention to the rows."""
        up = self._up_projections()[1]
        return (out.transpose(1, 2) @ up.transpose(1, 2)).transpose(1, 2).contiguous()

    def __getattr__(self, name: str) -> Any:
        raise NotImplementedError(
            f"{type(self._module).__name__} was given absorb=True, so only metal_attn's attention "
            f"can use its latent rows, but other code reads their {name}: call enable(model) to "
            "undo this, also before you set another attn_implementation"
        )

    def _up_projections(self) -> list[Tensor]:
        """(H, Dk, C) and (H, Dv, C): the parts of kv_b_proj."""
        dims = [self._module.qk_nope_head_dim, self._module.v_head_dim]
        weight: Tensor = self._module.kv_b_proj.weight
        return list(weight.view(-1, sum(dims), weight.shape[1]).split(dims, 1))

    def _note_bytes(self, row: int, q: Tensor) -> None:
        heads, v, latent = self._up_projections()[1].shape
        k = self._module.qk_nope_head_dim + q.shape[-1] - latent
        copies.note(
            f"latent rows of {row:,} bytes a token; keys and values expanded to {heads} heads "
            f"would be {heads * (k + v) * q.element_size():,} bytes"
        )


def plan(model: PreTrainedModel) -> list[tuple[nn.Module, type]]:
    """The modules to absorb, with their new classes. Raises NotImplementedError."""
    where = f"absorb=True for {type(model).__name__}"

    def refusal(reason: str) -> NotImplementedError:
        return NotImplementedError(f"{where}{reason}; use enable(model)")

    expanding = [(m, own_class(m)) for m in model.modules() if hasattr(m, EXPAND)]
    if not expanding:
        raise refusal(
            f", which has no attention that expands latent rows by {EXPAND} (as DeepSeek-V3's does "
            "since transformers 5.24)"
        )
    for module, kind in expanding:
        name = with_article(kind.__name__)
        parameters = list(inspect.signature(getattr(kind, EXPAND)).parameters)[1:]
        sizes = ("qk_nope_head_dim", "v_head_dim")
        if len(parameters) != 2 or not all(hasattr(module, size) for size in sizes):
            raise refusal(f": {kind.__name__} expands latent rows in an unknown way")
        linear = getattr(module, "kv_b_proj", None)
        if type(linear) is not nn.Linear or getattr(linear, "bias", None) is not None:
            raise refusal(
                f": kv_b_proj of {name} is {type_text(linear)}; only the weight of a "
                "torch.nn.Linear without bias can be absorbed"
            )
        columns, rotated = linear.in_features, getattr(module, "qk_rope_head_dim", 0)
        if columns > MAX_VALUE_HEAD_DIM or columns + rotated > MAX_HEAD_DIM:
            raise refusal(
                f": the latent rows of {name} have {columns} + {rotated} columns; the kernels take "
                f"at most {MAX_VALUE_HEAD_DIM}, and {MAX_HEAD_DIM} with the rotated columns"
            )
    return [(module, absorbed_class(kind)) for module, kind in expanding]


class _Absorbed(Replacement):
    """The base of absorbed classes."""


@functools.cache
def absorbed_class(kind: type) -> type:
    """A subclass of `kind` whose keys and values stay latent."""

    def expand_kv(
        self: Any, latents: Tensor | HeldRows, k_rotated: Tensor | HeldRows
    ) -> tuple[Latents, Latents]:
        rows = Latents(self, latents, k_rotated)
        return rows, rows

    return subclass_of(_Absorbed, absorbed_class, kind, **{EXPAND: expand_kv})


class LatentLayer(CacheLayerMixin):
    """A layer of `latent_cache`. Its memory, paged with page_size, is allocated by `update`."""

    is_sliding = False
    is_croppable = True

    def __init__(
        self, max_length: int, page_size: int | None = None, options: dict[str, Any] | None = None
    ) -> None:
        super().__init__()
        self.max_length, self.page_size, self.options = max_length, page_size, options or {}
        self.indexer_keys: Tensor | None = None  # (B, L, columns), for DeepSeek Sparse Attention
        self.cache: LatentCache | StaticLatentCache | None = None
        self.ids: list[int] = []  # the cache's id for each sequence of the batch

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        batch, columns = key_states.shape[0], (key_states.shape[-1], value_states.shape[-1])
        options = {"dtype": key_states.dtype, "device": key_states.device, **self.options}
        if self.page_size is None:
            self.cache = StaticLatentCache(batch, self.max_length, *columns, **options)
            self.ids = [*range(batch)]
        else:
            pages = batch * -(-self.max_length // self.page_size)
            self.cache = LatentCache(pages, self.page_size, *columns, **options)
            self.ids = [self.cache.allocate() for _ in range(batch)]
        self.device, self.dtype = key_states.device, key_states.dtype
        self.is_initialized = True

    @property
    def storage(self) -> CacheStorage:
        assert self.cache is not None
        return self.cache._storage

    def where(self) -> dict[str, Tensor]:
        """The ops' option that locates the sequences in the cache; {} if they are in order."""
        if isinstance(self.cache, LatentCache):
            return {"block_table": self.cache.block_table(self.ids)}
        assert self.cache is not None
        in_order = self.slots() == self.ids
        return {} if in_order else {"cache_batch_idx": self.cache.cache_batch_idx()}

    def slots(self) -> list[int]:
        assert self.cache is not None
        return self.cache.slots(self.ids)

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[HeldRows, HeldRows]:
        """Append latents (B, 1, L, C) and rotated keys (B, 1, L, R). Returns all rows."""
        if key_states.shape[1] != 1 or value_states.shape[:-1] != key_states.shape[:-1]:
            raise ValueError(
                f"the latent cache got keys of shape {tuple(key_states.shape)} and values of "
                f"shape {tuple(value_states.shape)}; they must be latents (B, 1, L, C) and rotated "
                "keys (B, 1, L, R), as in models with latent attention"
            )
        if self.cache is None:
            self.lazy_initialization(key_states, value_states)
        new = torch.cat([key_states, value_states], -1)
        if isinstance(self.cache, LatentCache):
            self.cache.append(self.ids, new)
        else:
            assert self.cache is not None
            self.cache.append(new)
        rows = HeldRows(self, (key_states.shape[-1], value_states.shape[-1]), key_states.dtype)
        return rows, rows

    def update_indexer(self, indexer_key_states: Tensor) -> Tensor:
        """Append keys of an indexer (B, L, columns). Returns all keys."""
        held = [] if self.indexer_keys is None else [self.indexer_keys]
        self.indexer_keys = torch.cat([*held, indexer_key_states], 1)
        return self.indexer_keys

    def get_seq_length(self) -> int:
        return self.cache.lengths(self.ids[:1])[0] if self.cache is not None else 0

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0

    def get_max_length(self) -> int:
        return self.max_length

    def reset(self) -> None:
        self.crop(-self.get_seq_length())
        self.indexer_keys = None

    def crop(self, tokens_to_remove: int) -> None:
        """Drop the last `-tokens_to_remove` rows, like transformers' caches."""
        if tokens_to_remove > 0:
            raise ValueError(f"tokens_to_remove is {tokens_to_remove}; it must not be positive")
        length = max(self.get_seq_length() + tokens_to_remove, 0)
        if self.indexer_keys is not None:
            self.indexer_keys = self.indexer_keys[:, :length]
        if self.cache is not None:
            for id in self.ids:
                self.cache.truncate(id, length, keep_recent=False)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        if self.indexer_keys is not None:
            beams = beam_idx.to(self.indexer_keys.device)
            self.indexer_keys = self.indexer_keys.index_select(0, beams)
        if isinstance(self.cache, LatentCache):
            ids, cache = self.ids, self.cache
            self.ids = [cache.fork(ids[origin]) for origin in beam_idx.tolist()]
            for id in ids:
                cache.free(id)
        elif self.cache is not None:
            self.cache.reorder(beam_idx)


def latent_cache(
    model: nn.Module,
    max_length: int,
    format: str | None = None,
    *,
    page_size: int | None = None,
    recent: int = 0,
) -> Cache:
    """A cache for `generate` of a model with latent attention: `past_key_values=latent_cache(...)`.

    Each layer is a `torch_metal_attn.kv_cache.StaticLatentCache`, and attention reads its rows in
    place. In transformers' caches latents and rotated keys are separate, so each step must
    concatenate them.

    Args: model: a model after `enable(model, absorb=True)`. max_length: the maximum number of
        tokens of a sequence. format: a format of `torch_metal_attn.quantisation`; rows are
        quantised as they are appended, and the prompt attends to the quantised rows too. page_size:
        rows of a page; each layer is then a `LatentCache`, whose pages beams share. recent: with a
        format, at least this number of the last rows is also kept in full precision.

    Raises: NotImplementedError: not every layer of the model is absorbed. ValueError: the format
        needs another number of columns.
    """
    as_int_at_least("max_length", max_length, 1)
    if page_size is not None:
        as_int_at_least("page_size", page_size, 1)
    layers = [module for module in unwrapped(model).modules() if isinstance(module, _Absorbed)]
    needed = max([0, *(getattr(module, "layer_idx", -1) + 1 for module in layers)])
    if not layers or needed != len(layers):
        raise NotImplementedError(
            f"latent_cache needs a model whose layers all have absorbed latent attention; "
            f"{type(model).__name__} has it in {count_text(len(layers), 'layer')}: call "
            "enable(model, absorb=True) first. If the model has other layers, use transformers' "
            "own caches"
        )
    module: Any = layers[0]
    options = {"format": format, "recent": recent}
    # This raises, before a model runs, if the format does not fit.
    StaticLatentCache(1, 1, module.kv_lora_rank, module.qk_rope_head_dim, **options)
    return Cache(layers=[LatentLayer(max_length, page_size, options) for _ in layers])

"""`enable(model, absorb=True)`: multi-head latent attention on the latent rows themselves.

transformers caches one latent row per token, and expands all of them to keys and values of every
head in each step. An absorbed module leaves them as they are: with few queries, the keys'
up-projection is multiplied into the queries, and the values' into the result.
"""

import functools
import inspect
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, CacheLayerMixin

from torch_metal_attn.call.arguments import natural
from torch_metal_attn.integrations import copies
from torch_metal_attn.integrations.transformers.fusion import own_class
from torch_metal_attn.integrations.transformers.refusals import unwrapped
from torch_metal_attn.kv_cache import StaticLatentCache
from torch_metal_attn.quantisation import dequantise, sizes

EXPAND = "expand_kv"  # of a module that caches latent rows
_ADVICE = "use enable(model)"


@dataclass(frozen=True)
class QuantisedRows:
    """Rows of a quantised cache, which `LatentLayer` returns in place of latents and rotated keys.

    k, v: (B, 1, Lk, ...), v the first columns of k. k_scale, v_scale: theirs. columns: C and R.
    """

    k: Tensor
    v: Tensor
    k_scale: Tensor
    v_scale: Tensor
    columns: tuple[int, int]
    dtype: torch.dtype


class Latents:
    """The rows that a module would expand: what `metal_attention` gets for its keys and values."""

    def __init__(
        self, module: nn.Module, latents: Tensor | QuantisedRows, k_rotated: Tensor | QuantisedRows
    ) -> None:
        self._module: Any = module
        self._quantised = latents if isinstance(latents, QuantisedRows) else None
        if isinstance(latents, Tensor) and isinstance(k_rotated, Tensor):
            self.latents = latents  # (B, 1, Lk, C)
            self.k_rotated = k_rotated  # (B, 1, Lk, R)

    def expanded(self) -> tuple[Tensor, Tensor]:
        """Keys and values of all heads, as the model's own code makes them."""
        parts = (self.latents, self.k_rotated) if self._quantised is None else self._dequantised()
        expand = getattr(self._module._metal_attn_own, EXPAND)
        k, v = expand(self._module, *parts)
        return k, v

    def _dequantised(self) -> tuple[Tensor, ...]:
        held = self._quantised
        assert held is not None
        rows = dequantise(held.k, held.k_scale, held.dtype)
        return rows.split(held.columns, -1)

    def rows(self) -> Tensor:
        """(B, 1, Lk, C + R): what both are parts of, or a copy if they lie elsewhere."""
        latents, k_rotated = self.latents, self.k_rotated
        columns = latents.shape[-1] + k_rotated.shape[-1]
        if (
            not torch.compiler.is_compiling()
            and latents.stride() == k_rotated.stride()
            and latents.untyped_storage().data_ptr() == k_rotated.untyped_storage().data_ptr()
            and k_rotated.storage_offset() == latents.storage_offset() + latents.shape[-1]
            and latents.stride(2) >= columns
        ):
            return latents.as_strided((*latents.shape[:-1], columns), latents.stride())
        return torch.cat([latents, k_rotated], -1)

    def absorbed(self, q: Tensor) -> tuple[tuple[Tensor, Tensor, Tensor], dict[str, Tensor]]:
        """The queries (B, H, Lq, C + R), keys and values of attention to the rows; their scales."""
        first = self._module.qk_nope_head_dim
        q = torch.cat([q[..., :first] @ self._up_projections()[0], q[..., first:]], -1)
        if (held := self._quantised) is not None:
            scales = {"k_scale": held.k_scale, "v_scale": held.v_scale}
            own = [x for x in (held.k, held.k_scale) if x.dim() == 4]
            self._tell_of_bytes(sum(x.shape[-1] * x.element_size() for x in own), q)
            return (q, held.k, held.v), scales
        rows = self.rows()
        self._tell_of_bytes(rows.shape[-1] * rows.element_size(), q)
        return (q, rows, rows[..., : self.latents.shape[-1]]), {}

    def values(self, out: Tensor) -> Tensor:
        """The values (B, Lq, H, Dv), contiguous, of what attention to the rows gives."""
        up = self._up_projections()[1]
        return (out.transpose(1, 2) @ up.transpose(1, 2)).transpose(1, 2).contiguous()

    def __getattr__(self, name: str) -> Any:
        raise NotImplementedError(
            f"{type(self._module).__name__} was given absorb=True, so only metal_attn's attention "
            f"can use its latent rows, but other code reads their {name}: call enable(model) for "
            "this model, and before you set another attn_implementation"
        )

    def _up_projections(self) -> list[Tensor]:
        """(H, Dk, C) and (H, Dv, C): the parts of kv_b_proj."""
        dims = [self._module.qk_nope_head_dim, self._module.v_head_dim]
        weight: Tensor = self._module.kv_b_proj.weight
        return list(weight.view(-1, sum(dims), weight.shape[1]).split(dims, 1))

    def _tell_of_bytes(self, row: int, q: Tensor) -> None:
        heads, v, latent = self._up_projections()[1].shape
        k = self._module.qk_nope_head_dim + q.shape[-1] - latent
        copies.note(
            f"latent rows of {row:,} bytes a token; keys and values expanded to {heads} heads "
            f"would be {heads * (k + v) * q.element_size():,}"
        )


def plan(model: PreTrainedModel) -> list[tuple[nn.Module, type]]:
    """The modules to absorb, with their new classes. Changes nothing.

    Raises: NotImplementedError: `model` has none, or one of another kind than DeepSeek's.
    """
    where = f"absorb=True for {type(model).__name__}"
    found = [(module, own_class(module)) for module in model.modules() if hasattr(module, EXPAND)]
    if not found:
        raise NotImplementedError(
            f"{where}, which has no attention that expands latent rows by {EXPAND} (as "
            f"DeepSeek-V3's does since transformers 5.24); {_ADVICE}"
        )
    for module, kind in found:
        names = list(inspect.signature(getattr(kind, EXPAND)).parameters)[1:]
        missing = [n for n in ("qk_nope_head_dim", "v_head_dim") if not hasattr(module, n)]
        if len(names) != 2 or missing:
            raise NotImplementedError(f"{where}: {kind.__name__} expands otherwise; {_ADVICE}")
        linear = getattr(module, "kv_b_proj", None)
        if type(linear) is not nn.Linear or linear.bias is not None:
            raise NotImplementedError(
                f"{where}: kv_b_proj of a {kind.__name__} is a {type(linear).__name__}; only the "
                f"weight of a torch.nn.Linear without bias can be absorbed; {_ADVICE}"
            )
    return [(module, absorbed_class(kind)) for module, kind in found]


class _Absorbed:
    """The base that every absorbed class has besides the class that it was made from."""

    _metal_attn_own: type

    def __reduce_ex__(self, protocol: Any) -> Any:
        # By the original class, because pickle finds a class by its name.
        return _bare, (self._metal_attn_own,), self.__dict__


def _bare(kind: type) -> Any:
    return object.__new__(absorbed_class(kind))


@functools.cache
def absorbed_class(kind: type) -> type:
    """`kind`, whose keys and values stay latent."""

    def expand_kv(
        self: Any, latents: Tensor | QuantisedRows, k_rotated: Tensor | QuantisedRows
    ) -> tuple[Latents, Latents]:
        rows = Latents(self, latents, k_rotated)
        return rows, rows

    body = {
        EXPAND: expand_kv,
        "_metal_attn_own": kind,
        "__module__": kind.__module__,
        "__qualname__": kind.__qualname__,
        "__doc__": kind.__doc__,
    }
    return type(kind.__name__, (_Absorbed, kind), body)


class LatentLayer(CacheLayerMixin):
    """A layer of `latent_cache`: a `StaticLatentCache` that is made with the first rows."""

    is_sliding = False
    is_croppable = True

    def __init__(self, max_length: int, format: str | None = None) -> None:
        super().__init__()
        self.max_length, self.format = max_length, format
        self.indexer_keys: Tensor | None = None  # (B, L, columns), of DeepSeek Sparse Attention
        self.cache: StaticLatentCache | None = None
        self._length = 0  # of every sequence

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.cache = StaticLatentCache(
            key_states.shape[0],
            self.max_length,
            key_states.shape[-1],
            value_states.shape[-1],
            dtype=key_states.dtype,
            device=key_states.device,
            format=self.format,
        )
        self.device, self.dtype = key_states.device, key_states.dtype
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor] | tuple[QuantisedRows, QuantisedRows]:
        """Append latents (B, 1, L, C) and rotated keys (B, 1, L, R); views of all rows."""
        if key_states.shape[1] != 1 or value_states.shape[:-1] != key_states.shape[:-1]:
            raise ValueError(
                f"a latent cache is given keys of shape {tuple(key_states.shape)} and values of "
                f"{tuple(value_states.shape)}; it must be latents (B, 1, L, C) and rotated keys "
                "(B, 1, L, R), as models with latent attention have"
            )
        if self.cache is None:
            self.lazy_initialization(key_states, value_states)
        assert self.cache is not None
        self.cache.append(torch.cat([key_states, value_states], -1))
        self._length += key_states.shape[2]
        columns = key_states.shape[-1], value_states.shape[-1]
        held = self.cache.layers[0]

        def of_all(x: Tensor) -> Tensor:
            """(B, 1, L, ...), or scales of heads."""
            return x[:, : self._length].transpose(1, 2) if x.dim() == 4 else x

        if held.k_scale is None or held.v_scale is None:
            latents, k_rotated = of_all(held.k_cache).split(columns, -1)
            return latents, k_rotated
        k, v = of_all(held.k_cache), of_all(held.v_cache)
        scales = of_all(held.k_scale), of_all(held.v_scale)
        rows = QuantisedRows(k, v, *scales, columns, key_states.dtype)
        return rows, rows

    def update_indexer(self, indexer_key_states: Tensor) -> Tensor:
        """Append keys of an indexer (B, L, columns); all of them."""
        held = [] if self.indexer_keys is None else [self.indexer_keys]
        self.indexer_keys = torch.cat([*held, indexer_key_states], 1)
        return self.indexer_keys

    def get_seq_length(self) -> int:
        return self._length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0

    def get_max_length(self) -> int:
        return self.max_length

    def reset(self) -> None:
        self._length = 0
        self.indexer_keys = None
        if self.cache is not None:
            self.cache.reset()

    def crop(self, tokens_to_remove: int) -> None:
        """Drop the last `-tokens_to_remove` rows, as transformers' own caches do."""
        if tokens_to_remove > 0:
            raise ValueError(f"tokens_to_remove is {tokens_to_remove}; it must not be positive")
        self._length = max(self._length + tokens_to_remove, 0)
        if self.indexer_keys is not None:
            self.indexer_keys = self.indexer_keys[:, : self._length]
        if self.cache is not None:
            for b in range(self.cache.batch_size):
                self.cache.truncate(b, self._length)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        if self.indexer_keys is not None:
            beams = beam_idx.to(self.indexer_keys.device)
            self.indexer_keys = self.indexer_keys.index_select(0, beams)
        if self.cache is not None:
            for rows in self.cache.layers[0].by_block():
                rows.copy_(rows.index_select(0, beam_idx.to(rows.device)))


def latent_cache(model: nn.Module, max_length: int, format: str | None = None) -> Cache:
    """A cache for `generate` of a model with latent attention: `past_key_values=latent_cache(...)`.

    Each layer is a `torch_metal_attn.kv_cache.StaticLatentCache`, whose rows attention reads where
    they lie. transformers' own caches hold latents and rotated keys apart, so each step joins them
    in a copy.

    Args: model: a model after `enable(model, absorb=True)`. max_length: tokens of a sequence, at
        most. format: of `torch_metal_attn.quantisation`; rows are quantised as they are appended,
        and all attention, the prompt's too, is to what is kept.

    Raises: NotImplementedError: not every layer of the model was absorbed. ValueError: the rows'
        columns do not fit the format.
    """
    natural("max_length", max_length, 1)
    layers = [module for module in unwrapped(model).modules() if isinstance(module, _Absorbed)]
    needed = max([0, *(getattr(module, "layer_idx", -1) + 1 for module in layers)])
    if not layers or needed != len(layers):
        raise NotImplementedError(
            f"latent_cache of {type(model).__name__}, of whose layers {len(layers)} have absorbed "
            "latent attention; call enable(model, absorb=True) first, and use transformers' own "
            "caches for models with other layers"
        )
    if format is not None:
        module: Any = layers[0]
        for columns in (module.kv_lora_rank, module.kv_lora_rank + module.qk_rope_head_dim):
            sizes(format, columns)
    return Cache(layers=[LatentLayer(max_length, format) for _ in layers])

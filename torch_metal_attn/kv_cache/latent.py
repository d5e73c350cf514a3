"""`LatentCache` and `StaticLatentCache`: one latent row per token, for all heads (MLA)."""

from typing import Any

from torch_metal_attn.call.arguments import MAX_HEAD_DIM, MAX_VALUE_HEAD_DIM, as_int_at_least
from torch_metal_attn.kv_cache.paged import PagedKVCache
from torch_metal_attn.kv_cache.static import StaticKVCache
from torch_metal_attn.quantisation import FORMATS, check_columns


class LatentCache(PagedKVCache):
    """Latent rows in pages, for DeepSeek's multi-head latent attention (MLA).

    A row has latent_dim columns, then rotary_dim columns that are rotated. The entire row is the
    token's key, and its first latent_dim columns are the value, so both are stored and read once.
    The queries are absorbed: a head's query is its unrotated columns times the keys' up-projection
    (latent_dim columns), then its rotated columns. Multiply the result, (B, Hq, L, latent_dim), by
    the values' up-projection.

    The methods are those of `PagedKVCache`: `append(ids, rows)` and `decode_step(ids, q, rows,
    softmax_scale=...)` take rows (B, 1, L, latent_dim + rotary_dim). With rotary_cos and rotary_sin
    (table rows, rotary_dim / 2) the last rotary_dim columns are rotated.

    Args: num_pages, page_size: as in `PagedKVCache`. latent_dim, rotary_dim: kv_lora_rank and
        qk_rope_head_dim of DeepSeek's configs. options: num_layers, dtype, device, format, layout,
        k_scale and recent of `PagedKVCache`; q8_0 and q4_0 need multiples of 32 columns.
    """

    def __init__(
        self,
        num_pages: int,
        page_size: int,
        latent_dim: int = 512,
        rotary_dim: int = 64,
        **options: Any,
    ) -> None:
        sizes, options = _cache_arguments(latent_dim, rotary_dim, options)
        super().__init__(num_pages, page_size, *sizes, **options)


class StaticLatentCache(StaticKVCache):
    """`LatentCache` with one row of tensors per sequence: `append(rows)`, `decode_step(q, rows)`.

    Args: batch_size, max_length: as in `StaticKVCache`. The others: as in `LatentCache`.
    """

    def __init__(
        self,
        batch_size: int,
        max_length: int,
        latent_dim: int = 512,
        rotary_dim: int = 64,
        **options: Any,
    ) -> None:
        sizes, options = _cache_arguments(latent_dim, rotary_dim, options)
        super().__init__(batch_size, max_length, *sizes, **options)


def _cache_arguments(
    latent_dim: int, rotary_dim: int, options: dict[str, Any]
) -> tuple[tuple[int, int, int], dict[str, Any]]:
    """num_kv_heads, head_dim and v_head_dim, and the other options of the cache."""
    latent_dim = as_int_at_least("latent_dim", latent_dim, 1, MAX_VALUE_HEAD_DIM)
    rotary_dim = as_int_at_least("rotary_dim", rotary_dim, 0, MAX_HEAD_DIM - latent_dim)
    format = options.get("format")
    if format in FORMATS:
        check_columns("latent_dim", latent_dim, format)
        check_columns("latent_dim + rotary_dim", latent_dim + rotary_dim, format)
    return (1, latent_dim + rotary_dim, latent_dim), {"values_in_keys": True} | options

"""vLLM's cache and attention ops on this library's kernels, with vLLM's names and argument order.

vLLM itself is not needed. Nothing here schedules requests or hands out blocks. The kernels read a
cache whose rows (one token, one head) are contiguous, as those of `reshape_and_cache_flash` are.
The other functions take vLLM's shapes of `key_cache` and `value_cache`, on memory with such rows:
`new_kv_cache` makes it, and other memory is refused instead of copied.
"""

import torch
from torch import Tensor

from torch_metal_attn import arguments as given
from torch_metal_attn.arguments import check_rank
from torch_metal_attn.wording import Wording

_FP8 = ("fp8", "fp8_e4m3")
_KEY_SHAPE = "(blocks, kv_heads, head_size / x, block_size, x)"
_VALUE_SHAPE = "(blocks, kv_heads, head_size, block_size)"
_FLASH_SHAPE = "(blocks, block_size, kv_heads, head_size)"
_OF_WRITES = Wording(
    {"k": "key", "v": "value", "k_cache": "key_cache", "v_cache": "value_cache"}
    | dict.fromkeys(("block_table", "cache_seqlens"), "slot_mapping")
)
_OF_READS = Wording(
    {
        "q": "query",
        "k": "key_cache",
        "v": "value_cache",
        "block_table": "block_tables",
        "seqused_k": "seq_lens",
        "softmax_scale": "scale",
    }
)


def new_kv_cache(
    num_blocks: int,
    block_size: int,
    num_kv_heads: int,
    head_size: int,
    dtype: torch.dtype,
    device: torch.device | str | None = None,
) -> tuple[Tensor, Tensor]:
    """A zeroed key_cache and value_cache in vLLM's shapes, on memory that the kernels read.

    Returns: key_cache (blocks, kv_heads, head_size / x, block_size, x), where x elements take 16
        bytes, and value_cache (blocks, kv_heads, head_size, block_size).
    """
    x = 16 // dtype.itemsize
    if head_size % x:
        raise ValueError(f"head_size is {head_size}; with {dtype} it must be a multiple of {x}")
    rows = (num_blocks, num_kv_heads, block_size)
    key_cache = torch.zeros(*rows, head_size // x, x, dtype=dtype, device=device)
    value_cache = torch.zeros(*rows, head_size, dtype=dtype, device=device)
    return key_cache.transpose(2, 3), value_cache.transpose(2, 3)


def reshape_and_cache(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    kv_cache_dtype: str,
    k_scale: Tensor,
    v_scale: Tensor,
) -> None:
    """Write new keys and values into their slots of a cache, as vLLM's `reshape_and_cache`.

    Args:
        key: (tokens, kv_heads, head_size). value: likewise.
        key_cache, value_cache: as from `new_kv_cache`.
        slot_mapping: (tokens,), int32 or int64: token i goes to row slot % block_size of block slot
            // block_size. A token whose slot is negative is padding and is not written.
        kv_cache_dtype: "auto" for a cache of key's dtype; "fp8" or "fp8_e4m3" for a cache of uint8
            or float8_e4m3fn that holds key / k_scale.
        k_scale, v_scale: one float32 number each; not used with "auto".

    Raises: NotImplementedError, TypeError, ValueError: an argument that is not supported. On mps
        slots are not checked, and those outside the cache are not written.
    """
    rows = _key_rows(key_cache), _value_rows(value_cache)
    _write(key, value, *rows, slot_mapping, kv_cache_dtype, k_scale, v_scale)


def reshape_and_cache_flash(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    kv_cache_dtype: str,
    k_scale: Tensor,
    v_scale: Tensor,
) -> None:
    """`reshape_and_cache` for caches (blocks, block_size, kv_heads, head_size), of any strides.

    Attention to such a cache is `flash_attn_with_kvcache` or `flash_attn_varlen_func` with
    block_table.
    """
    for name, cache in (("key_cache", key_cache), ("value_cache", value_cache)):
        check_rank(name, cache, _FLASH_SHAPE)
    rows = key_cache.transpose(1, 2), value_cache.transpose(1, 2)
    _write(key, value, *rows, slot_mapping, kv_cache_dtype, k_scale, v_scale)


def paged_attention_v1(
    out: Tensor,
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    num_kv_heads: int,
    scale: float,
    block_tables: Tensor,
    seq_lens: Tensor,
    block_size: int,
    max_seq_len: int,
    alibi_slopes: Tensor | None,
    kv_cache_dtype: str,
    k_scale: Tensor,
    v_scale: Tensor,
    tp_rank: int = 0,
    blocksparse_local_blocks: int = 0,
    blocksparse_vert_stride: int = 0,
    blocksparse_block_size: int = 64,
    blocksparse_head_sliding_step: int = 0,
) -> None:
    """Attention of one query per sequence to a paged cache, as vLLM's `paged_attention_v1`.

    Args:
        out: (sequences, heads, head_size), written.
        query: (sequences, heads, head_size).
        key_cache, value_cache, kv_cache_dtype, k_scale, v_scale: as for `reshape_and_cache`.
        num_kv_heads, block_size: those of the cache.
        scale: factor of the scores.
        block_tables: (sequences, max_blocks), int32.
        seq_lens: (sequences,), int32: the number of keys of each, the query's own included.
        max_seq_len: at least the largest of seq_lens. Later columns of block_tables are not used.
        alibi_slopes: (heads,), float32, or None.
        tp_rank, blocksparse_*: of block-sparse attention, which is not supported: leave them out.

    Raises: NotImplementedError, TypeError, ValueError: an argument that is not supported.
    """
    sparse = {
        "blocksparse_local_blocks": (blocksparse_local_blocks, (0,)),
        "blocksparse_vert_stride": (blocksparse_vert_stride, (0, 1)),
        "blocksparse_head_sliding_step": (blocksparse_head_sliding_step, (0,)),
    }
    for name, (value, allowed) in sparse.items():
        if value not in allowed:
            raise NotImplementedError(f"{name} is {value}; block-sparse attention is not supported")
    for name, tensor in (("out", out), ("query", query)):
        check_rank(name, tensor, "(sequences, heads, head_size)")
    keys, values = _key_rows(key_cache), _value_rows(value_cache)
    for name, number, found in (
        ("num_kv_heads", num_kv_heads, keys.shape[1]),
        ("block_size", block_size, keys.shape[2]),
    ):
        if given.whole(name, number) != found:
            raise ValueError(f"{name} is {number}; key_cache has {found}")
    if out.shape != query.shape or out.dtype != query.dtype or out.device != query.device:
        raise ValueError(
            f"out is {tuple(out.shape)}, {out.dtype} on {out.device}; it must be as query, "
            f"{tuple(query.shape)}, {query.dtype} on {query.device}"
        )
    check_rank("block_tables", block_tables, "(sequences, max_blocks)")
    keys, values, scales = _format(kv_cache_dtype, keys, values, k_scale, v_scale)
    blocks = -(-given.natural("max_seq_len", max_seq_len) // block_size)
    options = {
        "softmax_scale": float(given.number("scale", scale)),
        "block_table": block_tables[:, :blocks],
        "seqused_k": seq_lens,
        **given.only_given(alibi_slopes=alibi_slopes),
        **scales,
    }
    operands = (query[:, :, None], keys, values)
    result, _ = _OF_READS.run(torch.ops.metal_attn.flash_decode, operands, options)
    out.copy_(result[:, :, 0])


def paged_attention_v2(
    out: Tensor,
    exp_sum: Tensor,
    max_logits: Tensor,
    tmp_out: Tensor,
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    num_kv_heads: int,
    scale: float,
    block_tables: Tensor,
    seq_lens: Tensor,
    block_size: int,
    max_seq_len: int,
    alibi_slopes: Tensor | None,
    kv_cache_dtype: str,
    k_scale: Tensor,
    v_scale: Tensor,
    tp_rank: int = 0,
    blocksparse_local_blocks: int = 0,
    blocksparse_vert_stride: int = 0,
    blocksparse_block_size: int = 64,
    blocksparse_head_sliding_step: int = 0,
) -> None:
    """`paged_attention_v1` with the arguments of vLLM's `paged_attention_v2`.

    exp_sum, max_logits and tmp_out are scratch memory of vLLM's kernel. They are not read or
    written: both functions choose their own split of the keys.
    """
    paged_attention_v1(
        out,
        query,
        key_cache,
        value_cache,
        num_kv_heads,
        scale,
        block_tables,
        seq_lens,
        block_size,
        max_seq_len,
        alibi_slopes,
        kv_cache_dtype,
        k_scale,
        v_scale,
        tp_rank,
        blocksparse_local_blocks,
        blocksparse_vert_stride,
        blocksparse_block_size,
        blocksparse_head_sliding_step,
    )


def _key_rows(key_cache: Tensor) -> Tensor:
    """The cache as (blocks, kv_heads, block_size, head_size), a view."""
    check_rank("key_cache", key_cache, _KEY_SHAPE)
    parts = key_cache.transpose(2, 3)
    try:
        return parts.view(*parts.shape[:3], parts.shape[3] * parts.shape[4])
    except RuntimeError:
        raise _not_rows("key_cache", key_cache) from None


def _value_rows(value_cache: Tensor) -> Tensor:
    """The cache as (blocks, kv_heads, block_size, head_size), a view."""
    check_rank("value_cache", value_cache, _VALUE_SHAPE)
    if value_cache.shape[2] > 1 and value_cache.stride(2) != 1:
        raise _not_rows("value_cache", value_cache)
    return value_cache.transpose(2, 3)


def _not_rows(name: str, cache: Tensor) -> ValueError:
    return ValueError(
        f"{name} has shape {tuple(cache.shape)} and strides {cache.stride()}; each token's row of "
        "head_size elements must be contiguous: make the cache with new_kv_cache"
    )


def _format(
    kv_cache_dtype: str, keys: Tensor, values: Tensor, k_scale: Tensor, v_scale: Tensor
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """The cache in the dtype that the ops know, and their scales."""
    if kv_cache_dtype == "auto":
        return keys, values, {}
    if kv_cache_dtype not in _FP8:
        raise NotImplementedError(
            f'kv_cache_dtype is {kv_cache_dtype!r}; "auto", "fp8" and "fp8_e4m3" are supported'
        )
    scales = {}
    for name, cache, scale in (("k", keys, k_scale), ("v", values, v_scale)):
        if cache.dtype not in (torch.uint8, torch.float8_e4m3fn):
            raise ValueError(
                f"{_OF_READS.names[name]} has dtype {cache.dtype}; with {kv_cache_dtype} it must "
                "be uint8 or float8_e4m3fn"
            )
        given.check_tensor(f"{name}_scale", scale)
        if scale.numel() != 1:
            raise ValueError(f"{name}_scale has {scale.numel()} elements; it must have 1")
        # The ops have a scale per head.
        scales[f"{name}_scale"] = scale.reshape(1).repeat(cache.shape[1])
    return keys.view(torch.float8_e4m3fn), values.view(torch.float8_e4m3fn), scales


def _write(
    key: Tensor,
    value: Tensor,
    keys: Tensor,
    values: Tensor,
    slot_mapping: Tensor,
    kv_cache_dtype: str,
    k_scale: Tensor,
    v_scale: Tensor,
) -> None:
    """Each token is a sequence of one new row, in a cache of which it sees one block."""
    for name, tensor in (("key", key), ("value", value)):
        check_rank(name, tensor, "(tokens, kv_heads, head_size)")
    check_rank("slot_mapping", slot_mapping, "(tokens)")
    if slot_mapping.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"slot_mapping has dtype {slot_mapping.dtype}; it must be int32 or int64")
    if not key.shape[0] == value.shape[0] == slot_mapping.shape[0]:
        raise ValueError(
            f"key has {key.shape[0]} tokens, value {value.shape[0]} and slot_mapping "
            f"{slot_mapping.shape[0]}; they must be the same"
        )
    keys, values, scales = _format(kv_cache_dtype, keys, values, k_scale, v_scale)
    block_size = keys.shape[2]
    if slot_mapping.device.type == "cpu":
        slots = keys.shape[0] * block_size
        if (slot_mapping >= slots).any():
            raise ValueError(
                f"slot_mapping has {slot_mapping.max().item()}; key_cache has {slots} slots"
            )
        # On mps the kernel skips them: their block is -1.
        written = slot_mapping >= 0
        key, value, slot_mapping = key[written], value[written], slot_mapping[written]
    slot_mapping = slot_mapping.int()
    options = {"block_table": (slot_mapping // block_size)[:, None], **scales}
    arguments = (key[:, :, None], value[:, :, None], keys, values, slot_mapping % block_size)
    _OF_WRITES.run(torch.ops.metal_attn.append_kv, arguments, options)

"""vLLM's `reshape_and_cache_flash` on this library's kernels, with its argument order.

vLLM itself is not needed. To attend to such a cache, pass block_table to `flash_attn_with_kvcache`
or `flash_attn_varlen_func`.
"""

import torch
from torch import Tensor

from torch_metal_attn.call.arguments import check_integers, check_rank, check_tensor
from torch_metal_attn.ops.names import ArgumentNames
from torch_metal_attn.wording import count_text, value_text

_FP8 = ("fp8", "fp8_e4m3")
_FLASH_SHAPE = "(blocks, block_size, kv_heads, head_size)"
_NAMES = ArgumentNames(
    {"k": "key", "v": "value", "k_cache": "key_cache", "v_cache": "value_cache"}
    | dict.fromkeys(("block_table", "cache_seqlens"), "slot_mapping")
)


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
    """Write new keys and values into their slots of a cache, as vLLM's function of this name.

    Args:
        key, value: (tokens or more, kv_heads, head_size). Rows after the tokens of slot_mapping
            are padding, as in vLLM V1, and are not written.
        key_cache, value_cache: (blocks, block_size, kv_heads, head_size), of any strides.
        slot_mapping: (tokens,), int32 or int64: token i goes to row slot % block_size of block slot
            // block_size. A token whose slot is negative is padding and is not written.
        kv_cache_dtype: "auto" for a cache of key's dtype; "fp8" or "fp8_e4m3" for a cache of uint8
            or float8_e4m3fn that holds key / k_scale.
        k_scale, v_scale: one float32 number each; not used with "auto".

    Raises: NotImplementedError, TypeError, ValueError: an argument that is not supported. On mps
        slots are not checked, and those outside the cache are not written.
    """
    for name, cache in (("key_cache", key_cache), ("value_cache", value_cache)):
        check_rank(name, cache, _FLASH_SHAPE)
    keys, values = key_cache.transpose(1, 2), value_cache.transpose(1, 2)
    for name, tensor in (("key", key), ("value", value)):
        check_rank(name, tensor, "(tokens, kv_heads, head_size)")
    check_integers("slot_mapping", slot_mapping, "(tokens)")
    tokens = slot_mapping.shape[0]
    if min(key.shape[0], value.shape[0]) < tokens:
        raise ValueError(
            f"key has {count_text(key.shape[0], 'token')}, value {value.shape[0]} and slot_mapping "
            f"{tokens}; key and value must have at least {tokens}"
        )
    key, value = key[:tokens], value[:tokens]
    keys, values, scales = _format(kv_cache_dtype, keys, values, k_scale, v_scale)
    block_size = keys.shape[2]
    slots = keys.shape[0] * block_size
    if slot_mapping.device.type == "cpu":
        if (slot_mapping >= slots).any():
            raise ValueError(
                f"slot_mapping has slot {slot_mapping.max().item()}; key_cache has {slots} slots"
            )
        # On mps the kernel skips padding tokens, as their block is -1.
        written = slot_mapping >= 0
        key, value, slot_mapping = key[written], value[written], slot_mapping[written]
    # Each token is a sequence with one new row and one block.
    slot_mapping = slot_mapping.long().clamp(-1, slots)
    rows = (slot_mapping % block_size).int()
    options = {"block_table": (slot_mapping // block_size).int()[:, None], **scales}
    arguments = (key[:, :, None], value[:, :, None], keys, values, rows)
    _NAMES.run(torch.ops.metal_attn.append_kv, arguments, options)


def _format(
    kv_cache_dtype: str, keys: Tensor, values: Tensor, k_scale: Tensor, v_scale: Tensor
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """The cache in a dtype of the ops, and its scales."""
    if kv_cache_dtype == "auto":
        return keys, values, {}
    if kv_cache_dtype not in _FP8:
        raise NotImplementedError(
            f'kv_cache_dtype is {value_text(kv_cache_dtype)}; "auto", "fp8" and "fp8_e4m3" are '
            "supported"
        )
    scales = {}
    for name, cache_name, cache, scale in (
        ("k", "key_cache", keys, k_scale),
        ("v", "value_cache", values, v_scale),
    ):
        if cache.dtype not in (torch.uint8, torch.float8_e4m3fn):
            raise ValueError(
                f"{cache_name} has dtype {cache.dtype}; with {kv_cache_dtype} it must be uint8 or "
                "float8_e4m3fn"
            )
        check_tensor(f"{name}_scale", scale)
        if scale.numel() != 1:
            raise ValueError(
                f"{name}_scale has {count_text(scale.numel(), 'element')}; it must have 1"
            )
        # The ops take one scale per head.
        scales[f"{name}_scale"] = scale.reshape(1).repeat(cache.shape[1])
    return keys.view(torch.float8_e4m3fn), values.view(torch.float8_e4m3fn), scales

"""Caches that hold certain keys and values: in pages, by index, quantised."""

import math

import torch

from torch_metal_attn.quantisation import dequantise, quantise

FORMATS = ("q8_0", "q4_0", "fp8_e4m3")
SPARE = 3  # pages


def paged(k, v, lengths, page):
    """k and v (B, H, L, D), of which sequence b has lengths[b] keys, as `cache` of the checks.

    Pages are in any order, some are nobody's, and what is nobody's is NaN, or no number of a page.
    """
    generator = torch.Generator().manual_seed(0)
    blocks = [-(-length // page) for length in lengths]
    numbers = torch.randperm(sum(blocks) + SPARE, generator=generator).int()
    table = torch.full((len(lengths), max(blocks) + 2), -(2**31), dtype=torch.int32)
    for row, owned in zip(table, numbers.split([*blocks, SPARE]), strict=False):
        row[: len(owned)] = owned
    caches = [_pages(x, lengths, page, len(numbers), table) for x in (k, v)]
    return *caches, {"block_table": table}


def _pages(x, lengths, page, pages, table):
    _, heads, _, columns = x.shape
    nobody = 0x7F if not x.is_floating_point() else math.nan
    cache = x.new_full((pages, heads, page, columns), nobody)
    for b, length in enumerate(lengths):
        for i in range(length):
            cache[table[b, i // page], :, i % page] = x[b, :, i]
    return cache


def with_nan_tails(x, lengths):
    """(B, H, L, D) whose rows from lengths[b] on are NaN."""
    x = x.clone()
    for b, length in enumerate(lengths):
        x[b, :, length:] = math.nan
    return x


def quantised(k, v, kv_format, *, scale=None):
    """k and v as they are quantised (float32), and as `cache` of the checks."""
    exact, data, scales = [], [], {}
    for name, x in (("k_scale", k), ("v_scale", v)):
        stored, stored_scale = quantise(x.contiguous(), kv_format, scale)
        exact.append(dequantise(stored, stored_scale, torch.float32))
        data.append(stored)
        scales[name] = stored_scale
    return *exact, (*data, scales)


def in_pages(cache, lengths, page):
    """A quantised cache in pages: scales of blocks lie as the data do."""
    k, v, scales = cache
    *data, where = paged(k, v, lengths, page)
    if scales["k_scale"] is not None and scales["k_scale"].dim() > 2:
        *paged_scales, _ = paged(scales["k_scale"], scales["v_scale"], lengths, page)
        scales = dict(zip(("k_scale", "v_scale"), paged_scales, strict=True))
    return *data, scales | where

"""Helpers that store keys and values in pages, also quantised."""

import math

import torch

from torch_metal_attn.quantisation import dequantise, quantise

FORMATS = ("q8_0", "q4_0", "fp8_e4m3")
SPARE = 3  # pages that belong to no sequence


def paged(k, v, lengths, page):
    """k and v (B, H, L, D) in shuffled pages; spare pages and rows from lengths[b] on are NaN."""
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
    unused = 0x7F if not x.is_floating_point() else math.nan
    cache = x.new_full((pages, heads, page, columns), unused)
    for b, length in enumerate(lengths):
        for i in range(length):
            cache[table[b, i // page], :, i % page] = x[b, :, i]
    return cache


def with_nan_tails(x, lengths):
    x = x.clone()
    for b, length in enumerate(lengths):
        x[b, :, length:] = math.nan
    return x


def fp8_pages(k, v, scale, lengths, page):
    """k and v rounded to fp8, in float32, and their pages as the `cache` of check_flash_fwd."""
    data = [quantise(x.contiguous(), "fp8_e4m3", scale)[0] for x in (k, v)]
    *pages, where = paged(*data, lengths, page)
    exact = (dequantise(x, scale, torch.float32) for x in data)
    return *exact, (*pages, {"k_scale": scale, "v_scale": scale} | where)

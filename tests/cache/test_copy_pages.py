"""`metal_attn::copy_pages`: in the simulator, every access checked, and as its reference."""

import pytest
import torch

from tests.attention.test_flash_fwd_device_lengths import after_the_checks
from tests.cache.append_check import memory_of, same_memory
from tests.helpers.mutants import mutant_tests
from torch_metal_attn import simulate
from torch_metal_attn.runtime import extension

copy_pages = torch.ops.metal_attn.copy_pages
explain = torch.ops.metal_attn_explain.copy_pages


def random_bytes(count, seed=0):
    return torch.randint(0, 256, (count,), generator=torch.Generator().manual_seed(seed)).byte()


def cache_of(shape, dtype=torch.float16, offset=0, seed=0):
    """Every byte random, in a storage that has more on both sides."""
    numel = torch.Size(shape).numel()
    memory = random_bytes((numel + offset + 5) * dtype.itemsize, seed).view(dtype)
    return memory[offset : offset + numel].view(shape)


def check(cache, src, dst, index=torch.int32):
    after = same_memory(cache)
    for one, other in zip(src, dst, strict=True):
        after[other] = cache[one]
    src, dst = (torch.tensor(pages).to(index) for pages in (src, dst))
    assert copy_pages(cache, src, dst) is None
    assert torch.equal(memory_of(cache), memory_of(after))


def word_of(cache):
    (launch,) = extension.launches(explain(cache, torch.tensor([0]), torch.tensor([1])))
    return launch["defines"]["WORD"]


DTYPES = [
    *(torch.float32, torch.float16, torch.bfloat16, torch.int8, torch.uint8, torch.bool),
    *(torch.float64, torch.int64, torch.complex64, torch.float8_e4m3fn),
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dtypes(dtype, backend):
    cache = cache_of((6, 2, 8, 16), torch.uint8 if dtype == torch.bool else dtype)
    if dtype == torch.bool:
        cache = cache > 100
    check(cache, [0, 3], [5, 1], torch.int64)


LAYOUTS = {
    "heads first": lambda c: c,
    "rows first": lambda c: c.view(6, 8, 2, 32).transpose(1, 2),
    "pages innermost": lambda c: c.flatten().view(2, 8, 32, 6).permute(3, 0, 1, 2),
    "half of the pages": lambda c: c[::2],
    "one of two tensors in a page": lambda c: c[:, 1],
    "some rows": lambda c: c[:, :, 1:6],
    "some columns": lambda c: c[..., 3:20],
    "every second column": lambda c: c[..., ::2],
    "numbers": lambda c: c.flatten()[:6],
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(layout, backend):
    check(LAYOUTS[layout](cache_of((6, 2, 8, 32))), [0], [2])


@pytest.mark.parametrize(
    "offset, columns, word",
    [(0, 16, "uint4"), (4, 16, "uint2"), (2, 16, "uint"), (1, 16, "ushort"), (0, 9, "uint4")],
)
def test_words(offset, columns, word, backend):
    """As wide as the alignment allows."""
    cache = cache_of((6, 2, 8, columns), offset=offset)
    if cache.data_ptr() % 16 == 2 * offset:
        assert word_of(cache) == word
    check(cache, [3], [4])


def test_a_page_of_odd_bytes(backend):
    cache = cache_of((5, 3, 7), torch.uint8)
    assert word_of(cache) == "uchar"
    check(cache, [4, 0], [1, 2])


def test_large_pages(backend):
    """More words than a threadgroup copies, and more copies than one."""
    check(cache_of((9, 4, 64, 65)), [0, 2, 4], [1, 3, 5])


def test_one_source_for_many(backend):
    check(cache_of((6, 2, 8, 16)), [2, 2, 2], [0, 5, 3])


@pytest.mark.parametrize("shape", [(6, 0, 8), (6, 2, 8), (0, 2, 8), (3,)], ids=str)
def test_nothing_to_copy(shape, backend):
    cache = cache_of(shape)
    with simulate() as run:
        check(cache, [], [])
    assert run.launches == []


def test_empty_pages(backend):
    check(cache_of((6, 0, 8)), [1], [2])


@pytest.mark.parametrize("step", [2, 3])
def test_strided_indices(step, backend):
    cache, after = cache_of((8, 2, 8, 16)), cache_of((8, 2, 8, 16))
    after[[5, 6]] = after[[1, 2]]
    src = torch.tensor([[1] * step, [2] * step])[:, 0]
    dst = torch.tensor([[5] * step, [6] * step])[:, 0]
    copy_pages(cache, src, dst)
    assert torch.equal(cache.view(torch.int16), after.view(torch.int16))


@pytest.mark.parametrize("name", ["src", "dst"])
@pytest.mark.parametrize("bad", [-1, 6, -(2**62), 2**62])
def test_pages_that_only_the_device_sees_to_be_none(name, bad, monkeypatch):
    """Skipped: nothing is read or written outside."""
    cache, after = cache_of((6, 2, 8, 16)), cache_of((6, 2, 8, 16))
    after[5] = after[1]
    pages = {"src": torch.tensor([0, 1]), "dst": torch.tensor([4, 5])}
    after_the_checks(monkeypatch, pages[name], [bad, pages[name][1].item()])
    with simulate(check=True):
        copy_pages(cache, **pages)
    assert torch.equal(cache.view(torch.int16), after.view(torch.int16))


def test_a_cache_with_a_graph():
    cache = torch.zeros(6, 4, requires_grad=True) * 1
    copy_pages(cache, torch.tensor([0, 1]), torch.tensor([4, 5]))
    with pytest.raises(NotImplementedError, match="copy_pages has no gradient, and cache requires"):
        cache.sum().backward()


def small_cache():
    """The storage ends with the cache, so that all that follows is outside."""
    return cache_of((6, 2, 8, 16)).clone()


def pages_inside():
    check(small_cache(), [1, 5], [2, 3])


def pages_outside():
    """Of a source and of a destination, one page that is none."""
    for name in ("src", "dst"):
        pages = {"src": torch.tensor([0, 1]), "dst": torch.tensor([4, 5])}
        with pytest.MonkeyPatch.context() as monkeypatch:
            after_the_checks(monkeypatch, pages[name], [7, pages[name][1].item()])
            copy_pages(small_cache(), **pages)


MUTANTS = {
    pages_inside: """
        the page itself: cache + {~from => to~} * params.page_stride
        the page behind: {~from => (from - 1)~} * params.page_stride
        the other way [race]: {~to_page[offset] = from_page => cache[offset] = to_page~}[offset]
        first copy for all: src[{~copy * params.src_stride => 0~}]
        wrong stride: to * {~=> (~} params.page_stride{~=> + 1)~}
        last words left out: word {~=> + 1~} < params.page_words
    """,
    pages_outside: """
        pages outside read [out_of_bounds]: {~from < 0 || from >= params.pages => false~}
        pages outside written [out_of_bounds]: {~to < 0 || to >= params.pages => false~}
    """,
}

test_mutant_is_caught, test_the_unchanged_kernels_pass = mutant_tests(MUTANTS, "copy_pages")

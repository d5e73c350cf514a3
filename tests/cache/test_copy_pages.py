"""copy_pages in the simulator, with every access checked, and by the CPU kernel."""

from itertools import product

import pytest
import torch

from tests.attention.test_flash_fwd_device_lengths import after_the_checks
from tests.helpers.judged import judge
from tests.helpers.memory import memory_of, same_memory
from tests.helpers.mutants import mutant_tests
from torch_metal_attn import simulate
from torch_metal_attn.runtime import extension
from torch_metal_attn.testing import Copy

copy_pages = torch.ops.metal_attn.copy_pages


def cache_of(shape, dtype=torch.float16, offset=0):
    """A tensor of random bytes in a larger storage, which has random bytes too."""
    numel = torch.Size(shape).numel()
    size = ((numel + offset + 5) * dtype.itemsize,)
    memory = torch.randint(0, 256, size, generator=torch.Generator().manual_seed(0)).byte()
    return memory.view(dtype)[offset : offset + numel].view(shape)


def check(cache, src, dst, stride=1):
    after = same_memory(cache)
    for source, destination in zip(src, dst, strict=True):
        after[destination] = cache[source]
    pages = (torch.tensor(x).int().repeat_interleave(stride)[::stride] for x in (src, dst))
    assert copy_pages(cache, *pages) is None
    assert torch.equal(memory_of(cache), memory_of(after))


def word_of(cache):
    pages = torch.tensor([0]), torch.tensor([1])
    (launch,) = extension.launches(torch.ops.metal_attn_explain.copy_pages(cache, *pages))
    return launch["defines"]["WORD"]


PAGES = {"shape": (6, 2, 8, 16), "copies": ((0, 5), (3, 1)), "dtype": "float16"}
CASES = {
    "dtypes": [
        {"dtype": dtype, "index_dtype": index}
        for dtype in (
            *("float32", "float16", "bfloat16", "int8", "uint8", "bool", "float64", "int64"),
            "float8_e4m3fn",
        )
        for index in ("int32", "int64")
    ],
    "odd bytes": [{"shape": (5, 3, 7), "dtype": "uint8", "copies": ((4, 1), (0, 2))}],
    # A page has more words than a threadgroup copies, and there are several copies.
    "large pages": [{"shape": (9, 4, 64, 65), "copies": ((0, 1), (2, 3), (4, 5))}],
    "one source for many": [{"copies": ((2, 0), (2, 5), (2, 3))}],
    "empty pages": [{"shape": (6, 0, 8), "copies": ((1, 2),)}],
    "nothing": [{"shape": s, "copies": ()} for s in ((6, 0, 8), (6, 2, 8), (0, 2, 8))],
}


@pytest.mark.parametrize("subject", CASES)
def test_values(subject, backend):
    judge(*(Copy(**PAGES | fields) for fields in CASES[subject]))


LAYOUTS = {
    "half of the pages": lambda c: c[::2],
    "one of two tensors in a page": lambda c: c[:, 1],
    "some rows": lambda c: c[:, :, 1:6],
    "some columns": lambda c: c[..., 3:20],
    "every second column": lambda c: c[..., ::2],
    "pages of one number": lambda c: c.flatten()[:6],
    "complex numbers": lambda c: c.view(torch.complex64),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_pages_of_views_are_copied(layout, backend):
    check(LAYOUTS[layout](cache_of((6, 2, 8, 32))), [0], [2])


@pytest.mark.parametrize(
    "offset, columns, word",
    [(0, 16, "uint4"), (4, 16, "uint2"), (2, 16, "uint"), (1, 16, "ushort"), (0, 9, "uint4")],
)
def test_the_word_is_as_wide_as_the_alignment_allows(offset, columns, word, backend):
    cache = cache_of((6, 2, 8, columns), offset=offset)
    if cache.data_ptr() % 16 == 2 * offset:  # if the storage is 16-byte aligned
        assert word_of(cache) == word
    check(cache, [3], [4])


def test_zero_copies_launch_no_kernel():
    assert word_of(cache_of((5, 3, 7), torch.uint8)) == "uchar"
    with simulate() as run:
        check(cache_of((3,)), [], [])
    assert run.launches == []


@pytest.mark.parametrize("step", [2, 3])
def test_strided_indices(step, backend):
    check(cache_of((8, 2, 8, 16)), [1, 2], [5, 6], step)


def test_gradients_are_refused():
    cache = torch.zeros(6, 4, requires_grad=True) * 1
    copy_pages(cache, torch.tensor([0, 1]), torch.tensor([4, 5]))
    with pytest.raises(NotImplementedError, match="copy_pages has no gradient, and cache requires"):
        cache.sum().backward()


def small_cache():
    """The storage ends with the cache, so that an access after it is out of bounds."""
    return cache_of((6, 2, 8, 16)).clone()


def copies_with_valid_pages():
    check(small_cache(), [1, 5], [2, 3])


def copies_with_invalid_pages():
    """A copy is skipped if only the device sees that its source or destination is invalid."""
    for name, bad in product(("src", "dst"), (7, -1, 6, -(2**62), 2**62)):
        cache, after = small_cache(), small_cache()
        after[5] = after[1]
        pages = {"src": torch.tensor([0, 1]), "dst": torch.tensor([4, 5])}
        with pytest.MonkeyPatch.context() as monkeypatch:
            after_the_checks(monkeypatch, pages[name], [bad, pages[name][1].item()])
            copy_pages(cache, **pages)
        assert torch.equal(cache.view(torch.int16), after.view(torch.int16))


def test_copies_with_invalid_pages_are_skipped():
    with simulate(check=True):
        copies_with_invalid_pages()


MUTANTS = {
    copies_with_valid_pages: """
        the page itself: cache + {~from => to~} * params.page_stride
        the page before: {~from => (from - 1)~} * params.page_stride
        dst copied to src [race]: {~to_page[offset] = from_page => cache[offset] = to_page~}[offset]
        first copy for all: src[{~copy * params.src_stride => 0~}]
        wrong stride: to * {~=> (~} params.page_stride{~=> + 1)~}
        last words left out: word {~=> + 1~} < params.page_words
    """,
    copies_with_invalid_pages: """
        pages outside read [out_of_bounds]: {~from < 0 || from >= params.pages => false~}
        pages outside written [out_of_bounds]: {~to < 0 || to >= params.pages => false~}
    """,
}

test_mutant_is_caught, test_the_unchanged_kernels_pass = mutant_tests(MUTANTS, "copy_pages")

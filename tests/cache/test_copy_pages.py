"""`metal_attn::copy_pages`: in the simulator, every access checked, and as its reference."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.attention.test_flash_fwd_device_lengths import after_the_checks
from tests.cache.append_check import memory_of, same_memory
from tests.helpers.mutants import mutant_tests
from tests.helpers.refused import refused
from tests.rope.test_rope_registration import without_data
from torch_metal_attn import simulate
from torch_metal_attn.runtime import extension

copy_pages = torch.ops.metal_attn.copy_pages
explain = torch.ops.metal_attn_explain.copy_pages


@pytest.fixture(params=["simulator", "reference"])
def how(request):
    """Both kernels of the CPU."""
    if request.param == "reference":
        yield request.param
        return
    with simulate(check=True):
        yield request.param


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
def test_dtypes(dtype, how):
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
def test_layouts(layout, how):
    check(LAYOUTS[layout](cache_of((6, 2, 8, 32))), [0], [2])


@pytest.mark.parametrize(
    "offset, columns, word",
    [(0, 16, "uint4"), (4, 16, "uint2"), (2, 16, "uint"), (1, 16, "ushort"), (0, 9, "uint4")],
)
def test_words(offset, columns, word, how):
    """As wide as the alignment allows."""
    cache = cache_of((6, 2, 8, columns), offset=offset)
    if cache.data_ptr() % 16 == 2 * offset:
        assert word_of(cache) == word
    check(cache, [3], [4])


def test_a_page_of_odd_bytes(how):
    cache = cache_of((5, 3, 7), torch.uint8)
    assert word_of(cache) == "uchar"
    check(cache, [4, 0], [1, 2])


def test_large_pages(how):
    """More words than a threadgroup copies, and more copies than one."""
    check(cache_of((9, 4, 64, 65)), [0, 2, 4], [1, 3, 5])


def test_one_source_for_many(how):
    check(cache_of((6, 2, 8, 16)), [2, 2, 2], [0, 5, 3])


@pytest.mark.parametrize("shape", [(6, 0, 8), (6, 2, 8), (0, 2, 8), (3,)], ids=str)
def test_nothing_to_copy(shape, how):
    cache = cache_of(shape)
    with simulate() as run:
        check(cache, [], [])
    assert run.launches == []


def test_empty_pages(how):
    check(cache_of((6, 0, 8)), [1], [2])


@pytest.mark.parametrize("step", [2, 3])
def test_strided_indices(step, how):
    cache, after = cache_of((8, 2, 8, 16)), cache_of((8, 2, 8, 16))
    after[[5, 6]] = after[[1, 2]]
    src = torch.tensor([[1] * step, [2] * step])[:, 0]
    dst = torch.tensor([[5] * step, [6] * step])[:, 0]
    copy_pages(cache, src, dst)
    assert torch.equal(cache.view(torch.int16), after.view(torch.int16))


@given(
    shape=st.lists(st.integers(1, 9), min_size=1, max_size=4),
    order=st.randoms(use_true_random=False),
    dtype=st.sampled_from([torch.float32, torch.int8]),
    offset=st.integers(0, 9),
    seed=st.integers(0, 2**31),
)
def test_any_cache(how, shape, order, dtype, offset, seed):
    dims = list(range(len(shape) + 1))
    order.shuffle(dims)
    cache = cache_of((*shape, 7), dtype, offset, seed).permute(dims)
    pages = torch.randperm(cache.shape[0], generator=torch.Generator().manual_seed(seed)).tolist()
    half = len(pages) // 2
    check(cache, pages[:half], pages[half : 2 * half])


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


def make(**changed):
    arguments = {
        "cache": torch.zeros(6, 2, 8, 16),
        "src": torch.tensor([0, 1]),
        "dst": torch.tensor([4, 5]),
    }
    return arguments | changed


REFUSED = {
    "cache of no dimensions": ({"cache": torch.tensor(1.0)}, "cache has no dimensions"),
    "src of float": ({"src": torch.zeros(2)}, "src has dtype .*; it must be int32 or int64"),
    "dst of two dimensions": ({"dst": torch.zeros(2, 1).long()}, "dst has 2 dimensions"),
    "dst of another dtype": ({"dst": torch.tensor([4, 5]).int()}, "dst has dtype .* and src"),
    "dst of another length": ({"dst": torch.tensor([4])}, "dst has shape"),
}
REFUSED_WITH_DATA = {
    "expanded cache": ({"cache": torch.zeros(1, 4).expand(6, 4)}, "cache has .* may share memory"),
    "src outside": ({"src": torch.tensor([0, 6])}, r"src\[1\] is 6; it must be in 0..5"),
    "dst outside": ({"dst": torch.tensor([-1, 4])}, r"dst\[0\] is -1; it must be in 0..5"),
    "dst twice": ({"dst": torch.tensor([4, 4])}, r"dst\[1\] is 4, and so is dst\[0\]"),
    "dst read": ({"dst": torch.tensor([4, 1])}, r"src\[1\] is 1, and so is dst\[1\]"),
}
OPS = {
    "copy_pages": copy_pages,
    "simulator": torch.ops.metal_attn_simulator.copy_pages,
    "explain": explain,
    "fake": without_data(copy_pages),
}


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("case", REFUSED)
def test_refusals(case, op):
    changed, message = REFUSED[case]
    with refused(message):
        OPS[op](**make(**changed))


@pytest.mark.parametrize("op", ["copy_pages", "simulator", "explain"])
@pytest.mark.parametrize("case", REFUSED_WITH_DATA)
def test_refusals_of_values_and_memory(case, op):
    changed, message = REFUSED_WITH_DATA[case]
    arguments = make(**changed)
    before = arguments["cache"].clone()
    with refused(message):
        OPS[op](**arguments)
    assert torch.equal(arguments["cache"], before)


def test_indices_in_the_cache_are_refused():
    cache = torch.zeros(6, 4, dtype=torch.int64)
    with refused("src lies in the memory of cache"):
        copy_pages(cache, cache[0, :2], torch.tensor([4, 5]))


def test_a_cache_with_a_graph():
    with pytest.raises(NotImplementedError, match="cache is a leaf that requires grad"):
        copy_pages(**make(cache=torch.zeros(6, 4, requires_grad=True)))
    cache = torch.zeros(6, 4, requires_grad=True) * 1
    copy_pages(**make(cache=cache))
    with pytest.raises(NotImplementedError, match="copy_pages has no gradient, and cache requires"):
        cache.sum().backward()


def test_opcheck(how):
    torch.library.opcheck(copy_pages, tuple(make(cache=cache_of((6, 8))).values()))


def test_autograd_sees_the_write():
    cache = torch.rand(6, 4)
    x = torch.rand(6, 4, requires_grad=True)
    y = (x * cache).sum()
    copy_pages(**make(cache=cache))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward()


def test_compile():
    def step(cache, src, dst):
        copy_pages(cache, src, dst)
        return cache + 1

    arguments, expected = make(cache=torch.rand(6, 4)), None
    other = {name: x.clone() for name, x in arguments.items()}
    expected = step(**other)
    result = torch.compile(step, fullgraph=True, backend="aot_eager")(**arguments)
    assert torch.equal(result, expected)
    assert torch.equal(arguments["cache"], other["cache"])


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
    pages_inside: {
        "the page itself": ("cache + from * params.page_stride", "cache + to * params.page_stride"),
        "the page behind": ("from * params.page_stride", "(from - 1) * params.page_stride"),
        "the other way": (
            "to_page[offset] = from_page[offset]",
            "cache[offset] = to_page[offset]",
            "race",
        ),
        "first copy for all": ("src[copy * params.src_stride]", "src[0]"),
        "wrong stride": ("to * params.page_stride", "to * (params.page_stride + 1)"),
        "last words left out": ("word < params.page_words", "word + 1 < params.page_words"),
    },
    pages_outside: {
        "pages outside read": ("from < 0 || from >= params.pages", "false", "out_of_bounds"),
        "pages outside written": ("to < 0 || to >= params.pages", "false", "out_of_bounds"),
    },
}

test_mutant_is_caught, test_the_unchanged_kernels_pass = mutant_tests(MUTANTS, "copy_pages")

"""append_kv as a PyTorch op: autograd, compiling, fakes, explanations, and what it refuses."""

import pytest
import torch
from torch._dynamo.exc import Unsupported

from tests.cache.append_check import append_kv, check_equal, expected, make, memory_of, same_memory
from tests.helpers.cases import each_case
from tests.helpers.refused import refused
from tests.rope.test_rope_registration import without_data
from torch_metal_attn import simulate

explain = torch.ops.metal_attn_explain.append_kv

OPTIONS = [
    {},
    {"seqlens": [3, 4], "rotary_dim": 64, "q_heads": 3, "leftpad": [1, 2]},
    {"format": "q8_0", "page": 16},
    {"format": "fp8_e4m3", "cache_batch_idx": [1, 0]},
]


@pytest.mark.parametrize(
    "options, simulated", [(OPTIONS[1], False), *((options, True) for options in OPTIONS)], ids=str
)
def test_opcheck(options, simulated):
    tensors = make(**options).tensors
    for name in ("k_cache", "v_cache", "k_scale", "v_scale"):
        # opcheck compares what NaN would hide, and multiplies, which float8 has no kernel for.
        if name in tensors and tensors[name].dtype == torch.float16:
            tensors[name].zero_()
        elif name in tensors and tensors[name].dtype == torch.float8_e4m3fn:
            tensors[name] = tensors[name].view(torch.uint8)
    places = [tensors.pop(name) for name in ("k", "v", "k_cache", "v_cache")]
    if simulated:
        with simulate(check=True):
            torch.library.opcheck(append_kv, places, tensors)
    else:
        torch.library.opcheck(append_kv, places, tensors)


@pytest.mark.parametrize("options, dynamic", zip(OPTIONS, [False, True] * 2, strict=True), ids=str)
def test_compile(options, dynamic):
    problem = make(**options)
    after = expected(problem)

    def step(tensors):
        append_kv(**tensors)
        return tensors["k_cache"].view(torch.uint8).sum()

    compiled = torch.compile(step, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    total = compiled(problem.tensors)
    check_equal(problem.tensors, after)
    assert total == after["k_cache"].view(torch.uint8).sum()


def test_autograd_sees_the_writes():
    for name in ("k_cache", "v_cache", "q", "k_scale"):
        problem = make(rotary_dim=64, q_heads=3, format="q8_0" if name == "k_scale" else None)
        written = problem.tensors[name]
        x = torch.rand(written.shape, requires_grad=True)
        y = (x * written).sum()
        problem.run()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.backward()


def graph_size(node):
    return 1 + sum(graph_size(after) for after, _ in node.next_functions if after is not None)


class TestGradients:
    """There are none: who asks for one meets an error, and nobody else does."""

    @pytest.mark.parametrize(
        ("name", "changed"),
        [
            ("k", ["k_cache"]),
            ("v", ["v_cache"]),
            ("q", ["q"]),
            ("rotary_cos", ["k_cache", "q"]),
        ],
    )
    def test_of_what_was_written(self, name, changed):
        plain, problem = make(rotary_dim=64, q_heads=3), make(rotary_dim=64, q_heads=3)
        leaf = problem.tensors[name].detach().requires_grad_()
        problem.tensors[name] = leaf * 1 if name == "q" else leaf
        for each in (plain, problem):
            each.run()
        for written in ("k_cache", "v_cache", "q"):
            x = problem.tensors[written]
            check_equal({written: x.detach()}, {written: plain.tensors[written]})
            if written not in changed:
                assert not x.requires_grad
                continue
            message = f"append_kv has no gradient, and {name} requires grad"
            with pytest.raises(NotImplementedError, match=message):
                x.nan_to_num().sum().backward()
        assert leaf.grad is None

    def test_a_cache_keeps_no_graph_of_its_steps(self):
        problem = make()
        sizes = []
        for _ in range(3):
            problem.tensors["k"] = make().tensors["k"].requires_grad_() * 2
            problem.run()
            sizes.append(graph_size(problem.tensors["k_cache"].grad_fn))
        assert sizes == [3, 3, 3]  # of a view: how it was made, the write, and what requires grad

    @pytest.mark.parametrize("how", ["leaf", "unbind", "no_grad", "compiled"])
    def test_where_autograd_cannot_be_told(self, how):
        """Refused before anything is written."""
        problem = make()
        problem.tensors["k"].requires_grad_()
        cache = problem.tensors["k_cache"]
        message = "made under torch.no_grad"
        run = problem.run
        if how == "leaf":
            cache.requires_grad_()
            message = "k_cache is a leaf that requires grad"
        elif how == "unbind":
            problem.tensors["k_cache"] = torch.stack([cache, cache]).unbind()[0]
        elif how == "no_grad":
            with torch.no_grad():
                problem.tensors["k_cache"] = cache[:]
        else:
            run = torch.compile(problem.run, backend="aot_eager", fullgraph=True)
            message = "append_kv has no gradient, and k requires grad"
        before = same_memory(problem.tensors["k_cache"].detach())
        with pytest.raises((NotImplementedError, Unsupported), match=message):
            run()
        check_equal({"k_cache": problem.tensors["k_cache"].detach()}, {"k_cache": before})
        with torch.no_grad():
            problem.run()


def zeros(*shape, dtype=torch.float16):
    return torch.zeros(shape, dtype=dtype)


def ints(*values):
    return torch.tensor(values, dtype=torch.int32)


# The options of `make`, what of its tensors is changed, and the error.
BAD = {
    "dtype of k": ({}, {"k": zeros(2, 2, 5, 64, dtype=torch.float64)}, "k has dtype .*float64"),
    "dtype of v": ({}, {"v": zeros(2, 2, 5, 64, dtype=torch.float32)}, "v has dtype .* and k"),
    "rank of k": ({}, {"k": zeros(2, 5, 64)}, "k has 3 dimensions"),
    "shape of v": ({}, {"v": zeros(2, 2, 4, 64)}, "v has shape"),
    "last stride of k": ({}, {"k": zeros(2, 2, 64, 5).transpose(2, 3)}, "k has strides"),
    "heads of k_cache": ({}, {"k_cache": zeros(2, 3, 32, 64)}, "k_cache has shape"),
    "columns of v_cache": ({}, {"v_cache": zeros(2, 2, 32, 63)}, "v_cache has shape"),
    "rows of v_cache": ({}, {"v_cache": zeros(2, 2, 31, 64)}, "v_cache has shape"),
    "batch of caches": (
        {},
        {"k_cache": zeros(3, 2, 32, 64), "v_cache": zeros(3, 2, 32, 64)},
        "k_cache has a batch of 3 and k of 2",
    ),
    "dtype of k_cache": (
        {},
        dict.fromkeys(("k_cache", "v_cache"), zeros(2, 2, 32, 64, dtype=torch.int16)),
        "k_cache has dtype",
    ),
    "another dtype of k_cache": (
        {},
        {"k_cache": zeros(2, 2, 32, 64, dtype=torch.float32)},
        "k_cache has dtype .*float32 and k .*float16; they must be alike",
    ),
    "caches of different dtypes": (
        {"dtype": torch.float32},
        {"v_cache": zeros(2, 2, 32, 64, dtype=torch.bfloat16)},
        "v_cache has dtype .*bfloat16 and k_cache .*float32; they must be alike",
    ),
    "one cache quantised": ({"format": "q8_0"}, {"v_cache": zeros(2, 2, 32, 64)}, "v"),
    "no scale": ({"format": "q8_0"}, {"k_scale": None, "v_scale": None}, "k_scale"),
    "scale of another dtype": (
        {"format": "q8_0"},
        {"k_scale": zeros(2, 2, 32, 2).float(), "v_scale": zeros(2, 2, 32, 2).float()},
        "k_scale",
    ),
    "scale of another shape": (
        {"format": "q8_0"},
        {"k_scale": zeros(2, 2, 32, 1)},
        "k_scale has shape",
    ),
    "scale without a format": (
        {},
        {"k_scale": zeros(2, 2, 32, 2), "v_scale": zeros(2, 2, 32, 2)},
        "k_scale is given",
    ),
    "no room": (
        {"length": 33, "capacity": 33},
        {"k_cache": zeros(2, 2, 32, 64), "v_cache": zeros(2, 2, 32, 64)},
        "k has a length of 33 and k_cache room for 32",
    ),
    "shape of cache_seqlens": ({}, {"cache_seqlens": ints(1)}, "cache_seqlens has shape"),
    "dtype of cache_seqlens": ({}, {"cache_seqlens": ints(1, 2).long()}, "cache_seqlens has dtype"),
    "shape of leftpad_k": ({}, {"leftpad_k": ints(1)}, "leftpad_k has shape"),
    "dtype of cache_batch_idx": (
        {},
        {"cache_batch_idx": ints(1, 0).long()},
        "cache_batch_idx has dtype",
    ),
    "pages and indices": (
        {"page": 16},
        {"cache_batch_idx": ints(1, 0)},
        "cache_batch_idx is given with block_table",
    ),
    "dtype of block_table": (
        {"page": 16},
        {"block_table": ints(1, 0).long()[None]},
        "block_table has dtype",
    ),
    "shape of block_table": ({"page": 16}, {"block_table": ints(1, 0)}, "block_table has shape"),
    "size of a page": (
        {},
        {
            "k_cache": zeros(4, 2, 0, 64),
            "v_cache": zeros(4, 2, 0, 64),
            "block_table": ints(1, 0)[:, None],
        },
        "k_cache has pages of 0 keys; with block_table they must have at least 1",
    ),
    "q alone": ({}, {"q": zeros(2, 3, 5, 64)}, "q is given and rotary_cos is not"),
    "rotary_cos alone": (
        {"rotary_dim": 64},
        {"rotary_sin": None},
        "only one of rotary_cos and rotary_sin",
    ),
    "no rows of rotary_cos": (
        {},
        {"rotary_cos": zeros(0, 4), "rotary_sin": zeros(0, 4)},
        "rotary_cos has no rows",
    ),
    "columns of rotary_cos": (
        {},
        {"rotary_cos": zeros(9, 33), "rotary_sin": zeros(9, 33)},
        "rotary_cos has 33 columns",
    ),
    "rank of rotary_cos": (
        {},
        {"rotary_cos": zeros(1, 9, 4), "rotary_sin": zeros(1, 9, 4)},
        "rotary_cos has 3 dimensions",
    ),
    "shape of rotary_sin": (
        {"rotary_dim": 64},
        {"rotary_sin": zeros(9, 4).float()},
        "rotary_sin has shape",
    ),
    "head dim of q": ({"rotary_dim": 64}, {"q": zeros(2, 3, 5, 32)}, "q has shape"),
    "dtype of q": ({"rotary_dim": 64}, {"q": zeros(2, 3, 5, 64).float()}, "q has dtype"),
    "interleaved without tables": ({}, {"rotary_interleaved": True}, "rotary_interleaved is True"),
}
# What only data and memory show.
BAD_DATA = {
    "rows past the end": ({}, {"cache_seqlens": ints(0, 28)}, r"cache_seqlens\[1\] is 28 .* 0..32"),
    "rows before the first": ({}, {"cache_seqlens": ints(-1, 0)}, r"cache_seqlens\[0\] is -1"),
    "no such batch": ({}, {"cache_batch_idx": ints(0, 2)}, r"cache_batch_idx\[1\] is 2"),
    "no such page": (
        {"page": 16},
        {"block_table": ints(0, 99)[:, None].repeat(1, 2)},
        r"block_table\[1, 0\] is 99",
    ),
    "one batch twice": (
        {},
        {"cache_batch_idx": ints(1, 1)},
        "sequences 0 and 1 both write row 0 of batch 1",
    ),
    "one page twice": (
        {"page": 16},
        {"block_table": ints(3, 3)[:, None].repeat(1, 2)},
        "sequences 0 and 1 both write row 0 of page 3",
    ),
    "padding below nothing": ({}, {"leftpad_k": ints(0, -1)}, r"leftpad_k\[1\] is -1"),
    "too much padding": (
        {"rotary_dim": 64},
        {"leftpad_k": ints(0, 1)},
        "sequence 1 asks for rows -1 to 3 of rotary_cos",
    ),
    "too few rows of the tables": (
        {"rotary_dim": 64, "q_heads": 1, "q_length": 36},
        {},
        "sequence 0 asks for rows 0 to 35",
    ),
    "expanded cache": (
        {},
        {"k_cache": zeros(1, 2, 32, 64).expand(2, 2, 32, 64)},
        "k_cache has .* may share memory",
    ),
}


def bad_arguments(options, changed):
    tensors = make(**options).tensors | changed
    return {name: x for name, x in tensors.items() if x is not None}


OPS = {
    "append_kv": append_kv,
    "simulator": torch.ops.metal_attn_simulator.append_kv,
    "explain": explain,
    "fake": without_data(append_kv),
}


@pytest.mark.parametrize("op", OPS)
@each_case("case", BAD)
def test_refusals(case, op):
    options, changed, message = BAD[case]
    with refused(message):
        OPS[op](**bad_arguments(options, changed))


@pytest.mark.parametrize("op", ["append_kv", "simulator", "explain"])
@each_case("case", BAD_DATA)
def test_refusals_of_data_before_anything_is_written(case, op):
    options, changed, message = BAD_DATA[case]
    arguments = bad_arguments(options, changed)
    before = memory_of(arguments["v_cache"]).clone()
    with refused(message):
        OPS[op](**arguments)
    assert torch.equal(memory_of(arguments["v_cache"]), before)


def shared(name):
    """The arguments, of which `name` lies in the memory of what is written."""
    tensors = make(rotary_dim=64, q_heads=2, seqlens=[0, 0], format="q8_0", capacity=32).tensors
    cache = tensors["k_cache"]
    if name in ("v_cache", "k_scale"):
        whole = cache.view(tensors[name].dtype) if name == "k_scale" else cache
        tensors[name] = whole.flatten()[: tensors[name].numel()].view(tensors[name].shape)
    elif name in ("k", "v"):
        tensors[name] = tensors["q"]
    else:
        memory = memory_of(cache)[: tensors[name].nbytes].view(tensors[name].dtype)
        tensors[name] = memory.view(tensors[name].shape).zero_()
    return tensors


@pytest.mark.parametrize("name", ["v_cache", "k_scale", "k", "v", "cache_seqlens", "rotary_cos"])
def test_shared_memory_is_refused(name):
    with refused(f"{name} (may share elements|lies in the memory)"):
        append_kv(**shared(name))

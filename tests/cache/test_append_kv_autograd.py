"""append_kv has no gradients: who asks for one meets an error, and nobody else does."""

import pytest
import torch
from torch._dynamo.exc import Unsupported

from tests.cache.append_check import check_equal, make, same_memory


def graph_size(node):
    return 1 + sum(graph_size(after) for after, _ in node.next_functions if after is not None)


@pytest.mark.parametrize(
    ("name", "changed"),
    [
        ("k", ["k_cache"]),
        ("v", ["v_cache"]),
        ("q", ["q"]),
        ("rotary_cos", ["k_cache", "q"]),
    ],
)
def test_of_what_was_written(name, changed):
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


def test_a_cache_keeps_no_graph_of_its_steps():
    problem = make()
    sizes = []
    for _ in range(3):
        problem.tensors["k"] = make().tensors["k"].requires_grad_() * 2
        problem.run()
        sizes.append(graph_size(problem.tensors["k_cache"].grad_fn))
    assert sizes == [3, 3, 3]  # of a view: how it was made, the write, and what requires grad


@pytest.mark.parametrize("how", ["leaf", "unbind", "no_grad", "compiled"])
def test_where_autograd_cannot_be_told(how):
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

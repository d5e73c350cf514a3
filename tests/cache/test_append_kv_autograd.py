"""append_kv has no gradients. It raises an error only if a gradient is needed."""

import pytest
import torch
from torch._dynamo.exc import Unsupported

from tests.helpers.judged import arguments
from tests.helpers.memory import check_equal, same_memory
from tests.helpers.steps import append

append_kv = torch.ops.metal_attn.append_kv


def graph_size(node):
    return 1 + sum(graph_size(after) for after, _ in node.next_functions if after is not None)


@pytest.mark.parametrize(
    "name, changed",
    [("k", ["k_cache"]), ("v", ["v_cache"]), ("q", ["q"]), ("rotary_cos", ["k_cache", "q"])],
)
def test_written_tensors_require_grad(name, changed):
    """tests/common/test_every_op.py checks that the backward of the written tensors raises."""
    plain, call = (arguments(append(length=5, rotary_columns=64)) for _ in range(2))
    leaf = call[name].detach().requires_grad_()
    call[name] = leaf * 1 if name == "q" else leaf
    for each in (plain, call):
        append_kv(**each)
    for written in ("k_cache", "v_cache", "q"):
        x = call[written]
        assert torch.equal(x.detach().nan_to_num(), plain[written].nan_to_num())
        assert x.requires_grad == (written in changed)


def test_a_cache_keeps_no_graph_of_its_steps():
    call = arguments(append())
    call["k_cache"] = call["k_cache"].clone()[:]
    leaf, sizes = call["k"].clone().requires_grad_(), []
    for _ in range(3):
        append_kv(**call | {"k": leaf * 2})
        sizes.append(graph_size(call["k_cache"].grad_fn))
    assert sizes == [3, 3, 3]  # the nodes of the view, the write and the leaf


@pytest.mark.parametrize("how", ["leaf", "unbind", "no_grad", "compiled"])
def test_writes_that_autograd_cannot_record_are_refused(how):
    call = arguments(append())
    call["k"].requires_grad_()
    cache = call["k_cache"]
    message = "created under torch.no_grad"
    run = append_kv
    if how == "leaf":
        cache.requires_grad_()
        message = "k_cache is a leaf that requires grad"
    elif how == "unbind":
        call["k_cache"] = torch.stack([cache, cache]).unbind()[0]
    elif how == "no_grad":
        with torch.no_grad():
            call["k_cache"] = cache[:]
    else:
        run = torch.compile(append_kv, backend="aot_eager", fullgraph=True)
        message = "append_kv has no gradient, and k requires grad"
    before = same_memory(call["k_cache"].detach())
    with pytest.raises((NotImplementedError, Unsupported), match=message):
        run(**call)
    check_equal({"k_cache": call["k_cache"].detach()}, {"k_cache": before})
    with torch.no_grad():
        append_kv(**call)

"""torch.nn.attention.bias: tensors that describe a causal mask without storing it."""

import threading

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention.bias import causal_lower_right, causal_upper_left
from torch.nn.functional import scaled_dot_product_attention as imported_before

import torch_metal_attn
from tests.sdpa.sdpa_check import (
    BUILTIN,
    LEFT_TO_TORCH,
    NO_CALL,
    normal,
    nothing_said,  # noqa: F401
)
from torch_metal_attn import sdpa_replaced, simulate

pytestmark = pytest.mark.filterwarnings(f"ignore:.*{NO_CALL}")

BIASES = {"upper left": causal_upper_left, "lower right": causal_lower_right}
LENGTHS = [(5, 9), (9, 5)]  # queries, keys; with fewer keys than queries, some queries see no key


def problem(q_length, k_length):
    shapes = (4, q_length), (2, k_length), (2, k_length)
    return [normal(2, *shape, 16, seed=seed) for seed, shape in enumerate(shapes)]


def visible(which, q_length, k_length):
    offset = 0 if which == "upper left" else k_length - q_length
    return torch.ones(q_length, k_length, dtype=torch.bool).tril(offset)


def outputs(attend, tensors, *arguments, dtype=None, **options):
    leaves = [x.to(dtype, copy=True).requires_grad_() for x in tensors]
    out = attend(*leaves, *arguments, enable_gqa=True, **options)
    weight = torch.arange(out.numel()).cos().view(out.shape).to(out)
    return out.detach(), *torch.autograd.grad((out * weight).sum(), leaves)


def check(actual, expected):
    for one, other in zip(actual, expected, strict=True):
        torch.testing.assert_close(one.double(), other.double(), rtol=0.0, atol=5e-6)


@pytest.mark.filterwarnings("ignore:Lower right causal bias", f"ignore:.*{LEFT_TO_TORCH}")
@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("which", BIASES)
class TestValues:
    def expected(self, which, lengths):
        mask = visible(which, *lengths)
        return outputs(BUILTIN[0], problem(*lengths), mask, dtype=torch.float64)

    @pytest.mark.parametrize("function", ["attribute", "imported before"])
    def test_replaced(self, which, lengths, function):
        with simulate(check=True) as run, sdpa_replaced() as calls:
            attend = F.scaled_dot_product_attention if function == "attribute" else imported_before
            actual = outputs(attend, problem(*lengths), BIASES[which](*lengths))
        check(actual, self.expected(which, lengths))
        assert (calls.replaced, calls.left_alone) == (1, {})
        assert len(run.launches) == 4
        assert not any("MASK" in launch.defines for launch in run.launches)

    def test_left_to_torch(self, which, lengths):
        """Calls in another thread, and in float64, which no kernel supports, run torch's code."""
        bias = BIASES[which](*lengths)
        expected = self.expected(which, lengths)
        results = []

        def call_in_thread():
            for attend in (F.scaled_dot_product_attention, imported_before):
                results.append(outputs(attend, problem(*lengths), bias))

        with simulate(check=True) as run, sdpa_replaced() as calls:
            thread = threading.Thread(target=call_in_thread)
            thread.start()
            thread.join()
            for attend in (F.scaled_dot_product_attention, imported_before):
                results.append(outputs(attend, problem(*lengths), bias, dtype=torch.float64))
            outputs(F.scaled_dot_product_attention, problem(*lengths))
        for actual in results:
            check(actual, expected)
        assert len(results) == 4
        assert (calls.replaced, sum(calls.left_alone.values())) == (1, 2)
        assert len(run.launches) == 4


@pytest.mark.parametrize("replaced, biases", [(False, ["lower right"]), (True, [*BIASES] * 2)])
def test_compiled(replaced, biases):
    torch._dynamo.reset()
    ours, attend = torch_metal_attn.scaled_dot_product_attention, imported_before
    compiled = torch.compile(
        lambda *a: (attend if replaced else ours)(*a, enable_gqa=True) + 0,
        fullgraph=True,
        backend="aot_eager",
    )
    q, k, v = problem(5, 9)
    for which in biases:
        with simulate(check=True) as run, sdpa_replaced():
            actual = compiled(q, k, v, BIASES[which](5, 9))
        check([actual], [BUILTIN[0](q, k, v, visible(which, 5, 9), enable_gqa=True)])
        assert [launch.kernel for launch in run.launches] == ["flash_decode"]


def test_overridable_functions_contain_torchs_own():
    """torch.compile reads this list to decide whether a mode or a subclass may handle a call."""
    torch.overrides._get_overridable_functions.cache_clear()
    torch.overrides.get_testing_overrides.cache_clear()
    with sdpa_replaced():
        assert BUILTIN[0] in torch.overrides.get_overridable_functions()[F]


class TestErrors:
    def test_lengths_must_be_those_of_query_and_key(self):
        bias = causal_lower_right(5, 8)
        message = "a CausalBias of 5 queries and 8 keys; query has a length of 5 and key of 9"
        with pytest.raises(RuntimeError, match=message):
            torch_metal_attn.scaled_dot_product_attention(*problem(5, 9), bias, enable_gqa=True)

    def test_is_causal_must_be_false(self):
        q, k, v = problem(5, 9)
        for attend in (BUILTIN[0], torch_metal_attn.scaled_dot_product_attention):
            with pytest.raises(ValueError, match="CausalBias should not be used with causal=True"):
                attend(q, k, v, causal_upper_left(5, 9), 0.0, True, enable_gqa=True)

"""The kernels of CPU tensors, and names and texts in error messages."""

import numpy as np
import pytest
import torch

import torch_metal_attn
from tests.attention.autograd_check import make_qkv
from tests.helpers.cases import each_case
from torch_metal_attn.ops.names import ArgumentNames
from torch_metal_attn.runtime.refusals import unmarked
from torch_metal_attn.simulator import engine
from torch_metal_attn.wording import count_text, type_text, value_text

flash_fwd = torch.ops.metal_attn.flash_fwd


def test_outputs_are_poisoned(monkeypatch):
    """The other tests rely on NaN in new tensors to notice a kernel that writes nothing."""
    assert torch.empty(3).isnan().all()
    monkeypatch.setattr(engine, "run", lambda *arguments, **options: engine.Counters())
    with torch_metal_attn.simulate(check=True):
        out, lse = flash_fwd(*make_qkv())
    assert out.isnan().all()
    assert lse.isnan().all()


def test_environment_turns_the_simulator_on(monkeypatch):
    monkeypatch.setenv("TORCH_METAL_ATTN_BACKEND", "simulator")
    q, k, v = make_qkv()
    assert torch_metal_attn.explain(q, k, v).backend == "simulator"
    monkeypatch.setenv("TORCH_METAL_ATTN_BACKEND", "reference")
    assert torch_metal_attn.explain(q, k, v).backend == "reference"


NAMES = ArgumentNames({"k": "k_cache", "seqused_k": "cache_seqlens"}, blhd=True)
KV_NAMES = ArgumentNames({"k_cache": "kv[0]"})


@pytest.mark.parametrize(
    "message, expected",
    [
        ("`k` has 2 heads; call `k`.clone()", "k_cache has 2 heads; call k_cache.clone()"),
        ("`seqused_k`[0] is 9, say k", "cache_seqlens[0] is 9, say k"),
        ("`leftpad_k` and `k_scale` stay", "leftpad_k and k_scale stay"),
        ("`k` of shape `(1, 2, 3, 4)`", "k_cache of shape (1, 3, 2, 4)"),
        ("it must be `(B, H, L, D)` or `(2, 3)`", "it must be (B, L, H, D) or (2, 3)"),
    ],
)
@pytest.mark.parametrize("kind", [ValueError, NotImplementedError])
def test_marked_words_are_replaced(message, expected, kind):
    error = NAMES.error(kind(unmarked(message)))
    assert (type(error), str(error)) == (kind, expected)
    # A caller whose arguments have other names renames them again.
    assert str(KV_NAMES.error(error)) == expected.replace("k_cache", "kv[0]")


def test_other_errors_keep_their_text():
    unmarked("`k` is wrong")
    assert str(NAMES.error(ValueError("k is something else"))) == "k is something else"
    other = RuntimeError("k is wrong")
    assert NAMES.error(other) is other


def test_errors_of_cpp_checks_are_renamed():
    q, k = torch.randn(1, 2, 8, 16), torch.randn(1, 3, 9, 16)
    for arguments, message in (
        ((q, k, k), "q has 2 heads and k_cache 3; .* heads of k_cache must divide that of q"),
        ((q, k, q), "v has a number of heads of 2 and k_cache of 3; they must be equal"),
        ((q, k[0], q), r"k_cache has 3 .*\(3, 9, 16\); it must have 4: \(batch, kv_length, "),
        ((q, q, torch.zeros(1, 2, 8, 32)[..., ::2]), r"v has strides \(512, 32, 256, 2\)"),
    ):
        with pytest.raises(ValueError, match=f"^{message}"):
            NAMES.run(flash_fwd, arguments, {})
    with pytest.raises(TypeError, match=r"^cache_seqlens is a list; it must be a tensor or None$"):
        NAMES.run(flash_fwd, (q, q, q), {"seqused_k": [1.0]})
    with pytest.raises(RuntimeError, match="no_such_option"):
        NAMES.run(flash_fwd, (q, q, q), {"no_such_option": 1})


TEXTS = [
    (value_text(torch.zeros(2, 3)), "a float32 tensor of shape (2, 3)"),
    (value_text([torch.zeros(9).int(), 1]), "[an int32 tensor of shape (9,), 1]"),
    (value_text(torch.tensor(True)), "tensor(True)"),
    (value_text(10**9999), "an int of 33216 bits"),  # which Python refuses to print
    (type_text(np.zeros(3, np.uint8)), "a uint8 ndarray of shape (3,)"),
    (type_text(np.array(3)), "an ndarray"),
    (type_text(None), "None"),
    (type_text(3), "an int"),
    (count_text(1, "query"), "1 query"),
    (count_text(0, "query"), "0 queries"),
    (count_text(2, "key"), "2 keys"),
]


@each_case("text, expected", TEXTS)
def test_values_have_these_texts(text, expected):
    assert text == expected

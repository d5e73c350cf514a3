"""A program that checks the ops of a copy with the options of recipe.py against float64."""

import pytest
import torch

import torch_metal_attn
from torch_metal_attn.runtime.extension import launches
from torch_metal_attn.testing import running
from torch_metal_attn.testing.features import FEATURES, attention

OPS = torch.ops.metal_attn
torch.manual_seed(0)
q, k, v = (torch.randn(2, 3, 33, 16, requires_grad=True) for _ in range(3))
temperature = torch.tensor([0.5, 1.5, -1.0], requires_grad=True)
leaves = (q, k, v, temperature)


def exact(options):
    """out, and the gradients of the sum of its squares."""
    q, k, v, factor = (x.detach().double().requires_grad_() for x in leaves)
    scores = torch.einsum("bhid,bhjd->bhij", q, k) / 4
    if "temperature" in options:
        scores = scores * factor[:, None, None]
    if "softcap" in options:
        scores = options["softcap"] * torch.tanh(scores / options["softcap"])
    if "score_clamp" in options:
        scores = scores.clamp(-options["score_clamp"], options["score_clamp"])
    if options.get("causal"):
        scores = scores.masked_fill(torch.ones(33, 33).triu(1).bool(), -torch.inf)
    out = scores.softmax(-1) @ v
    return out, torch.autograd.grad(out.square().sum(), (q, k, v, factor), materialize_grads=True)


def check(actual, expected):
    for ours, theirs in zip(actual, expected, strict=True):
        torch.testing.assert_close(ours.double(), theirs, rtol=1e-4, atol=1e-5)


def differentiated(out):
    return out, *torch.autograd.grad(out.square().sum(), leaves, materialize_grads=True)


# Dense calls with each option alone and with all of them, in the simulator and the reference.
all_options = {"softcap": 2.0, "score_clamp": 0.6, "temperature": temperature}
for options in ({"temperature": temperature}, {"score_clamp": 0.6}, all_options):
    expected, gradients = exact(options | {"causal": True})

    def dense(options=options):
        rows = (x.transpose(1, 2) for x in (q, k, v))
        out = torch_metal_attn.flash_attn_func(*rows, causal=True, **options)
        return differentiated(out.transpose(1, 2))

    with torch_metal_attn.simulate(check=True) as run:
        check(dense(), (expected, *gradients))
    assert {"flash_fwd", "flash_bwd_dq", "flash_bwd_dkv"} <= set(run.counters)
    check(dense(), (expected, *gradients))
    plain, _ = exact({"causal": True})
    assert not torch.allclose(plain, expected, atol=1e-2)

expected, gradients = exact(all_options)
ends = torch.arange(3, dtype=torch.int32) * 33
with torch_metal_attn.simulate(check=True) as run:
    # Packed sequences.
    rows = (x.transpose(1, 2).flatten(0, 1) for x in (q, k, v))
    out, _ = OPS.flash_varlen_fwd(*rows, ends, ends, 33, 33, **all_options)
    out = out.unflatten(0, (2, 33)).transpose(1, 2)
    check(differentiated(out), (expected, *gradients))
    # A decode without gradients; then lists of all keys, with gradients.
    with torch.no_grad():
        out, _ = OPS.flash_decode(q, k, v, **all_options)
    check([out], [expected])
    indices = torch.arange(33, dtype=torch.int32).expand(1, 1, 33, 33).contiguous()
    out, _ = OPS.flash_decode(q, k, v, indices=indices, parents=None, **all_options)
    check(differentiated(out), (expected, *gradients))
    # decode_step appends the last key, and decodes the last query.
    with torch.no_grad():
        caches = [x.detach().clone() for x in (k, v)]
        step = [q[:, :, -1:], *(x[:, :, -1:] for x in (k, v))]
        seqlens = torch.full((2,), 32, dtype=torch.int32)
        out, _ = OPS.decode_step(*step, *caches, seqlens, **all_options)
    check([out], [expected[:, :, -1:]])
assert {"flash_fwd", "flash_decode", "flash_bwd_dq", "flash_bwd_dkv"} <= set(run.counters)

# The key of tuned tiles contains the options.
qkv = [x.detach() for x in (q, k, v)]
explained = launches(torch.ops.metal_attn_explain.flash_fwd(*qkv, **all_options))
assert " softcap temperature score_clamp " in explained[0]["tuning"]["key"]

# The cases of `verify` and `fuzz` have the option score_clamp.
case = attention("score_clamp", call="flash_varlen_fwd", packed=((33, 33),))
assert case.score_clamp == FEATURES["score_clamp"](case)["score_clamp"] == 1.0
assert any(change.get("score_clamp") == -1 for change in case.wrong())
with torch_metal_attn.simulate(check=True):
    outcome = running.run(case, torch.device("cpu"))
assert outcome.ok, outcome

# Calls refuse wrong values. Functions that do not take the options raise errors that name them.
for name, value, message in (
    ("temperature", temperature[:2], r"temperature has shape \(2,\); it must be \(3,\)"),
    ("score_clamp", -1.0, "score_clamp is -1; it must be 0"),
):
    with pytest.raises(ValueError, match=message):
        torch_metal_attn.flash_attn_func(*(x.transpose(1, 2) for x in (q, k, v)), **{name: value})
    for other in (torch_metal_attn.flex_attention, torch_metal_attn.scaled_dot_product_attention):
        with pytest.raises(TypeError, match=name):
            other(q, k, v, **{name: value})

"""A new score option, place by place: `temperature`, a factor of each head's scores.

docs/adding-a-kernel.md explains the places. `apply` makes the edits in a copy of the sources, and
test_recipe.py builds and runs that copy. So a place that moves, or that a new option needs
too, shows here first. The option is a tensor (H,) of float32 with a gradient; it is an example, and
shares a buffer slot with the gradient of a bias, which it therefore refuses.
"""

DOCSTRING = '''    """The scores by the options that are a number, before anything is added to them.

    softcap > 0: softcap * tanh(score / softcap) (Gemma 2, 2024).
    """
'''

# (file, text that stands there once, what replaces it)
EDITS = [
    # C++: the schemas, the struct and the dispatcher's parameters follow from this line.
    (
        "csrc/problem/options.h",
        "  X(OptionalTensor, learnable_sink, None, IN) \\\n",
        "  X(OptionalTensor, learnable_sink, None, IN) \\\n"
        "  X(OptionalTensor, temperature, None, IN) \\\n",
    ),
    # The feature, whose define selects the kernel.
    (
        "csrc/problem/attention.h",
        "  X(alibi, ALIBI)               \\\n",
        "  X(alibi, ALIBI)               \\\n  X(temperature, TEMPERATURE)   \\\n",
    ),
    (
        "csrc/ops/attention/check.cpp",
        "    features.alibi = true;\n  }\n",
        "    features.alibi = true;\n  }\n"
        "  if (const std::optional<Tensor>& temperature = a.options.temperature) {\n"
        '    check_operand("temperature", *temperature, "q", a.q, {ScalarType::Float},\n'
        "                  {{call.heads}});\n"
        '    check(!call.bias, "`temperature` is given and so is a bias; give one of them");\n'
        "    features.temperature = true;\n"
        "  }\n",
    ),
    (
        "csrc/ops/attention/fill.cpp",
        "  read_given(FLASH_ALIBI_SLOPES, o.alibi_slopes);\n",
        "  read_given(FLASH_ALIBI_SLOPES, o.alibi_slopes);\n"
        "  read_given(FLASH_TEMPERATURE, o.temperature);\n",
    ),
    # Metal: the slot, the feature's constant and what it does to d score / d product, the buffer,
    # and the rule.
    (
        "shaders/params.h",
        "  FLASH_K_SIN = 15,\n",
        "  FLASH_K_SIN = 15,\n  FLASH_TEMPERATURE = 24,\n",
    ),
    (
        "shaders/features.h",
        "constant constexpr bool SCORE_DERIVATIVES = SOFTCAP || ",
        "FEATURE(TEMPERATURE)\n"
        "constant constexpr bool SCORE_DERIVATIVES = SOFTCAP || TEMPERATURE || ",
    ),
    (
        "shaders/inputs.h",
        "  X(ALIBI, const device float*, alibi_slopes, FLASH_ALIBI_SLOPES) ",
        "  X(TEMPERATURE, const device float*, temperature, FLASH_TEMPERATURE) \\\n"
        "  X(ALIBI, const device float*, alibi_slopes, FLASH_ALIBI_SLOPES) ",
    ),
    (
        "shaders/scores.h",
        "  float slope_log2;  // ALIBI\n",
        "  float slope_log2;  // ALIBI\n  float temperature;  // TEMPERATURE\n",
    ),
    (
        "shaders/scores.h",
        "    if (ALIBI) {\n      slope_log2 =",
        "    if (TEMPERATURE) {\n      temperature = inputs.temperature[head];\n    }\n"
        "    if (ALIBI) {\n      slope_log2 =",
    ),
    (
        "shaders/scores.h",
        "    if (!SOFTCAP) {\n      scores.scale(params.scale_log2);\n",
        "    if (TEMPERATURE) {\n      scores.scale(temperature);\n    }\n"
        "    if (!SOFTCAP) {\n"
        "      if (WITH_SLOPES) {\n        slopes.fill(temperature);\n      }\n"
        "      scores.scale(params.scale_log2);\n",
    ),
    (
        "shaders/scores.h",
        "1.0f - capped * capped;",
        "(1.0f - capped * capped) * (TEMPERATURE ? temperature : 1.0f);",
    ),
    # Python: the reference, the functions' keyword, and the gradient. As the score is temperature
    # times a product of q, sum(dq * q) is temperature times its gradient.
    (
        "torch_metal_attn/reference.py",
        "softcap: float = 0.0) -> Tensor:\n" + DOCSTRING + "    return",
        "softcap: float = 0.0, temperature: Tensor | None = None) -> Tensor:\n"
        + DOCSTRING
        + "    if temperature is not None:\n"
        "        scores = scores * temperature.to(scores.dtype)[:, None, None]\n"
        "    return",
    ),
    (
        "torch_metal_attn/call/options.py",
        "    learnable_sink: Tensor | None\n",
        "    learnable_sink: Tensor | None\n    temperature: Tensor | None\n",
    ),
    (
        "torch_metal_attn/ops/flash_fwd_autograd.py",
        "    return gradients\n\n\ndef differentiable(",
        '    if needed.get("temperature"):\n'
        '        products = (gradients["q"].float() * q.float()).sum(-1)\n'
        '        gradients["temperature"] = products.sum(0 if packed else (0, 2)) /'
        ' arguments["temperature"]\n'
        "    return gradients\n\n\ndef differentiable(",
    ),
]

# What a reader of the copy would call, and its float64 counterpart.
CASE = """
import torch
import torch_metal_attn

torch.manual_seed(0)
q, k, v = (torch.randn(2, length, 3, 16, requires_grad=True) for length in (9, 33, 33))
temperature = torch.tensor([0.5, 1.5, -1.0], requires_grad=True)
leaves = (q, k, v, temperature)


def exact(softcap):
    q, k, v, factor = (x.detach().double().requires_grad_() for x in leaves)
    scores = torch.einsum("bihd,bjhd->bhij", q, k) / 4 * factor[:, None, None]
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(torch.ones(9, 33).triu(33 - 9 + 1).bool(), -torch.inf)
    out = torch.einsum("bhij,bjhd->bihd", scores.softmax(-1), v)
    return out, torch.autograd.grad(out.square().sum(), (q, k, v, factor))


for softcap in (0.0, 2.0):
    expected, gradients = exact(softcap)
    with torch_metal_attn.simulate(check=True) as run:
        out = torch_metal_attn.flash_attn_func(
            q, k, v, causal=True, softcap=softcap, temperature=temperature
        )
        found = torch.autograd.grad(out.square().sum(), leaves)
    assert {"flash_fwd", "flash_bwd_dq", "flash_bwd_dkv"} <= {x.kernel for x in run.launches}
    for ours, exactly in zip((out, *found), (expected, *gradients), strict=True):
        torch.testing.assert_close(ours.double(), exactly, rtol=1e-4, atol=1e-5)
    without = torch_metal_attn.flash_attn_func(q, k, v, causal=True, softcap=softcap)
    assert not torch.allclose(without, out, atol=1e-2)

try:
    torch_metal_attn.flash_attn_func(q, k, v, temperature=temperature[:2])
except ValueError as error:
    assert str(error) == "temperature has shape (2,); it must be (3,)", error
else:
    raise AssertionError("a wrong shape was not refused")
"""


def apply(root):
    """Make the edits in the copy at `root`; returns the names of the files that changed."""
    for name, old, new in EDITS:
        path = root / name
        text = path.read_text(encoding="utf-8")
        assert text.count(old) == 1, f"{name}: {text.count(old)} places, not one, have {old!r}"
        path.write_text(text.replace(old, new), encoding="utf-8")
    return {name for name, _, _ in EDITS}

"""Tiny models of diffusers with the backend "metal_attn" against torch's own attention."""

import pytest
import torch
from diffusers.models.attention_dispatch import attention_backend
from peft import LoraConfig

from tests.diffusers.tiny_models import FAMILIES, answer
from torch_metal_attn.simulator import runs

TOLERANCE = 1e-5


def launches():
    return len(runs.current().launches)


@pytest.mark.parametrize("name", FAMILIES)
def test_forward_equals_the_native_backend(name, device, metal_attn):
    family = FAMILIES[name]
    model, arguments = family.build(), family.arguments()
    with torch.no_grad():
        before = launches()
        with attention_backend("native"):
            expected = answer(model, arguments)
        assert launches() == before
        actual = answer(model, arguments)
    assert launches() - before == family.calls
    torch.testing.assert_close(actual, expected, atol=TOLERANCE, rtol=TOLERANCE)


@pytest.mark.parametrize("name", ["Flux", "UNet XL"])
def test_lora_gradients_equal_those_of_the_native_backend(name, device, metal_attn):
    family = FAMILIES[name]
    model, arguments = family.build(), family.arguments()
    model.requires_grad_(False)
    targets = ["to_q", "to_k", "to_v", "to_out.0"]
    model.add_adapter(LoraConfig(r=2, target_modules=targets, init_lora_weights="gaussian"))
    adapter = {name: p for name, p in model.named_parameters() if p.requires_grad}
    for parameter in adapter.values():  # with B = 0 the gradients of A would be 0
        torch.nn.init.normal_(parameter, std=0.1)
    with attention_backend("native"):
        answer(model, arguments).square().sum().backward()
    expected = {name: p.grad.clone() for name, p in adapter.items()}
    model.zero_grad()
    before = launches()
    answer(model, arguments).square().sum().backward()
    assert launches() - before >= 3 * family.calls, "each backward launches at least two kernels"
    assert any(gradient.abs().max() > 1e-3 for gradient in expected.values())
    for name, parameter in adapter.items():
        atol = 1e-4 * max(expected[name].abs().max().item(), 1e-3)
        torch.testing.assert_close(parameter.grad, expected[name], rtol=1e-4, atol=atol, msg=name)

"""Trainers that call torch's or flash-attn's attention have the same losses with our kernels."""

from collections import Counter
from contextlib import contextmanager

import accelerate
import pytest
import torch

from tests.libraries import modules
from tests.libraries.modules import FlashAttention, Language, NanoChat, NanoGPT
from torch_metal_attn import install_flash_attn, sdpa_replaced, simulate


@contextmanager
def kernels(expected):
    """Asserts how often a block launches each kernel: {kernel: number}."""
    with simulate(check=True) as run:
        yield
    assert Counter(launch.kernel for launch in run.launches) == expected


def backward_of(calls):
    return dict.fromkeys(["flash_bwd_delta", "flash_bwd_dq", "flash_bwd_dkv"], calls)


def build(factory):
    torch.manual_seed(0)
    return factory()


@pytest.mark.parametrize(
    "attention, context",
    [(NanoGPT, sdpa_replaced), (NanoChat, sdpa_replaced), (FlashAttention, install_flash_attn)],
    ids=["nanoGPT", "nanochat", "flash_attn"],
)
def test_losses_equal_those_of_stock_attention(attention, context):
    stock = NanoGPT if attention is NanoGPT else NanoChat
    expected = modules.train(build(lambda: Language(stock(), stock())))
    model = build(lambda: Language(attention(), attention()))
    with kernels({"flash_decode": 6} | backward_of(6)), context() as counted:
        losses = modules.train(model)
    if context is sdpa_replaced:
        assert (counted.replaced, counted.left_alone) == (6, {})
    assert losses[-1] < losses[0]
    assert losses == pytest.approx(expected, rel=1e-5)


def test_dropout_of_nanogpt_depends_on_the_seed_only():
    model = build(lambda: Language(NanoGPT(0.3)))
    losses = []
    for _ in range(2):
        torch.manual_seed(4)
        with kernels({"flash_fwd": 1}), sdpa_replaced():
            losses.append(modules.loss_of(model, modules.tokens()).item())
    assert losses[0] == losses[1]
    with torch.no_grad():
        model.eval()
        assert modules.loss_of(model, modules.tokens()).item() != losses[0]


def test_accelerate_has_at_most_twice_the_stock_error():
    """A prepared model in bf16 has gradients in float32."""

    def gradients(prepare, backward):
        model = prepare(build(lambda: Language(NanoGPT())))
        backward(modules.loss_of(model, modules.tokens()))
        return [x.grad for x in model.parameters()]

    def error(gradients):
        return sum((a - b).norm() ** 2 for a, b in zip(gradients, exact, strict=True)).sqrt()

    accelerator = accelerate.Accelerator(cpu=True, mixed_precision="bf16")
    exact = gradients(lambda model: model, torch.Tensor.backward)
    stock = gradients(accelerator.prepare, accelerator.backward)
    with kernels({"flash_decode": 1} | backward_of(1)), sdpa_replaced():
        ours = gradients(accelerator.prepare, accelerator.backward)
    assert {x.dtype for x in ours} == {torch.float32}
    assert 0 < error(ours) <= 2 * error(stock)

"""Libraries whose models call torch's attention: the same results, in the kernels, by count."""

from collections import Counter
from contextlib import contextmanager, nullcontext

import accelerate
import peft
import pytest
import torch
from torch import nn

import torch_metal_attn
from tests.libraries import modules
from tests.libraries.modules import FlashAttention, Language, NanoChat, NanoGPT, OurFunctions
from torch_metal_attn import sdpa_replaced, simulate

# Of a module: how many calls of attention a forward makes.
ATTENTIONS = {
    "timm": (modules.Timm, 1),
    "open_clip": (modules.OpenClip, 1),
    "openai-whisper": (modules.Whisper, 2),
}


@contextmanager
def kernels(expected):
    """A block whose launches of attention are counted: {kernel: number}."""
    with simulate(check=True) as run:
        yield
    counts = Counter(launch.kernel for launch in run.launches)
    assert counts == expected


def backward_of(calls):
    return dict.fromkeys(["flash_bwd_delta", "flash_bwd_dq", "flash_bwd_dkv"], calls)


def outputs(module, x):
    """The result and its gradients."""
    x = x.clone().requires_grad_()
    out = module(x)
    return [out.detach(), *torch.autograd.grad(out.square().mean(), [x, *module.parameters()])]


def build(factory, *arguments):
    torch.manual_seed(0)
    return factory(*arguments)


def rows():
    return torch.randn(2, modules.LENGTH, modules.WIDTH, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("name", ATTENTIONS)
def test_modules(name):
    factory, calls = ATTENTIONS[name]
    module, x = build(factory), rows()
    expected = outputs(module, x)
    with kernels({"flash_fwd": calls} | backward_of(calls)), sdpa_replaced() as counted:
        found = outputs(module, x)
    assert (counted.replaced, counted.left_alone) == (calls, {})
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("process_wide", [False, True])
def test_evaluation_of_an_encoder_layer(process_wide):
    """In evaluation torch has a fast path that calls no attention function; it is off inside."""
    layer = nn.TransformerEncoderLayer(
        modules.WIDTH, modules.HEADS, dim_feedforward=8, batch_first=True
    ).eval()
    x = rows()
    with torch.inference_mode():
        expected = layer(x)
        with kernels({"flash_fwd": 1}), sdpa_replaced(process_wide) as counted:
            found = layer(x)
    assert (counted.replaced, counted.left_alone) == (1, {})
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def unfused_timm():
    return build(modules.Timm, False), rows()


def weights_of_multihead_attention():
    attention = build(nn.MultiheadAttention, modules.WIDTH, modules.HEADS)
    return lambda x: attention(x, x, x, need_weights=True)[0], rows()


def word_timestamps():
    module = build(modules.Whisper)
    module.use_sdpa = False
    return module, rows()


@pytest.mark.parametrize(
    "case",
    [unfused_timm, weights_of_multihead_attention, word_timestamps],
    ids=lambda f: f.__name__,
)
def test_paths_that_are_not_reached(case, monkeypatch):
    """Nothing is counted, and the block says so when it ends."""
    monkeypatch.setattr(torch_metal_attn.integrations.sdpa_replacement._blocks, "warned", set())
    module, x = case()
    with kernels({}), pytest.warns(UserWarning, match="replaced no call of"):
        with sdpa_replaced() as counted:
            module(x)
    assert (counted.replaced, counted.left_alone) == (0, {})


@pytest.mark.parametrize(
    "attention, context",
    [
        (NanoGPT, sdpa_replaced),
        (NanoChat, sdpa_replaced),
        (FlashAttention, torch_metal_attn.install_flash_attn),
        (OurFunctions, nullcontext),
    ],
    ids=["nanoGPT", "nanochat", "flash_attn", "nanochat with our functions"],
)
def test_training(attention, context):
    """3 steps of a model with 2 layers: the losses of stock torch."""
    stock = NanoGPT if attention is NanoGPT else NanoChat
    expected = modules.train(build(lambda: Language(stock(), stock())))
    model = build(lambda: Language(attention(), attention()))
    with kernels({"flash_fwd": 6} | backward_of(6)), context() as counted:
        losses = modules.train(model)
    if context is sdpa_replaced:
        assert (counted.replaced, counted.left_alone) == (6, {})
    assert losses[-1] < losses[0]
    assert losses == pytest.approx(expected, rel=1e-5)


def test_nanogpts_dropout():
    """Reproducible by the seed, and other weights than torch drops."""
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


def test_nanochats_cache():
    """Its calls with a cache: a prompt, a chunk after it, and one token, with a window."""
    torch.manual_seed(0)
    q, k, v = torch.randn(1, 8, 2, 16), *torch.randn(2, 1, 8, 1, 16)
    cache = torch.zeros(2, 1, 10, 1, 16)
    found = []
    for start, stop in ((0, 4), (4, 7), (7, 8)):
        found.append(
            torch_metal_attn.flash_attn_with_kvcache(
                q[:, start:stop],
                *cache,
                k=k[:, start:stop],
                v=v[:, start:stop],
                cache_seqlens=torch.tensor([start], dtype=torch.int32),
                causal=True,
                window_size=(4, 0),
            )
        )
    expected = modules.nanochat_sdpa(q, k, v, causal=True, window_size=(4, 0))
    torch.testing.assert_close(torch.cat(found, 1), expected, rtol=1e-5, atol=1e-6)
    assert torch.equal(cache[:, :, :8], torch.stack([k, v]))


def test_peft():
    """LoRA adapters of the attention's projections; the other weights get no gradient."""
    config = peft.LoraConfig(r=2, target_modules=["c_attn"], init_lora_weights=False)
    model = build(lambda: peft.get_peft_model(Language(NanoGPT()), config))
    adapters = [x for x in model.parameters() if x.requires_grad]
    assert len(adapters) == 2

    def gradients():
        return torch.autograd.grad(modules.loss_of(model, modules.tokens()), adapters)

    expected = gradients()
    with kernels({"flash_fwd": 1} | backward_of(1)), sdpa_replaced():
        found = gradients()
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def test_accelerate():
    """A prepared model in bf16: twice stock torch's error, and gradients in float32."""

    def model():
        return build(lambda: Language(NanoGPT()))

    def gradients(model, backward):
        backward(modules.loss_of(model, modules.tokens()))
        return [x.grad for x in model.parameters()]

    def error(found):
        return sum((a - b).norm() ** 2 for a, b in zip(found, exact, strict=True)).sqrt()

    accelerator = accelerate.Accelerator(cpu=True, mixed_precision="bf16")
    exact = gradients(model(), torch.Tensor.backward)
    stock = gradients(accelerator.prepare(model()), accelerator.backward)
    with kernels({"flash_fwd": 1} | backward_of(1)), sdpa_replaced():
        found = gradients(accelerator.prepare(model()), accelerator.backward)
    assert {x.dtype for x in found} == {torch.float32}
    assert 0 < error(found) <= 2 * error(stock)


def test_lightning():
    """Its Trainer runs a step in the optimiser's closure, and validates in inference mode."""

    def fit():
        model = build(lambda: Language(NanoGPT()))
        optimiser = torch.optim.SGD(model.parameters(), lr=0.5)

        def closure():
            optimiser.zero_grad()
            loss = modules.loss_of(model, modules.tokens())
            loss.backward()
            return loss

        step = optimiser.step(closure).item()
        model.eval()
        with torch.inference_mode():
            return step, modules.loss_of(model, modules.tokens()).item()

    expected = fit()
    with kernels({"flash_fwd": 2} | backward_of(1)), sdpa_replaced():
        assert fit() == pytest.approx(expected, rel=1e-5)


def test_sentence_transformers():
    """It pools the states of a transformers model, which gets the implementation's name."""
    from tests.transformers import tiny_models

    model, given = tiny_models.build("BERT"), tiny_models.inputs("BERT", "right")
    mask = given["attention_mask"][..., None].float()
    assert 0 in mask

    def embeddings():
        with torch.no_grad():
            states = model(**given).last_hidden_state
        mean = (states * mask).sum(1) / mask.sum(1)
        return nn.functional.normalize(mean, dim=-1)

    expected = embeddings()
    model.set_attn_implementation("metal_attn")
    with kernels({"flash_fwd": 2}):
        torch.testing.assert_close(embeddings(), expected, rtol=1e-5, atol=1e-5)
    model.set_attn_implementation("sdpa")
    with kernels({"flash_fwd": 2}), sdpa_replaced():
        torch.testing.assert_close(embeddings(), expected, rtol=1e-5, atol=1e-5)

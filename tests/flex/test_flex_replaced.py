"""torch's own flex_attention inside flex_replaced(), compiled or not, and transformers on it."""

import pytest
import torch
import transformers
from torch.nn.attention import flex_attention as torch_module
from torch.nn.attention.flex_attention import flex_attention as torch_flex

import torch_metal_attn
from tests.flex import gallery
from tests.flex.flex_check import home
from torch_metal_attn import flex_replaced, simulate


def test_every_name_and_nothing_after():
    q, k, v = home()
    with simulate() as run, flex_replaced() as replaced:
        outs = [
            function(q, k, v, gallery.tanh_softcap)
            for function in (torch_flex, torch_module.flex_attention)
        ]
        ours = torch_metal_attn.flex_attention(q, k, v, gallery.tanh_softcap)
    assert all(torch.equal(out, ours) for out in outs)
    assert [launch.kernel for launch in run.launches] == ["flash_fwd"] * 3
    assert (replaced.replaced, replaced.left_alone) == (2, 0)
    with pytest.raises(NotImplementedError, match="backward on CPU"):
        torch_flex(q.clone().requires_grad_(), k, v)
    assert "return_aux" in torch_flex.__code__.co_varnames


def test_cpu_tensors_outside_of_the_simulator_are_torchs():
    q, k, v = home()
    with flex_replaced() as replaced, flex_replaced(), torch.compiler.set_stance("force_eager"):
        out = torch_flex(q, k, v, gallery.tanh_softcap)
    torch.testing.assert_close(
        out, torch_metal_attn.flex_attention(q, k, v, gallery.tanh_softcap), rtol=2e-3, atol=2e-3
    )
    assert (replaced.replaced, replaced.left_alone) == (0, 1)


@pytest.mark.parametrize("ours", [True, False])
def test_compiled(ours):
    """The graph breaks at the call; with fullgraph=True the error says so."""
    q, k, v = (x.requires_grad_() for x in home())
    function = torch_metal_attn.flex_attention if ours else torch_flex

    def attend(q, k, v):
        return function(q * 2, k, v, gallery.tanh_softcap) * 3

    with simulate(), flex_replaced():
        plain = attend(q, k, v)
        compiled = torch.compile(attend, backend="aot_eager")(q, k, v)
        assert torch.equal(compiled, plain)
        found, right = (torch.autograd.grad(out.sum(), (q, k, v)) for out in (compiled, plain))
        assert all(map(torch.equal, found, right))
        with pytest.raises(torch._dynamo.exc.Unsupported, match="is in no graph"):
            torch.compile(attend, backend="eager", fullgraph=True)(q, k, v)
    torch._dynamo.reset()


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=50, max_position_embeddings=64,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).eval()


def run_model(model, implementation):
    """Logits and gradients of a padded batch, and generated tokens."""
    model.set_attn_implementation(implementation)
    model.zero_grad()
    tokens = torch.arange(2 * 20).view(2, 20) % 50
    padding = torch.ones(2, 20, dtype=torch.int64)
    padding[0, :7] = 0
    logits = model(tokens, attention_mask=padding).logits[:, 7:]
    logits.sin().sum().backward()
    gradients = [parameter.grad for parameter in model.parameters()]
    generated = model.generate(
        tokens, attention_mask=padding, max_new_tokens=4, do_sample=False, pad_token_id=0
    )
    return logits, gradients, generated


def test_transformers(model):
    """attn_implementation="flex_attention": forward, training and generate."""
    logits, gradients, generated = run_model(model, "eager")
    # transformers compiles torch's function and create_block_mask, which takes minutes.
    with torch.compiler.set_stance("force_eager"), simulate() as run, flex_replaced() as replaced:
        found, found_gradients, found_generated = run_model(model, "flex_attention")
    torch.testing.assert_close(found, logits, rtol=1e-4, atol=1e-4)
    for one, right in zip(found_gradients, gradients, strict=True):
        torch.testing.assert_close(one, right, rtol=1e-4, atol=1e-4 * right.abs().max().item())
    assert torch.equal(found_generated, generated)
    assert replaced.left_alone == 0
    assert replaced.replaced == 2 * (1 + 4)
    kernels = [launch.kernel for launch in run.launches]
    assert (kernels.count("flash_fwd"), kernels.count("flash_bwd_dkv")) == (10, 2)

"""torch's flex_attention inside flex_replaced(), compiled or not, also called by transformers."""

import pytest
import torch
import transformers
from torch.nn.attention import flex_attention as torch_module
from torch.nn.attention.flex_attention import flex_attention as torch_flex

import torch_metal_attn
from tests.attention.autograd_check import loss_of
from tests.flex.flex_check import block_mask, rand, tanh_softcap
from tests.flex.test_captured_gradients import CAPTURED, everything
from torch_metal_attn import flex_replaced, simulate


def test_every_name_is_replaced_inside_the_block_only():
    q, k, v = rand()
    code = torch_flex.__code__
    with simulate(check=True) as run, flex_replaced() as replaced:
        functions = torch_flex, torch_module.flex_attention
        outs = [function(q, k, v, tanh_softcap) for function in functions]
        ours = torch_metal_attn.flex_attention(q, k, v, tanh_softcap)
    assert all(torch.equal(out, ours) for out in outs)
    assert [launch.kernel for launch in run.launches] == ["flash_fwd"] * 3
    assert (replaced.replaced, replaced.left_alone) == (2, 0)
    with flex_replaced(), pytest.raises(TypeError, match="query is a str; it must be a tensor"):
        torch_flex("a", k, v)
    with pytest.raises(NotImplementedError, match="backward on CPU"):
        torch_flex(q.clone().requires_grad_(), k, v)
    assert torch_flex.__code__ is code


def test_cpu_tensors_outside_of_the_simulator_are_left_to_torch():
    q, k, v = rand()
    with flex_replaced() as replaced, flex_replaced(), torch.compiler.set_stance("force_eager"):
        out = torch_flex(q, k, v, tanh_softcap)
    ours = torch_metal_attn.flex_attention(q, k, v, tanh_softcap)
    torch.testing.assert_close(out, ours, rtol=2e-3, atol=2e-3)
    assert (replaced.replaced, replaced.left_alone) == (0, 1)


def test_compiled_calls_are_replaced():
    mask = block_mask()

    def attend(q, k, v, scales, *captured, function):
        return function(q * 2, k, v, everything(scales * 2, *captured), mask, return_lse=True)

    captured = [x.clone() for x in CAPTURED[everything]]
    leaves = [x.requires_grad_() for x in (*rand(batch=2), *captured)]
    with simulate(check=True), flex_replaced():
        plain = attend(*leaves, function=torch_metal_attn.flex_attention)
        compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
        compiled = compiled(*leaves, function=torch_flex)
        actual, right = (torch.autograd.grad(loss_of(*x), leaves) for x in (compiled, plain))
    torch._dynamo.reset()
    for one, other in zip((*compiled, *actual), (*plain, *right), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_dtype_of_score_in_a_graph(dtype):
    """The score is float32 for any dtype of query, so a cast to this dtype rounds nothing."""

    def mod(score, b, h, q_idx, kv_idx):
        assert score.dtype == torch.float32
        return (score + ((q_idx - kv_idx) / 3).to(score.dtype)).to(score.dtype)

    qkv = rand(dtype=dtype)
    compiled = torch.compile(torch_metal_attn.flex_attention, backend="eager", fullgraph=True)
    with simulate(record=True) as run:
        compiled(*qkv, mod)
        torch_metal_attn.flex_attention(*qkv, mod)
    torch._dynamo.reset()
    in_graph, plain = (launch.defines for launch in run.recorded)
    assert in_graph == plain
    assert "float(t0)" in plain["FLEX_SCORE"]


def test_errors_in_a_graph():
    """Errors equal those of calls outside of a graph. score_mod and block_mask may be left out."""
    attend = torch.compile(torch_metal_attn.flex_attention, backend="eager", fullgraph=True)
    q, k, v = rand()
    with simulate(record=True):
        assert attend(q, k, v).shape == q.shape
        for options, message in (
            ({"score_mod": lambda score, b, h, q, kv: torch.erfinv(score)}, "mod uses erfinv"),
            ({"score_mod": lambda score, b, h, q, kv: score.half()}, "returns torch.float16"),
            ({"kernel_options": {"BLOCK_K": 64}}, "BLOCK_K=64; its keys are"),
            ({"block_mask": block_mask(sizes=(64, 96))}, "block_mask was made for 64 queries"),
        ):
            with pytest.raises(Exception, match=message):
                attend(q, k, v, **options)
    with pytest.raises(NotImplementedError, match="runs on CPU tensors in the simulator only"):
        attend(q, k, v)
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
    model.set_attn_implementation(implementation)
    model.zero_grad()
    tokens = torch.arange(2 * 20).view(2, 20) % 50
    padding = torch.ones(2, 20, dtype=torch.int64)
    padding[0, :7] = 0
    logits = model(tokens, attention_mask=padding).logits[:, 7:]
    logits.sin().sum().backward()
    gradients = [parameter.grad for parameter in model.parameters()]
    options = {"max_new_tokens": 2, "do_sample": False, "pad_token_id": 0}
    return logits, gradients, model.generate(tokens, attention_mask=padding, **options)


def test_transformers_calls_are_replaced(model):
    logits, gradients, generated = run_model(model, "eager")
    # transformers compiles torch's function and create_block_mask, which takes minutes.
    with torch.compiler.set_stance("force_eager"), simulate() as run, flex_replaced() as replaced:
        our_logits, our_gradients, our_tokens = run_model(model, "flex_attention")
    torch.testing.assert_close(our_logits, logits, rtol=1e-4, atol=1e-4)
    for one, right in zip(our_gradients, gradients, strict=True):
        torch.testing.assert_close(one, right, rtol=1e-4, atol=1e-4 * right.abs().max().item())
    assert torch.equal(our_tokens, generated)
    assert replaced.left_alone == 0
    assert replaced.replaced == 2 * (1 + 2)
    kernels = [launch.kernel for launch in run.launches]
    assert (kernels.count("flash_decode"), kernels.count("flash_bwd_dkv")) == (6, 2)

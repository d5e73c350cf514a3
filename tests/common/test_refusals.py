"""Refusals are ValueErrors, also with torch 2.15, in which ops raise another type."""

import pytest
import torch

import torch_metal_attn
from tests.common.test_bad_options import resized
from tests.helpers.forks import run_alone
from torch_metal_attn import functional, quantisation, vllm, with_kvcache
from torch_metal_attn.flash_attn import bert_padding
from torch_metal_attn.ops import fast_path
from torch_metal_attn.runtime import refusals

Q, K = torch.randn(1, 2, 8, 16), torch.randn(1, 3, 8, 16)
MESSAGE = "q has 2 heads and k 3; the number of heads of k must divide that of q"


def error_of_torch_2_15():
    """A refusal as the RuntimeError of torch 2.15."""
    try:
        torch.ops.metal_attn_explain.flash_fwd(Q, K, K)
    except (ValueError, RuntimeError) as error:
        return RuntimeError(str(error))


def test_a_refusal_is_distinguished_from_other_errors():
    refused = refusals.as_value_error(error_of_torch_2_15())
    assert (type(refused), str(refused)) == (ValueError, MESSAGE)
    for other in (RuntimeError("out of memory"), NotImplementedError(MESSAGE)):
        assert refusals.as_value_error(other) is other


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_ops_and_functions_raise_value_errors(mode, backend):
    with mode():
        with pytest.raises(ValueError, match=MESSAGE):
            torch.ops.metal_attn.flash_fwd(Q, K, K)
        with pytest.raises(ValueError, match="heads"):
            torch_metal_attn.flash_attn_func(Q.transpose(1, 2), *[K.transpose(1, 2)] * 2)
    assert torch_metal_attn.explain(Q, K, K).refusal == MESSAGE


def test_functions_convert_errors_of_cpp_ops(monkeypatch):
    """On mps the kernels of the op are C++."""

    def op(*arguments, **options):
        raise error_of_torch_2_15()

    monkeypatch.setattr(functional, "_FLASH_FWD", op)
    monkeypatch.setattr(with_kvcache, "_FLASH_DECODE", op)
    monkeypatch.setattr(fast_path, "flash_attn", op)
    monkeypatch.setattr(fast_path, "flash_attn_cached", op)
    q = Q.transpose(1, 2)
    with pytest.raises(ValueError, match=MESSAGE):
        torch_metal_attn.flash_attn_func(q, q, q)
    with pytest.raises(ValueError, match=r"q has 2 heads and k_cache 3; .* of k_cache must divide"):
        torch_metal_attn.flash_attn_with_kvcache(q, q, q)


def test_python_kernels_convert_errors(monkeypatch):
    monkeypatch.setattr(refusals, "_torch_hides_value_errors", lambda: True)
    library = torch.library.Library("refusals_test", "DEF")
    library.define("op(Tensor x) -> Tensor")

    @refusals.python_kernel("refusals_test::op", "CPU")
    def op(x):
        raise error_of_torch_2_15()

    with pytest.raises(ValueError, match=MESSAGE):
        torch.ops.refusals_test.op(Q)


COMPILED = """
import torch, torch_metal_attn

class Skipped:
    def __enter__(self): pass
    def __exit__(self, *_): pass

@torch.compile(backend="eager")
def f(q):
    with Skipped():
        torch._dynamo.graph_break()
        cos = torch.ones(8, 8)
        out, _ = torch.ops.metal_attn.flash_fwd(q, q, q, causal=True)
        out = torch.ops.metal_attn.rope(out, None, cos, cos)[0]
        return torch.ops.metal_attn.softmax(out)

q = torch.randn(1, 2, 8, 16, requires_grad=True)
out = f(q)
out.square().sum().backward()
assert torch.equal(out, f._torchdynamo_orig_callable(q)), "differs from eager mode"
assert q.grad.isfinite().all()
"""


EAGER = """
import sys
import torch

sys.modules.pop("torch._dynamo", None)
import torch_metal_attn

q = torch.randn(1, 2, 8, 16, requires_grad=True)
with torch_metal_attn.simulate():
    torch.ops.metal_attn.flash_fwd(q, q, q)[0].sum().backward()
assert "torch._dynamo" not in sys.modules
"""


def test_calls_do_not_load_the_compiler():
    """torch._dynamo takes seconds to import."""
    run_alone(EAGER)


def test_a_frame_that_torch_compile_skips_works():
    """Dynamo then compiles the frame's callees, but must not compile the kernels."""
    run_alone(COMPILED)


def shrunk(*shape, dtype=torch.float32):
    """A tensor without memory: torch's own kernels crash on it."""
    return resized(torch.ones(shape, dtype=dtype), 0)


ROWS, TOKENS, QKV = torch.ones(2, 2, 8), torch.ones(2, 4, 8), torch.ones(3, 2, 4, 1, 8)
# Functions that compute with torch before any op sees the tensor.
WITHOUT_MEMORY = {
    "blocks": lambda: quantisation.from_ggml(shrunk(4, 34, dtype=torch.uint8), "q8_0"),
    "attention_mask": lambda: bert_padding.unpad_input(TOKENS, shrunk(2, 4, dtype=torch.int32)),
    "slot_mapping": lambda: vllm.reshape_and_cache_flash(
        ROWS, ROWS, *torch.zeros(2, 2, 4, 2, 8), shrunk(2, dtype=torch.int64), "auto", None, None
    ),
    "token_ids": lambda: torch_metal_attn.kv_cache.PagedKVCache(2, 4, 1, 32).match_prefix(
        shrunk(3, dtype=torch.int64)
    ),
    "window_size": lambda: torch_metal_attn.flash_attn_func(*QKV, window_size=shrunk(2)),
    "softmax_scale": lambda: torch_metal_attn.flash_attn_func(*QKV, softmax_scale=shrunk(1)),
}


@pytest.mark.parametrize("name", WITHOUT_MEMORY)
def test_a_tensor_whose_storage_was_shrunk_is_refused(name):
    with pytest.raises(ValueError, match=f"^{name} has shape .*: it has been resized"):
        WITHOUT_MEMORY[name]()

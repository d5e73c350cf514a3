"""The backend "metal_attn" of diffusers: calls by diffusers' dispatcher, and registration."""

import runpy
import sys
from importlib.util import find_spec

import diffusers
import diffusers.models.autoencoders.autoencoder_kl_hunyuanimage_refiner as refiner
import pytest
import torch
from diffusers.hooks.layer_skip import AttentionScoreSkipFunctionMode
from diffusers.models import attention_dispatch
from diffusers.models.attention_dispatch import attention_backend, dispatch_attention_fn
from diffusers.models.transformers.transformer_kandinsky import nablaT_v2

import torch_metal_attn
from tests.diffusers.test_families import TOLERANCE, launches
from tests.diffusers.tiny_models import FAMILIES, answer
from tests.helpers.forks import run_program
from torch_metal_attn import integrations
from torch_metal_attn.integrations import registration
from torch_metal_attn.integrations.diffusers import metal_attention


def problem(queries=9, keys=7, heads=2, kv_heads=2, dtype=torch.float32):
    torch.manual_seed(0)
    shapes = ((queries, heads), (keys, kv_heads), (keys, kv_heads))
    return [torch.randn(2, length, h, 16, dtype=dtype) for length, h in shapes]


def sdpa_of_diffusers(*tensors):
    functional = diffusers.models.attention_processor.F
    bhld = (x.transpose(1, 2) for x in tensors)
    return functional.scaled_dot_product_attention(*bhld).transpose(1, 2)


KEYS = torch.tensor([[True] * 5 + [False] * 2, [True] * 7])
OPTIONS = {
    "none": {},
    "bool of keys": {"attn_mask": KEYS},
    "added to keys": {"attn_mask": torch.randn(2, 7)},
    "bool": {"attn_mask": torch.rand(2, 1, 9, 7) < 0.7},
    "added": {"attn_mask": torch.randn(1, 2, 9, 7)},
    "of all": {"attn_mask": torch.rand(9, 7) < 0.7},
    "causal": {"is_causal": True},
    "groups": {"enable_gqa": True},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_options_equal_the_native_backend(name, device, metal_attn):
    tensors = problem(heads=4 if name == "groups" else 2)
    before = launches()
    actual = dispatch_attention_fn(*tensors, **OPTIONS[name], scale=0.3)
    assert launches() > before
    expected = dispatch_attention_fn(*tensors, **OPTIONS[name], scale=0.3, backend="native")
    torch.testing.assert_close(actual, expected, atol=TOLERANCE, rtol=TOLERANCE)


def test_blocks_that_a_model_chooses_are_used(device, metal_attn):
    """Kandinsky 5 lists blocks of 64 keys for each head, by their mean scores."""
    tensors = problem(queries=256, keys=256)
    blocks = nablaT_v2(*tensors[:2], torch.eye(4, dtype=torch.bool), thr=0.5)
    seen = blocks.to_dense().bool().repeat_interleave(64, 2).repeat_interleave(64, 3)
    assert 0.2 < seen.float().mean() < 0.8
    before = launches()
    actual = dispatch_attention_fn(*tensors, attn_mask=blocks)
    assert launches() > before
    expected = dispatch_attention_fn(*tensors, attn_mask=seen, backend="native")
    torch.testing.assert_close(actual, expected, atol=TOLERANCE, rtol=TOLERANCE)
    for option in ({"is_causal": True}, {"dropout_p": 0.1}):
        with pytest.raises(ValueError, match=r"BlockMask, dropout_p is 0\.[01] and is_causal is "):
            dispatch_attention_fn(*tensors, attn_mask=blocks, **option)
    with AttentionScoreSkipFunctionMode(), pytest.raises(ValueError, match="hook of diffusers is"):
        dispatch_attention_fn(*tensors, attn_mask=blocks)


def test_dropout_drops(device, metal_attn):
    query, key, _ = problem()
    ones = torch.ones_like(key)
    sums = dispatch_attention_fn(query, key, ones, dropout_p=0.5)[..., 0]
    assert sums.std() > 0.1
    torch.testing.assert_close(sums.mean(), torch.tensor(1.0), atol=0.3, rtol=0)


def test_strided_operands_are_copied(device, metal_attn):
    tensors = problem()
    strided = [x.transpose(1, 3).contiguous().transpose(1, 3) for x in tensors]
    assert all(x.stride(-1) != 1 for x in strided)
    expected = dispatch_attention_fn(*tensors)
    assert torch.equal(dispatch_attention_fn(*strided), expected)
    assert torch.equal(sdpa_of_diffusers(*strided), expected)


def test_unsupported_arguments_are_refused(device, metal_attn):
    query, key, value = problem()
    nested = torch.nested.nested_tensor([torch.ones(7)] * 2)
    wide = dict.fromkeys(("query", "key", "value"), torch.randn(1, 2, 1, 577))
    double = {"query": query.double(), "key": key.double(), "value": value.double()}
    lse, parallel = {"attention_kwargs": {"return_lse": True}}, {"parallel_config": object()}
    for function, changes, error, message in (
        (dispatch_attention_fn, lse, ValueError, "return_lse is True; the metal_attn backend"),
        (dispatch_attention_fn, parallel, ValueError, "backend does not support context parallel"),
        (dispatch_attention_fn, double, ValueError, r"query has dtype torch\.float64; it must be"),
        (dispatch_attention_fn, wide, ValueError, "query has a head dim of 577"),
        (metal_attention, {"key": None}, TypeError, "key is None; it must be a tensor"),
        (metal_attention, {"value": value[0]}, ValueError, r"value .*; it must be \(B, L, H, D\)"),
        (metal_attention, {"attn_mask": nested}, NotImplementedError, "attn_mask is a nested ten"),
        (metal_attention, {"attn_mask": True}, TypeError, "attn_mask is a bool; it must be a ten"),
    ):
        with pytest.raises(error, match=message):
            function(**{"query": query, "key": key, "value": value} | changes)


def test_the_name_is_registered(metal_attn):
    model = FAMILIES["Flux"].build()
    with pytest.raises(ValueError, match=r"metal_atn.*must be one of.*metal_attn"):
        model.set_attention_backend("metal_atn")
    names = attention_dispatch.AttentionBackendName
    assert names("metal_attn") is names.METAL_ATTN is list(names)[-1] == "metal_attn"


def test_a_diffusers_that_is_too_old_is_refused(monkeypatch):
    monkeypatch.setattr(diffusers, "__version__", "0.36.0")
    with pytest.raises(ImportError, match=r"needs diffusers 0\.42 or later .*: this is 0\.36\.0"):
        # It is run by its path, because runpy finds no code of modules that pytest rewrites.
        runpy.run_path(find_spec("torch_metal_attn.integrations.diffusers.backend").origin)


def test_set_attention_backend_selects_our_kernels(device):
    """It sets the model's backend, or the active backend if the model has no dispatcher."""
    with attention_backend("native"), torch.no_grad():
        for family in (FAMILIES["Flux"], FAMILIES["UNet XL"]):
            model = family.build()
            model.set_attention_backend("metal_attn")
            before = launches()
            answer(model, family.arguments())
            assert launches() - before == family.calls


def test_models_without_attention_say_so(recwarn):
    unet, flux = FAMILIES["UNet XL"].build(), FAMILIES["Flux"].build()
    parts = ("encoder", "decoder")
    sizes = {f"{part}_block_out_channels": (8,) for part in parts}
    tiny = diffusers.AutoencoderTiny(**sizes, **{f"num_{part}_blocks": (1,) for part in parts})
    with attention_backend("native"):
        for model in (unet, flux):
            model.set_attention_backend("metal_attn")
        tiny.set_attention_backend("native")
        assert not recwarn.list
        unet.set_attn_processor(diffusers.models.attention_processor.AttnProcessor())
        for model, name in ((unet, "UNet2DConditionModel"), (tiny, "AutoencoderTiny")):
            with pytest.warns(UserWarning, match=f"{name} never calls .* has no effect") as warned:
                model.set_attention_backend("METAL_ATTN")
            assert warned[0].filename == __file__


def test_guidance_hooks_are_applied(device, metal_attn):
    query, key, value = problem(keys=9)
    with AttentionScoreSkipFunctionMode():
        assert torch.equal(dispatch_attention_fn(query, key, value), value)
        assert torch.equal(sdpa_of_diffusers(query, key, value), value)
        attend = torch.compile(dispatch_attention_fn, backend="eager", fullgraph=True)
        assert torch.equal(attend(query, key, value), value)


def test_compiled_calls_equal_eager_calls(device, metal_attn):
    tensors = problem()
    expected = dispatch_attention_fn(*tensors)

    for call in (dispatch_attention_fn, sdpa_of_diffusers):
        compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
        before = launches()
        assert torch.equal(compiled(*tensors), expected)
        assert launches() > before


def test_modules_keep_the_rest_of_functional():
    functional = diffusers.models.attention_processor.F
    assert functional is integrations.diffusers_functional
    assert functional.linear is torch.nn.functional.linear
    assert refiner.nn.functional is functional
    assert refiner.nn.Module is torch.nn.Module


@pytest.mark.parametrize("backend", ["flash", "flash_varlen"])
def test_flash_backends_run_our_kernels(backend, device):
    tensors = problem(dtype=torch.bfloat16)
    mask = KEYS if backend == "flash_varlen" else None
    expected = dispatch_attention_fn(*tensors, attn_mask=mask, backend="native")
    with torch_metal_attn.install_flash_attn(), attention_backend(backend):
        before = launches()
        actual = dispatch_attention_fn(*tensors, attn_mask=mask)
        assert launches() > before
    torch.testing.assert_close(actual, expected, atol=2e-2, rtol=2e-2)
    with pytest.raises(RuntimeError, match="not usable"), attention_backend(backend):
        pass


def test_the_environment_selects_the_backend():
    done = run_program("""
import os
os.environ["DIFFUSERS_ATTN_BACKEND"] = "metal_attn"
import torch_metal_attn
import diffusers.utils.constants as constants
from diffusers.models import attention_dispatch as dispatch
assert dispatch._AttentionBackendRegistry._active_backend == "metal_attn"
assert constants.DIFFUSERS_ATTN_BACKEND == dispatch.DIFFUSERS_ATTN_BACKEND == "metal_attn"
""")
    assert done.returncode == 0, done.stderr


def test_a_diffusers_that_was_imported_before_is_patched(monkeypatch):
    monkeypatch.setattr(diffusers.models.attention_processor, "F", torch.nn.functional)
    monkeypatch.delitem(attention_dispatch._AttentionBackendRegistry._backends, "metal_attn")
    monkeypatch.delitem(sys.modules, "torch_metal_attn.integrations.diffusers")
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    registration.register_with_diffusers()
    assert diffusers.models.attention_processor.F is integrations.diffusers_functional
    assert "metal_attn" in attention_dispatch._AttentionBackendRegistry.list_backends()

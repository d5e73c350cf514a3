"""ComfyUI's node, override and installation, called as ComfyUI's sources do."""

import importlib.util
import logging

import pytest
import torch
from torch.nn import functional

from torch_metal_attn.__main__ import main
from torch_metal_attn.integrations.comfyui import Attention, nodes, patch
from torch_metal_attn.integrations.comfyui.attention import OVERRIDE
from torch_metal_attn.integrations.sdpa_replacement import SdpaReplaced
from torch_metal_attn.simulator import runs


@pytest.fixture
def messages():
    logger = logging.getLogger("torch_metal_attn.integrations.comfyui")
    texts, handler, level = [], logging.Handler(), logger.level
    handler.emit = lambda record: texts.append(record.getMessage())
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    yield texts
    logger.setLevel(level)
    logger.removeHandler(handler)


def comfyui_attention(q, k, v, heads, mask=None, **options):
    """ComfyUI's attention functions, as its sources describe them."""
    batch = q.shape[0]
    if not options.get("skip_reshape"):
        width = q.shape[-1] // heads
        kv_heads = -1 if options.get("enable_gqa") else heads
        q = q.reshape(batch, -1, heads, width).transpose(1, 2)
        k, v = (x.reshape(batch, x.shape[1], kv_heads, width).transpose(1, 2) for x in (k, v))
    if mask is not None:
        mask = mask.reshape(*(1,) * (3 - mask.dim()), *mask.shape)
        mask = mask[:, None] if mask.dim() == 3 else mask
    passed_on = {name: options[name] for name in ("scale", "enable_gqa") if name in options}
    out = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, **passed_on)
    if options.get("skip_output_reshape"):
        return out
    return out.transpose(1, 2).reshape(batch, q.shape[2], -1)


def call(function, *args, **options):
    """Calls attention as ComfyUI does: an override gets the function and its arguments."""
    override = options.get("transformer_options", {}).get(OVERRIDE)
    options["_inside_attn_wrapper"] = True
    return override(function, *args, **options) if override else function(*args, **options)


class Model:
    """The part of ComfyUI's ModelPatcher that a patch needs."""

    def __init__(self):
        self.model_options = {"transformer_options": {}}
        self.wrappers = []

    def clone(self):
        other = Model()
        other.model_options["transformer_options"] = dict(self.model_options["transformer_options"])
        other.wrappers = list(self.wrappers)
        return other

    def remove_wrappers_with_key(self, wrapper_type, key):
        assert (wrapper_type, key) == ("outer_sample", "metal_attn")
        self.wrappers.clear()

    def add_wrapper_with_key(self, wrapper_type, key, wrapper):
        assert (wrapper_type, key) == ("outer_sample", "metal_attn")
        self.wrappers.append(wrapper)

    @property
    def options(self):
        return self.model_options["transformer_options"]


def flat(heads=2, kv_heads=2, queries=9, keys=7):
    torch.manual_seed(0)
    sizes = ((queries, heads), (keys, kv_heads), (keys, kv_heads))
    return [torch.randn(2, length, h * 16) for length, h in sizes]


def by_heads():
    return [x.unflatten(-1, (-1, 16)).transpose(1, 2) for x in flat()]


CALLS = {
    "by heads": (by_heads, {"skip_reshape": True}),
    "result by heads": (flat, {"skip_output_reshape": True}),
    "mask of all": (flat, {"mask": torch.rand(9, 7) < 0.7}),
    "mask of a batch": (flat, {"mask": torch.randn(2, 9, 7)}),
    "mask of keys": (flat, {"mask": torch.randn(2, 1, 7)}),
    "mask of heads": (flat, {"mask": torch.randn(1, 2, 9, 7)}),
    "precision": (flat, {"attn_precision": torch.float32, "low_precision_attention": False}),
    "scale": (flat, {"scale": 0.3}),
    "groups": (lambda: flat(heads=4), {"enable_gqa": True}),
}


@pytest.mark.parametrize("name", CALLS)
def test_calls_equal_comfyuis_attention(name, device):
    make, options = CALLS[name]
    tensors, heads = make(), 4 if name == "groups" else 2
    expected = call(comfyui_attention, *tensors, heads, **options)
    model = patch(Model())
    before = len(runs.current().launches)
    actual = call(comfyui_attention, *tensors, heads, **options, transformer_options=model.options)
    assert len(runs.current().launches) > before
    assert model.options[OVERRIDE].replaced == 1
    torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    "dtype, options, reason",
    [
        (torch.float64, {}, "query has dtype torch.float64"),
        (torch.float32, {"new_option": 1}, "attention has no option new_option"),
    ],
)
def test_unsupported_calls_are_left_to_comfyui(dtype, options, reason, device, messages):
    tensors, override = [x.to(dtype) for x in flat()], Attention()
    for _ in range(2):
        model = {"transformer_options": {OVERRIDE: override}}
        out = call(comfyui_attention, *tensors, 2, **options, **model)
    assert torch.equal(out, comfyui_attention(*tensors, 2))
    assert override.replaced == 0
    assert [(reason in key, count) for key, count in override.left_alone.items()] == [(True, 2)]
    assert [reason in message for message in messages] == [True]


def test_tensors_of_other_shapes_are_left_alone(device):
    q, k, v = flat()
    for reason, tensors, options in (
        ("q has shape (2, 9, 32); it must be (B, heads, L, D)", (q, k, v), {"skip_reshape": True}),
        ("q has shape (2, 2, 9, 16); it must be (B, L, heads * D)", by_heads(), {}),
        ("k is None; it must be a tensor", (q, None, v), {}),
        ("mask is a list; it must be a tensor: pass torch.", (q, k, v), {"mask": [1]}),
        ("skip_output_reshape is 2; it must be a bool", (q, k, v), {"skip_output_reshape": 2}),
        ("k has 16 columns; with 2 heads of 16 columns it must have 32", (q, k[..., :16], v), {}),
        ("k has 17 columns; with 2 heads of 16", (q, k[..., :17], v), {"enable_gqa": True}),
        ("heads is 0; it must be at least 1", (q, k, v), {"heads": 0}),
    ):
        override = Attention()
        override(lambda *args, **kwargs: None, *tensors, **{"heads": 2} | options)
        assert [key.startswith(reason) for key in override.left_alone] == [True]


def test_cpu_calls_outside_the_simulator_are_left_alone():
    override = Attention()
    call(comfyui_attention, *flat(), 2, transformer_options={OVERRIDE: override})
    (reason,) = override.left_alone
    assert "only inside torch_metal_attn.simulate()" in reason


def test_a_second_patch_replaces_ours_but_not_others(device):
    model = patch(patch(Model()))
    assert len(model.wrappers) == 1
    assert model.wrappers[0].__self__ is model.options[OVERRIDE]
    model.options[OVERRIDE] = comfyui_attention
    with pytest.raises(ValueError, match="override to <function"):
        patch(model)
    with pytest.raises(TypeError, match="model is None; it must be ComfyUI's ModelPatcher"):
        patch(None)


def sampled(model, attentions, **options):
    def executor():
        for _ in range(attentions):
            call(comfyui_attention, *flat(), 2, **options, transformer_options=model.options)
        return "latents"

    (wrapper,) = model.wrappers
    return wrapper(executor)


def test_a_run_logs_its_calls_of_attention(device, messages):
    model = patch(Model())
    assert sampled(model, 3) == "latents"
    assert messages[-1] == "metal_attn ran 3 calls of attention, ComfyUI 0"
    sampled(model, 0)
    assert "ran no attention of this model: another node has replaced" in messages[-1]
    sampled(model, 2, new_option=1)
    assert messages[-1].endswith("ran no attention of this model: see the reasons above")


def test_the_node_patches_a_clone_of_the_model():
    node = nodes.NODE_CLASS_MAPPINGS["MetalAttention"]
    assert nodes.NODE_DISPLAY_NAME_MAPPINGS.keys() == nodes.NODE_CLASS_MAPPINGS.keys()
    required = node.INPUT_TYPES()["required"]
    assert required == {"model": ("MODEL",), "enabled": ("BOOLEAN", {"default": True})}
    model = Model()
    method = getattr(node(), node.FUNCTION)
    assert method(model=model, enabled=False) == (model,)
    (patched,) = method(model=model, enabled=True)
    assert isinstance(patched.options[OVERRIDE], Attention)
    assert not model.options, "the original model must stay unchanged"


def test_install_and_uninstall_can_be_repeated(tmp_path, capsys):
    folder = str(tmp_path)
    assert main(["comfyui", "install", folder]) == 2
    error = capsys.readouterr().err
    assert "has no folder custom_nodes: give the folder that ComfyUI's main.py" in error
    (tmp_path / "custom_nodes").mkdir()
    for _ in range(2):
        assert main(["comfyui", "install", folder]) == 0
    file = tmp_path / "custom_nodes" / "torch_metal_attn" / "__init__.py"
    spec = importlib.util.spec_from_file_location("custom_node", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.NODE_CLASS_MAPPINGS is nodes.NODE_CLASS_MAPPINGS
    assert main(["comfyui", "uninstall", folder]) == 0
    assert not file.parent.exists()
    assert main(["comfyui", "uninstall", folder]) == 0
    assert "there is no" in capsys.readouterr().out


def test_files_of_others_are_kept(tmp_path, capsys):
    file = tmp_path / "custom_nodes" / "torch_metal_attn" / "__init__.py"
    file.parent.mkdir(parents=True)
    file.write_text("mine = True\n")
    for action in ("install", "uninstall"):
        assert main(["comfyui", action, str(tmp_path)]) == 2
        assert "was not written by this version" in capsys.readouterr().err
    assert file.read_text() == "mine = True\n"


def test_the_variable_replaces_attention_everywhere(monkeypatch, device):
    entered = []
    monkeypatch.setattr(SdpaReplaced, "__enter__", lambda self: entered.append(self))
    nodes.replace_everywhere()
    assert not entered
    monkeypatch.setenv(nodes.VARIABLE, "all")
    nodes.replace_everywhere()
    assert [context._process_wide for context in entered] == [True]
    monkeypatch.setenv(nodes.VARIABLE, "some")
    with pytest.raises(ValueError, match="TORCH_METAL_ATTN_COMFYUI is 'some'; it must be"):
        nodes.replace_everywhere()

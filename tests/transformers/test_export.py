"""Models as graphs for other programs: torch.jit.trace, torch.export, inductor, AOTInductor."""

import io
import zipfile

import pytest
import torch
from torch import nn

transformers = pytest.importorskip("transformers")

from tests.transformers import tiny_models as tiny  # noqa: E402
from tests.transformers.model_check import TOLERANCE, difference  # noqa: E402
from torch_metal_attn.integrations.transformers import enable, metal_attention  # noqa: E402
from torch_metal_attn.testing.judge import normal  # noqa: E402


class Scores(nn.Module):
    def __init__(self, name, **changes):
        super().__init__()
        self.model = tiny.build(name, **changes)

    def forward(self, ids, mask):
        return self.model(input_ids=ids, attention_mask=mask, use_cache=False).logits


def texts(length, batch):
    starts = torch.tensor([0] * (batch - 1) + [3])[:, None]
    return tiny.tokens(length, batch), (torch.arange(length) >= starts).long()


class TestTraced:
    @pytest.mark.parametrize("fuse_rope", [False, True])
    def test_trace_takes_other_batches_and_lengths(self, fuse_rope):
        scores = Scores("Gemma2")
        cases = [texts(19, 2), texts(13, 3), texts(31, 1)]
        with torch.no_grad():
            expected = [scores(*case) for case in cases]
            enable(scores.model, fuse_rope=fuse_rope)
            traced = torch.jit.trace(scores, cases[0], check_trace=False)
            file = io.BytesIO()
            torch.jit.save(traced, file)
            loaded = torch.jit.load(io.BytesIO(file.getvalue()))
            for case, scores_of_case in zip(cases, expected, strict=True):
                assert difference(loaded(*case), scores_of_case, case[1].bool()) <= TOLERANCE
        names = [node.kind() for node in loaded.inlined_graph.nodes()]
        assert names.count("metal_attn::flash_fwd") == 2

    def test_trace_without_a_mask_takes_other_lengths(self):
        q, k, v = normal(3, 1, 2, 21, 8)

        def attend(q, k, v):
            return metal_attention(nn.Module(), q, k, v, None)[0]

        traced = torch.jit.trace(attend, (q[:, :, :5], k[:, :, :5], v[:, :, :5]))
        for length in (2, 5, 21):
            inputs = [one[:, :, :length] for one in (q, k, v)]
            torch.testing.assert_close(traced(*inputs), attend(*inputs))


def test_exported_program_takes_other_batches_and_lengths(tmp_path):
    """AOTInductor's C++ is generated, but not compiled."""
    scores = Scores("Llama", num_hidden_layers=1)
    cases = [texts(19, 2), texts(40, 3)]
    sizes = {0: torch.export.Dim("batch"), 1: torch.export.Dim("length", min=2, max=64)}
    with torch.no_grad():
        expected = [scores(*case) for case in cases]
        enable(scores.model, fuse_rope=True)
        program = torch.export.export(scores, cases[0], dynamic_shapes=(sizes, sizes), strict=False)
        for case, scores_of_case in zip(cases, expected, strict=True):
            actual = program.module()(*case)
            assert difference(actual, scores_of_case, case[1].bool()) <= TOLERANCE
        options = {"aot_inductor.package_cpp_only": True, "aot_inductor.precompile_headers": False}
        package = torch._inductor.aoti_compile_and_package(
            program, package_path=str(tmp_path / "model.pt2"), inductor_configs=options
        )
    with zipfile.ZipFile(package) as files:
        (calls,) = (files.read(name) for name in files.namelist() if name.endswith("wrapper.json"))
    for op in ("rope", "flash_fwd"):
        assert f"metal_attn::{op}".encode() in calls


def test_inductor_trains():
    """The default backend of torch.compile, on one layer: a whole model takes minutes."""
    model = tiny.build("Llama", num_hidden_layers=1)
    inputs = normal(2, 19, 64)
    tables = model.model.rotary_emb(inputs, torch.arange(19)[None])
    layer = model.model.layers[0].self_attn.train()

    def gradients(function):
        x = inputs.clone().requires_grad_()
        function(x, position_embeddings=tables, attention_mask=None)[0].square().sum().backward()
        gradients = [x.grad, *(parameter.grad for parameter in layer.parameters())]
        layer.zero_grad()
        return gradients

    model.set_attn_implementation("eager")
    expected = gradients(layer)
    enable(model)
    torch.compiler.reset()
    actual = gradients(torch.compile(layer, fullgraph=True))
    for one, other in zip(actual, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4 * other.abs().max())

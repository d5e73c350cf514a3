"""enable(model, fuse_rope=True): the kernel rotates queries; memory never has rotated queries."""

import copy
import io
import pickle

import pytest
import torch
from torch._subclasses import FakeTensorMode

transformers = pytest.importorskip("transformers", minversion="5.20")

from tests.transformers import model_check as check  # noqa: E402
from tests.transformers import tiny_models as tiny  # noqa: E402
from tests.transformers.tiny_families import BATCHED, FAMILIES  # noqa: E402
from torch_metal_attn.integrations.transformers import (  # noqa: E402
    continuous_batching,
    enable,
    fusion,
)
from torch_metal_attn.integrations.transformers.unrotated import Tables, Unrotated  # noqa: E402
from torch_metal_attn.simulator import runs, simulate  # noqa: E402

WITHOUT_ROPE = ["BERT", "CLIP", "T5", "ViT", "Whisper"]
OTHER_ROPE = ["DeepSeek-V2", "DeepSeek-V3", "DeepSeek-V3.2", "GLM-MoE-DSA", "Llama4"]
REFUSED = {
    **dict.fromkeys(WITHOUT_ROPE, "has no attention that calls apply_rotary_pos_emb"),
    **dict.fromkeys(OTHER_ROPE, "rotates its queries by .*, which is not known"),
    "DINOv3": "rotates its queries neither by halves nor by pairs",  # only those of patches
    "Gemma4": "calls apply_rotary_pos_emb in an unknown way",
    "Ministral 3": "uses its queries between rotation and attention",
}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "attention_factor": 1.3}
YARN["original_max_position_embeddings"] = 32


class TestMatchesEager:
    @pytest.mark.parametrize("name", [name for name in FAMILIES if name not in REFUSED])
    def test_prefill(self, name):
        assert check.compare(name, "left", fuse_rope=True)[0] <= check.TOLERANCE

    @pytest.mark.parametrize(
        "name", ["Llama", "Gemma3", "gpt-oss", "Phi3", "Cohere2", "GLM", "GPT-NeoX", "StableLM"]
    )
    def test_dropped_tables_are_noticed(self, name, monkeypatch):
        options = Unrotated.options

        def without_cos(unrotated):
            return options(unrotated) | {"q_rotary_cos": torch.ones_like(unrotated.cos)}

        monkeypatch.setattr(Unrotated, "options", without_cos)
        assert check.compare(name, "left", fuse_rope=True)[0] > 10 * check.TOLERANCE

    @pytest.mark.parametrize("name", ["Llama", "Cohere2", "StableLM"])
    def test_on_device(self, name, device):
        """The last token sees the whole cache, the second of three does not, so kernels differ."""
        new_tokens = 3 if name == "Llama" else 2
        options = {"cache_implementation": "static", "max_new_tokens": new_tokens}
        apart = check.compare_generated(name, fuse_rope=True, device=device, **options)
        assert apart <= check.TOLERANCE
        if (run := runs.current()) is not None:
            flash = [launch for launch in run.launches if launch.kernel.startswith("flash")]
            assert {launch.kernel for launch in flash} == {"flash_fwd", "flash_decode"}
            # Cohere 2 rotates nothing where it has no window.
            rotated = sum("Q_ROTARY" in launch.defines for launch in flash)
            assert rotated == len(flash) // (2 if name == "Cohere2" else 1)
            assert rotated == sum(launch.kernel == "rope" for launch in run.launches)

    @pytest.mark.parametrize("name", ["Llama", "GLM"])
    def test_attention_factor(self, name):
        assert (
            check.compare(name, "left", fuse_rope=True, rope_parameters=YARN)[0] <= check.TOLERANCE
        )

    @pytest.mark.parametrize("name", ["Qwen2-VL", "Qwen3-VL"])
    def test_positions_of_three_axes(self, name):
        positions = torch.stack([torch.arange(tiny.PROMPT) * n for n in (1, 2, 5)])
        inputs = {"input_ids": tiny.tokens(), "position_ids": positions[:, None].expand(3, 2, -1)}
        assert check.compare(name, inputs=inputs, fuse_rope=True)[0] <= check.TOLERANCE

    @pytest.mark.parametrize("name", ["Llama", "gpt-oss"])
    def test_tables_with_positions_innermost(self, name, monkeypatch):
        model = tiny.build(name)
        kind = type(model.model.rotary_emb)
        forward = kind.forward

        def strided(self, x, position_ids):
            return tuple(table.mT.contiguous().mT for table in forward(self, x, position_ids))

        monkeypatch.setattr(kind, "forward", strided)
        assert check.compare(name, "left", model=model, fuse_rope=True)[0] <= check.TOLERANCE

    @pytest.mark.parametrize(
        ("name", "changes"), [("gpt-oss", {"layer_types": ["sliding_attention"]}), ("StableLM", {})]
    )
    def test_compiled(self, name, changes):
        apart = check.compare_compiled(name, fuse_rope=True, num_hidden_layers=1, **changes)
        assert apart <= check.TOLERANCE

    @pytest.mark.parametrize("name", ["Llama", "gpt-oss", "GLM", "StableLM"])
    def test_training(self, name):
        inputs = tiny.inputs(name, "right") | {"use_cache": False}
        expected = check.gradients(tiny.build(name), inputs)
        model = enable(tiny.build(name), fuse_rope=True)
        if name in ("Llama", "GLM"):
            model.gradient_checkpointing_enable({"use_reentrant": False})
        check.assert_same_gradients(check.gradients(model, inputs), expected)

    @pytest.mark.parametrize("name", BATCHED[:2])
    def test_continuous_batching(self, name):
        model = tiny.build(name)
        expected = tiny.generate_each(model, tiny.prompts())
        enable(model, fuse_rope=True)
        with continuous_batching(model):
            actual = tiny.generate_batch(model, tiny.prompts())
        assert [tokens for tokens, _ in actual] == [tokens for tokens, _ in expected]


class TestQueriesAreNeverWrittenRotated:
    def test_rope_runs_for_keys_only(self):
        model = enable(tiny.build("Llama"), fuse_rope=True)
        with simulate(record=True) as run:
            tiny.answer(model, **tiny.inputs("Llama", "left"))
        assert [launch.kernel for launch in run.recorded] == ["rope", "flash_fwd"] * 2
        for launch in run.recorded:
            if launch.kernel == "rope":
                # The 2 KV heads of 2 sequences, rounded up to whole threadgroups. q has 4 heads.
                length, heads = launch.grid[1:]
                assert length == tiny.PROMPT
                assert 2 * 2 <= heads < 2 * 4
            else:
                assert launch.defines["Q_ROTARY"] == "1"

    def test_less_device_memory_is_moved(self):
        q, k = torch.randn(1, 8, 64, 64).half(), torch.randn(1, 2, 64, 64).half()
        cos, sin = torch.randn(2, 1, 64, 32).half()
        ops = torch.ops.metal_attn
        with simulate(count=True) as apart:
            ops.flash_fwd(*ops.rope(q, k, cos, sin), k, causal=True)
        with simulate(count=True) as fused:
            rotated, _ = ops.rope(k, None, cos, sin)
            ops.flash_fwd(q, rotated, k, causal=True, q_rotary_cos=cos, q_rotary_sin=sin)
        for moved, less in (("load_bytes", 0), ("store_bytes", q.nbytes)):
            before, after = (
                sum(getattr(c, moved)["device"] for c in run.counters.values())
                for run in (apart, fused)
            )
            assert after <= before - less


class TestRefusals:
    @pytest.mark.parametrize("name", REFUSED)
    def test_unsupported_families_are_refused(self, name):
        model = tiny.build(name)
        classes = [type(module) for module in model.modules()]
        reason = rf"fuse_rope=True for {type(model).__name__}.*{REFUSED[name]}.*use enable\(model\)"
        with pytest.raises(NotImplementedError, match=reason):
            enable(model, fuse_rope=True)
        assert model.config._attn_implementation == "eager"
        assert [type(module) for module in model.modules()] == classes

    def test_another_rotation_is_refused(self, monkeypatch):
        llama = transformers.models.llama.modeling_llama
        rotate = llama.apply_rotary_pos_emb
        for function in (
            lambda q, k, cos, sin, unsqueeze_dim=1: rotate(q, k, cos, -sin, unsqueeze_dim),
            lambda q, k, cos, sin, unsqueeze_dim=1: (rotate(q, k, cos, sin, unsqueeze_dim)[0], k),
            lambda x, y, cos, sin: rotate(x, y, cos, sin),
        ):
            monkeypatch.setattr(llama, "apply_rotary_pos_emb", function)
            with pytest.raises(NotImplementedError, match="LlamaAttention rotates its queries"):
                enable(tiny.build("Llama"), fuse_rope=True)

    def test_a_replaced_forward_is_refused(self):
        model = tiny.build("Llama")
        layer = model.model.layers[1].self_attn
        layer.forward = layer.forward
        with pytest.raises(NotImplementedError, match="a LlamaAttention has a forward that is not"):
            enable(model, fuse_rope=True)

    def test_tables_that_match_on_one_axis_only_are_refused(self, monkeypatch):
        """Halves of different axes match where time, height and width are equal."""
        model = tiny.build("Qwen3-VL")
        kind = type(model.rotary_emb)
        forward = kind.forward

        def mixed(self, x, position_ids):
            whole = forward(self, x, position_ids)
            by_time = forward(self, x, position_ids[0]) if position_ids.ndim > 2 else whole
            pairs = zip(whole, by_time, strict=True)
            return tuple(torch.cat([a[..., :8], b[..., 8:]], -1) for a, b in pairs)

        monkeypatch.setattr(kind, "forward", mixed)
        with pytest.raises(NotImplementedError, match="rotates its queries neither by halves nor"):
            enable(model, fuse_rope=True)

    def test_other_uses_of_unrotated_queries_raise(self):
        x, table, cat = torch.randn(2, 1, 3, 4), torch.randn(1, 3, 2), fusion._Torch().cat
        q = Unrotated(x, table, table, False, "SomeAttention")
        for use in (
            lambda: q.contiguous(),
            lambda: q * 2.0,
            lambda: torch.ones(2) * q,
            lambda: cat([x, q], dim=-1),
            lambda: cat([q, x], dim=1),
            lambda: cat([q, q], dim=-1),
            lambda: torch.nn.functional.pad(q, (0, 1)),
            lambda: q[0],
        ):
            with pytest.raises((NotImplementedError, TypeError), match=r"SomeAttention|Unrotated"):
                use()

    def test_another_implementation_on_a_fused_model_raises(self):
        model = enable(tiny.build("Llama"), fuse_rope=True)
        for other in ("eager", "sdpa"):
            model.set_attn_implementation(other)
            with pytest.raises((NotImplementedError, TypeError), match=r"LlamaAttention|Unrotated"):
                tiny.answer(model, input_ids=tiny.tokens())

    def test_another_unsqueeze_dim_is_refused(self):
        rotate_k = fusion._key_rotation("SomeAttention", Tables("halves", False))
        q, table = torch.randn(2, 1, 3, 4), torch.randn(1, 3, 4)
        with pytest.raises(NotImplementedError, match="unsqueeze_dim=2 in SomeAttention"):
            rotate_k(q, q, table, table, unsqueeze_dim=2)


class TestModel:
    def fused(self):
        return enable(tiny.build("Llama"), fuse_rope=True)

    def test_enable_removes_fusion(self):
        model = self.fused()
        original = transformers.models.llama.modeling_llama.LlamaAttention
        layer = model.model.layers[0].self_attn
        assert isinstance(layer, original)
        assert type(layer) is not original
        with torch.device("meta"):  # a default device is not used
            for _ in range(2):
                assert type(enable(model, fuse_rope=True).model.layers[0].self_attn) is type(layer)
        enable(model)
        assert all(not isinstance(module, fusion._Fused) for module in model.modules())
        assert type(layer) is original

    @pytest.mark.parametrize("where", [torch.device("meta"), FakeTensorMode()])
    def test_models_without_values_are_fused(self, where):
        expected = self.fused()
        with where:
            model = enable(type(expected)(expected.config), fuse_rope=True)
        assert type(model.model.layers[0].self_attn) is type(expected.model.layers[0].self_attn)

    def test_copies_and_pickles_stay_fused(self):
        model, ids, stream = self.fused(), tiny.tokens(), io.BytesIO()
        expected = tiny.answer(model, input_ids=ids)
        torch.save(model, stream)
        stream.seek(0)
        copies = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
        for one in (*copies, torch.load(stream, weights_only=False)):
            assert isinstance(one.model.layers[0].self_attn, fusion._Fused)
            assert torch.equal(tiny.answer(one, input_ids=ids), expected)

    def test_a_saved_model_is_not_fused(self, tmp_path):
        model, plain = self.fused(), tiny.build("Llama")
        assert model.state_dict().keys() == plain.state_dict().keys()
        assert str(model) == str(plain)
        model.save_pretrained(tmp_path)
        loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
        assert type(loaded) is type(plain)
        assert "metal" not in (tmp_path / "config.json").read_text()

    def test_a_part_of_a_model_can_be_fused(self):
        model, inputs = tiny.build("PaliGemma"), tiny.inputs("PaliGemma")
        expected = tiny.answer(model, **inputs)
        enable(enable(model).model.language_model, fuse_rope=True)
        assert check.difference(tiny.answer(model, **inputs), expected) <= check.TOLERANCE

"""Autocast, with the dtypes of torch's own attention, and transformers' Trainer with bf16=True."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

transformers = pytest.importorskip("transformers", minversion="5.20")

from peft import LoraConfig, get_peft_model  # noqa: E402
from transformers import DataCollatorWithFlattening, Trainer, TrainingArguments  # noqa: E402

from tests.transformers import tiny_models as tiny  # noqa: E402
from tests.transformers.model_check import difference, gradients  # noqa: E402
from tests.transformers.tiny_families import CORE, FAMILIES  # noqa: E402
from torch_metal_attn.integrations.transformers import (  # noqa: E402
    enable,
    metal_attention,
    record_routes,
)

# With fewer experts per token, rounding may select another expert in a near tie.
EVERY_EXPERT = {"gpt-oss": {"num_experts_per_tok": 4}, "DeepSeek-V3": {"num_experts_per_tok": 4}}

# The padded side, the dtype of a model, autocast or not, and a fused rotation or not.
PRECISIONS = [
    *((name, "right", torch.float32, True, False) for name in CORE),
    ("Gemma2", "left", torch.float16, False, False),
    ("Gemma3", "left", torch.bfloat16, False, True),
    ("Gemma3", "left", torch.float32, True, True),
    ("Llama", "left", torch.float16, True, True),
    ("Llama", "left", torch.bfloat16, True, False),
    ("T5", "left", torch.float16, False, False),
]


class Operands(TorchDispatchMode):
    """Records the dtypes of q, k, v, masks and biases of every call of our attention."""

    def __init__(self):
        super().__init__()
        self.dtypes = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        options = kwargs or {}
        if func.namespace == "metal_attn" and ("fwd" in func.name() or "decode" in func.name()):
            added = [options.get("attn_mask"), options.get("attn_bias")]
            operands = [*args[:3], *(one for one in added if one is not None)]
            self.dtypes |= {one.dtype for one in operands} - {torch.bool}
        return func(*args, **options)


def bfloat16():
    return torch.autocast("cpu", torch.bfloat16)


class TestAutocast:
    @pytest.mark.parametrize("name, side, dtype, autocast, fuse_rope", PRECISIONS)
    def test_error_is_at_most_twice_that_of_eager(self, name, side, dtype, autocast, fuse_rope):
        """Autocast determines the dtype of all operands, also of rotary tables."""
        model, inputs = tiny.build(name, **EVERY_EXPERT.get(name, {})), tiny.inputs(name, side)
        if FAMILIES[name].generates:
            inputs["use_cache"] = False  # a cache promotes keys and values to one dtype
        exact, where = tiny.answer(model, **inputs), tiny.present(inputs)
        model.to(dtype)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast), Operands() as operands:
            eager = difference(tiny.answer(model, **inputs).float(), exact, where)
            enable(model, fuse_rope=fuse_rope)
            assert difference(tiny.answer(model, **inputs).float(), exact, where) <= 2 * eager
        assert operands.dtypes == {torch.bfloat16 if autocast else dtype}

    @pytest.mark.parametrize("fuse_rope", [False, True])
    @pytest.mark.parametrize("name", ["Llama", "Gemma3"])
    def test_error_of_gradients_is_at_most_twice_that_of_eager(self, name, fuse_rope):
        inputs = tiny.inputs(name, "right") | {"use_cache": False}

        def error(model):
            with bfloat16():
                actual = gradients(model, inputs)
            apart = [(actual[name] - one).norm() ** 2 for name, one in exact.items()]
            return sum(apart).sqrt()

        exact = gradients(tiny.build(name), inputs)
        eager = error(tiny.build(name))
        assert error(enable(tiny.build(name), fuse_rope=fuse_rope)) <= 2 * eager

    def test_a_cache_of_another_dtype_is_cast(self):
        options = {"max_new_tokens": 4}
        model, inputs = tiny.build("Qwen3"), tiny.inputs("Qwen3", "left")
        _, exact = tiny.generate(model, inputs, **options)
        with bfloat16():
            _, eager = tiny.generate(model, inputs, **options)
            with Operands() as operands:
                _, ours = tiny.generate(enable(model), inputs, **options)
        assert operands.dtypes == {torch.bfloat16}
        # Rounding may change later tokens, so only the first ones are compared.
        assert difference(ours[:, 0], exact[:, 0]) <= 2 * difference(eager[:, 0], exact[:, 0])

    def test_masks_are_rounded_like_torch(self):
        """The lowest float32 is -inf in bfloat16, so a row of nothing else sees no key."""
        q, k, v = torch.randn(3, 1, 2, 5, 8, generator=torch.Generator().manual_seed(0))
        mask = torch.zeros(1, 1, 5, 5)
        mask[..., 3:] = mask[:, :, 1] = torch.finfo(torch.float32).min
        with bfloat16():
            actual = metal_attention(torch.nn.Module(), q, k, v, mask)[0].transpose(1, 2)
            expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, mask)
        assert actual.dtype == expected.dtype == torch.bfloat16
        torch.testing.assert_close(actual, expected)
        assert not actual[:, :, 1].any()

    def test_float64_is_not_cast(self):
        q = torch.randn(1, 2, 5, 8, dtype=torch.float64)
        with bfloat16(), pytest.raises(ValueError, match="float64"):
            metal_attention(torch.nn.Module(), q, q, q, None)


class TestTrainer:
    """Losses and norms of gradients of a few steps, against attn_implementation="sdpa"."""

    STEPS = 3

    def train(self, model, folder, packed=False, **options):
        lengths = (7, 19, 1, 13, 16, 4) if packed else (19,) * 6
        tokens = tiny.tokens(19, batch=len(lengths)).tolist()
        rows = [row[:length] for row, length in zip(tokens, lengths, strict=True)]
        arguments = TrainingArguments(
            str(folder),
            max_steps=self.STEPS,
            per_device_train_batch_size=2,
            learning_rate=1e-3,
            bf16=True,
            use_cpu=True,
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            **options,
        )
        flatten = DataCollatorWithFlattening(return_flash_attn_kwargs=True)
        trainer = Trainer(
            model,
            arguments,
            train_dataset=[{"input_ids": row, "labels": row} for row in rows],
            data_collator=flatten if packed else None,
        )
        with Operands() as operands, record_routes() as routes:
            trainer.train()
        steps = [step for step in trainer.state.log_history if "loss" in step]
        assert len(steps) == self.STEPS
        curve = torch.tensor([[step["loss"], step["grad_norm"]] for step in steps])
        return curve, operands.dtypes, routes

    def compare(self, name, folder, wrap=lambda model: model, packed=False, **options):
        reference = tiny.build(name)
        reference.set_attn_implementation("sdpa")
        # With a cache transformers makes no mask, and sdpa would not separate the sequences.
        expected, *_ = self.train(wrap(reference), folder, packed, **options | {"use_cache": False})
        model = wrap(enable(tiny.build(name)))
        actual, dtypes, routes = self.train(model, folder, packed, **options)
        assert dtypes == {torch.bfloat16}
        assert routes.kernel.total() >= self.STEPS * model.config.num_hidden_layers
        if packed:
            assert routes.packed == routes.kernel
        torch.testing.assert_close(actual[:, 0], expected[:, 0], rtol=2e-3, atol=0)
        torch.testing.assert_close(actual[:, 1], expected[:, 1], rtol=1e-2, atol=0)

    @pytest.mark.parametrize(
        "name, packed, use_cache",
        [("Llama", False, True), ("Mistral", True, False), ("Mistral", True, True)],
    )
    def test_matches_sdpa(self, name, packed, use_cache, tmp_path):
        self.compare(name, tmp_path, packed=packed, use_cache=use_cache)

    def test_lora_with_checkpointing_matches_sdpa(self, tmp_path):
        def wrap(model):
            torch.manual_seed(0)
            config = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
            return get_peft_model(model, config)

        reentrant = {"gradient_checkpointing_kwargs": {"use_reentrant": True}}
        self.compare("Llama", tmp_path, wrap, True, gradient_checkpointing=True, **reentrant)

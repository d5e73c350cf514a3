"""Sequences packed in one row, separated by position_ids: bounds instead of a dense mask."""

import inspect
import pickle
import re
from contextlib import nullcontext

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

transformers = pytest.importorskip("transformers")

from transformers import masking_utils  # noqa: E402
from transformers.utils import TransformersKwargs  # noqa: E402

from tests.transformers import model_check  # noqa: E402
from tests.transformers import tiny_models as tiny  # noqa: E402
from tests.transformers.model_check import LENGTHS, bounds  # noqa: E402
from tests.transformers.test_masks import check_attention  # noqa: E402
from torch_metal_attn.integrations.transformers import (  # noqa: E402
    band,
    enable,
    metal_attention,
    metal_attention_mask,
    packing,
    record_routes,
)
from torch_metal_attn.testing.judge import normal  # noqa: E402

BOUNDS = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")
POSITIONS = ("position_ids",)
BANDS = {
    "causal": lambda size: masking_utils.causal_mask_function,
    "full": lambda size: masking_utils.bidirectional_mask_function,
    "sliding": masking_utils.sliding_window_causal_mask_function,
    "both sides": masking_utils.sliding_window_bidirectional_mask_function,
}
CHUNKS = masking_utils.chunked_causal_mask_function(3, torch.zeros(1, dtype=torch.int64))


def positions_of(rows):
    """position_ids (B, L) of packed sequences, whose lengths `rows` lists for each row."""
    return torch.stack([torch.cat([torch.arange(length) for length in row]) for row in rows])


def call_for(function, positions, remapped=True):
    """transformers' arguments for the mask function. remapped: False for older versions."""
    sequences = masking_utils.find_packed_sequence_indices(positions)
    batch, length = positions.shape
    remap = getattr(masking_utils, "remap_positions_for_packed_sequence", None)
    if remap is not None and remapped:
        function = remap(function, positions)
    return {
        "batch_size": batch,
        "q_length": length,
        "kv_length": length,
        "mask_function": masking_utils.and_masks(
            masking_utils.packed_sequence_mask_function(sequences), function
        ),
        "allow_is_causal_skip": False,
        "device": "cpu",
    }


@st.composite
def packed_calls(draw):
    rows = [draw(st.lists(st.integers(1, 9), min_size=2, max_size=4)) for _ in range(2)]
    short, long = sorted(rows, key=sum)
    rows = [long, [*short, sum(long) - sum(short)] if sum(long) > sum(short) else short]
    function = BANDS[draw(st.sampled_from(sorted(BANDS)))](draw(st.integers(1, 12)))
    return call_for(function, positions_of(rows[: draw(st.integers(1, 2))]), draw(st.booleans()))


class TestDescriptor:
    @settings(max_examples=50)
    @given(packed_calls())
    def test_equals_transformers(self, call):
        batch, length = call["batch_size"], call["q_length"]
        mask = metal_attention_mask(**call)
        assert mask.shape == (batch, 1, length, len(band.COLUMNS))
        assert torch.equal(band.expand(mask, length, length), masking_utils.sdpa_mask(**call))
        check_attention(mask, masking_utils.sdpa_mask(**call), batch, length, length)

    def test_chunks_are_dense(self):
        call = call_for(CHUNKS, positions_of([(5, 11)]))
        assert torch.equal(metal_attention_mask(**call), masking_utils.sdpa_mask(**call))

    def test_positions_without_a_packed_mask(self):
        positions = positions_of([(5, 11)])
        call = call_for(masking_utils.causal_mask_function, positions) | {
            "allow_is_causal_skip": True
        }
        remap = masking_utils.remap_positions_for_packed_sequence
        call["mask_function"] = remap(masking_utils.causal_mask_function, positions)
        expected = masking_utils.sdpa_mask(**call | {"allow_is_causal_skip": False})
        assert torch.equal(metal_attention_mask(**call), expected)


def attend(mask, **bounds):
    q, k, v = normal(3, 1, 2, 31, 8)
    return metal_attention(torch.nn.Module(), q, k, v, mask, **bounds)[0]


class TestBounds:
    """cu_seq_lens together with a mask that was made from position_ids."""

    def mask(self, function=masking_utils.causal_mask_function):
        return metal_attention_mask(**call_for(function, positions_of([LENGTHS])))

    def test_empty_sequences_change_nothing(self):
        mask = self.mask(masking_utils.sliding_window_causal_mask_function(5))
        for ends in ((0, 17, 18, 31), (0, 0, 17, 18, 18, 31, 31)):
            assert torch.equal(attend(mask, **bounds(*ends)), attend(mask))

    def test_tokens_outside_of_all_sequences_give_zero(self):
        out = attend(self.mask(), **bounds(0, 17, 18))
        assert torch.equal(out[:, :18], attend(self.mask())[:, :18])
        assert not out[:, 18:].any()

    @pytest.mark.parametrize("ends", [(0, 31), (0, 17, 31), (0, 16, 18, 31), (0, 9, 17, 18, 31)])
    def test_bounds_that_contradict_positions_are_refused(self, ends):
        with pytest.raises(ValueError, match=r"cu_seq_lens_q=.* and position_ids disagree"):
            attend(self.mask(), **bounds(*ends))

    def test_only_the_first_layer_synchronises(self, monkeypatch):
        mask, ends, compared = self.mask(), bounds(0, 17, 18, 31), []
        equal = torch.equal
        monkeypatch.setattr(packing.torch, "equal", lambda *a: compared.append(a) or equal(*a))
        for _ in range(2):
            attend(mask, **ends)
            assert len(compared) == 2
        attend(mask)
        assert len(compared) == 2


def test_positions_separate_the_sequences_of_a_model():
    model = tiny.build("Mistral")
    batch, expected = model_check.packed_batch(model)
    by_positions = {name: batch[name] for name in ("input_ids", "position_ids")}
    for fuse_rope, inputs in ((False, by_positions), (True, by_positions), (True, batch)):
        with record_routes() as routes:
            actual = tiny.answer(enable(model, fuse_rope=fuse_rope), **inputs, use_cache=False)
        torch.testing.assert_close(actual, expected, rtol=0, atol=1e-5)
        assert routes.packed == routes.kernel


@pytest.mark.parametrize("name", ["Afmoe", "Electra", "Ernie", "GptOss", "OPT", "Xmod"])
def test_models_whose_masks_ignore_positions(name):
    """The advice of the error works. Xmod counts positions from 1."""
    model = tiny.smallest(name)
    batch, expected = model_check.packed_batch(model)
    inputs = {"input_ids": batch["input_ids"], "use_cache": False}
    positions = batch["position_ids"]
    advice = r"use_cache=False .* If this model does not, pass cu_seq_lens_\* and max_length_\* as"
    with pytest.raises(ValueError, match=advice):
        tiny.answer(enable(model), **inputs, position_ids=positions)
    positions = positions + (name == "Xmod")
    actual = tiny.answer(model, **inputs, position_ids=positions, **bounds(0, 17, 18, 31))
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-5)


def test_bounds_with_a_mask_of_chunks_are_refused():
    """A descriptor cannot represent chunks inside of sequences. The error says what to do."""
    mask = metal_attention_mask(**call_for(CHUNKS, positions_of([(17, 1, 13)])))
    with pytest.raises(NotImplementedError, match="pass position_ids and use_cache=False"):
        attend(mask, **bounds(0, 17, 18, 31))


class Waits(TorchDispatchMode):
    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **kwargs or {})


# position_ids, bounds and seq_idx from TRL 1.16's collator for sequences of 3, 1 and 2 tokens,
# for values of its pad_to_multiple_of. unsloth adds packed_seq_lengths.
IDS = (5, 9, 2, 7, 4, 4)
BATCHES = {
    None: ([0, 1, 2, 0, 0, 1], [0, 3, 4, 6], [0, 0, 0, 1, 2, 2]),
    8: ([0, 1, 2, 0, 0, 1, 0, 0], [0, 3, 4, 6, 7, 8], [0, 0, 0, 1, 2, 2, 3, 4]),
}


@pytest.fixture(scope="module")
def expected():
    model = enable(tiny.build("Llama"))
    parts = torch.tensor([IDS]).split((3, 1, 2), 1)
    return torch.cat([tiny.answer(model, input_ids=part) for part in parts], 1)


class TestBatchesOfTrainers:
    """`seq_idx` and other descriptions of sequences, next to the bounds that separate them."""

    def batch(self, multiple=None):
        positions, ends, numbers = BATCHES[multiple]
        rows = {
            "input_ids": torch.tensor([[*IDS, *[0] * (len(positions) - 6)]]),
            "position_ids": torch.tensor([positions]),
            "seq_idx": torch.tensor([numbers], dtype=torch.int32),
        }
        return rows | bounds(*ends)

    def answer(self, batch, **options):
        return tiny.answer(enable(tiny.build("Llama")), **batch, **options)

    @pytest.mark.parametrize("use_cache", [False, True])
    @pytest.mark.parametrize("multiple", BATCHES)
    def test_batches_are_accepted(self, multiple, use_cache, expected):
        facts = {
            "packed_seq_lengths": torch.tensor([3, 1, 2], dtype=torch.int32),
            "num_items_in_batch": torch.tensor(3),
            "shift_labels": torch.zeros(1, 6),
            "token_type_ids": torch.zeros(1, 6),
        }
        actual = self.answer(self.batch(multiple) | facts, use_cache=use_cache)
        torch.testing.assert_close(actual[:, :6], expected, rtol=0, atol=1e-5)

    def test_dense_masks_keep_sequences_apart(self):
        mask = metal_attention_mask(**call_for(CHUNKS, positions_of([(5, 11)])))
        for one in (mask, torch.zeros(mask.shape).masked_fill(~mask, -torch.inf)):
            for end, apart in ((5, True), (4, False)):
                ends = torch.tensor([0, end, 16])
                assert packing.separates("cu_seqlens", ends, (1, 16), None, one) == apart

    @pytest.mark.parametrize(
        ("kept", "changed", "error"),
        [
            (BOUNDS + POSITIONS, {"seq_idx": [[0, 0, 1, 1, 2, 2]]}, "cu_seq_lens_* disagree about"),
            (BOUNDS, {"packed_seq_lengths": [2, 2, 2]}, "cu_seq_lens_* disagree about where"),
            (BOUNDS, {"cu_seqlens": [0, 6]}, "cu_seq_lens_* disagree about where"),
            (POSITIONS, {"seq_idx": [[0, 0, 1, 1, 2, 2]]}, "position_ids disagree about where"),
            ((), {"seq_idx": [[0, 0, 0, 1, 2, 2]]}, "No attention of transformers reads seq_idx"),
            ((), {"packed_seq_lengths": [3, 1, 2]}, "Pass cu_seq_lens_* and max_length_* as well"),
            (BOUNDS, {"seq_idx": [[0.5] * 6]}, "it must be a tensor of integers of shape (1, 6)"),
            (BOUNDS, {"seq_idx": [[0] * 7]}, "it must be a tensor of integers of shape (1, 6)"),
        ],
    )
    def test_contradictory_sequences_are_refused(self, kept, changed, error):
        batch = {name: one for name, one in self.batch().items() if name in (*kept, "input_ids")}
        batch |= {name: torch.tensor(one) for name, one in changed.items()}
        with pytest.raises(ValueError, match=re.escape(error)) as raised:
            self.answer(batch, use_cache=False)
        assert "set_attn_implementation" not in str(raised.value)

    def test_a_mask_must_separate_the_sequences_of_every_row(self):
        """The mask separates the sequences of one row, but not those of the other."""
        q, k, v = normal(3, 2, 2, 6, 8)
        mask = torch.block_diag(torch.ones(3, 3), torch.ones(3, 3)).bool()
        for second, apart in ((3, True), (2, False)):
            numbers = torch.tensor([[0] * 3 + [1] * 3, [0] * second + [1] * (6 - second)])
            with nullcontext() if apart else pytest.raises(ValueError, match="no bounds and no "):
                metal_attention(torch.nn.Module(), q, k, v, mask[None, None], seq_idx=numbers)

    def test_one_sequence_per_row_is_accepted(self):
        ids = torch.tensor([IDS] * 2)
        numbers = torch.tensor([[0] * 6, [1] * 6])
        expected = self.answer({"input_ids": ids})
        assert torch.equal(self.answer({"input_ids": ids, "seq_idx": numbers}), expected)

    def test_only_the_first_layer_synchronises(self):
        q, k, v = normal(3, 1, 2, 6, 8)
        for mode in (torch.inference_mode, nullcontext):
            with mode():
                batch = self.batch()
            del batch["input_ids"]
            metal_attention(torch.nn.Module(), q, k, v, None, **batch)
            with Waits() as waits:
                metal_attention(torch.nn.Module(), q, k, v, None, **batch)
            assert waits.count == 0
        assert pickle.loads(pickle.dumps(batch)).keys() == batch.keys()
        batch["seq_idx"][0, 0] = 5
        with pytest.raises(ValueError, match="disagree about where sequences begin"):
            metal_attention(torch.nn.Module(), q, k, v, None, **batch)

    def test_compiled_graphs_trust_bounds(self, expected):
        model = enable(tiny.build("Llama"))
        model.compile(fullgraph=True, backend="eager")
        batch = self.batch()
        actual = tiny.answer(model, **batch, use_cache=True)
        torch.testing.assert_close(actual, expected, rtol=0, atol=1e-5)
        batch = {name: batch[name] for name in ("input_ids", "seq_idx")}
        with pytest.raises(Exception, match="that no bounds and no mask separate"):
            tiny.answer(model, **batch, use_cache=True)

    @pytest.mark.parametrize(
        ("changed", "advice"),
        [
            ({"tree_kv_index": torch.arange(6)}, "metal_attn does not know tree_kv_index. If"),
            (
                {"output_attentions": True},
                "use model.*, and pass packed sequences as a padded batch",
            ),
        ],
    )
    def test_advice_for_packed_batches(self, changed, advice):
        with pytest.raises(NotImplementedError, match=advice):
            self.answer(self.batch() | changed)

    def test_every_keyword_of_transformers_is_handled(self):
        q = torch.randn(1, 1, 4, 8)
        named = {*inspect.signature(metal_attention).parameters, *packing.SEQUENCES, *BOUNDS}
        for name in TransformersKwargs.__annotations__.keys() - named - {"output_attentions"}:
            metal_attention(torch.nn.Module(), q, q, q, None, **{name: torch.zeros(1, 4)})


class TestPositionsWithCache:
    PACKED = positions_of([LENGTHS])

    def forward(self, name="Llama", *, batch=1, **inputs):
        inputs = {"input_ids": tiny.tokens(31, batch=batch), "use_cache": True} | inputs
        return tiny.answer(enable(tiny.build(name)), **inputs)

    @pytest.mark.parametrize(
        "name, rows, static",
        [
            *((name, [LENGTHS], False) for name in ("Llama", "Mistral", "Gemma4")),
            *(("Llama", rows, False) for rows in ([(30, 1)], [(2, 29)], [(31,), (17, 14)])),
            ("Llama", [LENGTHS], True),
        ],
    )
    def test_restarting_positions_are_refused(self, name, rows, static):
        inputs = {"position_ids": positions_of(rows), "batch": len(rows)}
        if static:
            config = tiny.build(name).config
            inputs["past_key_values"] = transformers.StaticCache(config=config, max_cache_len=40)
        with pytest.raises(ValueError, match=r"position_ids in \w+ restart at 0.* use_cache=False"):
            self.forward(name, **inputs)

    def test_positions_that_do_not_restart_are_accepted(self):
        count = torch.arange(31)
        for positions in (
            *(count, count + 5, 0 * count, (count - 7).clamp(min=0)),
            *(torch.where(count < 7, 1, count - 7), torch.cat([count[:9], count[4:26]])),
        ):
            inputs = {"input_ids": tiny.tokens(31, batch=1), "position_ids": positions[None]}
            assert model_check.compare("Llama", inputs=inputs)[0] <= model_check.TOLERANCE

    @pytest.mark.parametrize("shape", [(2, 31), (1, 1, 31, 31)])
    def test_explicit_masks_are_accepted(self, shape):
        mask = torch.ones(shape, dtype=torch.bool).tril() if len(shape) > 2 else torch.ones(shape)
        self.forward(position_ids=self.PACKED, attention_mask=mask, batch=len(mask))

    def test_restarting_positions_after_a_cache_are_accepted(self):
        model, ids = enable(tiny.build("Mistral")), tiny.tokens(31, batch=1)
        cache = transformers.DynamicCache(config=model.config)
        tiny.answer(model, input_ids=ids, past_key_values=cache)
        tiny.answer(model, input_ids=ids, position_ids=self.PACKED, past_key_values=cache)

    def test_only_causal_masks_check_positions(self):
        bands = [BANDS[name](5) for name in ("causal", "sliding", "both sides")]
        for function, refused in zip([CHUNKS, *bands], [True, True, True, False], strict=True):
            mask = metal_attention_mask(1, 31, 31, 0, 0, function)
            assert packing.positions_restart(mask, self.PACKED) == refused
            assert not packing.positions_restart(mask, torch.arange(31)[None])

    def test_positions_on_several_axes_are_not_checked(self):
        q, k, v = torch.randn(3, 1, 2, 31, 8)
        mask = packing.mark_unseparated(band.causal(1, 31, "cpu"))
        several = self.PACKED.expand(3, 1, -1)
        metal_attention(torch.nn.Module(), q, k, v, mask, position_ids=several)
        with pytest.raises(ValueError, match="restart at 0"):
            metal_attention(torch.nn.Module(), q, k, v, mask, position_ids=several[0])

    def test_one_synchronisation_for_all_layers(self):
        """There is none with an attention mask, as in `generate`."""
        model, ids = enable(tiny.build("Llama")), tiny.tokens(31, batch=1)
        assert model.config.num_hidden_layers > 1
        with Waits() as waits:
            tiny.answer(model, input_ids=ids, use_cache=True)
        assert waits.count == 1
        mask = metal_attention_mask(1, 31, 31, attention_mask=torch.ones(1, 31, dtype=torch.bool))
        q, k, v = torch.randn(3, 1, 2, 31, 8)
        with Waits() as waits:
            metal_attention(torch.nn.Module(), q, k, v, mask, position_ids=torch.arange(31)[None])
        assert waits.count == 0

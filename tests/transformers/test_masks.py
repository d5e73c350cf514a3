"""The mask function and the descriptor: exactly transformers' dense masks, in less memory."""

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

transformers = pytest.importorskip("transformers")

from transformers import masking_utils  # noqa: E402

from tests.helpers.cases import each_case  # noqa: E402
from tests.transformers import tiny_models as tiny  # noqa: E402
from tests.transformers.tiny_inputs import padding  # noqa: E402
from torch_metal_attn.integrations.transformers import (  # noqa: E402
    attention,
    band,
    enable,
    masks,
    metal_attention,
    metal_attention_mask,
)
from torch_metal_attn.wording import count_text  # noqa: E402

WINDOW = masking_utils.sliding_window_causal_mask_function(16)
HOLES = torch.arange(16) != torch.tensor([[5], [16]])
PADDED = torch.arange(16) >= torch.tensor([[0], [3]])


def expanded(mask, batch, q_length, kv_length):
    """A mask of any form as bool (B, 1, Sq, Sk)."""
    whole = torch.ones(batch, 1, q_length, kv_length, dtype=torch.bool)
    if mask is None:
        return whole
    if band.is_causal(mask):
        assert mask.shape == (batch, 1, q_length, 0)
        return whole.tril()
    if mask.dtype == torch.int32:
        assert band.is_descriptor(mask, kv_length)
        return band.expand(mask, q_length, kv_length)
    return mask


@st.composite
def forwards(draw):
    """A call of the mask function as a dynamic, static, sliding or chunked cache makes it."""
    batch, q_length = draw(st.integers(1, 3)), draw(st.integers(1, 20))
    seen = draw(st.sampled_from([0, 0, 1, 5, 9, 14, 21]))
    pattern = draw(st.sampled_from(["causal", "full", "sliding", "both sides", "chunked"]))
    size = draw(st.integers(1, 24))
    # A sliding cache keeps size - 1 tokens. The mask must be right for any number.
    kept = draw(st.sampled_from([seen, min(seen, size - 1), draw(st.integers(0, seen))]))
    empty = draw(st.sampled_from([0, 0, 3, 40]))
    total = seen + q_length
    attention_mask = None
    if draw(st.booleans()):
        length = total + draw(st.sampled_from([0, empty]))
        attention_mask = torch.ones(batch, length, dtype=torch.bool)
        for row in attention_mask:
            row[: draw(st.integers(0, total))] = draw(st.booleans())
            row[total - draw(st.integers(0, total)) :] = draw(st.booleans())
            row[draw(st.integers(0, total - 1))] &= draw(st.sampled_from([True, True, True, False]))
        attention_mask[:, total:] = draw(st.booleans())
    start = torch.zeros(batch, dtype=torch.int64)
    if attention_mask is not None:
        start = (attention_mask.cumsum(-1) == 0).sum(-1)
    function = {
        "causal": masking_utils.causal_mask_function,
        "full": masking_utils.bidirectional_mask_function,
        "sliding": masking_utils.sliding_window_causal_mask_function(size),
        "both sides": masking_utils.sliding_window_bidirectional_mask_function(size),
        "chunked": masking_utils.chunked_causal_mask_function(size, start),
    }[pattern]
    causal = pattern in ("causal", "sliding", "chunked")
    return {
        "batch_size": batch,
        "q_length": q_length,
        "kv_length": kept + q_length + empty,
        "q_offset": torch.tensor([seen]) if draw(st.booleans()) else seen,
        "kv_offset": seen - kept,
        "mask_function": function,
        "attention_mask": attention_mask,
        "allow_is_causal_skip": causal,
        "allow_is_bidirectional_skip": not causal,
        "device": "cpu",
    }


def dense(call):
    return masking_utils.sdpa_mask(
        **call | {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
    )


def check_attention(mask, whole, batch, q_length, kv_length):
    """The mask, its copy without the attribute, and the mask next to a bias act as dense masks."""
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(batch, 2, q_length, 8, generator=generator)
    k, v = torch.randn(2, batch, 1, kv_length, 8, generator=generator)

    def attend(mask, **options):
        return metal_attention(torch.nn.Module(), q, k, v, mask, **options)[0]

    actual = attend(mask)
    torch.testing.assert_close(actual, attend(whole))
    if mask is not None:
        assert torch.equal(attend(mask.clone()), actual), "without the attribute"
    bias = torch.randn(1, 2, q_length, kv_length, generator=generator)
    biased = attend(whole, position_bias=bias)
    torch.testing.assert_close(attend(mask, position_bias=bias), biased)


def attend(q, k, mask):
    return metal_attention(torch.nn.Module(), q, k, k, mask)[0]


class TestMaskFunction:
    @settings(max_examples=120)
    @given(forwards())
    def test_equals_transformers(self, call):
        sizes = [call[name] for name in ("batch_size", "q_length", "kv_length")]
        mask = metal_attention_mask(**call)
        assert torch.equal(expanded(mask, *sizes), dense(call))
        check_attention(mask, dense(call), *sizes)

    def mask(self, **changes):
        options = {"batch_size": 2, "q_length": 1, "kv_length": 16, "device": "cpu"}
        return metal_attention_mask(**options | changes)

    def test_masks_without_descriptors(self):
        everywhere = {"attention_mask": torch.ones(2, 16, dtype=torch.bool)}
        chunks = masking_utils.chunked_causal_mask_function(16, torch.zeros(2, dtype=torch.int64))
        static = {"attention_mask": everywhere["attention_mask"][:, :4], "q_length": 4}
        for changes in ({}, everywhere, {"mask_function": WINDOW}, {"mask_function": chunks}):
            assert band.is_causal(self.mask(**{"q_length": 16} | changes))
        for changes in ({"q_length": 4}, static):  # a static cache's prefill, top-left
            assert band.is_causal(self.mask(**changes))
        both = {
            "mask_function": masking_utils.bidirectional_mask_function,
            "allow_is_bidirectional_skip": True,
        }
        assert self.mask(q_length=16, **both) is None
        for offset in (15, torch.tensor([15])):  # a dynamic cache's decoding
            assert self.mask(q_offset=offset) is None

    @pytest.mark.parametrize("pattern", [masking_utils.causal_mask_function, WINDOW])
    def test_each_step_of_a_static_cache_has_one_form(self, pattern):
        for padded in ({}, {"attention_mask": PADDED}):
            call = padded | {"mask_function": pattern, "allow_is_causal_skip": False}
            shapes = {self.mask(q_offset=at, **call).shape for at in (5, 14, 15)}
            assert shapes == {(2, 1, 1, 8)}

    def test_compiled_causal_masks_equal_dense_masks(self):
        @torch.compile(fullgraph=True, backend="eager")
        def compiled(q, offset):
            return attend(q, k, metal_attention_mask(1, q.shape[2], 9, offset))

        k = torch.randn(1, 2, 9, 8)
        for q, offset in ((k, 0), (k[:, :, :1], 3)):
            seen = (torch.arange(9) <= torch.arange(q.shape[2])[:, None] + offset)[None, None]
            torch.testing.assert_close(compiled(q, offset), attend(q, k, seen))

    def test_additive_masks(self, monkeypatch):
        """Models that add masks to their scores or concatenate them get eager's masks."""
        monkeypatch.setattr(masks, "additive_masks", set())
        config = transformers.SplinterConfig()
        call = {"q_length": 16, "attention_mask": HOLES, "config": config, "dtype": torch.float16}
        assert self.mask(**call).dtype == torch.bool
        monkeypatch.setattr(masks, "additive_masks", {"splinter"})
        mask = self.mask(**call)
        assert torch.equal(
            mask, masking_utils.eager_mask(2, 16, 16, attention_mask=HOLES, dtype=torch.float16)
        )
        # A model that needs dense masks gets None where eager attention gets None.
        monkeypatch.setattr(masks, "DENSE_MODELS", {"splinter"})
        full = {"mask_function": masking_utils.bidirectional_mask_function, "attention_mask": None}
        assert self.mask(**call | full, allow_is_bidirectional_skip=True) is None
        causal = self.mask(**call | {"attention_mask": None})
        assert torch.equal(causal, masking_utils.eager_mask(2, 16, 16, dtype=torch.float16))

    def test_descriptor_has_a_row_per_sequence(self):
        window = masking_utils.sliding_window_causal_mask_function(6)
        mask = self.mask(q_length=16, mask_function=window, attention_mask=PADDED)
        assert mask.dtype == torch.int32
        rows = [[0, 16, 16, 0, 16, 5, 0, 0], [0, 16, 16, 3, 16, 5, 0, 0]]
        assert mask.tolist() == [[[row]] * 16 for row in rows]
        assert mask.stride() == (8, 0, 8, 1), "the queries share their memory"
        assert str(band.unpack(mask)) == "causal window -5+0 padded"

    def test_masks_that_are_not_bands_are_dense(self):
        blocks = masking_utils.blockwise_overlay(torch.zeros(2, 16, dtype=torch.int64))
        # These chunks do not begin where the padding ends.
        chunks = masking_utils.chunked_causal_mask_function(5, torch.tensor([0, 2]))

        def other(batch_idx, head_idx, q_idx, kv_idx):
            return kv_idx != q_idx - 1

        for case in (
            {"attention_mask": HOLES},
            {"mask_function": chunks},
            {"mask_function": masking_utils.or_masks(masking_utils.causal_mask_function, blocks)},
            {"mask_function": masking_utils.and_masks(masking_utils.causal_mask_function, other)},
            {"allow_is_causal_skip": False},
            {"use_vmap": True},
            {"config": transformers.Gemma2Config(model_type="doge")},
            {"mask_function": masking_utils.sliding_window_causal_mask_function(0)},
        ):
            call = {"batch_size": 2, "q_length": 16, "kv_length": 16, "device": "cpu"}
            call |= {"mask_function": masking_utils.causal_mask_function} | case
            mask = metal_attention_mask(**call)
            call.pop("config", None)
            assert mask.dtype == torch.bool
            assert torch.equal(mask, dense(call))

    @pytest.mark.parametrize("kept, q_offset", [(12, 33), (13, 33), (14, 33), (17, 37), (18, 37)])
    def test_masks_of_caches_that_begin_inside_a_chunk(self, kept, q_offset):
        sizes = {"batch_size": 2, "q_length": 9, "kv_length": kept + 9, "q_offset": q_offset}
        call = sizes | {
            "kv_offset": q_offset - kept,
            "mask_function": masking_utils.chunked_causal_mask_function(19, torch.tensor([0, 4])),
            "attention_mask": torch.arange(q_offset + 9) >= torch.tensor([[0], [4]]),
            "device": "cpu",
        }
        mask = metal_attention_mask(**call)
        assert (mask.dtype == torch.int32) == (kept >= q_offset - 19)
        assert torch.equal(expanded(mask, 2, 9, kept + 9), dense(call))


class TestHiddenValues:
    """Masks whose values the host cannot read: on meta, fake, and inside of torch.func."""

    @pytest.mark.parametrize("name", ["Llama", "Llama4"])
    def test_forwards_without_values_have_the_right_shapes(self, name):
        model, inputs = enable(tiny.build(name)), tiny.inputs(name, "left")
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            ids = mode.from_tensor(inputs["input_ids"])
            assert model(input_ids=ids, use_cache=False).logits.shape[:2] == ids.shape
        model.to("meta")
        inputs = {name: value.to("meta") for name, value in inputs.items()}
        ids = inputs["input_ids"]
        for prompt in (inputs, {"input_ids": ids}):
            cache = transformers.StaticCache(config=model.config, max_cache_len=40)
            for part in (prompt, {"input_ids": ids[:, :1]}):
                shape = model(**part, past_key_values=cache).logits.shape
                assert shape[:2] == part["input_ids"].shape

    def test_gradients_of_each_sample_equal_eager(self):
        model, inputs = enable(tiny.build("Llama")), tiny.inputs("Llama", "right")
        weights = {name: weight.detach() for name, weight in model.named_parameters()}

        def loss(weights, ids, mask):
            arguments = {"input_ids": ids[None], "attention_mask": mask[None], "use_cache": False}
            answer = torch.func.functional_call(model, weights, (), arguments).logits[0]
            return (answer.square().sum(-1) * mask).sum()

        gradient, (ids, mask) = torch.func.grad(loss), inputs.values()
        actual = torch.func.vmap(gradient, in_dims=(None, 0, 0))(weights, ids, mask)
        model.set_attn_implementation("eager")
        for row in range(2):
            expected = gradient(weights, ids[row], mask[row])
            for name, one in expected.items():
                scale = 1e-4 * one.abs().max()
                torch.testing.assert_close(actual[name][row], one, rtol=1e-4, atol=scale)


class NoMask(TorchDispatchMode):
    """Fails on every result of at least `size` elements, and counts calls of flash_fwd."""

    def __init__(self, size):
        super().__init__()
        self.size, self.calls = size, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self.calls += func is torch.ops.metal_attn.flash_fwd.default
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                assert leaf.numel() < self.size, f"{func} made {tuple(leaf.shape)}"
        return result


class TestNoMaskIsAllocated:
    LENGTH = 400  # its square exceeds the elements of every tensor in a tiny model

    def forward(self, name, side):
        model = enable(tiny.build(name, max_position_embeddings=512))
        ids = tiny.tokens(self.LENGTH, batch=1)
        mask = padding(side, self.LENGTH)[1:]
        with NoMask(self.LENGTH**2) as mode:
            tiny.answer(model, input_ids=ids, attention_mask=mask)
        assert mode.calls == model.config.num_hidden_layers

    @pytest.mark.parametrize(
        "name", ["Llama", "Mistral", "Gemma2", "gpt-oss", "Llama4", "BERT", "ModernBERT"]
    )
    def test_prefill(self, name):
        for side in ("none", "left"):
            self.forward(name, side)

    def test_a_dense_mask_is_noticed(self, monkeypatch):
        monkeypatch.setattr(masks, "_recognise", lambda function: None)
        with pytest.raises(AssertionError, match=r"made \(1, 1, 400, 400\)"):
            self.forward("Mistral", "none")


class TestDescriptor:
    def descriptor(self):
        return metal_attention_mask(2, 16, 16, attention_mask=PADDED, device="cpu")

    @settings(max_examples=300)
    @given(
        position=st.integers(-3, 19),
        ends=st.tuples(st.integers(0, 16), st.integers(0, 16)).map(sorted),
        left=st.integers(-1, 9),
        right=st.integers(-1, 9),
        chunk=st.integers(0, 9),
    )
    @example(position=-3, ends=[0, 16], left=-1, right=0, chunk=0)
    def test_lengths_of_one_query(self, position, ends, left, right, chunk):
        start, end = (torch.tensor([length], dtype=torch.int32) for length in ends)
        mask = band.pack(band.Band(position, 1, 16, left, right, chunk, start, end), 1, "cpu")
        lengths = band.lengths(mask)
        first, last = lengths["leftpad_k"], lengths["seqused_k"]
        assert 0 <= first <= last <= 16
        keys = torch.arange(16)
        assert torch.equal((first <= keys) & (keys < last), band.expand(mask, 1, 16).flatten())

    def test_layers_do_not_synchronise(self, monkeypatch):
        q, mask = torch.randn(2, 1, 16, 8), self.descriptor()
        copied, read = mask.clone(), []
        monkeypatch.setattr(attention, "_flash", lambda q, k, v, **options: q)
        tolist = torch.Tensor.tolist

        def recorded(tensor):
            read.append(tensor.shape)
            return tolist(tensor)

        for name in ("tolist", "item", "__bool__", "__int__", "__index__", "cpu", "numpy"):
            monkeypatch.setattr(torch.Tensor, name, recorded)
        attend(q, q, mask)
        assert read == []
        attend(q, q, copied)
        assert read == [(2, 8)]

    def test_one_synchronisation_for_each_mask(self, monkeypatch):
        fetched, on_host = [], masks._on_host
        monkeypatch.setattr(masks, "_on_host", lambda *v: fetched.append(v) or on_host(*v))
        self.descriptor()
        assert len(fetched) == 1

    @pytest.mark.parametrize("made_for", [1, 16, 20])
    def test_masks_for_other_numbers_of_queries_are_refused(self, made_for):
        ends = torch.tensor([30, 32], dtype=torch.int32)
        mask = band.pack(band.Band(4, made_for, 32, window_size_right=0), 2, "cpu")
        every = band.pack(band.Band(0, made_for, 32, seqused_k=ends), 2, "cpu")
        k, compiled = torch.randn(2, 1, 32, 8), torch.compile(attend, backend="eager")
        for queries in (1, 16, 20):
            q = torch.randn(2, 1, queries, 8)
            torch.testing.assert_close(compiled(q, k, every), attend(q, k, every))
            if queries != made_for:
                has = f"has {count_text(queries, 'query')} and 32 keys"
                words = f"{has}, but its mask is for {made_for} "
                for function in (attend, compiled):
                    with pytest.raises(NotImplementedError, match=words):
                        function(q, k, mask)

    def test_changed_descriptors_raise(self):
        """A model that slices its mask would get wrong results."""
        q, mask = torch.randn(2, 1, 16, 8), self.descriptor()
        diagonal = metal_attention_mask(2, 16, 16)
        attend(q, q, diagonal[..., :3])
        one, eight = q[:, :, :1], q[:, :, :8]
        changed = [mask[..., :4], torch.cat([mask, mask], 1), mask.float(), mask.bool()]
        changed += [diagonal.float(), diagonal.bool(), diagonal == 0]
        for queries, keys, other, words in (
            (one, q, mask, "its mask is for 16 queries and 16 keys"),
            (q, q[:, :, :12], mask, "its mask is for 16 queries and 16 keys"),
            (one, q, diagonal[:, :, -1:], "its mask is for"),
            (q, q, diagonal[:, :, :7], "its mask is for"),
            *((q, q, other, "mask") for other in changed),
            # A mask of eight keys may have the shape of a descriptor.
            (one, eight, torch.ones(2, 1, 1, 8).int(), "must be bool or floating"),
            (one, q, torch.ones(2, 1, 1, 16).int(), "must be bool or floating"),
            (one, q, torch.ones(2, 1, 1, 16).long(), "must be bool or floating"),
            (one, q, torch.arange(16).int().view(2, 1, 1, 8), "pass a bool mask"),
            (eight, eight, torch.ones(2, 1, 8, 8).int(), "pass a bool mask"),
        ):
            with pytest.raises((NotImplementedError, ValueError), match=words):
                attend(queries, keys, other)

    def test_compiled_graph_accepts_descriptors(self):
        ends = {"leftpad_k": torch.tensor([0, 3]).int(), "seqused_k": torch.tensor([30, 32]).int()}
        causal = {"q_offset": 12, "window_size_right": 0}
        limits = {
            "causal after a cache": causal,
            "a padded prefix": {"q_offset": 0, **ends},
            "window on both sides": {"q_offset": 6, "window_size_left": 3, "window_size_right": 5},
            "chunks after a cache": causal | {"attention_chunk": 7},
            "all of it": causal | ends | {"window_size_left": 6, "attention_chunk": 9},
        }
        k, q = torch.randn(2, 1, 32, 8), torch.randn(2, 2, 20, 8)
        compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
        for name, limit in limits.items():
            mask = band.pack(band.Band(q_length=20, kv_length=32, **limit), 2, "cpu")
            torch.testing.assert_close(compiled(q, k, mask), attend(q, k, mask), msg=name)


@each_case(
    "changes, message",
    [
        ({"batch_size": None}, "batch_size is None; it must be an int"),
        ({"batch_size": 3, "attention_mask": HOLES}, "2 rows; it must have bat"),
        ({"q_length": "a"}, "q_length is 'a'; it must be an int"),
        ({"kv_length": -1}, "kv_length is -1; it must be at least 0"),
        ({"q_offset": torch.ones(2)}, r"q_offset has shape \(2,\) and dtype torch.float32"),
        ({"kv_offset": float("nan")}, "kv_offset is nan; it must be an int"),
        ({"mask_function": "a"}, "mask_function is 'a'; it must be a function"),
        ({"attention_mask": True}, "attention_mask is a bool; it must be a tensor"),
    ],
)
def test_wrong_arguments_are_refused(changes, message):
    with pytest.raises((TypeError, ValueError), match=message):
        metal_attention_mask(**{"batch_size": 2, "q_length": 4, "kv_length": 16} | changes)

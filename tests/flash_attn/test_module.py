"""flash-attn's import paths: signatures, padding, and the module name `flash_attn`."""

import importlib
import inspect
import operator
import sys
import types

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import torch_metal_attn
import torch_metal_attn.flash_attn as ours
from tests.helpers.cases import each_case
from tests.helpers.forks import run_alone
from torch_metal_attn import install_flash_attn
from torch_metal_attn.flash_attn import bert_padding
from torch_metal_attn.flash_attn.layers import rotary
from torch_metal_attn.testing.judge import normal

# The parameters of flash-attn 2.8.4, read from its release. We may add keyword-only ones.
TAIL = (
    "dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, "
    "alibi_slopes=None, deterministic=False, return_attn_probs=False"
)
PACKING = "cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k"
ATTENTION = {
    "flash_attn_func": f"q, k, v, {TAIL}",
    "flash_attn_kvpacked_func": f"q, kv, {TAIL}",
    "flash_attn_qkvpacked_func": f"qkv, {TAIL}",
    "flash_attn_varlen_func": f"q, k, v, {PACKING}, {TAIL}, block_table=None",
    "flash_attn_varlen_kvpacked_func": f"q, kv, {PACKING}, {TAIL}",
    "flash_attn_varlen_qkvpacked_func": f"qkv, cu_seqlens, max_seqlen, {TAIL}",
    "flash_attn_with_kvcache": (
        "q, k_cache, v_cache, k=None, v=None, rotary_cos=None, rotary_sin=None, "
        "cache_seqlens=None, cache_batch_idx=None, cache_leftpad=None, block_table=None, "
        "softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, "
        "rotary_interleaved=True, alibi_slopes=None, num_splits=0, return_softmax_lse=False"
    ),
}
WINDOW = "window_size_left, window_size_right"
SCORES = f"dropout_p, softmax_scale, causal, {WINDOW}, softcap, alibi_slopes"
BACKWARD = "dout, q, k, v, out, softmax_lse, dq, dk, dv"
DEFAULTS = (
    "dropout_p, softmax_scale, causal, window_size_left=-1, window_size_right=-1, softcap=0.0, "
    "alibi_slopes=None, return_softmax=False, block_table=None, leftpad_k=None, seqused_k=None, "
    "zero_tensors=False, num_splits=0"
)
PRIVATE = {
    "_get_block_size_n": "device, head_dim, is_dropout, is_causal",
    "_flash_attn_forward": f"q, k, v, {SCORES}, return_softmax",
    "_flash_attn_varlen_forward": f"q, k, v, {PACKING}, {DEFAULTS}",
    "_flash_attn_backward": f"{BACKWARD}, {SCORES}, deterministic, rng_state=None",
    "_flash_attn_varlen_backward": (
        f"{BACKWARD}, {PACKING}, {SCORES}, deterministic, rng_state=None, zero_tensors=False"
    ),
}
CONCATENATED = "unpad_input_for_concatenated_sequences"
SIGNATURES = {
    **ATTENTION,
    **{f"flash_attn_interface.{name}": names for name, names in PRIVATE.items()},
    "bert_padding.index_first_axis": "input, indices",
    "bert_padding.index_put_first_axis": "values, indices, first_axis_dim",
    "bert_padding.pad_input": "hidden_states, indices, batch, seqlen",
    "bert_padding.unpad_input": "hidden_states, attention_mask, unused_mask=None",
    f"bert_padding.{CONCATENATED}": "hidden_states, attention_mask_in_length",
    "layers.rotary.RotaryEmbedding": (
        "dim, base=10000.0, interleaved=False, scale_base=None, device=None"
    ),
    "layers.rotary.RotaryEmbedding.forward": (
        "self, qkv, kv=None, seqlen_offset=0, max_seqlen=None, num_heads_q=None"
    ),
    "layers.rotary.apply_rotary_emb": (
        "x, cos, sin, interleaved=False, inplace=False, seqlen_offsets=0, cu_seqlens=None, "
        "max_seqlen=None"
    ),
    "layers.rotary.apply_rotary_emb_kv_": "kv, cos, sin, interleaved=False, seqlen_offsets=0",
    "layers.rotary.apply_rotary_emb_qkv_": (
        "qkv, cos, sin, cos_k=None, sin_k=None, interleaved=False, seqlen_offsets=0, "
        "num_heads_q=None"
    ),
}
SUBMODULES = ["bert_padding", "flash_attn_interface", "layers", "layers.rotary"]


@pytest.mark.parametrize("path", SIGNATURES)
def test_signatures_are_flash_attns(path):
    function = operator.attrgetter(path)(ours)
    positional = [
        p.name if p.default is p.empty else f"{p.name}={p.default!r}"
        for p in inspect.signature(function).parameters.values()
        if p.kind is p.POSITIONAL_OR_KEYWORD
    ]
    assert ", ".join(positional) == SIGNATURES[path]


def test_functions_are_the_librarys():
    for name in ATTENTION:
        function = getattr(torch_metal_attn, name)
        for module in (ours, ours.flash_attn_interface):
            assert getattr(module, name) is function
    assert rotary.apply_rotary_emb_func is rotary.apply_rotary_emb


HIDDEN, MASK = normal(2, 3, 4), torch.ones(2, 3)
INVALID_CALLS = [
    ("unpad_input", (HIDDEN, None), "^attention_mask is None; it must be a tensor"),
    ("unpad_input", (HIDDEN, MASK.T), r"^attention_mask has shape \(3, 2\); it must be \(2, 3\)"),
    ("unpad_input", (HIDDEN[0, 0], MASK), r"^hidden_states has shape \(4,\); .*\(B, L, \.\.\.\)"),
    ("unpad_input", (HIDDEN, MASK.to("meta")), "^attention_mask is on meta, where"),
    ("unpad_input", (HIDDEN.to("meta"), MASK), "^attention_mask is on cpu and hidden_states on m"),
    ("pad_input", (HIDDEN[0], torch.tensor([0]), 1, 3), "^indices has 1 number and hidden_states"),
    ("pad_input", (HIDDEN[0], torch.arange(3), -1, 3), "^batch is -1; it must be at least 0"),
    ("pad_input", (HIDDEN[0], torch.arange(3), 2**62, 3), r"^batch \* seqlen is .*; it must fit"),
    ("pad_input", (HIDDEN[0], torch.arange(3), 1, 2), r"^indices has 2; it must be in 0\.\.1, the"),
    ("index_put_first_axis", (HIDDEN, torch.tensor([0, 1]), None), "^first_axis_dim is None; it"),
    ("index_put_first_axis", (torch.tensor(1.0), torch.arange(1), 2), r"^values has shape \(\); "),
    *(
        ("index_first_axis", (HIDDEN, indices), f"^indices {message}")
        for indices, message in (
            (torch.tensor([0, 2]), r"has 2; it must be in 0\.\.1, the rows of input"),
            (torch.ones(2), "has dtype torch.float32; it must be int32 or int64"),
            (torch.tensor(1), r"has shape \(\); it must be \(n\)"),
            (torch.tensor([0]).to("meta"), "is on meta and input on cpu; .*one device"),
        )
    ),
    *(
        (CONCATENATED, (HIDDEN, lengths), f"^attention_mask_in_length {message}")
        for lengths, message in (
            (torch.ones(3, 2).long(), r"has shape \(3, 2\); it must be \(2, 3\)"),
            (torch.ones(2, 3), r"has dtype torch.float32; it must be integers"),
            (torch.tensor([[3, 1, 0], [1, 0, 0]]), ".*a row whose sum exceeds 3"),
            (torch.tensor([[2, -1, 0], [1, 0, 0]]), ".*has a negative length"),
        )
    ),
]


class TestPadding:
    @given(data=st.data(), batch=st.integers(0, 4), seqlen=st.integers(0, 9))
    def test_unpad_and_pad(self, data, batch, seqlen):
        """0 is padding, 1 a token, and 2 a token that is allocated but not used."""
        row = st.lists(st.integers(0, 2), min_size=seqlen, max_size=seqlen)
        kinds = data.draw(st.lists(row, min_size=batch, max_size=batch))
        trailing = data.draw(st.sampled_from([(), (3,), (2, 3)]))
        dtype = data.draw(st.sampled_from([torch.bool, torch.int64, torch.float32]))
        marked = torch.tensor(kinds, dtype=torch.int64).reshape(batch, seqlen)
        mask, unused = (marked == 1).to(dtype), (marked == 2).to(dtype)
        hidden = normal(batch, seqlen, *trailing)

        tokens = [(b, i) for b in range(batch) for i in range(seqlen) if kinds[b][i]]
        ends = [sum(b < end for b, _ in tokens) for end in range(batch + 1)]
        results = bert_padding.unpad_input(hidden, mask, unused)
        packed, indices, cu_seqlens, longest, seqused = results
        assert packed.shape == (len(tokens), *trailing)
        assert all(torch.equal(packed[t], hidden[where]) for t, where in enumerate(tokens))
        assert indices.tolist() == [b * seqlen + i for b, i in tokens]
        assert cu_seqlens.tolist() == ends
        assert type(longest) is int
        assert longest == max((len(kind) - kind.count(0) for kind in kinds), default=0)
        assert seqused.tolist() == [kind.count(1) for kind in kinds]
        assert cu_seqlens.dtype == seqused.dtype == torch.int32

        padded = bert_padding.pad_input(packed, indices, batch, seqlen)
        there = (marked != 0).reshape(batch, seqlen, *(1 for _ in trailing))
        assert torch.equal(padded, torch.where(there, hidden, 0.0))

    def test_gradients_of_padding(self):
        mask = torch.tensor([[1, 0, 1], [0, 1, 1]])

        def unpad_and_pad(hidden):
            packed, indices, *_ = bert_padding.unpad_input(hidden, mask)
            return bert_padding.pad_input(packed**2, indices, 2, 3)

        hidden = normal(2, 3, 2).double().requires_grad_()
        assert torch.autograd.gradcheck(unpad_and_pad, hidden)

    @given(data=st.data(), batch=st.integers(0, 3), seqlen=st.integers(1, 9))
    def test_several_sequences_per_row(self, data, batch, seqlen):
        lengths = torch.zeros(batch, seqlen, dtype=torch.int64)
        for row in lengths:
            parts = data.draw(st.lists(st.integers(1, seqlen), max_size=seqlen))
            while sum(parts) > seqlen:
                parts.pop()
            row[: len(parts)] = torch.tensor(parts)
        hidden = normal(batch, seqlen, 2)
        packed, indices, cu_seqlens, longest = getattr(bert_padding, CONCATENATED)(hidden, lengths)
        rows = [b * seqlen + i for b in range(batch) for i in range(int(lengths[b].sum()))]
        each = [length for row in lengths.tolist() for length in row if length]
        assert indices.tolist() == rows
        assert torch.equal(packed, hidden.flatten(0, 1)[rows])
        assert cu_seqlens.tolist() == [sum(each[:end]) for end in range(len(each) + 1)]
        assert cu_seqlens.dtype == torch.int32
        assert longest == max(each, default=0)

    @each_case("function, arguments, message", INVALID_CALLS)
    def test_invalid_calls_are_refused(self, function, arguments, message):
        with pytest.raises((TypeError, ValueError), match=message):
            getattr(bert_padding, function)(*arguments)


class TestInstall:
    def test_import_paths(self):
        with install_flash_attn():
            import flash_attn

            assert flash_attn is ours
            assert flash_attn.__version__.startswith("2.8.")
            for name in SUBMODULES:
                module = importlib.import_module(f"flash_attn.{name}")
                assert module is importlib.import_module(f"{ours.__name__}.{name}")
            assert importlib.util.find_spec("flash_attn") is not None
            with pytest.raises(ModuleNotFoundError, match=r"flash_attn\.cute"):
                importlib.import_module("flash_attn.cute")
        assert not [name for name in sys.modules if name.split(".")[0] == "flash_attn"]
        with pytest.raises(ModuleNotFoundError):
            importlib.import_module("flash_attn")

    def test_install_may_be_called_twice(self):
        with install_flash_attn():
            with install_flash_attn():
                pass
            assert sys.modules["flash_attn"] is ours
        with install_flash_attn():
            assert sys.modules["flash_attn"] is ours

    def test_stays_if_its_result_is_dropped(self):
        run_alone(
            "import gc, torch_metal_attn; torch_metal_attn.install_flash_attn(); gc.collect(); "
            "from flash_attn.bert_padding import unpad_input"
        )

    def test_an_imported_flash_attn_is_refused(self, monkeypatch):
        monkeypatch.setitem(sys.modules, "flash_attn", types.ModuleType("flash_attn"))
        with pytest.raises(RuntimeError, match=r"already imported: <module .*; call install_flash"):
            install_flash_attn()

    def test_an_installed_flash_attn_is_refused(self, monkeypatch, tmp_path):
        (tmp_path / "flash_attn").mkdir()
        (tmp_path / "flash_attn" / "__init__.py").touch()
        monkeypatch.syspath_prepend(tmp_path)
        with pytest.raises(RuntimeError, match=r"installed: .*__init__\.py; uninstall it"):
            install_flash_attn()
        assert "flash_attn" not in sys.modules

"""`fuzz`: the cases that it draws, and that right results are not reported."""

import json
import random
from functools import cache

import pytest
import torch

from tests.helpers.cases import each_case
from torch_metal_attn import simulate, testing
from torch_metal_attn.ops import differentiation
from torch_metal_attn.quantisation import FORMATS
from torch_metal_attn.testing import running, storage
from torch_metal_attn.testing.attention import CALLS
from torch_metal_attn.testing.case import drawn as drawn_fields
from torch_metal_attn.testing.families import FAMILIES, draw, draw_of
from torch_metal_attn.testing.tensors import Memory

CPU = torch.device("cpu")
SEED = 0


@cache
def drawn():
    """Cases with indices far apart, so that they come from many models."""
    return [draw(SEED, 40 * index) for index in range(1000)]


# Cases whose bound or expected error is easily wrong.
SINK = {"call": "flash_attn_func", "softmax_scale": 1.0, "learnable_sink": "float16"}
EMPTY = {"call": "flash_varlen_fwd", "packed": ((0, 0),), "spare_rows": 1}
RIGHT = [
    testing.Attention(**SINK, backward=True, values="sharp"),
    testing.Attention(**EMPTY, learnable_sink="float32", backward=True),
    testing.Step(call="append_kv", backward=True),
    testing.Attention(dtype="float64", head_dim=32, v_head_dim=32, kv_length=3, format="q8_0"),
    testing.Copy(shape=(1, 1, 1), copies=(), layout=("order 021", "padded 8")),
]
# Cases in which the kernels' rounding errors are large.
DROPOUT = {"call": "flash_varlen_bwd", "dtype": "float16", "packed": ((16, 11),)}
ROTARY = {"call": "flash_varlen_fwd", "dtype": "bfloat16", "packed": ((6, 4),), "rotary": "qk"}
ROTARY |= {"rotary_columns": 8, "rotary_interleaved": True, "seed": 111443381}
RIGHT_OF_KERNELS = [
    testing.Attention(**DROPOUT, dropout_p=0.6, backward=True, exact_delta=True, values="constant"),
    testing.Attention(**ROTARY, causal=True, values="sharp"),
]


class TestDrawing:
    def test_seed_and_index_determine_a_case(self):
        assert [draw(SEED, 40 * i) for i in (999, 0, 77)] == [drawn()[i] for i in (999, 0, 77)]
        assert draw(1, 0) != drawn()[0]

    def test_every_function_and_option_is_drawn(self):
        r = random.Random(SEED)
        attention = [draw_of(testing.Attention, r) for _ in range(5000)]
        legal = [case for case in attention if not case.refused()]
        assert {type(case) for case in drawn()} == {n for n, f in FAMILIES.items() if f.weight}
        assert {case.call for case in legal} == set(CALLS)
        legal_fields = {(case.call, name) for case in legal for name in case.fields()}
        for name, how in drawn_fields(testing.Attention).items():
            for call in how.calls or CALLS:
                assert (call, name) in legal_fields, (call, name)
        formats = {"", *FORMATS}
        assert {(case.cache, case.format) for case in legal} == {
            (cache, format) for cache in ("", "paged", "indexed") for format in formats
        }
        assert any(0 in pair for case in legal for pair in case.sequences)

    def test_one_case_in_ten_is_illegal(self):
        wrong = [case for case in drawn() if case.refused()]
        assert 0.05 < len(wrong) / len(drawn()) < 0.15
        assert len({case.refused() for case in wrong}) > 20

    def test_cases_share_kernels(self):
        """Compiling takes longer than running, so many cases must share a kernel."""
        cases = [draw(SEED, index) for index in range(1000)]
        kinds = {(type(case), case.call, case.fields().get("dtype")) for case in cases}
        assert len(kinds) < len(cases) / 15

    def test_every_drawn_case_is_valid(self):
        assert not [case for case in drawn() if case.invalid_reason()]

    @each_case("case", RIGHT)
    def test_correct_results_are_not_reported(self, case):
        outcome = running.run(case, CPU)
        assert outcome.ok, outcome

    @pytest.mark.parametrize("case", RIGHT_OF_KERNELS, ids=lambda case: case.call)
    def test_correct_results_of_kernels_are_not_reported(self, case, device):
        outcome = running.run(case, device)
        assert outcome.ok, outcome

    def test_invalid_cases_have_a_reason(self):
        packed = {"call": "flash_attn_varlen_func", "packed": ((1, 1),)}
        sdpa = {"call": "scaled_dot_product_attention", "attn_mask": "bfloat16 qk"}
        groups = {"call": "flash_decode", "format": "q2_g64", "v_format": "q2_g64"}
        for fields, reason in (
            (packed | {"cache": "indexed"}, "flash_attn_varlen_func has no cache_batch_idx"),
            (sdpa, "torch's masks are of bool, float32 or the queries' dtype"),
            (groups | {"head_dim": 72, "v_head_dim": 64}, "q2_g64 has blocks of 64 columns"),
            (groups | {"head_dim": 64, "v_head_dim": 72}, "q2_g64 has blocks of 64 columns"),
        ):
            assert testing.Attention(**fields).invalid_reason().endswith(reason)

    @pytest.mark.parametrize("q_length, kv_length", [(0, 9), (9, 0)])
    def test_strides_of_empty_tensors_are_not_drawn_as_illegal(self, q_length, kv_length):
        """Every function accepts such strides."""
        for name in ("q", "k", "v"):
            sizes = {"q_length": q_length, "kv_length": kv_length}
            case = testing.Attention(**sizes, invalidated=f"strides of {name}")
            is_empty = (q_length if name == "q" else kv_length) == 0
            assert bool(case.invalid_reason()) == is_empty

    @pytest.mark.parametrize("illegal", testing.Attention().wrong(), ids=str)
    def test_illegal_options_are_refused(self, illegal, device):
        cases = [testing.Attention(call=call, **{"kv_length": 8, **illegal}) for call in CALLS]
        case = next(case for case in cases if not case.invalid_reason() and case.refused())
        outcome = running.run(case, device)
        assert outcome.ok, outcome
        assert not outcome.measures


class TestJson:
    def test_every_case_can_be_read_from_its_json(self):
        for case in drawn()[:500]:
            text = json.dumps(storage.to_json(case))
            assert storage.from_json(json.loads(text)) == case

    def test_a_case_is_printed_as_python(self):
        for case in drawn()[:100]:
            assert eval(f"testing.{case}") == case

    @pytest.mark.parametrize(
        "data, words",
        [
            ({"family": "Nothing"}, "family is 'Nothing'; it must be one of Attention, "),
            ({"family": "Copy", "pages": 3}, "Copy has no pages"),
            ({"family": "Attention", "call": "flash_fwd", "num_splits": 2}, "has no num_splits"),
        ],
    )
    def test_json_of_unknown_cases_is_refused(self, data, words):
        with pytest.raises(ValueError, match=words):
            storage.from_json(data)


class TestMemory:
    LAYOUTS = ((), ("padded 3",), ("order 120", "padded 8"), ("repeated 0",), ("order 3210",))

    @pytest.mark.parametrize("layout", LAYOUTS, ids=str)
    @pytest.mark.parametrize("dtype", [torch.float16, torch.int32, torch.bool, torch.float8_e4m3fn])
    def test_layouts_keep_values(self, layout, dtype):
        x = torch.randn(3, 2, 5, 4).to(dtype)
        if "repeated 0" in layout:
            x = x[:1].expand(3, -1, -1, -1)
        memory = Memory(CPU)
        placed = memory.place("x", x, layout)
        assert placed.dtype == dtype
        assert torch.equal(placed.float(), x.float())
        assert (placed.stride(0) == 0) == ("repeated 0" in layout)
        if layout == ("order 120", "padded 8"):
            assert placed.stride() == (20, 700, 100, 1)
        assert memory.undisturbed().ok

    def test_a_write_next_to_a_tensor_is_seen(self):
        memory = Memory(CPU)
        x = memory.place("x", torch.zeros(2, 3), ("padded 2",))
        x.fill_(1.0)
        assert memory.undisturbed(("x",)).ok
        assert memory.undisturbed().error == 12  # 1.0 differs from 0.0 in two bytes, six times
        torch.as_strided(x, (1,), (1,), x.storage_offset() - 1).fill_(0.0)
        assert memory.undisturbed(("x",)).error > 0


def test_a_lost_gradient_is_noticed(monkeypatch):
    """A call without a gradient must raise if its result is differentiated."""
    monkeypatch.setattr(differentiation, "without_gradient", lambda message, tensors, run: run())
    drawn_alike = (c for c in drawn() if c.call == "flash_decode" and c.backward)
    case = next(c for c in drawn_alike if not (c.refused() or c.poison or c.differentiable))
    with simulate(check=True):
        assert running.run(case, CPU).status == running.RAISED


def test_families_are_public():
    assert set(testing.__all__) == {family.__name__ for family in FAMILIES} | {"check"}

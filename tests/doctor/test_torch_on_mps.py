"""The ways of torch's attention on mps, against torch's own headers where it ships them."""

import re
from dataclasses import replace
from pathlib import Path

import torch

from tests.helpers.cases import each_case
from torch_metal_attn.tools.doctor import torch_on_mps
from torch_metal_attn.tools.doctor.torch_on_mps import FUSED, RAISES, UNFUSED, Call, way

HEADERS = Path(torch.__file__).parent / "include" / "ATen" / "native" / "mps" / "kernels"
MANY = Call((1, 8, 100, 64), (1, 2, 120, 64), (1, 2, 120, 64), torch.float16)
FEW = replace(MANY, query=(1, 8, 8, 64))


def test_head_dims_are_those_of_torchs_kernels():
    prefill, decode = HEADERS / "PrefillAttention.h", HEADERS / "DecodeAttention.h"
    if not prefill.exists():  # before torch 2.13
        assert torch.__version__ < "2.13"
        return
    listed = re.sub(r"[\s\\]", "", prefill.read_text().split("attn_shapes_helper(")[1])
    dims = re.findall(r"instantiate_attn\(iname,itype,\d+,\d+,(\d+)", listed.split("#define")[0])
    assert sorted(map(int, dims)) == list(torch_on_mps._PREFILL_HEAD_DIMS)
    dims = re.findall(r"INSTANTIATE_SDPA_VECTOR\(DTYPE, (\d+), \1\)", decode.read_text())
    assert sorted(map(int, dims)) == list(torch_on_mps._DECODE_HEAD_DIMS)


# Of torch 2.13 and of 2.12.
WAYS = {
    "many queries": (MANY, FUSED, UNFUSED),
    "few queries": (FEW, FUSED, FUSED),
    "as few as without a kernel": (replace(FEW, query=(1, 8, 9, 64)), FUSED, UNFUSED),
    "more queries than keys": (replace(FEW, key=(1, 2, 7, 64)), UNFUSED, UNFUSED),
    "gradients": (replace(MANY, gradients=True), UNFUSED, UNFUSED),
    "dropout": (replace(MANY, dropout=True), RAISES, UNFUSED),
    "dropout and gradients": (replace(MANY, dropout=True, gradients=True), UNFUSED, UNFUSED),
    "a mask": (replace(MANY, mask=torch.bool), FUSED, UNFUSED),
    "a mask for few": (replace(FEW, mask=torch.float16), FUSED, UNFUSED),
    "a mask of another dtype": (replace(MANY, mask=torch.float32), UNFUSED, UNFUSED),
    "causal": (replace(MANY, is_causal=True), FUSED, UNFUSED),
    "causal and few": (replace(FEW, is_causal=True), FUSED, UNFUSED),
    "causal and a mask": (replace(MANY, is_causal=True, mask=torch.bool), FUSED, RAISES),
    "few, causal and a mask": (replace(FEW, is_causal=True, mask=torch.bool), RAISES, RAISES),
    "no keys": (replace(MANY, key=(1, 2, 0, 64)), UNFUSED, UNFUSED),
    "another v": (replace(MANY, value=(1, 2, 120, 32)), UNFUSED, UNFUSED),
    "float64": (replace(MANY, dtype=torch.float64), UNFUSED, UNFUSED),
}


@each_case("name", WAYS)
def test_ways(name):
    call, later, before = WAYS[name]
    assert way(call, "2.13.0")[0] == later
    assert way(call, "2.12.1")[0] == before
    assert (way(call, "2.13.0")[1] == "") == (later == FUSED)


def of_head_dim(call, size):
    names = ("query", "key", "value")
    return replace(call, **{name: (*getattr(call, name)[:-1], size) for name in names})


def test_head_dims():
    def fused(call):
        return [d for d in range(1, 300) if way(of_head_dim(call, d), "2.15.0")[0] == FUSED]

    assert fused(MANY) == [32, 64, 72, 80, 96, 128, 256]
    assert fused(FEW) == [64, 96, 128, 256]


def test_reasons_tell_for_how_many_queries_a_head_dim_is_fused():
    """So that head dim 32 is not both fused and not, in one report, without a reason."""
    dims = "torch's fused kernels have 64, 96, 128, 256 for up to 8 queries, and 32, 64, 72, 80, "
    dims += "96, 128, 256 for more"
    assert way(of_head_dim(FEW, 32), "2.13.0") == (UNFUSED, f"head dim 32: {dims}")
    assert way(of_head_dim(MANY, 32), "2.13.0") == (
        FUSED,
        "at head dim 32 torch fuses more than 8 queries only",
    )
    assert way(of_head_dim(MANY, 40), "2.13.0") == (UNFUSED, f"head dim 40: {dims}")
    older = "torch before 2.13 fuses up to 8 queries without a mask, at head dims 64, 96 and 128"
    assert way(FEW, "2.12.1") == (FUSED, older)
    assert way(of_head_dim(FEW, 256), "2.12.1") == (UNFUSED, older)


def test_prefill_kernels_can_be_switched_off(monkeypatch):
    monkeypatch.setenv("PYTORCH_MPS_DISABLE_PREFILL_ATTENTION", "1")
    assert way(MANY, "2.13.0")[0] == UNFUSED
    assert way(FEW, "2.13.0") == (FUSED, "at head dim 64 torch fuses up to 8 queries only")


def test_memory_of_the_scores():
    assert MANY.scores_bytes == 8 * 100 * 120 * 2
    assert replace(MANY, gradients=True).scores_bytes == 8 * 100 * 120 * 4
    broadcast = replace(MANY, query=(100, 64), key=(3, 2, 120, 64))
    assert broadcast.scores_bytes == 3 * 2 * 100 * 120 * 2

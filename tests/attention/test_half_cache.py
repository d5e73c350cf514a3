"""float32 queries on keys and values in half precision, as llama.cpp has them by default."""

import pytest
import torch

from tests.attention.flash_fwd_check import (
    check_flash_decode,
    check_flash_fwd,
    make_qkv,
)
from tests.helpers.mutants import mutant_tests
from torch_metal_attn import (
    explain,
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_varlen_func,
)
from torch_metal_attn.testing.judge import ints

ops = torch.ops.metal_attn
CHECKS = {"flash_fwd": check_flash_fwd, "flash_decode": check_flash_decode}
HALVES = [torch.float16, torch.bfloat16]
SHAPE = {"heads": 4, "kv_heads": 2, "q_length": 3, "kv_length": 70, "head_dim": 72}


def operands(dtype=torch.float16, **shape):
    q, k, v = make_qkv(**SHAPE | shape)
    return q, k.to(dtype), v.to(dtype)


@pytest.mark.parametrize("op", CHECKS)
def test_as_an_op(op):
    """The fake kernel, what explains it and what it must move."""
    q, k, v = operands(head_dim=64)
    run = getattr(ops, op)
    torch.library.opcheck(run, (q, k, v), {"causal": True})
    explained = explain(run, q, k, v)
    assert explained.specialisation["ELEMENT"] == "float"
    assert explained.specialisation["KV_ELEMENT"] == "half"
    statistics = 4 * 3 * 4  # a float32 number a row of q
    assert explained.cost.bytes == 2 * q.nbytes + k.nbytes + v.nbytes + statistics


def test_gradients_are_refused_in_backward():
    q, k, v = operands()
    q.requires_grad_()
    out, lse = ops.flash_fwd(q, k, v)
    with pytest.raises(NotImplementedError, match=r"k and v in torch.float16 and q in torch.float"):
        out.sum().backward()
    with torch.no_grad(), pytest.raises(ValueError, match=r"k has dtype .*; they must be alike"):
        ops.flash_bwd(out, None, q, k, v, out, lse)


def test_functions_without_a_cache_want_one_dtype():
    """As flash-attn's. Those that read a cache take float32 queries: test_functional.py."""
    q, k, v = (x.transpose(1, 2) for x in operands(head_dim=64))
    for keys, values, name in ((k, v, "k"), (k.float(), v, "v")):
        with pytest.raises(ValueError, match=rf"^{name} has dtype float16 and q float32; .*alike"):
            flash_attn_func(q, keys, values)
        with pytest.raises(ValueError, match=rf"^{name} has dtype float16 and q float32; .*alike"):
            flash_attn_varlen_func(q[0], keys[0], values[0], ints(0, 3), ints(0, 70), 3, 70)
    with pytest.raises(ValueError, match=r"float16 and q float32; .*alike"):
        flash_attn_kvpacked_func(q, torch.stack((k, v), 2))


MUTANTS = {
    "flash_fwd": """
        flash_fwd: queries rounded:
            {~held.fragments[i][HELD ? d : 0] = read(i, d => const Fragment<T> pair = read(i,
            d);held.fragments[i][HELD ? d : 0] = Fragment<T>(T(half(pair.x)), pair.y~});
    """,
    "flash_decode": """
        flash_decode: queries rounded: {~=> ELEMENT(half(~}queries.element(row.query, d){~=> ))~}
        flash_decode: one of two keys' columns: ELEMENT(unit.fragments[f].{~y => x~})
    """,
}


test_mutant_is_caught, test_the_unchanged_kernels_pass = mutant_tests(
    MUTANTS, run=lambda op: CHECKS[op](*operands(head_dim=64), device="cpu")
)

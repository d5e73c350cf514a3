"""Errors of ops with the argument names of the functions that call them."""

import pytest

from torch_metal_attn.call.wording import Wording

WORDING = Wording({"k": "k_cache", "seqused_k": "cache_seqlens"}, heads_third=True)


@pytest.mark.parametrize(
    "given, said",
    [
        ("k has 2 heads; call k.clone() first", "k_cache has 2 heads; call k_cache.clone() first"),
        ("seqused_k[0] is 9", "cache_seqlens[0] is 9"),
        ("leftpad_k and k_scale stay", "leftpad_k and k_scale stay"),
        ("k of shape (1, 2, 3, 4)", "k_cache of shape (1, 3, 2, 4)"),
        ("it must be (B, H, L, D) or (2, 3)", "it must be (B, L, H, D) or (2, 3)"),
    ],
)
def test_words(given, said):
    assert WORDING.of(given) == said


def test_errors():
    """The op's own kinds are reworded, torch's schema errors become TypeErrors, others stay."""
    for kind in (ValueError, NotImplementedError):
        error = WORDING.error(kind("k requires grad"))
        assert (type(error), str(error)) == (kind, "k_cache requires grad")
    schema = (
        "metal_attn::flash_fwd() Expected a value of type 'Optional[Tensor]' for argument 'k' but "
        "instead found type 'list'.\nPosition: 1\nValue: [1.0]\nDeclaration: metal_attn::flash_fwd"
    )
    error = WORDING.error(RuntimeError(schema))
    assert (type(error), str(error)) == (
        TypeError,
        "k_cache is a list; it must be a tensor or None",
    )
    other = RuntimeError("k is out of memory")
    assert WORDING.error(other) is other

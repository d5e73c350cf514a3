"""decode_step: new rows for a cache and attention to it, in one dispatch or two."""

import pytest
import torch

from tests.attention.flash_fwd_options import ints, random_mask
from tests.attention.held_cases import hold
from tests.helpers.memory import check_equal, same_memory
from tests.helpers.steps import step, tensors_of
from torch_metal_attn import simulate
from torch_metal_attn.testing.judge import on

ops = torch.ops.metal_attn
PADDED = {"cache": "indexed", "leftpad_k": (0, 5), "length": 5, "rotary_columns": 32}
PADDED |= {"rotary_last": True, "causal": False}
ROWS_FIRST = {"cache": "paged", "cache_layout": ("order 021",)}
VALUES = {
    "one row": {"length": 1, "rotary_columns": 32, "rotary_interleaved": True},
    "splits": {"length": 5, "rotary_columns": 32, "num_splits": 3}
    | {"lengths": (13, 170), "capacity": 192},
    # 256 rows of a KV head: the tile walks over the keys twice, and appends once.
    "more rows than a tile": {"length": 16, "heads": 16, "kv_heads": 1, "num_splits": 2}
    | {"rotary_columns": 32, "rotary_interleaved": True},
    # New keys over the ends of pages.
    "pages": ROWS_FIRST | {"page": 3, "capacity": 66, "lengths": (6, 23), "rotary_columns": 64},
    # Each format of a cache, in each dtype of the rows.
    "q8_0": ROWS_FIRST | {"format": "q8_0", "dtype": "float32", "rotary_columns": 64},
    "q4_0": ROWS_FIRST | {"format": "q4_0", "dtype": "bfloat16", "rotary_columns": 64},
    "fp8_e4m3": {"format": "fp8_e4m3", "rotary_columns": 64},
    "float16 under float32": {"cache_dtype": "float16", "dtype": "float32", "rotary_columns": 64},
    "bfloat16 under float32": ROWS_FIRST
    | {"cache_dtype": "bfloat16", "dtype": "float32", "page": 8, "head_dim": 20, "v_head_dim": 20},
    "queries of one place": PADDED | {"by_token": False},
    "rows counted from the cache's first": PADDED | {"rotary_from_leftpad": False},
    "any strides and head dims": {"head_dim": 40, "v_head_dim": 11, "rotary_columns": 6}
    | {"layout": ("padded 3",), "cache_layout": ("padded 3",)},
}


@pytest.mark.parametrize("name", VALUES)
def test_values(name, device):
    """Against float64, and what the caches hold bit for bit."""
    hold([step(**{"length": 3, "causal": True} | VALUES[name])], device)


def test_as_three_ops(device):
    """The same bits with every option of the scores, which no case of `Step` has."""
    options = {"window_size_left": 7, "causal": True, "attention_chunk": 8}
    options |= {"softcap": 2.0, "softmax_scale": 0.4, "num_splits": 1}
    options |= {"learnable_sink": torch.tensor([1.0, 0.0, -1.0, 2.0])}
    options |= {"attn_mask": random_mask(2, 4, 5, 32)}
    options |= {"alibi_slopes": torch.tensor([0.1, 0.2, 0.3, 0.4])}
    options |= {"attn_bias": random_mask(4, 5, 32, dtype=torch.float32)}
    options = on(device, options)
    tensors = tensors_of(length=5, leftpad_k=(0, 5), cache="indexed", capacity=32)
    mine, theirs = ({n: same_memory(x).to(device) for n, x in tensors.items()} for _ in range(2))
    found = ops.decode_step(**mine, **options)
    where = {n: theirs[n] for n in ("cache_batch_idx", "leftpad_k")}
    new = {n: theirs[n] for n in ("k", "v", "k_cache", "v_cache", "cache_seqlens")}
    ops.append_kv(**new, **where)
    used = theirs["cache_seqlens"] + 5
    caches = theirs["k_cache"], theirs["v_cache"]
    expected = ops.flash_decode(theirs["q"], *caches, seqused_k=used, **where, **options)
    check_equal(*({n: x.cpu() for n, x in each.items()} for each in (mine, theirs)))
    for ours, other in zip(found, expected, strict=True):
        assert ours.isfinite().all()
        assert torch.equal(ours, other)


@pytest.mark.parametrize("num_splits, launches", [(1, 1), (4, 2)])
def test_dispatches(num_splits, launches):
    """One, or two with splits, where the ops take two or three."""
    tensors = tensors_of(length=1, rotary_columns=32, capacity=200, lengths=(100, 170))
    with simulate(record=True) as run:
        ops.decode_step(**tensors, num_splits=num_splits, causal=True, rotary_interleaved=True)
    kernels = [launch.kernel for launch in run.recorded]
    assert kernels == ["flash_decode", "merge_splits"][:launches]


REFUSED = {
    "no new rows": (
        {"k": torch.zeros(2, 2, 0, 64).half(), "v": torch.zeros(2, 2, 0, 64).half()},
        "no new rows",
    ),
    "past the end": ({"cache_seqlens": ints(13, 30)}, r"cache_seqlens\[1\] is 30"),
    "before the beginning": ({"cache_seqlens": ints(-1, 3)}, r"cache_seqlens\[0\] is -1"),
    "two caches in one": (
        {"v_cache": lambda t: t["k_cache"]},
        "v_cache is the first columns of k_cache",
    ),
    **{
        f"q in {cache}": (
            {"q": lambda t, cache=cache: t[cache][:, :, 3:8]},
            f"q may share elements with {cache}, which is written in place",
        )
        for cache in ("k_cache", "v_cache")
    },
    "q of another head dim": ({"q": torch.zeros(2, 4, 5, 32).half()}, "head dim"),
    "q of another dtype": (
        {"q": torch.zeros(2, 4, 5, 64)},
        "q has dtype float32 and k float16; they must be alike",
    ),
    "q of another dtype on a quantised cache": (
        {
            "q": torch.zeros(2, 4, 5, 64),
            **{f"{name}_cache": torch.zeros(2, 2, 32, 64, dtype=torch.int8) for name in "kv"},
            **{f"{name}_scale": torch.zeros(2, 2, 32, 2).half() for name in "kv"},
        },
        "q has dtype float32 and k float16; they must be alike",
    ),
    "one table": ({"rotary_cos": torch.ones(40, 16)}, "only one of rotary_cos and rotary_sin"),
    "splits": ({"num_splits": 2000}, "num_splits is 2000"),
    "a leaf as cache": (
        {"k_cache": torch.zeros(2, 2, 33, 64).half().requires_grad_()},
        "k_cache is a leaf that requires grad",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case, device):
    """Before anything is written."""
    changes, message = REFUSED[case]
    tensors = tensors_of(length=5, capacity=32)
    changes = {n: x(tensors) if callable(x) else x for n, x in changes.items()}
    arguments = {
        n: x.to(device) if torch.is_tensor(x) else x for n, x in (tensors | changes).items()
    }
    before = {name: same_memory(tensors[name]) for name in ("k_cache", "v_cache")}
    error = NotImplementedError if "leaf" in case else ValueError
    with pytest.raises(error, match=message):
        ops.decode_step(**arguments)
    check_equal({name: tensors[name] for name in before}, before)


@pytest.mark.parametrize("name", ["q", "k"])
def test_gradients(name):
    """Raise when they are asked for; what is in the cache then has none either."""
    plain, tensors = tensors_of(length=5), tensors_of(length=5)
    tensors[name].requires_grad_()
    results = ops.decode_step(**tensors)
    for result, expected in zip(results, ops.decode_step(**plain), strict=True):
        assert torch.equal(result, expected)
        with pytest.raises(NotImplementedError, match=f"decode_step .* {name} requires grad"):
            result.nan_to_num().sum().backward()
    assert tensors["k_cache"].requires_grad == (name == "k")
    assert not tensors["v_cache"].requires_grad

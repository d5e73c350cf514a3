"""decode_step against rope, append_kv and flash_decode one after another: the same bits."""

import pytest
import torch

from tests.attention.flash_fwd_options import ints, random_mask
from tests.attention.held_cases import hold
from tests.cache.append_check import check_equal, make, normal, place_of, same_memory
from torch_metal_attn import quantisation, simulate
from torch_metal_attn.testing import Step

ops = torch.ops.metal_attn
HEADS = {"q_heads": 4, "kv_heads": 2}


def problem(*, rotary_dim=None, seqlens=(13, 20), q_length=None, **shape):
    """What append_kv is given, with keys in the cache before, and q that is rotated or not."""
    made = make(rotary_dim=rotary_dim, seqlens=list(seqlens), q_length=q_length, **HEADS | shape)
    for name in ("k", "v"):
        fill(made, name)
    return made.tensors


def fill(made, name):
    """Normal keys up to each sequence's length, in what is else NaN."""
    tensors, cache = made.tensors, made.tensors[f"{name}_cache"]
    scale = tensors.get(f"{name}_scale")
    columns = tensors[name].shape[3]
    for b, length in enumerate(tensors["cache_seqlens"].tolist()):
        old = normal(1, cache.shape[1], length, columns, dtype=tensors["k"].dtype, seed=b + 50)
        data, found = old, None
        format = made.formats[name]
        if format is None:
            data = old.to(cache.dtype)
        else:
            given = scale if format == "fp8_e4m3" else None
            if given is not None and given.dim() == 2:
                given = given[b : b + 1]
            data, found = quantisation.quantise(old, format, given)
        bits = torch.uint8 if cache.element_size() == 1 else torch.int8
        for i in range(length):
            place, row = place_of(tensors, b, i)
            cache[place, :, row].view(bits).copy_(data[0, :, i].view(bits))
            if found is not None and format != "fp8_e4m3":
                scale[place, :, row] = found[0, :, i]


def separately(
    tensors,
    *,
    num_splits,
    rotary_interleaved=False,
    rotate_q_by_token=True,
    rotary_from_leftpad=True,
    rotary_first_column=0,
    **options,
):
    """The three ops: two dispatches, or three with splits."""
    t = dict(tensors)
    new_keys = t["k"].shape[2]
    q = t.pop("q").clone()
    cache = {
        name: t[name]
        for name in ("block_table", "cache_batch_idx", "leftpad_k", "k_scale", "v_scale")
        if name in t
    }
    rotated = {}
    if "rotary_cos" in t:
        rotated = {"q": q, "rotary_cos": t["rotary_cos"], "rotary_sin": t["rotary_sin"]}
        rotated |= {"rotary_interleaved": rotary_interleaved}
        rotated |= {"rotate_q_by_token": rotate_q_by_token}
        rotated |= {"rotary_from_leftpad": rotary_from_leftpad}
        rotated |= {"rotary_first_column": rotary_first_column}
    caches = t["k_cache"], t["v_cache"]
    ops.append_kv(t["k"], t["v"], *caches, t["cache_seqlens"], **rotated, **cache)
    used = t["cache_seqlens"] + new_keys
    return ops.flash_decode(q, *caches, seqused_k=used, num_splits=num_splits, **cache, **options)


def check(tensors, device, *, num_splits=1, **options):
    """`decode_step` leaves, and returns, what the three ops do."""
    mine = {name: same_memory(x).to(device) for name, x in tensors.items()}
    theirs = {name: same_memory(x).to(device) for name, x in tensors.items()}
    options = {n: x.to(device) if torch.is_tensor(x) else x for n, x in options.items()}
    out, lse = ops.decode_step(**mine, num_splits=num_splits, **options)
    expected, expected_lse = separately(theirs, num_splits=num_splits, **options)
    check_equal({n: x.cpu() for n, x in mine.items()}, {n: x.cpu() for n, x in theirs.items()})
    assert out.isfinite().all()
    if num_splits == 1 and "rotary_cos" not in tensors:
        assert torch.equal(out, expected)
        assert torch.equal(lse, expected_lse)
    else:  # the last split has all new keys, and a kernel that rotates q may have another tile
        close = {"rtol": 2e-3, "atol": 2e-3} if out.dtype == torch.float16 else {}
        torch.testing.assert_close(out, expected, **close)
        torch.testing.assert_close(lse, expected_lse)


STEP = {"call": "decode_step", "heads": 4, "kv_heads": 2, "head_dim": 64, "v_head_dim": 64}
STEP |= {"dtype": "float16", "capacity": 64, "lengths": (13, 20), "length": 3, "causal": True}
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
    given = STEP | VALUES[name]
    hold([Step(q_length=given["length"], **given)], device)


def test_as_three_ops(device):
    """The same bits with every option of the scores, which no case of `Step` has."""
    options = {"window_size_left": 7, "causal": True, "attention_chunk": 8}
    options |= {"softcap": 2.0, "softmax_scale": 0.4}
    options |= {"learnable_sink": torch.tensor([1.0, 0.0, -1.0, 2.0])}
    options |= {"attn_mask": random_mask(2, 4, 5, 32)}
    options |= {"alibi_slopes": torch.tensor([0.1, 0.2, 0.3, 0.4])}
    options |= {"attn_bias": random_mask(4, 5, 32, dtype=torch.float32)}
    check(problem(length=5, leftpad=[0, 5], cache_batch_idx=[3, 0]), device, **options)


@pytest.mark.parametrize("num_splits, launches", [(1, 1), (4, 2)])
def test_dispatches(num_splits, launches):
    """One, or two with splits, where the ops take two or three."""
    tensors = problem(length=1, rotary_dim=32, capacity=200, seqlens=[100, 170])
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
    tensors = problem()
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
    plain, tensors = problem(), problem()
    tensors[name].requires_grad_()
    results = ops.decode_step(**tensors)
    for result, expected in zip(results, ops.decode_step(**plain), strict=True):
        assert torch.equal(result, expected)
        with pytest.raises(NotImplementedError, match=f"decode_step .* {name} requires grad"):
            result.nan_to_num().sum().backward()
    assert tensors["k_cache"].requires_grad == (name == "k")
    assert not tensors["v_cache"].requires_grad

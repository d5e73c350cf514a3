"""flash_attn_with_kvcache: flash-attn's arguments, compared with the reference in torch."""

import itertools

import pytest
import torch

from tests.attention.flash_fwd_options import ints, rotary_tables
from tests.cache.kv_caches import FORMATS, LAYOUTS, in_pages, paged, quantised
from tests.helpers.cases import each_case
from tests.helpers.home import PAGE
from torch_metal_attn import flash_attn_with_kvcache, simulate
from torch_metal_attn.reference import attention, cached, rotate
from torch_metal_attn.testing.judge import normal
from torch_metal_attn.with_kvcache import DECODE_QUERIES

MANY = DECODE_QUERIES + 1


def make(*, batch=2, q_length=1, kv_length=64, heads=4, kv_heads=2, head_dim=32, new=None, seed=0):
    """q, and a cache (B, L, Hkv, D); with `new` as many new keys and values, else None."""
    q = normal(batch, q_length, heads, head_dim, seed=seed)
    caches = [normal(batch, kv_length, kv_heads, head_dim, seed=seed + i) for i in (1, 2)]
    rows = [None, None]
    if new is not None:
        rows = [normal(batch, new, kv_heads, head_dim, seed=seed + i) for i in (3, 4)]
    return q, *caches, *rows


def expected(q, k_cache, v_cache, k, v, seqlens, *, tables=None, interleaved=True, **options):
    """In float64, over caches (B, L, Hkv, D); without new keys they are as they were."""
    causal, window = options.pop("causal", False), options.pop("window_size", (-1, -1))
    leftpad = options.pop("cache_leftpad", None)
    q, k_cache, v_cache = (x.double().transpose(1, 2).clone() for x in (q, k_cache, v_cache))
    lengths = seqlens.tolist()
    if k is not None:
        k, v = (x.double().transpose(1, 2) for x in (k, v))
        for b, length in enumerate(lengths):
            rotated_k, rotated_q = k[b : b + 1], q[b : b + 1]
            if tables is not None:
                cos, sin = (table[length:].double() for table in tables)  # also with padding
                by_token = causal or window != (-1, -1)
                rows = slice(None) if by_token else torch.zeros(q.shape[2]).long()
                rotated_k = rotate(rotated_k, cos, sin, interleaved)
                rotated_q = rotate(rotated_q, cos[rows], sin[rows], interleaved)
            q[b] = rotated_q[0]
            k_cache[b, :, length : length + k.shape[2]] = rotated_k[0]
            v_cache[b, :, length : length + k.shape[2]] = v[b]
        seqlens = seqlens + k.shape[2]
    out, lse = attention(
        *(q, k_cache, v_cache),
        causal=causal,
        window_size_left=window[0],
        window_size_right=-1 if causal else window[1],
        seqused_k=seqlens,
        leftpad_k=leftpad,
        compute_dtype=torch.float64,
        **options,
    )
    return out.transpose(1, 2), lse, k_cache.transpose(1, 2), v_cache.transpose(1, 2)


def check(tensors, seqlens, device, *, tables=None, interleaved=True, num_splits=0, **options):
    q, k_cache, v_cache, k, v = tensors
    out, lse, keys, values = expected(
        *tensors, seqlens, tables=tables, interleaved=interleaved, **options
    )
    given = [x if x is None else x.to(device) for x in (q, k_cache.clone(), v_cache.clone(), k, v)]
    rotary = {}
    if tables is not None:
        rotary = {"rotary_cos": tables[0].to(device), "rotary_sin": tables[1].to(device)}
        rotary["rotary_interleaved"] = interleaved
    on_device = {n: x.to(device) if torch.is_tensor(x) else x for n, x in options.items()}
    found, found_lse = flash_attn_with_kvcache(
        *given,
        cache_seqlens=seqlens.to(device),
        num_splits=num_splits,
        return_softmax_lse=True,
        **rotary,
        **on_device,
    )
    close = {"rtol": 3e-6, "atol": 3e-6}
    torch.testing.assert_close(found.cpu(), out.float(), **close)
    torch.testing.assert_close(found_lse.cpu(), lse.float(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(given[1].cpu(), keys.float(), **close)
    torch.testing.assert_close(given[2].cpu(), values.float(), **close)


CASES = {
    "plain": {},
    "splits": {"num_splits": 3},
    "causal": {"causal": True},
    "window": {"window_size": (9, 3)},
    "leftpad": {"cache_leftpad": ints(3, 0), "causal": True},
    "softcap, scale, alibi": {
        "softcap": 2.0,
        "softmax_scale": 0.4,
        "alibi_slopes": torch.tensor([0.1, 0.2, 0.3, 0.4]),
    },
    "chunk, sink, alibi of a batch": {
        "attention_chunk": 8,
        "learnable_sink": torch.tensor([1.0, 0.0, -1.0, 2.0]),
        "alibi_slopes": torch.rand(2, 4),
    },
}


@pytest.mark.parametrize(
    "case, q_length",
    [
        *itertools.product(["plain", "splits", "causal"], [1, MANY]),
        *itertools.product(["window", "softcap, scale, alibi"], [1, MANY]),
        *itertools.product(["leftpad", "chunk, sink, alibi of a batch"], [4, MANY]),
    ],
)
def test_without_new_keys(case, q_length, device):
    """Up to DECODE_QUERIES by flash_decode, more by flash_fwd."""
    check(make(q_length=q_length), ints(37, 21), device, **CASES[case])


@pytest.mark.parametrize(
    "case, q_length, new, rotary",
    [
        (case, *lengths, (None, False, True)[(i + j) % 3])
        for i, case in enumerate(["plain", "splits", "causal", "window", "leftpad"])
        for *lengths, j in [(1, 1, 0), (3, 5, 0), (4, 4, 0), (MANY, MANY, 1)]
    ],
)
def test_with_new_keys(case, q_length, new, rotary, device):
    """rotary: none, of halves, interleaved."""
    tables = None if rotary is None else rotary_tables(64, 8)
    check(
        make(q_length=q_length, new=new),
        ints(17, 9),
        device,
        tables=tables,
        interleaved=bool(rotary),
        **CASES[case],
    )


def test_lengths_of_any_form(device):
    """An int is every sequence's; None is the whole cache."""
    tensors = [x if x is None else x.to(device) for x in make()]
    for length, meant in ((21, ints(21, 21)), (None, ints(64, 64))):
        found = flash_attn_with_kvcache(*tensors, cache_seqlens=length)
        same = flash_attn_with_kvcache(*tensors, cache_seqlens=meant.to(device))
        assert torch.equal(found, same)


@pytest.mark.parametrize("q_length", [1, MANY])
def test_cache_batch_idx(q_length, device):
    q, k_cache, v_cache, k, v = (x.to(device) for x in make(q_length=q_length, new=q_length))
    idx = ints(1, 0).to(device)
    swapped = [x[idx.long()].clone() for x in (k_cache, v_cache)]
    seqlens = ints(17, 9).to(device)
    found = flash_attn_with_kvcache(
        q, k_cache, v_cache, k, v, cache_seqlens=seqlens, cache_batch_idx=idx
    )
    same = flash_attn_with_kvcache(q, *swapped, k, v, cache_seqlens=seqlens)
    assert torch.equal(found, same)
    assert torch.equal(k_cache[idx.long()], swapped[0])
    assert torch.equal(v_cache[idx.long()], swapped[1])


@pytest.mark.parametrize("q_length", [1, MANY])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_pages(layout, q_length, device):
    """flash-attn's (pages, page, Hkv, D), as it is or as a view of (pages, Hkv, page, D)."""
    tensors = make(q_length=q_length, new=q_length, kv_length=64)
    q, k_cache, v_cache, k, v = tensors
    lengths = [17, 26]
    heads_first = [x.transpose(1, 2) for x in (k_cache, v_cache)]
    keys, values, where = paged(*heads_first, [64, 64], PAGE, layout=layout)
    options = {"causal": True, "return_softmax_lse": True}
    caches = [x.to(device).transpose(1, 2) for x in (keys, values)]
    table = where["block_table"].to(device)
    out, lse = flash_attn_with_kvcache(
        q.to(device),
        *caches,
        *(k.to(device), v.to(device)),
        cache_seqlens=ints(*lengths).to(device),
        block_table=table[:, : 64 // PAGE],
        **options,
    )
    oracle, oracle_lse, *after = expected(*tensors, ints(*lengths), causal=True)
    torch.testing.assert_close(out.cpu(), oracle.float(), rtol=3e-6, atol=3e-6)
    torch.testing.assert_close(lse.cpu(), oracle_lse.float(), rtol=1e-5, atol=1e-5)
    for cache, meant in zip(caches, after, strict=True):
        rows = cached(cache.cpu().transpose(1, 2), where["block_table"][:, : 64 // PAGE], None)
        assert torch.equal(rows.transpose(1, 2), meant.float())


@pytest.mark.parametrize(
    "format, q_length, pages",
    zip(FORMATS, [1, MANY, 1], [True, False, False], strict=True),
)
def test_formats(format, q_length, pages, device):
    """The cache afterwards is the quantised one, and attention is to its values."""
    q, k_cache, v_cache, k, v = make(q_length=q_length, new=q_length, kv_length=64)
    scale = torch.tensor([0.02, 0.03]) if format == "fp8_e4m3" else None
    after = []
    for cache, new in ((k_cache, k), (v_cache, v)):
        whole = cache.clone()
        for b, length in enumerate((17, 9)):
            whole[b, length : length + q_length] = new[b]
        after.append(whole.transpose(1, 2))
    *exact, _ = quantised(*after, format, scale=scale)
    exact = [x.transpose(1, 2) for x in exact]
    oracle, *_ = expected(q, *exact, None, None, ints(17, 9) + q_length, causal=True)
    *_, (keys, values, scales) = quantised(
        *(x.transpose(1, 2) for x in (k_cache, v_cache)), format, scale=scale
    )
    where = {}
    cache = (keys, values, scales)
    if pages:
        cache = in_pages(cache, [64, 64], PAGE)
        where["block_table"] = cache[2].pop("block_table")[:, : 64 // PAGE].to(device)
    as_given = {
        name: (x.transpose(1, 2) if x.dim() == 4 else x).to(device) for name, x in cache[2].items()
    }
    out = flash_attn_with_kvcache(
        q.to(device),
        *(x.to(device).transpose(1, 2) for x in cache[:2]),
        *(k.to(device), v.to(device)),
        cache_seqlens=ints(17, 9).to(device),
        causal=True,
        **as_given,
        **where,
    )
    torch.testing.assert_close(out.cpu(), oracle.float(), rtol=3e-6, atol=3e-6)


@pytest.mark.parametrize(
    "q_length, num_splits, kernels",
    [
        (1, 1, ["flash_decode"]),
        (DECODE_QUERIES, 2, ["flash_decode", "merge_splits"]),
        (MANY, 1, ["append_kv", "flash_fwd"]),
    ],
)
def test_launches(q_length, num_splits, kernels):
    q, k_cache, v_cache, k, v = make(q_length=q_length, new=q_length)
    with simulate(record=True) as run:
        flash_attn_with_kvcache(
            q, k_cache, v_cache, k, v, cache_seqlens=17, num_splits=num_splits, causal=True
        )
    assert [launch.kernel for launch in run.recorded] == kernels


def test_q_stays_as_it_is(device):
    """Rotated where it is read, or in a copy."""
    for q_length in (1, MANY):
        q, *rest = (x.to(device) for x in make(q_length=q_length, new=q_length))
        before = q.clone()
        cos, sin = (table.to(device) for table in rotary_tables(64, 8))
        flash_attn_with_kvcache(q, *rest, cos, sin, cache_seqlens=5, causal=True)
        assert torch.equal(q, before)


def tables_of(rows):
    return {"rotary_cos": torch.ones(rows, 8), "rotary_sin": torch.ones(rows, 8)}


OLD = {"k": None, "v": None}  # without new keys
SHORT_TABLE = {"block_table": ints(0, 1).view(2, 1)}
REFUSED = [
    ({"k": None}, "only one of k and v"),
    ({"cache_seqlens": 2**31}, "is 2147483648; it must fit"),
    ({"cache_seqlens": None}, "cache_seqlens is None"),
    ({"cache_seqlens": 64}, r"cache_seqlens\[0\] is 64"),
    ({"cache_seqlens": 4.0}, "cache_seqlens is 4.0; it must be an int or a tensor"),
    ({"q": torch.zeros(2, 4, 32)}, "q has shape"),
    (OLD | tables_of(40), "rotary_cos or rotary_sin is given without k and v"),
    ({"num_splits": -1}, "num_splits is -1"),
    ({"num_splits": 1025}, r"num_splits is 1025; .* in 1\.\.1024"),
    ({"num_splits": "a"}, "num_splits is 'a'; it must be an int"),
    ({"k_scale": [1.0]}, "k_scale is a list; it must be a"),
    (
        {"rotary_cos": [1.0], "rotary_sin": [1.0]},
        "rotary_cos is a list; it must be a tensor or None",
    ),
    ({"cache_leftpad": torch.tensor([1, 2])}, "cache_leftpad has dtype int64"),
    (  # padding does not move the rows
        tables_of(5) | {"cache_leftpad": ints(3, 3)},
        r"rows 5 to 5 of rotary_cos \(from cache_seqlens on\); they must be in 0\.\.4",
    ),
    (
        {"k_cache": torch.zeros(1, 64, 2, 32).expand(2, 64, 2, 32)},
        r"k_cache has shape \(2, 64, 2, 32\) and strides \(0, 64, 32, 1\)",
    ),
    (
        SHORT_TABLE | {"cache_seqlens": 64},
        r"cache_seqlens\[0\] is 64 .* in 0\.\.64, the rows in the pages that block_table has for",
    ),
    (OLD | {"cache_seqlens": 65}, r"cache_seqlens\[0\] is 65; .*0\.\.64"),
    (
        OLD | SHORT_TABLE | {"cache_seqlens": 65},
        r"cache_seqlens\[0\] is 65; .* the keys in the pages that block_table has for",
    ),
    (OLD | {"cache_seqlens": torch.tensor([5, 5])}, "cache_seqlens has dtype int64"),
    (
        OLD | {"k_cache": torch.zeros(2, 40, 2, 32).half()},
        "v_cache has dtype float32 and k_cache float16; they must be alike",
    ),
    (OLD | {"k_cache": torch.zeros(2, 40, 1, 32)}, "v_cache has .* 2 and k_cache of 1"),
    (OLD | {"cache_leftpad": torch.tensor([1, 2])}, "cache_leftpad has dtype int64"),
    ({"softcap": -1.0}, "softcap is -1"),
    ({"learnable_sink": torch.zeros(5)}, r"learnable_sink has shape \(5,\); it must be \(4,\)"),
    ({"window_size": 3}, "window_size is 3"),
    ({"block_table": ints(0, 9).view(2, 1), "cache_seqlens": 3}, r"block_table\[1, 0\] is 9"),
]


@pytest.mark.parametrize("q_length", [1, MANY])
@pytest.mark.parametrize("new", [0, 1, 17])
def test_gradients(new, q_length):
    """Raise when they are asked for; a model that runs without torch.no_grad does not."""
    q, k_cache, v_cache, k, v = make(q_length=q_length, new=new or 1)
    if new == 0:
        k, v = None, None
    plain = [k_cache.clone(), v_cache.clone()]
    expected = flash_attn_with_kvcache(q, *plain, k, v, cache_seqlens=5)
    leaves = [x.detach().clone().requires_grad_() for x in (q, k, v) if x is not None]
    new_rows = [x * 1 for x in leaves[1:]] or [None, None]
    out = flash_attn_with_kvcache(leaves[0], k_cache, v_cache, *new_rows, cache_seqlens=5)
    assert torch.equal(out, expected)
    with pytest.raises(NotImplementedError, match=r"has no gradient.*, and \w+ requires grad"):
        out.sum().backward()
    assert k_cache.requires_grad == (new > 0)


@pytest.mark.parametrize("q_length", [1, MANY])
@pytest.mark.parametrize("name", ["q", "k_cache", "v_cache", "alibi_slopes"])
def test_gradient_of_any_argument(name, q_length):
    """One contract for any number of queries, also in torch.func's transforms."""
    q, k_cache, v_cache, *_ = make(q_length=q_length)
    given = {"q": q, "k_cache": k_cache, "v_cache": v_cache, "alibi_slopes": torch.rand(4)}

    def total(x):
        return flash_attn_with_kvcache(**given | {name: x}).sum()

    message = rf"flash_attn_with_kvcache has no gradient, and {name} requires grad: use flash_attn_"
    with pytest.raises(NotImplementedError, match=message):
        total(given[name].clone().requires_grad_()).backward()
    with pytest.raises(NotImplementedError, match=message):
        torch.func.grad(total)(given[name])
    with pytest.raises(NotImplementedError, match=rf"no forward-mode derivative .*, which {name}"):
        torch.func.jvp(total, (given[name],), (given[name],))


@pytest.mark.parametrize("q_length", [1, MANY])
def test_gradient_in_a_graph(q_length):
    compiled = torch.compile(flash_attn_with_kvcache, backend="eager", fullgraph=True)
    q, k_cache, v_cache, *_ = make(q_length=q_length)
    assert torch.equal(compiled(q, k_cache, v_cache), flash_attn_with_kvcache(q, k_cache, v_cache))
    with pytest.raises(Exception, match=r"has no gradient, and q requires grad"):
        compiled(q.requires_grad_(), k_cache, v_cache)


@pytest.mark.parametrize("q_length", [1, MANY])
@pytest.mark.parametrize("empty", ["batch", "new"])
def test_no_new_rows(empty, q_length, device):
    """An empty batch, or keys of length 0, which still rotate q."""
    q, k_cache, v_cache, k, v = (
        x.to(device) for x in make(q_length=q_length, **({"new": 0} | {empty: 0}))
    )
    cos, sin = (table.to(device) for table in rotary_tables(64, 8))
    lengths = ints(*[9] * len(q)).to(device)
    out = flash_attn_with_kvcache(q, k_cache, v_cache, k, v, cos, sin, lengths, causal=True)
    rotated = q.transpose(1, 2).cpu()
    if len(q):
        rotated = rotate(rotated, cos.cpu()[9:], sin.cpu()[9:], True)
    plain = flash_attn_with_kvcache(
        rotated.transpose(1, 2).to(device), k_cache, v_cache, cache_seqlens=lengths, causal=True
    )
    torch.testing.assert_close(out, plain, atol=1e-5, rtol=1e-5)
    assert out.shape == q.shape


@pytest.mark.parametrize("q_length", [1, MANY])
@each_case("changes, message", REFUSED)
def test_refused(changes, message, q_length, device):
    q, k_cache, v_cache, k, v = make(q_length=q_length, new=1)
    arguments = {"q": q, "k_cache": k_cache, "v_cache": v_cache, "k": k, "v": v}
    arguments |= {"cache_seqlens": 5} | changes
    arguments = {n: x.to(device) if torch.is_tensor(x) else x for n, x in arguments.items()}
    before = arguments["k_cache"].clone()
    with pytest.raises((TypeError, ValueError), match=message):
        flash_attn_with_kvcache(**arguments)
    assert torch.equal(arguments["k_cache"], before), "rows were written"

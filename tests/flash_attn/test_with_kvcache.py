"""flash_attn_with_kvcache: all arguments of flash-attn, against the reference in torch."""

import pytest
import torch

from tests.attention.flash_fwd_check import rotary_tables
from tests.attention.held_cases import case, hold
from tests.helpers.cases import each_case
from tests.helpers.home import PAGE
from tests.helpers.steps import step
from torch_metal_attn import flash_attn_with_kvcache, simulate
from torch_metal_attn.reference import rotate
from torch_metal_attn.testing import Attention, Step
from torch_metal_attn.testing.judge import ints, normal, on
from torch_metal_attn.with_kvcache import VERIFY_QUERIES

MANY = VERIFY_QUERIES + 1
CALL = "flash_attn_with_kvcache"


def make(*, batch=2, q_length=1, heads=4, kv_heads=2, head_dim=32, new=None, seed=0):
    """q, a cache (B, L, Hkv, D), and `new` new keys and values, or None."""
    kv_length = 64 if new is None or new < VERIFY_QUERIES else 96
    q = normal(batch, q_length, heads, head_dim, seed=seed)
    caches = [normal(batch, kv_length, kv_heads, head_dim, seed=seed + i) for i in (1, 2)]
    rows = [None, None]
    if new is not None:
        rows = [normal(batch, new, kv_heads, head_dim, seed=seed + i) for i in (3, 4)]
    return q, *caches, *rows


# Attention to old keys: options, and numbers of queries.
OLD_KEYS = [
    ({}, (1,)),
    ({"causal": True, "softmax_scale": 0.4}, (4, MANY)),
    ({"window_size_left": 9, "window_size_right": 3}, (4,)),
    (
        {"leftpad_k": (3, 0), "num_splits": 3, "softcap": 2.0, "attention_chunk": 8}
        | {"learnable_sink": "float32", "alibi_slopes": "bh"},
        (4, MANY),
    ),
]
# With new keys: options, and the numbers of queries and of new keys.
HALVES, PAIRS = ({"rotary_columns": 16, "rotary_interleaved": x} for x in (False, True))
NEW_KEYS = [
    (HALVES, (3, 5)),
    (PAIRS | {"num_splits": 3, "causal": True}, (1, 1)),
    (PAIRS | {"window_size_left": 9}, (MANY, MANY)),
    ({"leftpad_k": (3, 0), "causal": True}, (3, 5)),
    (HALVES | {"leftpad_k": (3, 0), "causal": True}, (MANY, MANY)),
]
ROWS_FIRST = {"cache": "paged", "page": PAGE, "cache_layout": ("order 021",)}
CACHES = [
    (ROWS_FIRST | {"cache_dtype": "bfloat16"}, 1),
    (ROWS_FIRST, MANY),
    ({"cache": "indexed"}, 1),
    ({"cache": "indexed"}, MANY),
    ({"cache": "indexed", "format": "fp8_e4m3"}, 1),
    (ROWS_FIRST | {"format": "q8_0"}, MANY),
]
HEADS = {"heads": 4, "kv_heads": 2, "head_dim": 32, "v_head_dim": 32, "strict": True}


def cases(old_keys, new_keys, caches):
    """Up to VERIFY_QUERIES queries run on flash_decode, more on flash_fwd."""
    sizes = {"batch": 2, "kv_length": 64, "seqused_k": (37, 21)}
    for options, lengths in old_keys:
        for q_length in lengths:
            yield Attention(CALL, q_length=q_length, **HEADS | sizes | options)
    for options, (q_length, new) in new_keys:
        by_token = "causal" in options or "window_size_left" in options
        more = {"q_length": q_length, "length": new, "by_token": by_token, "capacity": 96}
        yield Step(CALL, lengths=(17, 9), **HEADS | options | more)
    for cache, n in caches:
        more = {"q_length": n, "length": n, "causal": True, "by_token": True, "capacity": 96}
        yield Step(CALL, lengths=(17, 26), **HEADS | cache | more)


# Packed queries and trees, with and without new rows.
WHOLE = {"call": CALL, "heads": 4, "kv_heads": 2, "head_dim": 64, "causal": True}
TREE = {"tree": "parents", "tree_by_sequence": True}
PACKED_AND_TREES = [
    step(packed=((3, 3), (0, 0), (5, 4)), lengths=(20, 6, 33), **WHOLE),
    case(batch=3, q_length=1, q_lengths=(3, 0, 5), seqused_k=(20, 6, 33), kv_length=33, **WHOLE),
    step(length=6, rotary_columns=32, **TREE, **WHOLE),
    case(batch=2, q_length=6, seqused_k=(19, 26), kv_length=64, **TREE, **WHOLE),
]


@pytest.mark.parametrize("case", [*cases(OLD_KEYS, NEW_KEYS, CACHES), *PACKED_AND_TREES], ids=str)
def test_values(case):
    """The CPU kernels run, because this tests how the function calls the ops."""
    hold([case], torch.device("cpu"))


@pytest.mark.parametrize("case", [*cases(OLD_KEYS[-1:], NEW_KEYS[1::3], [])], ids=str)
def test_values_of_the_device(case, device):
    hold([case], device)


WINDOWS = [{}, {"causal": True}, {"window_size": (5, -1)}, {"window_size": (-1, 2)}]


@pytest.mark.parametrize("new", [None, 3])
@each_case("options", [*WINDOWS, {"softmax_scale": 0.4}, {"cache_batch_idx": ints(1, 0)}])
def test_plain_calls_equal_other_calls(options, new):
    """Plain calls have a separate op. Its results equal those of other calls."""
    arguments = options | {"cache_seqlens": ints(37, 21)}
    if "cache_batch_idx" not in options:
        arguments["block_table"] = ints(1, 0).view(2, 1)
    for interleaved in (False, True):
        plain, other = (make(q_length=3, new=new) for _ in range(2))
        if new:
            tables = dict(zip(("rotary_cos", "rotary_sin"), rotary_tables(96, 8), strict=True))
            arguments |= tables | {"rotary_interleaved": interleaved}
        out = flash_attn_with_kvcache(*plain, **arguments)
        expected, _ = flash_attn_with_kvcache(*other, **arguments, return_softmax_lse=True)
        assert torch.equal(out, expected)
        assert all(map(torch.equal, plain[1:3], other[1:3]))


def test_lengths_of_any_form():
    """An int is the length of every sequence. None means the whole cache."""
    tensors = make()
    for length, lengths in ((21, ints(21, 21)), (None, ints(64, 64))):
        actual = flash_attn_with_kvcache(*tensors, cache_seqlens=length)
        same = flash_attn_with_kvcache(*tensors, cache_seqlens=lengths)
        torch.testing.assert_close(actual, same)


@pytest.mark.parametrize(
    "q_length, num_splits, kernels",
    [
        (1, 1, ["flash_decode"]),
        (VERIFY_QUERIES, 2, ["flash_decode", "merge_splits"]),
        (MANY, 0, ["append_kv", "flash_fwd"]),
        (MANY, 1, ["append_kv", "flash_fwd"]),
        (MANY, 2, ["append_kv", "flash_decode", "merge_splits"]),
    ],
)
def test_launches(q_length, num_splits, kernels):
    options = {"cache_seqlens": 17, "num_splits": num_splits, "causal": True}
    with simulate(record=True) as run:
        flash_attn_with_kvcache(*make(q_length=q_length, new=q_length), **options)
    assert [launch.kernel for launch in run.recorded] == kernels


@pytest.mark.parametrize("length", [5, 70])
def test_q_must_not_overlap_a_cache(length):
    """Appending would write q before attention reads it."""
    memory, v_cache, k, v = (torch.randn(1, n, 2, 32) for n in (300, 200, length, length))
    call = {"v_cache": v_cache, "k": k, "v": v}
    call |= {"cache_seqlens": 9, "causal": True, "num_splits": 1}
    with simulate(check=True):
        before = memory.clone()
        with pytest.raises(ValueError, match="q may share elements with k_cache, which"):
            flash_attn_with_kvcache(memory[:, 5 : length + 5], memory[:, :200], **call)
        assert torch.equal(memory, before)
        out = flash_attn_with_kvcache(memory[:, 200 : length + 200], memory[:, :200], **call)
    assert out.isfinite().all()


def tables_of(rows):
    return dict.fromkeys(("rotary_cos", "rotary_sin"), torch.ones(rows, 8))


OLD = {"k": None, "v": None}  # without new keys
SHORT_TABLE = {"block_table": ints(0, 1).view(2, 1)}
BAD_PAGE = {"block_table": ints(0, 1, 9, 1).view(2, 2)}
INVALID_CALLS = [
    ({"k": None}, "only one of k and v"),
    ({"cache_seqlens": 2**31}, "is 2147483648; it must fit"),
    ({"cache_seqlens": None}, "cache_seqlens is None"),
    ({"cache_seqlens": 64}, r"cache_seqlens\[0\] is 64"),
    ({"cache_seqlens": 4.0}, "cache_seqlens is 4.0; it must be an int or a tensor"),
    ({"q": torch.zeros(2, 4, 32)}, "q has shape"),
    (OLD | tables_of(40), "rotary_cos or rotary_sin is given without k and v"),
    ({"num_splits": 1025}, r"num_splits is 1025; .* in 1\.\.1024"),
    ({"cache_leftpad": torch.tensor([1, 2])}, "cache_leftpad has dtype int64"),
    (  # padding does not move the rows
        tables_of(5) | {"cache_leftpad": ints(3, 3)},
        r"rows 5 to 5 of rotary_cos \(starting at cache_seqlens\); they must be in 0\.\.4",
    ),
    (
        OLD | SHORT_TABLE | {"cache_seqlens": 65},
        r"cache_seqlens\[0\] is 65; .* the pages of sequence 0 in block_table hold",
    ),
    # Errors of attention. They must be raised before rows are written.
    ({"q": lambda q: torch.cat([q, q], -1)[..., ::2]}, r"q has strides \(.*; the last must be 1"),
    (BAD_PAGE | {"cache_seqlens": ints(5, 64)}, r"block_table\[1, 0\] is 9"),
    (
        {"cache_batch_idx": ints(1, 1), "cache_seqlens": ints(5, 9)},
        "sequence 0 writes row 5 of batch 1 of k_cache, and sequence 1 reads it .*; copy the batch",
    ),
]


@pytest.mark.parametrize("q_length", [1, MANY])
@pytest.mark.parametrize("new", [0, 1, 17])
def test_gradients_raise_in_backward(new, q_length):
    """An error is raised in backward only, so that a model runs without torch.no_grad."""
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
def test_a_gradient_of_any_argument_raises(name, q_length):
    """The errors are the same for any number of queries, also in transforms of torch.func."""
    q, k_cache, v_cache, *_ = make(q_length=q_length)
    arguments = {"q": q, "k_cache": k_cache, "v_cache": v_cache, "alibi_slopes": torch.rand(4)}

    def total(x):
        return flash_attn_with_kvcache(**arguments | {name: x}).sum()

    message = rf"flash_attn_with_kvcache has no gradient, and {name} requires grad: use flash_attn_"
    with pytest.raises(NotImplementedError, match=message):
        total(arguments[name].clone().requires_grad_()).backward()
    with pytest.raises(NotImplementedError, match=message):
        torch.func.grad(total)(arguments[name])
    with pytest.raises(NotImplementedError, match=rf"no forward-mode derivative .*, which {name}"):
        torch.func.jvp(total, (arguments[name],), (arguments[name],))


@pytest.mark.parametrize("q_length", [1, MANY])
@pytest.mark.parametrize("new", [None, 1])
def test_autocast(new, q_length):
    """q, k and v are cast. The caches are written in place, so they must have autocast's dtype."""
    q, k_cache, v_cache, *rows = make(q_length=q_length, new=new)
    halves = [None if x is None else x.bfloat16() for x in (q, k_cache, v_cache, *rows)]
    written = [x.clone() for x in halves[1:3]]
    expected = flash_attn_with_kvcache(*halves, cache_seqlens=40)
    with torch.autocast("cpu", torch.bfloat16):
        actual = flash_attn_with_kvcache(q, *written, *rows, cache_seqlens=40)
        with pytest.raises(ValueError, match=r"v_cache has dtype .*, and autocast casts q"):
            flash_attn_with_kvcache(q, written[0], v_cache, *rows, cache_seqlens=40)
    for result, right in zip((actual, *written), (expected, *halves[1:3]), strict=True):
        assert torch.equal(result, right)


@pytest.mark.parametrize("q_length", [1, MANY])
def test_gradients_raise_in_a_graph(q_length):
    compiled = torch.compile(flash_attn_with_kvcache, backend="eager", fullgraph=True)
    q, k_cache, v_cache, *_ = make(q_length=q_length)
    assert torch.equal(compiled(q, k_cache, v_cache), flash_attn_with_kvcache(q, k_cache, v_cache))
    with pytest.raises(Exception, match=r"has no gradient, and q requires grad"):
        compiled(q.requires_grad_(), k_cache, v_cache)


@pytest.mark.parametrize("q_length", [1, MANY])
@pytest.mark.parametrize("empty", ["batch", "new"])
def test_zero_new_rows_are_accepted(empty, q_length, device):
    """The batch is empty, or there are 0 new keys. q is still rotated."""
    tensors = make(q_length=q_length, **{"new": 0} | {empty: 0})
    q, k_cache, v_cache, k, v = (x.to(device) for x in tensors)
    cos, sin = (table.to(device) for table in rotary_tables(96, 8))
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
@each_case("changes, message", INVALID_CALLS)
def test_invalid_calls_are_refused(changes, message, q_length, device):
    q, k_cache, v_cache, k, v = make(q_length=q_length, new=1)
    arguments = {"q": q, "k_cache": k_cache, "v_cache": v_cache, "k": k, "v": v}
    arguments |= {"cache_seqlens": 5} | changes
    if callable(arguments["q"]):
        arguments["q"] = arguments["q"](q)
    arguments = on(device, arguments)
    before = arguments["k_cache"].clone()
    with pytest.raises((TypeError, ValueError), match=message):
        flash_attn_with_kvcache(**arguments)
    assert torch.equal(arguments["k_cache"], before), "rows were written"

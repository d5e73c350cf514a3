"""PagedKVCache and StaticKVCache name the invalid argument that they refuse, and stay unchanged."""

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.cache.test_kv_cache import HEAD_DIM, HEADS, LAYERS, PAGE, make
from tests.common.test_bad_options import resized
from tests.helpers.cases import each_case
from torch_metal_attn.kv_cache import LatentCache, PagedKVCache, StaticKVCache, StaticLatentCache


def some_rows(batch=1, heads=HEADS, length=3, columns=HEAD_DIM):
    return torch.zeros(batch, heads, length, columns)


def static():
    return StaticKVCache(3, 10, HEADS, HEAD_DIM, num_layers=LAYERS, dtype=torch.float32)


ROWS, TABLE = some_rows(), torch.ones(40, 2)
TABLES = {"rotary_cos": TABLE, "rotary_sin": TABLE}
PACKED = ROWS[0].transpose(0, 1)
SMALL = {"num_pages": 4, "page_size": 4, "num_kv_heads": 2, "head_dim": 64}
CONSTRUCTOR_ARGUMENTS = [
    *(
        ({size: 2**31}, f"{size} is 2147483648; .*in 1")
        for size in (*SMALL, "v_head_dim", "num_layers")
    ),
    ({"num_pages": 0}, "num_pages is 0; it must be at least 1"),
    ({"head_dim": 577}, r"head_dim is 577; it must be in 1\.\.576"),
    ({"head_dim": 576}, r"v_head_dim is 576; it must be in 1\.\.512"),
    ({"layout": "BHD"}, "layout is 'BHD'; it must be NHD or HND"),
    ({"dtype": torch.int8}, r"dtype is torch.int8; it must be float32, float16 or bfloat16"),
    ({"device": "gpu"}, "device is 'gpu'; it must be a torch device"),
    ({"device": "meta"}, "device is meta, where tensors have no values"),
    ({"format": "q5"}, "format is 'q5'; it must be one of q8_0"),
    ({"v_format": "q4_g32"}, "v_format is 'q4_g32' with no format; leave it"),
    ({"v_head_dim": 48, "format": "q4_g64"}, "v_head_dim is 48; q4_g64 needs a multiple of 64"),
    ({"k_scale": torch.ones(2)}, "k_scale is given and its format is None; leave"),
    ({"format": "fp8_e4m3", "k_scale": torch.ones(3)}, r"k_scale has .*; it must be \(2,\)"),
    ({"v_head_dim": 65, "values_in_keys": True}, "v_head_dim is 65 and head_dim 64; with"),
    (
        {"values_in_keys": True, "format": "fp8_e4m3", "v_scale": TABLE},
        "v_scale is given with values_in_keys",
    ),
    ({"hadamard": 64}, "hadamard is 64 with no format; lea"),
    ({"hadamard": 128, "format": "q8_0"}, "head_dim has 64 columns; hadamard=128 needs a multiple"),
    ({"recent": 4}, "recent is 4 with no format, so"),
    ({"recent": -1}, "recent is -1; it must be at least 0"),
    ({"recent": 2**30}, "recent is 1073741824; it must be in 0"),
    ({"recent": 4, "windows": [3], "format": "q8_0"}, r"recent is 4 with windows \[3\]; attention"),
    ({"windows": [5, 5]}, "windows has 2 ints; it must have 1, one per layer"),
    ({"windows": [-2]}, r"windows\[0\] is -2; it must be at least -1"),
    ({"windows": 5}, "windows is 5; it must be a sequence of ints, one per layer"),
    ({"page_size": 4.5}, "page_size is 4.5; it must be an int"),
    ({"format": "fp8_e4m3", "v_scale": 2.0}, "v_scale is a float; it must be a tensor"),
]
APPEND_ARGUMENTS = [
    ({"ids": [7]}, "there is no sequence 7"),
    ({"ids": 0}, "ids is 0; it must be a sequence of int"),
    ({"layer": 2}, "layer is 2; it must be in 0"),
    ({"k": None}, "k is None; it must be a tensor"),
    ({"k": ROWS[0]}, r"k has shape \(2, 3, 8\)"),
    ({"k": ROWS.double()}, "k is torch.float64 on cpu; it must be torch.float32 on cpu"),
    ({"v": None}, "v is None; only a cache with"),
    ({"v": some_rows(heads=3)}, r"v has shape \(1, 3, 3, 8\); it must be \(1, 2, 3, 8\)"),
    ({"token_ids": [[1, 2]]}, r"token_ids has rows of \[2\] tokens; they must have \[3\]"),
    ({"token_ids": 1.5}, "token_ids is 1.5; it must be a row of ints for each sequence"),
    ({"length": [3]}, r"k has shape .*; it must be \(3, 2, 8\): length is given"),
    ({"length": [1, 2]}, "length has 2 ints; it must"),
]
THREE = {"q": PACKED, "k": PACKED, "v": PACKED, "length": 3}
NO_ROWS = {"q": PACKED[:0], "k": PACKED[:0], "v": PACKED[:0], "length": [0]}
STEP_ARGUMENTS = [
    *(
        ({name: None}, f"decode_step of a cache has no argument {name}: the cache sets it")
        for name in ("block_table", "cache_seqlens", "k_scale", "hadamard")
    ),
    ({"cu_seqlens_q": None}, "decode_step of a cache has no argument cu_seqlens_q: pass length"),
    (THREE | {"q": ROWS[0]}, r"q has shape \(2, 3, 8\); it must have 3 rows, \(T, Hq, D\): length"),
    (THREE | {"parents": torch.zeros(2).int()}, r"parents has shape \(2,\); it must have 3 rows"),
    (NO_ROWS, r"length is \[0\]; decode_step needs at least one new row"),
    *((THREE | {n: 1}, f"{n} is given with length;") for n in ("indices", "kv_block_size")),
]
CALLS = [
    (lambda c: StaticLatentCache(1, 4, 513), r"latent_dim is 513; it must be in 1\.\.512"),
    (lambda c: StaticLatentCache(1, 4, rotary_dim=65), r"rotary_dim is 65; it must be in 0\.\.64"),
    (
        lambda c: StaticLatentCache(1, 4, 64, 16, format="q8_0"),
        r"latent_dim \+ rotary_dim is 80; q8_0 needs a multiple of 32",
    ),
    (lambda c: StaticKVCache(2**31, 4, 2, 8), "batch_size is 2147483648; it must be in 1"),
    (lambda c: StaticKVCache(1, 2**31, 2, 8), "max_length is 2147483648; it must be in 1"),
    (lambda c: StaticKVCache(1, 4, 2, 8, windows=[3]), "StaticKVCache has no argument windows"),
    (
        lambda c: LatentCache(1, 4, 32, 32).append([], torch.zeros(())),
        r"k has shape \(\); it must be \(0, 1, L, 64\)",
    ),
    (lambda c: c.seqlens([0, 0]), r"ids are \[0, 0\]; each sequence may occur only once"),
    (lambda c: c.truncate(0, 1), "length is 1; sequence 0 has 0 rows"),
    (lambda c: (c.free(0), c.fork(0)), "there is no sequence 0: the id was freed, or never"),
    (lambda c: c.free("a"), "id is 'a'; it must be an int"),
    (lambda c: c.seqlens([0], "1"), "layer is '1'; it must be an int"),
    (lambda c: c.match_prefix([1.5]), r"token_ids\[0\] is 1.5; it must be an int"),
    (lambda c: c.advance([0], -1), "length is -1; it must be at least 0"),
    (lambda c: c.reserve([0], 1.5), "length is 1.5; it must be an int"),
    (lambda c: c.reserve([0], resized(torch.tensor(1), 0)), r"length has shape \(\) .* of 0 bytes"),
    (lambda c: c.import_sequence([]), "exported has type list; it must be what export_sequence"),
    *(
        (lambda c, x=x: c.allocate(x), "namespace is .*; it must be None, a str, an int")
        for x in (True, 1.0, ["a"], ("a", True))
    ),
    (
        lambda c: make(windows=[-1, 5]).cascade([], layer=1, window_size=(6, 0)),
        r"window_size is \(6, 0\); layer 1 keeps the rows of a window, so .* in 0\.\.5",
    ),
    (lambda c: static().decode_step(*[ROWS] * 3, foo=1), "decode_step has no argument foo;"),
    (lambda c: static().advance(11), r"length is 11; a sequence has 0 of 10 rows, .* in 0\.\.10"),
    (lambda c: static().truncate("a", 1), "index is 'a'; it must be an int"),
    (lambda c: static().slots([0.5]), r"indices\[0\] is 0.5; it must be an int"),
    (lambda c: static().reset(2), "indices is 2; it must be a sequence of ints"),
    (lambda c: static().reorder([0]), "beam_idx has 1 entry; it must"),
    (lambda c: static().reorder([0, 3, 1]), "beam_idx is 3; it must be in 0"),
    (
        lambda c: static().reorder(torch.zeros(1).int().expand(2**31)),
        "beam_idx has 2147483648 numbers; it may have up to 134217728",
    ),
]
INVALID_CALLS = [
    *((lambda c, x=x: PagedKVCache(**SMALL | x), message) for x, message in CONSTRUCTOR_ARGUMENTS),
    *(
        (lambda c, x=x: c.append(**{"ids": [0], "k": ROWS, "v": ROWS} | x), message)
        for x, message in APPEND_ARGUMENTS
    ),
    *(
        (lambda c, x=x: c.decode_step(**{"ids": [0], "q": ROWS, "k": ROWS, "v": ROWS} | x), message)
        for x, message in STEP_ARGUMENTS
    ),
    *CALLS,
]

INVALID_OPERANDS = [
    ({"k": some_rows(columns=2 * HEAD_DIM)[..., ::2]}, "k has strides"),
    ({"v": some_rows(columns=2 * HEAD_DIM)[..., ::2]}, "v has strides"),
    (dict.fromkeys(TABLES, torch.ones(40, 5)), "rotary_cos has 5 columns and k has a head dim of"),
    ({"rotary_cos": TABLE}, "only one of rotary_cos and rotary_sin"),
    (dict.fromkeys(TABLES, TABLE[:9]), r"rows 7 to 9 of rotary_cos .*; they must be in 0\.\.8"),
    (TABLES | {"rotary_cos": [1.0]}, "rotary_cos is a list"),
    ({"q": some_rows()}, "q is given and rotary_cos is not"),
    (TABLES | {"q": some_rows(columns=4)}, r"q has shape \(1, 2, 3, 4\)"),
    ({"rotary_interleaved": True}, "rotary_interleaved is True and"),
    (TABLES | {"q": torch._neg_view(some_rows())}, "q is a view with its negative bit set"),
    (TABLES | {"q": some_rows().requires_grad_()}, "q is a leaf .*metal_attn::append_kv cannot wr"),
    ({"leftpad_k": torch.ones(1).int()}, "append has no argument leftpad_k; it"),
]


@pytest.mark.parametrize("kind", [torch.tensor, np.array, iter], ids=lambda kind: kind.__name__)
def test_ids_may_be_of_any_type(kind):
    cache = make()
    ids = [cache.allocate(), cache.allocate()]
    rows = some_rows(batch=2)
    for layer in range(LAYERS):
        cache.append(kind(ids), rows, rows, layer, token_ids=[[1, 2, 3]] * 2)
        cache.reserve(kind(ids), 2, layer)
        cache.advance(kind(ids), 2, layer)
    cache.accept(kind(ids), [[1], [0]], [[-1, -1], [-1, 0]])
    assert cache.seqlens(kind(ids)).tolist() == [4, 4]
    assert torch.equal(cache.block_table(kind(ids)), cache.block_table(ids))


@pytest.mark.parametrize("shared", [False, True])
@each_case("changes, message", INVALID_OPERANDS)
def test_a_refused_append_changes_nothing(changes, message, shared):
    operands = {"k": some_rows(), "v": some_rows()} | changes
    cache, plain = make(), StaticKVCache(1, 10, HEADS, HEAD_DIM, dtype=torch.float32)
    id, ones, tokens = cache.allocate(), some_rows(length=PAGE) + 1, list(range(PAGE))
    for layer in range(LAYERS):
        cache.append([id], ones, ones, layer, token_ids=[tokens])
    plain.append(ones, ones)
    if shared:
        cache.fork(id)
    cache.truncate(id, PAGE - 1)
    plain.truncate(0, PAGE - 1)

    def state():
        stored = (x.clone() for c in (cache, plain) for one in c.layers for x in one.by_block())
        same, matched = cache.match_prefix(tokens)
        cache.free(same)
        numbers = torch.tensor([cache.num_free_pages, matched])
        return [*stored, cache.block_table([id]), cache.seqlens([id]), plain.seqlens(), numbers]

    before = state()
    assert before[-1][1] == PAGE
    for one, arguments in ((cache, ([id],)), (plain, ())):
        with pytest.raises((TypeError, ValueError, NotImplementedError), match=message):
            one.append(*arguments, **operands)
    assert all(map(torch.equal, state(), before))


def test_an_append_is_checked_without_a_launch():
    """The check runs before a page is allocated, so that an error changes nothing."""
    called = []

    class Record(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            called.append(func.name())
            return func(*args, **kwargs or {})

    cache, rows = make(), some_rows()
    id = cache.allocate()
    with Record():
        cache.append([id], rows, rows, q=rows.clone(), **TABLES)
    ours = [name for name in called if "metal_attn" in name]
    assert ours == ["metal_attn_explain::append_kv", "metal_attn::append_kv"]


@pytest.mark.parametrize("shared_by", ["a fork", "its tokens"])
def test_advance_refuses_rows_that_were_not_reserved(shared_by):
    """The last page is shared with a fork, or the tokens of truncated rows can still match it."""
    cache, rows = make(), some_rows(length=PAGE)
    id = cache.allocate()
    for layer in range(LAYERS):
        cache.append([id], rows, rows, layer, token_ids=[range(PAGE)])
    cache.truncate(id, PAGE - 1)
    if shared_by == "a fork":
        cache.reserve([id], 1)
        cache.fork(id)
    with pytest.raises(ValueError, match="length is 1; call reserve with the same length first"):
        cache.advance([id], 1)
    assert cache.seqlens([id]).tolist() == [PAGE - 1]
    cache.reserve([id], 1)
    cache.advance([id], 1)
    assert cache.match_prefix(range(PAGE))[1] == 0


@each_case("call, message", INVALID_CALLS)
def test_invalid_calls_are_refused(call, message):
    cache = make()
    cache.allocate()
    with pytest.raises((TypeError, ValueError), match=message):
        call(cache)
    assert cache.num_free_pages == make().num_free_pages
    if 0 in cache._sequences:
        assert cache.seqlens([0]).tolist() == [0]

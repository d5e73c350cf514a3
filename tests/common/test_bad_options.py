"""What flash_fwd and flash_varlen_fwd refuse of their options: the ValueError says what and why."""

import math

import pytest
import torch

import torch_metal_attn
from tests.helpers.cases import each_case
from tests.helpers.refused import refused, refused_alike, without_data

NAMESPACES = {
    "op": (torch.ops.metal_attn, ""),
    "explain": (torch.ops.metal_attn, "_explain"),
    "simulator": (torch.ops.metal_attn_simulator, ""),
}
LONGEST = 2**31 - 1024


def call(where, tensors, options):
    """The dense op, or with cu_seqlens_q among the tensors the packed one."""
    namespace, suffix = NAMESPACES[where]
    name = "flash_varlen_fwd" if "cu_seqlens_q" in tensors else "flash_fwd"
    return getattr(namespace, name + suffix)(*tensors.values(), **options)


def ints(*values):
    return torch.tensor(values, dtype=torch.int32)


def dense():
    """Two sequences of 4 query heads and 2 KV heads, 16 queries and 24 keys."""
    shapes = {"q": (2, 4, 16, 32), "k": (2, 2, 24, 32), "v": (2, 2, 24, 48)}
    return {name: torch.randn(shape, dtype=torch.float16) for name, shape in shapes.items()}


def packed():
    """Two sequences of 16 and 4 queries, and of 10 and 24 keys."""
    shapes = {"q": (20, 4, 32), "k": (34, 2, 32), "v": (34, 2, 48)}
    tensors = {name: torch.randn(shape, dtype=torch.float16) for name, shape in shapes.items()}
    ends = {"cu_seqlens_q": ints(0, 16, 20), "cu_seqlens_k": ints(0, 10, 34)}
    return tensors | ends | {"max_seqlen_q": 16, "max_seqlen_k": 24}


def bools(*shape):
    return torch.ones(shape, dtype=torch.bool)


def tables(q=None, k=None):
    """cos and sin for each side: of the shape given."""
    return {
        f"{side}_rotary_{name}": torch.ones(shape)
        for side, shape in (("q", q), ("k", k))
        if shape is not None
        for name in ("cos", "sin")
    }


def strided(tensor):
    """The same numbers, two elements apart."""
    return torch.stack([tensor, tensor], -1).flatten(-2)[..., ::2]


def resized(tensor, size):
    tensor.untyped_storage().resize_(size)
    return tensor


def state(rng_state=None, dropout_p=0.1):
    """Options of dropout."""
    rng_state = torch.tensor([1, 2]) if rng_state is None else rng_state
    return {"dropout_p": dropout_p, "rng_state": rng_state}


def twice(tensor, message):
    """A case for each of the index tensors, seqused_k and leftpad_k."""
    return {
        f"{name}: {message}": ({name: tensor}, rf"{name} {message}")
        for name in ("seqused_k", "leftpad_k")
    }


# What is wrong without looking at a tensor's values or memory.
BAD = {
    # Numbers
    "scale nan": ({"softmax_scale": math.nan}, r"softmax_scale is nan; .*finite"),
    "scale inf": ({"softmax_scale": -math.inf}, r"softmax_scale is -inf; .*finite"),
    "scale 1e39": ({"softmax_scale": 1e39}, r"softmax_scale is 1e\+39; .*finite in float32"),
    "softcap nan": ({"softcap": math.nan}, r"softcap is nan; it must be 0 \(off\) or positive"),
    "softcap inf": ({"softcap": math.inf}, r"softcap is inf; .*positive and finite"),
    "softcap negative": ({"softcap": -1.0}, r"softcap is -1; it must be 0 \(off\)"),
    "softcap 1e39": ({"softcap": 1e39}, r"softcap is 1e\+39; .*finite in float32"),
    "softcap 1e-60": ({"softcap": 1e-60}, r"softcap is 1e-60; .*positive .*in float32"),
    "causal and a right window": (
        {"causal": True, "window_size_right": 3},
        r"window_size_right is 3 with causal=True, which makes it 0; leave it at -1",
    ),
    "chunk negative": ({"attention_chunk": -1}, r"attention_chunk is -1; .*0 \(off\) or in 1\.\."),
    "chunk too long": (
        {"attention_chunk": LONGEST + 1},
        rf"attention_chunk is {LONGEST + 1}; .*in 1\.\.{LONGEST}",
    ),
    "offset too far": (
        {"q_offset": LONGEST + 1},
        rf"q_offset is {LONGEST + 1}; it must be in -{LONGEST}\.\.{LONGEST}",
    ),
    "offset too far back": ({"q_offset": -(2**63)}, r"q_offset is -9223372036854775808; .*in -"),
    # Lengths
    **twice(torch.tensor([3, 3]), r"has dtype int64; it must be int32"),
    **twice(torch.ones(2), r"has dtype float32; it must be int32"),
    **twice(ints(3), r"has shape \(1,\); it must be \(2,\)"),
    **twice(ints(3, 3, 3), r"has shape \(3,\); it must be \(2,\)"),
    **twice(ints(3, 3)[None], r"has shape \(1, 2\) .*contiguous with 1 dimension"),
    **twice(ints(3)[0], r"has shape \(\) .*contiguous with 1 dimension"),
    **twice(strided(ints(3, 3)), r"has shape \(2,\) and strides \(2,\); .*contiguous"),
    **twice(ints(3).expand(2), r"has shape \(2,\) and strides \(0,\); .*contiguous"),
    # Masks and biases
    "mask int": (
        {"attn_mask": bools(16, 24).int()},
        r"attn_mask has dtype int32; it must be bool, float32, float16 or bfloat16",
    ),
    "mask uint8": ({"attn_mask": bools(16, 24).byte()}, r"attn_mask has dtype .*; it must be "),
    "mask float64": (
        {"attn_mask": torch.zeros(16, 24).double()},
        r"attn_mask has dtype float64; it must be bool, float32, float16 or bfloat16",
    ),
    "bias bool": ({"attn_bias": bools(16, 24)}, r"attn_bias has dtype bool; .*float32"),
    "bias float64": (
        {"attn_bias": torch.zeros(16, 24).double()},
        r"attn_bias has dtype float64; .*float32, float16 or bfloat16",
    ),
    "floating mask and bias": (
        {"attn_mask": torch.zeros(16, 24), "attn_bias": torch.zeros(16, 24)},
        r"attn_mask is floating and attn_bias is given too; add the two yourself",
    ),
    "mask of no dimension": (
        {"attn_mask": bools()},
        r"attn_mask has shape \(\); it must broadcast to \(2, 4, 16, 24\)",
    ),
    "mask of 5 dimensions": (
        {"attn_mask": bools(1, 2, 4, 16, 24)},
        r"attn_mask has shape \(1, 2, 4, 16, 24\); it must broadcast to \(2, 4, 16, 24\)",
    ),
    "mask too long": ({"attn_mask": bools(16, 25)}, r"attn_mask has shape \(16, 25\); .*broadcast"),
    "mask too short": ({"attn_mask": bools(23)}, r"attn_mask has shape \(23,\); .*broadcast"),
    "mask transposed": ({"attn_mask": bools(24, 16)}, r"attn_mask has shape \(24, 16\); "),
    "mask of KV heads": ({"attn_mask": bools(2, 2, 16, 24)}, r"attn_mask has shape .*\(2, 4, 16"),
    "mask of padding": ({"attn_mask": bools(2, 24)}, r"attn_mask has shape \(2, 24\); "),
    "mask empty": ({"attn_mask": bools(16, 0)}, r"attn_mask has shape \(16, 0\); .*broadcast"),
    "bias of a batch": (
        {"attn_bias": torch.zeros(3, 1, 1, 1)},
        r"attn_bias has shape \(3, 1, 1, 1\); it must broadcast to \(2, 4, 16, 24\)",
    ),
    # Slopes and sinks
    "slopes half": (
        {"alibi_slopes": torch.zeros(4).half()},
        r"alibi_slopes has dtype float16; it must be float32",
    ),
    "slopes of KV heads": (
        {"alibi_slopes": torch.zeros(2)},
        r"alibi_slopes has shape \(2,\); it must be \(4,\) or \(2, 4\)",
    ),
    "slopes transposed": ({"alibi_slopes": torch.zeros(4, 2)}, r"alibi_slopes has shape \(4, 2\)"),
    "slopes of 1 batch": ({"alibi_slopes": torch.zeros(1, 4)}, r"alibi_slopes has shape \(1, 4\)"),
    "slopes scalar": ({"alibi_slopes": torch.zeros(())}, r"alibi_slopes has shape \(\)"),
    "slopes strided": (
        {"alibi_slopes": strided(torch.zeros(4))},
        r"alibi_slopes has strides \(2,\); the last must be 1: call alibi_slopes\.contiguous\(\)",
    ),
    "slopes strided by batch": (
        {"alibi_slopes": torch.zeros(4, 2).T},
        r"alibi_slopes has strides \(1, 2\); the last must be 1",
    ),
    "sink float64": (
        {"learnable_sink": torch.zeros(4).double()},
        r"learnable_sink has dtype float64; it must be float32, float16 or bfloat16",
    ),
    "sink of KV heads": (
        {"learnable_sink": torch.zeros(2)},
        r"learnable_sink has shape \(2,\); it must be \(4,\)",
    ),
    "sink of batches": ({"learnable_sink": torch.zeros(2, 4)}, r"learnable_sink has shape \(2, 4"),
    "sink expanded": (
        {"learnable_sink": torch.zeros(1).expand(4)},
        r"learnable_sink has strides \(0,\); the last must be 1: call learnable_sink\.contig",
    ),
    # Rotary tables
    "no sin": (
        {"q_rotary_cos": torch.ones(16, 8)},
        r"only one of q_rotary_cos and q_rotary_sin is given; give both or neither",
    ),
    "no cos": (
        {"k_rotary_sin": torch.ones(24, 8)},
        r"only one of k_rotary_cos and k_rotary_sin is given; give both or neither",
    ),
    "cos of q, sin of k": (
        {"q_rotary_cos": torch.ones(24, 8), "k_rotary_sin": torch.ones(24, 8)},
        r"only one of q_rotary_cos and q_rotary_sin is given",
    ),
    "interleaved without tables": (
        {"rotary_interleaved": True},
        r"rotary_interleaved is True and no rotary table is given",
    ),
    "tables float64": (
        {name: table.double() for name, table in tables((16, 8)).items()},
        r"q_rotary_cos has dtype float64; it must be float32, float16 or bfloat16",
    ),
    "tables of two dtypes": (
        tables((16, 8)) | {"q_rotary_sin": torch.ones(16, 8).half()},
        r"q_rotary_sin is float16 with 8 columns and q_rotary_cos float32 ",
    ),
    "tables of two widths": (
        tables((16, 8), (24, 4)),
        r"k_rotary_cos is float32 with 4 columns and q_rotary_cos float32 "
        r"with 8; they must be alike",
    ),
    "table too short": (
        tables((15, 8)),
        r"q_rotary_cos has shape \(15, 8\); it must be .* length of at least 16 and R in 2\.\.32",
    ),
    "table of k too short": (
        tables(None, (23, 8)),
        r"k_rotary_cos has shape \(23, 8\); .* length of at least 24",
    ),
    "sin alone too short": (
        tables((16, 8)) | {"q_rotary_sin": torch.ones(15, 8)},
        r"q_rotary_sin has shape \(15, 8\); ",
    ),
    "table too wide": (tables((16, 17)), r"q_rotary_cos has shape \(16, 17\); .*R in 2\.\.32"),
    "table without columns": (tables((16, 0)), r"q_rotary_cos has shape \(16, 0\); "),
    "table of 1 dimension": (tables((16,)), r"q_rotary_cos has shape \(16,\); "),
    "table of no dimension": (tables(()), r"q_rotary_cos has shape \(\); "),
    "table of 4 dimensions": (tables((2, 1, 16, 8)), r"q_rotary_cos has shape \(2, 1, 16, 8\); "),
    "table of 3 batches": (
        tables((3, 16, 8)),
        r"q_rotary_cos has shape \(3, 16, 8\); it must be \(length, R / 2\) or \(2, length, R / 2",
    ),
    "table strided": (
        {name: strided(table) for name, table in tables((16, 8)).items()},
        r"q_rotary_cos has strides \(16, 2\); the last must be 1: call q_rotary_cos\.contig",
    ),
    # Dropout
    "dropout_p negative": (state(dropout_p=-0.1), r"dropout_p is -0\.1; it must be in 0\.\.1"),
    "dropout_p over 1": (state(dropout_p=1.5), r"dropout_p is 1\.5; it must be in 0\.\.1"),
    "dropout_p nan": (state(dropout_p=math.nan), r"dropout_p is nan; it must be in 0\.\.1"),
    "dropout without a state": (
        {"dropout_p": 0.1},
        r"dropout_p is 0\.1 and rng_state is None; dropout needs a random state",
    ),
    "state without dropout": (
        state(dropout_p=0.0),
        r"dropout_p is 0 and rng_state is given; dropout needs .* nothing else does",
    ),
    "state of int32": (state(ints(1, 2)), r"rng_state has dtype int32; it must be int64"),
    "state float8": (
        state(torch.zeros(2).to(torch.float8_e5m2)),
        r"rng_state has dtype .*; it must be int64",
    ),
    "state of 3 numbers": (
        state(torch.tensor([1, 2, 3])),
        r"rng_state has shape \(3,\); it must be \(2,\)",
    ),
    "state of no dimension": (state(torch.tensor(1)), r"rng_state has shape \(\); "),
    "state strided": (
        state(strided(torch.tensor([1, 2]))),
        r"rng_state has strides \(2,\); the last must be 1: call rng_state\.contiguous\(\) first",
    ),
}

# What only a tensor's values or memory tell.
BAD_DATA = {
    "seqused_k negative": ({"seqused_k": ints(3, -1)}, r"seqused_k\[1\] is -1; .*in 0\.\.24, the"),
    "seqused_k too long": ({"seqused_k": ints(25, 1)}, r"seqused_k\[0\] is 25; .*in 0\.\.24, the"),
    "leftpad_k negative": ({"leftpad_k": ints(-5, 1)}, r"leftpad_k\[0\] is -5; .*in 0\.\.24, the"),
    "leftpad_k too long": ({"leftpad_k": ints(0, 25)}, r"leftpad_k\[1\] is 25; .*in 0\.\.24, the"),
    "state on meta": (
        state(torch.zeros(2).long().to("meta")),
        r"rng_state is on meta and q on cpu",
    ),
}


def with_small_storage():
    """Each tensor option with a storage that no longer holds it."""
    good = {
        "seqused_k": ints(3, 4),
        "leftpad_k": ints(0, 1),
        "attn_mask": bools(2, 4, 16, 24),
        "attn_bias": torch.zeros(2, 4, 16, 24),
        "alibi_slopes": torch.zeros(2, 4),
        "learnable_sink": torch.zeros(4),
    }
    good |= tables((16, 8), (24, 8))
    for name in good:
        whole = {other: tensor for other, tensor in good.items() if name[:8] == other[:8]}
        whole[name] = resized(good[name].clone(), 7)
        yield (
            f"{name} resized",
            (whole, rf"{name} has shape .* a storage of 7 bytes, which must hold \d+ elements"),
        )
    yield (
        "rng_state resized",
        (state(resized(torch.tensor([1, 2]), 7)), r"rng_state has shape \(2,\).* of 7 bytes"),
    )


BAD_DATA |= dict(with_small_storage())

PACKED_BAD = {
    "cu_seqlens_q int64": (
        {"cu_seqlens_q": torch.tensor([0, 16, 20])},
        r"cu_seqlens_q has dtype int64; it must be int32",
    ),
    "cu_seqlens_k float": (
        {"cu_seqlens_k": torch.tensor([0.0, 10.0, 34.0])},
        r"cu_seqlens_k has dtype float32; it must be int32",
    ),
    "cu_seqlens_q of 2 dimensions": (
        {"cu_seqlens_q": ints(0, 16, 20)[None]},
        r"cu_seqlens_q has shape \(1, 3\) .*contiguous with 1 dimension",
    ),
    "cu_seqlens_k strided": (
        {"cu_seqlens_k": strided(ints(0, 10, 34))},
        r"cu_seqlens_k has shape \(3,\) and strides \(2,\); .*contiguous",
    ),
    "cu_seqlens_q empty": (
        {"cu_seqlens_q": ints(), "cu_seqlens_k": ints()},
        r"cu_seqlens_q is empty; it must hold a 0 and each sequence's end",
    ),
    "cu_seqlens of two lengths": (
        {"cu_seqlens_k": ints(0, 34)},
        r"cu_seqlens_k has a length of 2 and cu_seqlens_q of 3; they must be equal",
    ),
    "max_seqlen_q negative": ({"max_seqlen_q": -1}, r"max_seqlen_q is -1; it must be in 0\.\."),
    "max_seqlen_k too long": (
        {"max_seqlen_k": 2**31},
        rf"max_seqlen_k is 2147483648; it must be in 0\.\.{LONGEST}",
    ),
    "q of 4 dimensions": (
        {"q": torch.zeros(1, 20, 4, 32).half()},
        r"q has 4 dimensions, .* it must have 3: \(tokens, heads, head_dim\)",
    ),
    "k of 4 dimensions": (
        {"k": torch.zeros(1, 34, 2, 32).half()},
        r"k has 4 dimensions, .* it must have 3: \(tokens, (kv_)?heads, head_dim\)",
    ),
    "v length": (
        {"v": torch.zeros(33, 2, 48).half()},
        r"v has a length of 33 and k of 34; they must be equal",
    ),
    "v heads": ({"v": torch.zeros(34, 1, 48).half()}, r"v has a number of heads of 1 and k of 2"),
    "k head dim": ({"k": torch.zeros(34, 2, 24).half()}, r"k has a head dim of 24 and q of 32"),
    "heads": (
        {"k": torch.zeros(34, 3, 32).half(), "v": torch.zeros(34, 3, 48).half()},
        r"q has 4 heads and k 3; k's must divide q's",
    ),
    "head dim": (
        {"q": torch.zeros(20, 4, 577).half(), "k": torch.zeros(34, 2, 577).half()},
        r"q has a head dim of 577; it must be in 1\.\.576",
    ),
    "q strided": (
        {"q": strided(torch.zeros(20, 4, 32).half())},
        r"q has strides \(256, 64, 2\); the last must be 1",
    ),
    "mask of the rows": (
        {"attn_mask": bools(20, 34)},
        r"attn_mask has shape \(20, 34\); it must broadcast to \(2, 4, 16, 24\)",
    ),
    "table of the rows": (
        tables((15, 8)),
        r"q_rotary_cos has shape \(15, 8\); .* length of at least 16",
    ),
}

PACKED_BAD_DATA = {
    "cu_seqlens_q starts late": (
        {"cu_seqlens_q": ints(1, 16, 20)},
        r"cu_seqlens_q\[0\] is 1; it must be 0",
    ),
    "cu_seqlens_k starts early": (
        {"cu_seqlens_k": ints(-1, 10, 34)},
        r"cu_seqlens_k\[0\] is -1; it must be 0",
    ),
    "cu_seqlens_q decreases": (
        {"cu_seqlens_q": ints(0, 16, 15)},
        r"cu_seqlens_q\[2\] is 15 and the one before 16; they must not decrease",
    ),
    "cu_seqlens_k decreases": (
        {"cu_seqlens_k": ints(0, -1, 34)},
        r"cu_seqlens_k\[1\] is -1 and the one before 0; they must not decrease",
    ),
    "cu_seqlens_q passes the rows": (
        {"cu_seqlens_q": ints(0, 16, 21)},
        r"cu_seqlens_q ends at 21 of 20 rows; it must not pass them",
    ),
    "cu_seqlens_k passes the rows": (
        {"cu_seqlens_k": ints(0, 11, 35)},
        r"cu_seqlens_k ends at 35 of 34 rows; it must not pass them",
    ),
    "cu_seqlens_k overflows": (
        {"cu_seqlens_k": ints(0, 2**31 - 1, -(2**31))},
        r"cu_seqlens_k .*(decrease|longer)",
    ),
    "max_seqlen_q too short": (
        {"max_seqlen_q": 15},
        r"cu_seqlens_q has a sequence of 16 rows and max_seqlen_q is 15; no .*longer",
    ),
    "max_seqlen_k too short": (
        {"max_seqlen_k": 23},
        r"cu_seqlens_k has a sequence of 24 rows and max_seqlen_k is 23; no .*longer",
    ),
    "seqused_k beyond its sequence": (
        {"seqused_k": ints(11, 24)},
        r"seqused_k\[0\] is 11; it must be in 0\.\.10, the keys of sequence 0",
    ),
    "leftpad_k beyond its sequence": (
        {"leftpad_k": ints(10, 25)},
        r"leftpad_k\[1\] is 25; it must be in 0\.\.24, the keys of sequence 1",
    ),
    "cu_seqlens_q resized": (
        {"cu_seqlens_q": resized(ints(0, 16, 20), 8)},
        r"cu_seqlens_q has shape \(3,\) .* a storage of 8 bytes",
    ),
}

# What is bad of two dense sequences is as bad of two packed ones.
CASES = [(dense, *case) for case in (BAD | BAD_DATA).items()] + [
    (packed, *case) for case in (BAD | PACKED_BAD | PACKED_BAD_DATA).items()
]
FAKE_CASES = [(dense, *case) for case in BAD.items()] + [
    (packed, *case) for case in (BAD | PACKED_BAD).items()
]


def ids(value):
    return value if isinstance(value, str) else getattr(value, "__name__", "")


def split(make, changes):
    """The op's tensors and its options, changed."""
    tensors = make()
    options = {name: value for name, value in changes.items() if name not in tensors}
    return tensors | {name: changes[name] for name in tensors if name in changes}, options


@each_case("make, name, case", CASES)
def test_refused(make, name, case):
    changes, message = case
    tensors, options = split(make, changes)
    with refused(rf"^{message}"):
        call("op", tensors, options)


@each_case("make, name, case", CASES[:: len(CASES) // 40])
def test_refused_before_anything_runs(make, name, case):
    changes, message = case
    tensors, options = split(make, changes)
    with torch_metal_attn.simulate(check=True) as run:
        with refused(message):
            call("op", tensors, options)
        with refused(message):
            call("simulator", tensors, options)
    assert not run.launches


@each_case("make, name, case", FAKE_CASES)
def test_refused_without_data(make, name, case):
    """The fake kernels say the same, of both namespaces."""
    changes, message = case
    tensors, options = split(make, changes)
    given = without_data(tensors), without_data(options)
    refused_alike(
        rf"^{message}",
        lambda: call("explain", tensors, options),
        lambda: call("op", *given),
        lambda: call("simulator", *given),
    )


@each_case("make, name, case", FAKE_CASES[:: len(FAKE_CASES) // 6])
def test_refused_while_it_is_compiled(make, name, case):
    changes, message = case
    tensors, options = split(make, changes)
    compiled = torch.compile(lambda: call("op", tensors, options), backend="eager")
    torch.compiler.reset()
    with pytest.raises(torch._dynamo.exc.TorchRuntimeError, match=message):
        compiled()


@pytest.mark.parametrize("make", [dense, packed])
def test_sizes_that_are_symbols_are_checked_when_it_runs(make):
    tensors = make()

    @torch.compile(backend="eager", dynamic=True)
    def compiled(*values):
        return call("op", dict(zip(tensors, values, strict=True)), {})

    torch.compiler.reset()
    compiled(*tensors.values())
    tensors["v"] = tensors["v"][:, :1]
    with refused("v has a number of heads of 1 and k of 2; they must be equal"):
        compiled(*tensors.values())


def good_options():
    return {
        "seqused_k": ints(3, 4),
        "leftpad_k": ints(0, 1),
        "attn_mask": bools(2, 4, 16, 24),
        "attn_bias": torch.zeros(2, 4, 16, 24),
        "alibi_slopes": torch.zeros(2, 4),
        "learnable_sink": torch.zeros(4),
        **tables((16, 8), (24, 8)),
    }


@pytest.mark.usefixtures("unlaunched")
@pytest.mark.parametrize("make", [dense, packed], ids=ids)
def test_good_is_good(make):
    """So that each test above fails for the one thing it changes; on every device."""
    tensors, options = make(), good_options()
    for where in NAMESPACES:
        call(where, tensors, options)
    out, lse = call("op", without_data(tensors), without_data(options))
    assert (out.shape, lse.shape) == tuple(tensor.shape for tensor in call("op", tensors, options))


@pytest.mark.parametrize("make", [dense, packed], ids=ids)
@pytest.mark.parametrize("name", good_options())
def test_on_another_device(make, name):
    options = good_options()
    options[name] = options[name].to("meta")
    for where in NAMESPACES:
        with refused(rf"^{name} is on meta and q on cpu; they must be on one device"):
            call(where, make(), options)


@pytest.mark.parametrize("name", ["cu_seqlens_q", "cu_seqlens_k"])
def test_cu_seqlens_on_another_device(name):
    tensors = packed()
    tensors[name] = tensors[name].to("meta")
    for where in NAMESPACES:
        with refused(rf"^{name} is on meta"):
            call(where, tensors, {})


@pytest.mark.parametrize("name", ["attn_mask", "attn_bias", "learnable_sink", "q_rotary_cos"])
def test_sparse(name):
    options = good_options()
    options[name] = options[name].to_sparse()
    with refused(rf"{name} is sparse .* {name}\.to_dense\(\)"):
        call("explain", dense(), options)


@pytest.mark.parametrize("name", good_options())
@pytest.mark.parametrize("dtype", [torch.bits8, torch.float8_e8m0fnu], ids=str)
def test_dtypes_without_a_name(name, dtype):
    """For which the stable ABI has no scalar_type."""
    options = good_options()
    options[name] = torch.zeros(options[name].shape, dtype=torch.uint8).view(dtype)
    for where in ("op", "explain"):
        with refused(rf"^{name} has a dtype without a name .*; it must be"):
            call(where, dense(), options)


@pytest.mark.parametrize("name", good_options())
def test_not_a_tensor(name):
    options = good_options() | {name: [1.0, 2.0]}
    for where in NAMESPACES:
        with pytest.raises(RuntimeError, match=rf"'{name}'"):
            call(where, dense(), options)


@pytest.mark.usefixtures("unlaunched")
@pytest.mark.parametrize("make", [dense, packed], ids=ids)
def test_numbers_at_their_limits_are_allowed(make):
    for options in (
        {"q_offset": LONGEST},
        {"q_offset": -LONGEST},
        {"attention_chunk": LONGEST},
        {"window_size_left": 2**63 - 1, "window_size_right": 2**63 - 1},
        {"window_size_left": -(2**63), "window_size_right": -(2**63)},
        {"causal": True, "window_size_right": 0},
        {"causal": True, "window_size_right": -7},
        {"softcap": 1e30},
        {"softmax_scale": -1e30},
    ):
        for where in NAMESPACES:
            call(where, make(), options)

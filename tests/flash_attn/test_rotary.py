"""flash-attn's rotary functions and module, against the oracle of tests/rope/rope_check.py."""

from itertools import pairwise

import pytest
import torch

from tests.helpers.cases import each_case
from tests.rope.rope_check import check_close, make_tables, normal, oracle
from torch_metal_attn import simulate
from torch_metal_attn.flash_attn.layers import rotary
from torch_metal_attn.testing.judge import on

EMB, QKV, KV = rotary.apply_rotary_emb, rotary.apply_rotary_emb_qkv_, rotary.apply_rotary_emb_kv_
TORCH = rotary.apply_rotary_emb_torch

# A function, the shape and options of a call, and the parts that it rotates and keeps.
FORMS = {
    "x": (EMB, (2, 17, 3, 24), {}, lambda x: ([x], [])),
    "x in place": (EMB, (2, 17, 3, 24), {"inplace": True}, lambda x: ([x], [])),
    "qkv": (QKV, (2, 17, 3, 4, 24), {}, lambda x: (x.unbind(2)[:2], x.unbind(2)[2:])),
    "heads of qkv": (
        *(QKV, (2, 17, 8, 24), {"num_heads_q": 4}),
        lambda x: (x.split((4, 2, 2), 2)[:2], [x[:, :, 6:]]),
    ),
    "kv": (KV, (2, 17, 2, 3, 24), {}, lambda x: (x.unbind(2)[:1], x.unbind(2)[1:])),
}
OFFSETS = {
    "none": (0, False),
    "int": (7, True),
    "int64": (torch.tensor([3, 0]), False),
    "int32": (torch.tensor([3, 9], dtype=torch.int32), True),
}


@pytest.mark.parametrize("offsets, interleaved", OFFSETS.values(), ids=OFFSETS)
@pytest.mark.parametrize("form", FORMS)
def test_dense_tensors_are_rotated(form, offsets, interleaved, device):
    """v does not change, nor do the columns after those that the tables rotate."""
    function, shape, options, parts = FORMS[form]
    cos, sin = make_tables(30, 16)
    x = normal(*shape)
    target = x.to(device, copy=True)
    options = options | {"interleaved": interleaved, "seqlen_offsets": offsets}
    out = function(target, cos.to(device), sin.to(device), **on(device, options))
    assert (out is target) == (form != "x")
    assert out.is_contiguous()
    assert torch.equal(target.cpu(), x) == (form == "x")
    name = "seqlen_offsets" if torch.is_tensor(offsets) else "seqlen_offset"
    where = {name: offsets, "interleaved": interleaved}
    rotated_parts, kept = parts(out.cpu())
    for ours, old in zip(rotated_parts, parts(x)[0], strict=True):
        check_close(ours.transpose(1, 2), old.transpose(1, 2), cos, sin, **where)
    for ours, old in zip(kept, parts(x)[1], strict=True):
        assert torch.equal(ours, old)


class TestPacked:
    @pytest.mark.parametrize("inplace", [False, True])
    @pytest.mark.parametrize("offsets", [0, 4, torch.tensor([3, 0, 1, 9])], ids=str)
    def test_packed_sequences_are_rotated(self, offsets, inplace, device):
        cos, sin = make_tables(30, 16)
        cu_seqlens = torch.tensor([0, 5, 5, 16, 17], dtype=torch.int32)
        x = normal(17, 3, 24)
        options = {"seqlen_offsets": offsets, "cu_seqlens": cu_seqlens, "max_seqlen": 11}
        target = x.to(device, copy=True)
        out = EMB(target, cos.to(device), sin.to(device), inplace=inplace, **on(device, options))
        assert (out is target) == inplace
        assert out.shape == x.shape
        each = offsets.tolist() if torch.is_tensor(offsets) else [offsets] * 4
        for (start, end), offset in zip(pairwise(cu_seqlens.tolist()), each, strict=True):
            part, mine = (rows[start:end].transpose(0, 1)[None] for rows in (x, out.cpu()))
            check_close(mine, part, cos, sin, seqlen_offset=offset)

    def test_tokens_of_no_sequence_are_rotated_at_position_0(self):
        cos, sin = make_tables(8, 16)
        x = normal(6, 2, 16)
        out = EMB(x, cos, sin, cu_seqlens=torch.tensor([0, 4]), seqlen_offsets=2)
        torch.testing.assert_close(out[4:5][None], rotated(x[4:5][None], cos, sin))
        none = EMB(x, cos, sin, cu_seqlens=torch.tensor([0]))
        torch.testing.assert_close(none[4], out[4])


LEAVES = {
    name: (function, shape, options | {"seqlen_offsets": 3, "interleaved": True})
    for name, (function, shape, options, _) in FORMS.items()
    if name != "x"
} | {"packed x": (EMB, (17, 3, 24), {"inplace": True, "cu_seqlens": torch.tensor([0, 5, 17])})}


@pytest.mark.parametrize("view", [False, True])
@pytest.mark.parametrize("case", LEAVES)
def test_leaves_are_rotated_in_place(case, view, device):
    """flash-attn's functions write to leaves that require grad, and gradients reach the leaves."""
    function, shape, options = LEAVES[case]
    options = on(device, options)
    tables = [table.to(device) for table in make_tables(30, 16)]
    x, weight = normal(*shape).to(device), normal(*shape, seed=1).to(device)
    leaf, other = (x.clone().requires_grad_() for _ in range(2))
    out = function(leaf[:] if view else leaf, *tables, **options)
    expected = function(other * 1, *tables, **options)
    (out * weight).sum().backward()
    (expected * weight).sum().backward()
    assert torch.equal(out, expected)
    assert torch.equal(leaf, out)
    assert out.data_ptr() == leaf.data_ptr()
    assert leaf._version > 0
    assert torch.equal(leaf.grad, other.grad)
    assert not torch.equal(leaf.grad, weight)


def test_compiled_functions_rotate_leaves_in_place():
    torch._dynamo.reset()
    compiled = torch.compile(rotary.apply_rotary_emb_qkv_, backend="eager")
    x, weight = normal(2, 17, 3, 3, 24), normal(2, 17, 3, 3, 24, seed=1)
    results = []
    for function in (compiled, rotary.apply_rotary_emb_qkv_):
        leaf = x.clone().requires_grad_()
        out = function(leaf, *make_tables(30, 16))
        out.backward(weight)
        results.append((out, leaf, leaf.grad))
    assert all(map(torch.equal, *results))


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("batch", [(), (2,)])
def test_flash_attns_composition_equals_the_oracle(batch, interleaved):
    cos, sin = make_tables(17, 16)
    x = normal(2, 17, 3, 24).double()
    expected = rotated(x, cos, sin, interleaved=interleaved)
    cos, sin = (table.double().expand(*batch, 17, 8) for table in (cos, sin))
    actual = TORCH(x, cos, sin, interleaved=interleaved)
    torch.testing.assert_close(actual, expected)


def rotated(x, cos, sin, **options):
    """The oracle for (B, L, H, D), in x's dtype."""
    return oracle(x.transpose(1, 2), cos, sin, **options).transpose(1, 2).to(x.dtype)


def test_qkv_is_one_dispatch():
    cos, sin = make_tables(30, 16)
    with simulate(record=True) as run:
        rotary.apply_rotary_emb_qkv_(normal(2, 17, 3, 4, 24), cos, sin)
    assert [launch.kernel for launch in run.recorded] == ["rope"]


X, PACKED, COS = normal(2, 17, 3, 24), normal(5, 3, 16), torch.zeros(30, 8)


def ends(*values):
    return {"x": PACKED, "cu_seqlens": torch.tensor(values)}


LONG = ends(0, 5) | {"max_seqlen": 29, "seqlen_offsets": 2}
EXPANDED = {"x": X[:1].expand(2, 17, 3, 24), "inplace": True}
INVALID_CALLS = [
    (EMB, {"x": PACKED}, r"x has shape \(5, 3, 16\); it must be \(B, L, H, D\)"),
    (EMB, ends(0, 2) | {"x": X}, r"x has shape \(2, 17, 3, 24\); with cu_seqlens .* \(T, H, D\)"),
    (EMB, {"seqlen_offsets": 14}, "seqlen_offsets is 14 and x has a length of 17"),
    (EMB, {"seqlen_offsets": torch.tensor([0.0, 1.0])}, "seqlen_offsets has dtype torch.float32;"),
    (EMB, {"seqlen_offsets": torch.tensor([0])}, r"seqlen_offsets has shape \(1,\); .* \(2,\)"),
    (EMB, {"seqlen_offsets": torch.tensor([0, 2**40])}, "seqlen_offsets asks for rows 0 to 10995"),
    (EMB, ends(0.0, 5.0), "cu_seqlens has dtype torch.float32"),
    (EMB, ends(0, 6), r"cu_seqlens is \[0, 6\]; .* at most 5, the tokens"),
    (EMB, LONG, "max_seqlen is 29 and seqlen_offsets 2; their sum must be at most 30"),
    (EMB, {"x": [1.0]}, "x is a list; it must be a tensor"),
    (EMB, {"cos": None}, "cos is None; it must be a tensor"),
    (EMB, {"interleaved": "a"}, "interleaved is 'a'; it must be a bool"),
    (EMB, EXPANDED, r"x has shape \(2, 17, 3, 24\) and strides .*; .* call x.clone\(\)"),
    (QKV, {"qkv": normal(2, 17, 4, 3, 24)}, r"qkv has shape \(2, 17, 4, 3, 24\); it must be"),
    (QKV, {"qkv": normal(2, 17, 6, 24)}, "num_heads_q is None; it must leave an even"),
    *(
        (QKV, {"qkv": normal(2, 17, 6, 24), "num_heads_q": n}, f"num_heads_q is {n}; it must leave")
        for n in (3, 8)
    ),
    (QKV, {"qkv": None}, "qkv is None; it must be a tensor"),
    (QKV, {"qkv": normal(2, 17, 6, 24), "num_heads_q": 4.0}, r"num_heads_q is 4\.0; it must be an"),
    (QKV, {"cos_k": 1, "sin_k": 1}, "cos_k is an int; it must be a tensor"),
    (QKV, {"num_heads_q": 4}, "num_heads_q is 4; it must be None"),
    (QKV, {"cos_k": COS}, "sin_k is None; give both"),
    (
        QKV,
        {"cos_k": COS, "sin_k": COS[:, :4]},
        r"sin_k has shape \(30, 4\) and dtype torch.float32; it must match cos",
    ),
    (KV, {"kv": normal(2, 17, 3, 4, 24)}, r"kv has shape \(2, 17, 3, 4, 24\); it must be"),
    (TORCH, {"cos": torch.ones(17)}, r"cos has shape \(17,\) and x"),
    (TORCH, {"sin": torch.ones(17, 8), "cos": torch.ones(17, 4)}, r"sin has shape \(17, 8\) and x"),
    (TORCH, {"cos": torch.ones(17, 8).to("meta")}, "cos is on meta and x on cpu; .*one device"),
    *(
        (rotary.RotaryEmbedding, {"dim": 16} | options, message)
        for options, message in (
            ({"dim": 15}, "dim is 15; it must be an even int"),
            ({"base": 0}, "base is 0; it must be a positive"),
        )
    ),
    *(
        (rotary.RotaryEmbedding(16), {"qkv": normal(2, 17, 3, 4, 24)} | options, message)
        for options, message in (
            ({"qkv": torch.tensor(1.0)}, r"qkv has shape \(\); it must have 4 or 5 dimensions"),
            ({"max_seqlen": 2**62}, r"max_seqlen is .*; it must be in 0\.\.2147483647"),
        )
    ),
]


@each_case("function, changes, message", INVALID_CALLS)
def test_invalid_calls_are_refused(function, changes, message):
    """Errors have the caller's names and shapes. The op has another order of dimensions."""
    cos, sin = make_tables(30, 16)
    defaults = {EMB: {"x": X}, TORCH: {"x": X}, QKV: {"qkv": normal(2, 17, 3, 4, 24)}}
    tables = {"cos": cos, "sin": sin} if function in (EMB, TORCH, QKV, KV) else {}
    arguments = defaults.get(function, {}) | tables | changes
    before = {n: x.clone() for n, x in arguments.items() if torch.is_tensor(x) and not x.is_meta}
    with pytest.raises((TypeError, ValueError), match=message):
        function(**arguments)
    assert all(torch.equal(arguments[n], x) for n, x in before.items())


class TestRotaryEmbedding:
    def angles(self, length, dim=16, base=10000.0):
        frequencies = base ** (-torch.arange(0, dim, 2).double() / dim)
        return torch.outer(torch.arange(length).double(), frequencies)

    @pytest.mark.parametrize("interleaved", [False, True])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_qkv_is_rotated(self, dtype, interleaved, device):
        module = rotary.RotaryEmbedding(16, base=100.0, interleaved=interleaved).to(device)
        x = normal(2, 17, 3, 4, 24, dtype=dtype)
        target = x.to(device, copy=True)
        assert module(target, seqlen_offset=3) is target
        angles = self.angles(20, base=100.0)
        tables = [table.to(dtype) for table in (angles.cos(), angles.sin())]
        options = {"seqlen_offset": 3, "interleaved": interleaved}
        for part in (0, 1):
            out, old = (t[:, :, part].transpose(1, 2) for t in (target.cpu(), x))
            # The last bit of a table in float32 may differ from float64's.
            expected = oracle(old, *tables, **options)
            bound = 4 * torch.finfo(dtype).eps * expected.abs().max()
            assert (out.double() - expected).abs().max() <= bound
        assert torch.equal(target.cpu()[:, :, 2], x[:, :, 2])

    @pytest.mark.parametrize("packed", [False, True])
    def test_scores_decay_with_distance(self, packed):
        """xPos: q_m . k_n is that of the plain rotation, times scale ** ((m - n) / scale_base)."""
        module = rotary.RotaryEmbedding(16, scale_base=8.0)
        x = normal(1, 33, 3, 1, 16)
        if packed:
            q, k = (module(x.clone())[0, :, part, 0].double() for part in (0, 1))
        else:
            q, kv = module(x[:, :, 0].clone(), x[:, :, 1:].clone())
            q, k = q[0, :, 0].double(), kv[0, :, 0, 0].double()
        angles = self.angles(33)
        plain = [rotated(x[:, :, part].double(), angles.cos(), angles.sin()) for part in (0, 1)]
        pairs = (torch.arange(0, 16, 2).double() + 0.4 * 16) / (1.4 * 16)
        distance = (torch.arange(33)[:, None] - torch.arange(33)).double()
        weights = (pairs ** (distance[..., None] / 8.0)).repeat(1, 1, 2)
        expected = torch.einsum("md,nd,mnd->mn", plain[0][0, :, 0], plain[1][0, :, 0], weights)
        torch.testing.assert_close(q @ k.T, expected, rtol=1e-4, atol=1e-4)

    def test_tables_are_made_again(self):
        """Longer sequences, other dtypes and training after inference need new tables."""
        module = rotary.RotaryEmbedding(16)
        with torch.inference_mode():
            module(normal(1, 3, 3, 2, 16))
        for length, dtype in ((3, torch.float32), (9, torch.float32), (5, torch.float16)):
            x = normal(1, length, 3, 2, 16, dtype=dtype)
            new = rotary.RotaryEmbedding(16)(x.clone())
            assert torch.equal(module(x.clone()), new)
        x = normal(1, 3, 3, 2, 16).requires_grad_()
        with torch.inference_mode():
            module(x.detach().clone())
        module(x * 1).sum().backward()
        assert x.grad is not None

    def test_a_cast_module_keeps_its_frequencies(self):
        x = normal(1, 500, 3, 2, 16)
        cast, plain = rotary.RotaryEmbedding(16).half(), rotary.RotaryEmbedding(16)
        assert torch.equal(cast(x.clone()), plain(x.clone()))
        assert not plain.state_dict()

    def test_offsets_on_the_device_need_max_seqlen(self, device):
        module = rotary.RotaryEmbedding(16).to(device)
        x, offset = normal(2, 1, 3, 2, 16).to(device), torch.tensor([3, 7], device=device)
        with pytest.raises(ValueError, match="max_seqlen is None; if seqlen_offset is a tensor"):
            module(x, seqlen_offset=offset)
        out = module(x.clone(), seqlen_offset=offset, max_seqlen=8)
        for row, position in ((0, 3), (1, 7)):
            alone = module(x[row : row + 1].clone(), seqlen_offset=position)
            torch.testing.assert_close(out[row : row + 1], alone, rtol=0, atol=0)

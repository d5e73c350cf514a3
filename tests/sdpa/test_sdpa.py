"""scaled_dot_product_attention: every argument of torch's function, against torch in float64."""

import math
import re
from itertools import product

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention as torch_sdpa

from tests.attention.held_cases import FORWARD, case, hold
from tests.helpers.cases import each_case
from tests.sdpa.sdpa_check import check, close, normal
from torch_metal_attn import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache
from torch_metal_attn import scaled_dot_product_attention as sdpa
from torch_metal_attn.testing.judge import DTYPES
from torch_metal_attn.testing.tensors import DTYPES as NAMES

CALL = {"call": "scaled_dot_product_attention", "heads": 4, "kv_heads": 2}
VALUES = [
    *(
        case(**CALL, q_length=q, kv_length=k, causal=causal, **more)
        for q, k in ((33, 65), (65, 33), (65, 1))
        for causal, more in ((False, {"softmax_scale": 0.2}), (True, {}))
    ),
    *(
        case(**CALL | FORWARD, attn_mask=f"{dtype} bhqk", mask_layout=("order 0132",))
        for dtype in ("bool", "float32", "float16")
    ),
]
# These cases run on the CPU kernels only.
CPU_VALUES = [case(**CALL | {"dtype": dtype, "kv_heads": 4}, causal=True) for dtype in NAMES]
CPU_VALUES += [case(**CALL, q_length=9, kv_length=11, dropout_p=0.4)]


def test_values(device):
    hold(VALUES, device)


def test_values_without_the_simulator():
    hold([*VALUES, *CPU_VALUES], torch.device("cpu"))


def random_mask(shape, kind, seed=7):
    """A mask that hides about a third; kind is bool or a floating dtype."""
    hidden = normal(*shape, seed=seed) < -0.4
    if kind == torch.bool:
        return ~hidden
    return normal(*shape, seed=seed + 1).masked_fill(hidden, -math.inf).to(kind)


RANKS = [
    ((5, 8), (7, 8)),
    ((5, 8), (4, 7, 8)),
    ((4, 5, 8), (7, 8)),
    ((2, 4, 5, 8), (4, 7, 8)),
    ((3, 4, 5, 8), (1, 1, 7, 8)),
    ((3, 1, 5, 8), (3, 4, 7, 8)),
    ((2, 3, 4, 5, 8), (2, 3, 4, 7, 8)),
    ((1, 3, 4, 5, 8), (3, 4, 7, 8)),
    ((3, 2, 4, 5, 8), (4, 7, 8)),
    ((0, 4, 5, 8), (0, 4, 7, 8)),
    ((2, 4, 0, 8), (2, 4, 7, 8)),
]


class TestOperands:
    @each_case("q_length, kv_length, causal", product((1, 33, 65), (1, 33, 65), (False, True)))
    def test_plain_calls(self, q_length, kv_length, causal):
        """A plain call without gradients calls an op directly."""
        q, k, v = normal(2, 3, q_length, 16), *normal(2, 2, 3, kv_length, 16, seed=1)
        expected = torch_sdpa(q, k, v, is_causal=causal, scale=0.3)
        for leaf in (q, q.clone().requires_grad_()):
            close(sdpa(leaf, k, v, is_causal=causal, scale=0.3).detach(), expected)

    @each_case("q_shape, k_shape", RANKS)
    def test_ranks_and_broadcasting(self, q_shape, k_shape):
        q, k, v = normal(*q_shape), normal(*k_shape, seed=1), normal(*k_shape, seed=2)
        close(sdpa(q, k, v), torch_sdpa(q, k, v))

    def test_grouped_queries_that_broadcast(self):
        q, k, v = normal(2, 4, 9, 16), *normal(2, 2, 2, 11, 16, seed=1)
        close(sdpa(q[0], k[0], v[0], enable_gqa=True), torch_sdpa(q, k, v, enable_gqa=True)[0])
        operands = q[:1], k, v[:, :1]
        close(sdpa(*operands, enable_gqa=True), torch_sdpa(*operands, enable_gqa=True))

    def test_one_column_of_any_stride(self, device):
        """contiguous() does not change the stride of a single column."""
        q, k, v = normal(2, 1, 9, 5), normal(2, 1, 7, 5, seed=1), normal(2, 1, 7, 5, seed=2)
        q, k, v = (t.to(device)[..., 3:4] for t in (q, k, v))
        q = q.mT.contiguous().mT
        assert q.stride(-1) != 1
        close(sdpa(q, k, v), torch_sdpa(q.cpu(), k.cpu(), v.cpu()))

    def test_queries_without_keys(self):
        q, k, v = normal(1, 2, 5, 8), *normal(2, 1, 2, 0, 8)
        assert (sdpa(q, k, v) == 0).all()
        assert (sdpa(q, k, v, torch.ones(5, 0)) == 0).all()
        assert sdpa(q, k, v).shape == (1, 2, 5, 8)

    @pytest.mark.parametrize("shape", [(0, 2, 5, 8), (1, 0, 5, 8), (1, 2, 0, 8)])
    def test_empty_tensors_may_have_any_strides(self, shape, device):
        """Strides of empty tensors are ignored, and contiguous() does not change them."""
        leaf = torch.zeros(1, device=device, requires_grad=True)
        q = leaf.expand(shape)
        mask = torch.zeros(shape[-2], shape[-2], device=device, requires_grad=True)
        for out in (sdpa(q, q, q), sdpa(q, q, q, mask)):
            assert out.shape == shape
            out.sum().backward()
        assert (leaf.grad == 0).all()
        assert (mask.grad == 0).all()

    @pytest.mark.parametrize("autocast_dtype", [torch.bfloat16, torch.float16])
    def test_autocast(self, autocast_dtype):
        q, k, v = normal(1, 2, 9, 8), normal(1, 2, 9, 8, dtype=torch.bfloat16), normal(1, 2, 9, 8)
        mask = random_mask((9, 9), torch.float16)
        with torch.autocast("cpu", dtype=autocast_dtype):
            out, expected = sdpa(q, k, v, mask), torch_sdpa(q, k, v, mask)
        assert out.dtype == expected.dtype == autocast_dtype
        torch.testing.assert_close(out, expected, rtol=0.02, atol=0.02)
        with torch.autocast("cpu", dtype=autocast_dtype), pytest.raises(ValueError, match="query"):
            sdpa(*[q.double()] * 3)  # torch's autocast leaves float64 alone


# Shapes of query and of a mask for 7 keys.
MASK_SHAPES = [
    ((5, 8), (5, 7)),
    ((5, 8), ()),
    ((4, 5, 8), (4, 1, 1)),
    ((2, 4, 5, 8), (5, 7)),
    ((2, 4, 5, 8), (7,)),
    ((2, 4, 5, 8), (1, 4, 1, 7)),
    ((2, 4, 5, 8), (2, 1, 5, 7)),
    ((2, 3, 4, 5, 8), (4, 1, 7)),
    ((2, 3, 4, 5, 8), (2, 3, 1, 1, 7)),
    ((2, 3, 4, 5, 8), (2, 1, 1, 1, 7)),  # the second dimension becomes a part of the heads
    ((2, 3, 4, 5, 8), (1, 3, 4, 5, 7)),  # the first two dimensions become a part of the heads
    ((2, 1, 4, 5, 8), (2, 1, 4, 5, 7)),
    ((2, 3, 2, 4, 5, 8), (2, 3, 1, 1, 5, 7)),
    ((0, 4, 5, 8), (0, 4, 5, 7)),
    ((2, 4, 0, 8), (0, 7)),
]


class TestMasks:
    @pytest.mark.parametrize("kind", [torch.bool, torch.float32])
    @each_case("q_shape, mask_shape", MASK_SHAPES)
    def test_masks_of_every_shape(self, q_shape, mask_shape, kind):
        k_shape = (*q_shape[:-2], 7, 8)
        q, k, v = normal(*q_shape), normal(*k_shape, seed=1), normal(*k_shape, seed=2)
        check(q, k, v, random_mask(mask_shape, kind))

    @pytest.mark.parametrize(
        "value, expected", [(False, "0"), (-math.inf, "0"), (math.nan, "nan"), ("lowest", "mean")]
    )
    def test_rows_without_a_key(self, value, expected):
        q, k, v = normal(3, 1, 2, 5, 8)
        mask = torch.ones(5, 5, dtype=torch.bool) if value is False else torch.zeros(5, 5)
        mask[2] = torch.finfo(torch.float32).min if value == "lowest" else value
        out, low = (attend(q, k, v, mask)[:, :, 2] for attend in (sdpa, torch_sdpa))
        close(out.nan_to_num(9.0), low.nan_to_num(9.0))
        assert {"0": (out == 0), "nan": out.isnan(), "mean": out.isfinite()}[expected].all()


class TestViews:
    def test_views_are_never_copied(self):
        """Leading dimensions that no view can merge raise an error."""
        q = normal(2, 3, 4, 5, 8)
        swapped = q.transpose(0, 1).contiguous().transpose(0, 1)
        for name in ("query", "key", "value"):
            with pytest.raises(ValueError, match=rf"^{name} of shape .*{name}\.contiguous\(\)"):
                sdpa(**{"query": q, "key": q, "value": q} | {name: swapped})
        close(sdpa(swapped.contiguous(), q, q), torch_sdpa(q, q, q))
        row = normal(2, 1, 4, 5, 8)
        with pytest.raises(ValueError, match=r"query\.expand\(2, 3, 4, 5, 8\)\.contiguous\(\)"):
            sdpa(row, q, q)
        close(sdpa(row.expand(2, 3, 4, 5, 8).contiguous(), q, q), torch_sdpa(row, q, q))
        mask = random_mask((2, 3, 4, 5, 5), torch.bool)
        swapped = mask.transpose(0, 1).contiguous().transpose(0, 1)
        with pytest.raises(ValueError, match=r"^attn_mask of shape .*attn_mask\.contiguous\(\)"):
            sdpa(q, q, q, swapped)
        close(sdpa(q, q, q, swapped.contiguous()), torch_sdpa(q, q, q, mask))

    def test_masks_that_no_view_broadcasts(self):
        """A merged dimension has one stride, so it cannot broadcast only the middle of three."""
        whole, heads_later = normal(2, 3, 4, 5, 8), normal(2, 3, 5, 4, 8).transpose(2, 3)
        for q, heads in ((whole, 4), (heads_later, 1)):
            mask = random_mask((2, 1, heads, 5, 5), torch.bool)
            shape = (2, 3, heads, 5, 5)
            with pytest.raises(ValueError, match=rf"attn_mask\.expand{re.escape(str(shape))}"):
                sdpa(q, q, q, mask)
            expected = torch_sdpa(q, q, q, mask)
            close(sdpa(q, q, q, mask.expand(shape).contiguous()), expected)
        close(sdpa(*[heads_later.contiguous()] * 3, mask), expected)

    @pytest.mark.parametrize("mask_shape", [(5, 5), (2, 1, 1, 1, 5), (2, 3, 1, 5, 5)])
    def test_passes_views_of_the_inputs(self, mask_shape):
        q = normal(2, 3, 4, 5, 8)
        mask = random_mask(mask_shape, torch.bool)
        seen = []
        op = torch.ops.metal_attn.flash_fwd

        class Watch(torch.utils._python_dispatch.TorchDispatchMode):
            def __torch_dispatch__(self, function, types, args=(), kwargs=None):
                if function is op.default:
                    seen.extend([*args, kwargs["attn_mask"]])
                return function(*args, **(kwargs or {}))

        with Watch():
            sdpa(q, q, q[0, 0] if mask_shape[1] > 1 or len(mask_shape) == 2 else q, mask)
        assert [t.data_ptr() for t in seen] == [q.data_ptr()] * 3 + [mask.data_ptr()]
        assert seen[3].untyped_storage().nbytes() == mask.untyped_storage().nbytes()


def invalid_calls():
    """Yields changes of a call, the type of the error, and the message."""
    q, k, wide = normal(2, 4, 5, 8), normal(2, 2, 7, 8), normal(2, 4, 5, 577)
    far = q[..., :1, :].expand(2, 4, 2**31, 8)
    mask = torch.ones(5, 5, dtype=torch.bool)

    def keys(k, **options):
        return {"key": k, "value": k, "enable_gqa": True} | options

    # Torch refuses these calls too.
    yield {"attn_mask": mask, "is_causal": True}, RuntimeError, "attn_mask should not be set"
    yield {"query": q[0, 0, 0]}, RuntimeError, "at least 2 dimensional"
    yield {"key": q.half()}, RuntimeError, "same dtype"
    yield {"key": q.to("meta")}, RuntimeError, "same device"
    yield {"dropout_p": 1.5}, RuntimeError, r"between 0 and 1, but got 1\.5"
    yield keys(k, enable_gqa=False), RuntimeError, "broadcast; for grouped heads pass enable_gqa=T"
    yield keys(normal(3, 2, 7, 8)), RuntimeError, "hape"
    yield keys(normal(2, 3, 7, 8)), RuntimeError, "must divide"
    yield keys(k[:, :0]), RuntimeError, "must divide"
    yield keys(k, query=q[0, 0]), RuntimeError, "3 dimensions"
    yield {"query": [1.0]}, TypeError, "query is a list"
    yield {"key": None}, TypeError, "key is None"
    yield {"value": 3}, TypeError, "value is an int"
    yield {"attn_mask": True}, TypeError, "attn_mask is a bool"
    yield {"dropout_p": None}, TypeError, "dropout_p is None"
    yield {"scale": "1"}, TypeError, "scale is '1'"
    yield {"is_causal": 1}, TypeError, "is_causal is 1"
    yield {"is_causal": mask}, TypeError, "is_causal is a bool tensor .*pass a mask as attn_mask"
    yield {"enable_gqa": None}, TypeError, "enable_gqa is None"
    # The kernels do not support these calls.
    yield {"key": q.mT.contiguous().mT}, ValueError, r"key of shape .* has strides .*key\."
    doubles = dict.fromkeys(("query", "key", "value"), q.double())
    yield doubles, ValueError, "query has dtype torch.float64; it must be float32, float16"
    yield {"key": normal(2, 4, 5, 9)}, ValueError, "key has a head dim of 9 and query of 8"
    yield {"value": normal(2, 4, 6, 8)}, ValueError, "value has a length of 6 and key of 5"
    yield {"query": wide, "key": wide}, ValueError, r"query has a head dim of 577; .* 1\.\.576"
    yield {"value": q[..., :0]}, ValueError, r"value has a head dim of 0; it must be in 1\.\.512"
    yield {"query": q.to_sparse()}, ValueError, r"query has layout torch.sparse_coo.*\.to_dense"
    yield {"scale": math.inf}, ValueError, "^scale is inf; .*must be finite"
    yield {"attn_mask": torch.ones(5, 5).to_sparse()}, ValueError, "attn_mask has layout"
    yield {"query": far}, ValueError, "^query has a len"
    yield {"key": far, "value": far}, ValueError, "^key has a length of 2147483"


class TestErrors:
    @each_case("changes, error, message", [*invalid_calls()])
    def test_invalid_calls_are_refused(self, changes, error, message):
        q = normal(2, 4, 5, 8)
        with pytest.raises(error, match=message):
            sdpa(**{"query": q, "key": q, "value": q} | changes)

    def test_bools_are_numbers(self):
        q = normal(2, 4, 5, 8)
        options = {"dropout_p": False, "scale": True}
        torch.testing.assert_close(sdpa(q, q, q, **options), torch_sdpa(q, q, q, **options))

    @pytest.mark.parametrize("dtype", DTYPES)
    def test_mask_dtypes(self, dtype):
        """A mask may have the same dtypes as in torch."""
        q = normal(1, 2, 5, 8, dtype=dtype)
        for kind in (torch.bool, *DTYPES, torch.float64, torch.int32, torch.uint8, torch.complex64):
            mask = torch.ones(5, 5).to(kind)
            for attend, said in ((torch_sdpa, ""), (sdpa, f".*attn_mask.dtype: {kind}")):
                if kind in (torch.bool, torch.float32, dtype):
                    attend(q, q, q, mask)
                    continue
                with pytest.raises(RuntimeError, match="Expected attn_mask dtype" + said):
                    attend(q, q, q, mask)

    @pytest.mark.parametrize(
        "shape", [(6, 5), (5, 6), (2, 5, 5), (3, 4, 5, 5), (1, 2, 4, 5, 5), (0, 5), (5, 0)]
    )
    def test_wrong_mask_shapes_are_refused(self, shape):
        """torch's CPU kernel reads past masks of size 0. Its math backend refuses all these."""
        q, mask = normal(2, 4, 5, 8), torch.ones(shape, dtype=torch.bool)
        with sdpa_kernel(SDPBackend.MATH), pytest.raises(RuntimeError):
            torch_sdpa(q, q, q, mask)
        with pytest.raises(RuntimeError, match=r"attn_mask has shape .*\(2, 4, 5, 5\), the shape"):
            sdpa(q, q, q, mask)

    def test_nested_tensors_and_unequal_kv_heads_are_refused(self):
        q = normal(2, 4, 5, 8)
        k, v = normal(2, 2, 5, 8), normal(2, 4, 5, 8)
        with pytest.raises(NotImplementedError, match="2 key heads and 4 value heads"):
            sdpa(q, k, v, enable_gqa=True)
        ends = torch.zeros(2).int()
        for layout in (torch.strided, torch.jagged):
            nested = torch.nested.nested_tensor([normal(5, 4, 8), normal(3, 4, 8)], layout=layout)
            for call, message in (
                (lambda n: sdpa(n, n, n), "query is a nested tensor"),
                (lambda n: sdpa(q, q, q, n), "attn_mask is a nested tensor"),
                (lambda n: flash_attn_func(n, n, n), "is a nested tensor: .*flash_attn_varlen"),
                (lambda n: flash_attn_varlen_func(n, n, n, ends, ends, 3, 3), "^q is a nested"),
                (lambda n: flash_attn_with_kvcache(n, n, n), "^q is a nested tensor"),
            ):
                with pytest.raises(NotImplementedError, match=message):
                    call(nested)


class TestCompile:
    @pytest.fixture(autouse=True)
    def reset_dynamo(self):
        torch._dynamo.reset()

    @pytest.mark.parametrize(
        "q_shape, k_shape, mask, dynamic",
        [
            ((2, 4, 9, 16), (2, 2, 9, 16), None, False),
            ((2, 4, 9, 16), (2, 2, 0, 16), ((2, 1, 9, 0), torch.float32), False),
            ((2, 3, 4, 0, 8), (2, 3, 4, 0, 8), ((2, 1, 1, 1, 0), torch.bool), True),
            ((2, 3, 4, 5, 8), (2, 3, 4, 0, 8), ((0,), torch.bool), False),
        ],
    )
    def test_compile(self, q_shape, k_shape, mask, dynamic):
        """A length of 0 in a shape is replaced by `length`, which changes if shapes are dynamic."""
        compiled = torch.compile(sdpa, fullgraph=True, dynamic=dynamic, backend="aot_eager")
        for length in (9, 12) if dynamic else (9,):
            shapes = [[n or length for n in shape] for shape in (q_shape, k_shape, k_shape)]
            q, k, v = (normal(*shape, seed=seed) for seed, shape in enumerate(shapes))
            options = {"enable_gqa": q.dim() == 4, "scale": 0.3, "is_causal": mask is None}
            if mask is not None:
                options["attn_mask"] = random_mask([n or length for n in mask[0]], mask[1])
            close(compiled(q, k, v, **options), torch_sdpa(q, k, v, **options))

    def test_autocast_while_compiling(self):
        q = normal(1, 2, 9, 8)
        compiled = torch.compile(sdpa, fullgraph=True, backend="aot_eager")
        assert compiled(q, q, q).dtype == torch.float32
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert compiled(q, q, q).dtype == torch.bfloat16

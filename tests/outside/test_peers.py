"""MLX's, PyTorch's and ggml's kernels, unmodified, in the simulator, compared with torch."""

from functools import partial

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from tests.outside import ggml_kernels, metal_sources, peers
from torch_metal_attn.simulator import SimulatorFault, compile_shader
from torch_metal_attn.simulator.lint import PROJECT_RULES, lint_source
from torch_metal_attn.testing.judge import ROUNDING

pytestmark = pytest.mark.peer

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16


@pytest.mark.parametrize("name", metal_sources.FAMILIES)
def test_a_kernel_of_each_family_equals_torch(mlx, aten, name):
    torch.manual_seed(0)
    out, expected = metal_sources.FAMILIES[name]()
    rounding = 1e-3 if out.dtype is torch.float16 else 2e-6
    assert (out.to(expected.dtype) - expected).abs().max() <= rounding * expected.abs().max()


@pytest.mark.parametrize("name", ggml_kernels.RUNS)
def test_each_kernel_of_ggml_equals_a_formula(ggml, name):
    torch.manual_seed(0)
    if name in ggml_kernels.RACES:
        with pytest.raises(SimulatorFault, match=r"^race: "):
            ggml_kernels.RUNS[name](check=True)
    out, expected = ggml_kernels.RUNS[name](check=name not in ggml_kernels.RACES)
    error = (out.double() - expected).abs().max() / expected.abs().max()
    assert error <= ggml_kernels.BOUNDS.get(name, 2e-6)


def headers(requirement):
    @pytest.fixture(scope="session")
    def folder():
        try:
            return peers.include_dir(requirement)
        except peers.PeerUnavailable as error:
            pytest.skip(str(error))

    return folder


mlx, ggml, aten = map(headers, (peers.MLX, peers.GGML, peers.TORCH))


def make_qkv(dtype, q_length, kv_length, head_dim):
    torch.manual_seed(0)
    shapes = (4, q_length, head_dim), (2, kv_length, head_dim), (2, kv_length, head_dim)
    return [torch.randn(1, *shape).to(dtype) for shape in shapes]


def make_mask(kind, dtype, q_length, kv_length):
    """A mask (B, H, Lq, Lk): bool without an empty row, or additive."""
    if kind is None:
        return None
    if kind == "additive":
        return torch.randn(1, 4, q_length, kv_length).to(dtype)
    mask = torch.rand(1, 4, q_length, kv_length) > 0.3
    mask[..., 0] = True
    return mask


def assert_as_good_as_torch(out, q, k, v, mask=None):
    """At most twice the error of torch in the same dtype, or one rounding of the result."""
    wide = mask.double() if mask is not None and mask.dtype.is_floating_point else mask
    qkv = (x.double() for x in (q, k, v))
    oracle = scaled_dot_product_attention(*qkv, attn_mask=wide, enable_gqa=True)
    same_dtype = scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
    torch_error = (same_dtype.double() - oracle).abs().max().item()
    rounding = ROUNDING[q.dtype] * oracle.abs().max().item()
    error = (out.double() - oracle).abs().max().item()
    assert error <= max(2 * torch_error, rounding), (error, torch_error)


def visible(q, k, causal, mask, corner=0):
    """The mask, combined with a causal mask whose first row shows `corner` + 1 keys."""
    if not causal:
        return mask
    below = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril(corner)
    return below if mask is None else below & mask


@pytest.mark.parametrize("kernel", [peers.mlx_steel_attention, peers.torch_prefill_attention])
@pytest.mark.parametrize(
    ("head_dim", "causal", "mask_kind", "q_length", "kv_length", "dtype", "check"),
    [
        (64, False, None, 64, 64, F16, False),
        (64, True, None, 70, 101, F32, True),
        (64, False, "bool", 70, 101, F16, True),
        (128, False, "additive", 35, 50, BF16, True),
        (64, False, "bool", 70, 101, F16, False),  # without checks: its first block has a name
    ],
)
def test_prefill_is_as_good_as_torch(
    mlx, aten, kernel, dtype, head_dim, causal, mask_kind, q_length, kv_length, check
):
    q, k, v = make_qkv(dtype, q_length, kv_length, head_dim)
    mask = make_mask(mask_kind, dtype, q_length, kv_length)
    out, _ = kernel(q, k, v, causal=causal, mask=mask, check=check)
    corner = kv_length - q_length if kernel is peers.mlx_steel_attention else 0
    assert_as_good_as_torch(out, q, k, v, visible(q, k, causal, mask, corner))


@pytest.mark.parametrize(
    ("q_length", "mask_kind", "dtype"),
    [
        *((1, None, F16), (1, "bool", F32), (1, "additive", F16), (1, None, BF16)),
        *((2, None, F16), (3, None, F32)),
    ],
)
def test_mlx_sdpa_vector_is_as_good_as_torch(mlx, dtype, q_length, mask_kind):
    kv_length, blocks = (100, 1) if q_length == 1 else (150, 32)
    q, k, v = make_qkv(dtype, q_length, kv_length, 64)
    mask = make_mask(mask_kind, dtype, q_length, kv_length)
    constants = {
        **dict.fromkeys(("query_transposed", "do_causal", "has_sinks"), False),
        "has_mask": mask is not None,
        "bool_mask": mask_kind == "bool",
        "float_mask": mask_kind == "additive",
        "blocks": blocks,
    }
    defines = {"ELEMENT": peers.METAL_TYPES[dtype], "HEAD_DIM": 64}
    options = {"constants": constants, "check": mask is not None or dtype != F16}
    library = compile_shader(peers.SDPA_VECTOR, include_dirs=[mlx], defines=defines, **options)
    out = torch.full_like(q, torch.nan)
    sizes = (kv_length, k.stride(1), k.stride(2), v.stride(1), v.stride(2), 64**-0.5)
    grid = {"threads": (4 * 1024, q_length, 1), "group_size": (1024, 1, 1)}
    if blocks == 1:
        masks = [None] * 5
        if mask is not None:
            masks[0 if mask_kind == "bool" else 1] = mask
            masks[2:] = mask.stride(3), mask.stride(2), mask.stride(1)
        library.one(q, k, v, out, 2, *sizes, *masks, **grid)
    else:
        partial = torch.full((4, q_length, blocks, 64), torch.nan, dtype=dtype)
        sums, maxima = torch.full((2, 4, q_length, blocks), torch.nan)
        library.first(
            *(q, k, v, partial, sums, maxima, None, *sizes),
            threads=(2 * 32, 2, blocks * q_length),
            group_size=(32, 2, q_length),
        )
        library.second(partial, sums, maxima, out, blocks, **grid)
    assert_as_good_as_torch(out, q, k, v, mask)


NAX, MPP = peers.mlx_nax_attention, peers.torch_mpp_attention


@pytest.mark.parametrize(
    ("kernel", "lane_map", "head_dim", "causal", "mask_kind", "dtype", "check"),
    [
        (NAX, "apple10", 64, True, None, F16, False),
        (NAX, "apple10", 128, False, "bool", BF16, True),
        (partial(MPP, table="apple10"), "apple10", 64, False, "additive", BF16, False),
        (partial(MPP, table="apple9"), "apple9", 96, True, "bool", F16, True),
    ],
)
def test_kernels_depend_on_a_lane_map(
    mlx, aten, kernel, lane_map, head_dim, causal, mask_kind, dtype, check
):
    """Each kernel is right under its lane map, and wrong under all others."""
    q, k, v = make_qkv(dtype, 70, 101, head_dim)
    mask = make_mask(mask_kind, dtype, 70, 101)
    options = {"causal": causal, "mask": mask, "check": check}
    out, _ = kernel(q, k, v, **options, lane_map=lane_map)
    corner = 101 - 70 if kernel is NAX else 0
    assert_as_good_as_torch(out, q, k, v, visible(q, k, causal, mask, corner))
    for other in {"apple10", "apple9", 0, 1} - {lane_map}:
        under_other, _ = kernel(q, k, v, **options, lane_map=other)
        assert (under_other.double() - out.double()).abs().max() > 0.5


@pytest.mark.parametrize(
    ("passes", "mask_kind", "dtype"),
    [(1, None, F16), (2, "causal", F32), (1, "bool", F16), (2, "additive", BF16)],
)
def test_torch_decode_attention_is_as_good_as_torch(aten, dtype, mask_kind, passes):
    q_length, kv_length = 2, 100
    q, k, v = make_qkv(dtype, q_length, kv_length, 64)
    mask = None if mask_kind == "causal" else make_mask(mask_kind, dtype, q_length, kv_length)
    out = torch.full_like(q, torch.nan)
    element = peers.METAL_TYPES[dtype]
    library = compile_shader(peers.DECODE, include_dirs=[aten], check=mask_kind is not None)
    suffix = {None: "none", "causal": "none_causal", "bool": "bool", "additive": element}[mask_kind]
    any_mask = torch.zeros(1, 1, 1, 1, dtype=torch.uint8) if mask is None else mask
    batches, heads, rows, _ = zip(*(t.stride() for t in (q, k, v)), strict=True)
    common = (heads, rows, 64**-0.5, any_mask, any_mask.stride()[::-1], (*batches, 4))
    first = 4 if passes == 1 else 6
    casts = {first + i: "int32" for i in (0, 1, 2, 3, 6, 7)}
    whole = {"threads": (4 * 1024, q_length, 1), "group_size": (1024, 1, 1)}
    if passes == 1:
        kernel = getattr(library, f"sdpa_vector_{element}_64_64_mask{suffix}")
        kernel(q, k, v, out, 2, kv_length, *common, arg_casts=casts, **whole)
    else:
        partial = torch.full((4, q_length, 32, 64), torch.nan, dtype=dtype)
        sums, maxima = torch.full((2, 4, q_length, 32), torch.nan)
        kernel = getattr(library, f"sdpa_vector_2pass_1_{element}_64_64_mask{suffix}")
        kernel(
            *(q, k, v, partial, sums, maxima, 2, kv_length, *common),
            arg_casts=casts,
            threads=(4 * 256, q_length, 32),
            group_size=(256, 1, 1),
        )
        second = getattr(library, f"sdpa_vector_2pass_2_{element}_64")
        second(partial, sums, maxima, out, **whole)
    assert_as_good_as_torch(out, q, k, v, visible(q, k, mask_kind == "causal", mask))


KERNELS = "#include <mlx/backend/metal/kernels/"
HEADERS = {
    "mlx": f"{KERNELS}utils.h>\n{KERNELS}fft.h>\n{KERNELS}sdpa_vector.h>\n",
    "aten": "#include <c10/metal/atomic.h>\n"
    "#include <ATen/native/mps/kernels/PrefillAttention.h>\n",
}


@pytest.mark.parametrize("project", HEADERS)
def test_the_lint_finds_nothing_that_apple_accepts(project, request):
    findings = lint_source(HEADERS[project], include_dirs=[str(request.getfixturevalue(project))])
    rules = {finding.rule for finding in findings}
    assert rules & PROJECT_RULES
    assert not rules - PROJECT_RULES - {"compile"}

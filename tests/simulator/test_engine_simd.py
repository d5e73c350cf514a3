"""SIMD operations and matrices, compared with a model in Python."""

import functools
import operator

import pytest
import torch

from .planted import choice, compiled, result

LANES = range(32)


def on_lanes(body, out, values=None, type_name="float", lanes=32, **options):
    """Run `body` on one SIMD group and return `out`. In the body, o is `out` and a is `values`."""
    parameters = f"device {type_name}* o, const device {type_name}* a, "
    parameters += "uint lane [[thread_index_in_simdgroup]]"
    values = out if values is None else values
    options |= {"threads": lanes, "group_size": lanes}
    return result(body, values, size=out, parameters=parameters, **options)


def lane_values(expressions, values: torch.Tensor, type_name: str = "float") -> dict[str, list]:
    """The values of each of `expressions` in 32 lanes; x is the lane's value."""
    stores = [f"o[{32 * n} + lane] = {expression};" for n, expression in enumerate(expressions)]
    body = f"{type_name} x = a[lane]; {' '.join(stores)}"
    out = on_lanes(body, values.new_zeros(len(stores), 32), values, type_name)
    return dict(zip(expressions, out.tolist(), strict=True))


SHUFFLES = {
    "simd_shuffle(x, 7)": lambda v, i: v[7],
    "simd_shuffle(x, (lane * 5 + 3) % 32)": lambda v, i: v[(i * 5 + 3) % 32],
    "simd_broadcast(x, 31)": lambda v, i: v[31],
    "simd_broadcast_first(x)": lambda v, i: v[0],
    "simd_shuffle_xor(x, 1)": lambda v, i: v[i ^ 1],
    "simd_shuffle_xor(x, 16)": lambda v, i: v[i ^ 16],
    "simd_shuffle_up(x, 3)": lambda v, i: v[i - 3] if i >= 3 else v[i],
    "simd_shuffle_down(x, 3)": lambda v, i: v[i + 3] if i + 3 < 32 else v[i],
    "simd_shuffle_rotate_up(x, 5)": lambda v, i: v[(i - 5) % 32],
    "simd_shuffle_rotate_down(x, 5)": lambda v, i: v[(i + 5) % 32],
    "simd_shuffle_and_fill_up(x, x + 100, 4)": lambda v, i: v[i - 4] if i > 3 else v[i + 28] + 100,
    "simd_shuffle_and_fill_down(x, x + 100, 4)": lambda v, i: (
        v[i + 4] if i < 28 else v[i - 28] + 100
    ),
    "simd_shuffle_and_fill_up(x, x + 100, 1, 8)": lambda v, i: (
        v[i - 1] if i % 8 else v[i + 7] + 100
    ),
    "quad_shuffle(x, 2)": lambda v, i: v[i // 4 * 4 + 2],
    "quad_broadcast(x, 1)": lambda v, i: v[i // 4 * 4 + 1],
    "quad_shuffle_xor(x, 3)": lambda v, i: v[i ^ 3],
    "quad_shuffle_up(x, 1)": lambda v, i: v[i - 1] if i % 4 else v[i],
    "quad_shuffle_down(x, 1)": lambda v, i: v[i + 1] if i % 4 < 3 else v[i],
    "quad_shuffle_rotate_up(x, 1)": lambda v, i: v[i // 4 * 4 + (i - 1) % 4],
    "quad_shuffle_rotate_down(x, 1)": lambda v, i: v[i // 4 * 4 + (i + 1) % 4],
}


def prefix(op, start, inclusive):
    def model(v, i):
        return functools.reduce(op, v[: i + 1] if inclusive else v[:i], start)

    return model


def over(op, quad=False):
    def model(v, i):
        return functools.reduce(op, v[i // 4 * 4 : i // 4 * 4 + 4] if quad else v)

    return model


REDUCTIONS = {
    "simd_sum(x)": over(operator.add),
    "simd_max(x)": over(max),
    "simd_min(x)": over(min),
    "simd_prefix_inclusive_sum(x)": prefix(operator.add, 0, True),
    "simd_prefix_exclusive_sum(x)": prefix(operator.add, 0, False),
    "quad_sum(x)": over(operator.add, True),
    "quad_product(x)": over(operator.mul, True),
    "quad_max(x)": over(max, True),
    "quad_min(x)": over(min, True),
}
BITWISE = {
    "simd_and(x)": over(operator.and_),
    "simd_or(x)": over(operator.or_),
    "simd_xor(x)": over(operator.xor),
    "quad_and(x)": over(operator.and_, True),
    "quad_or(x)": over(operator.or_, True),
    "quad_xor(x)": over(operator.xor, True),
}


VOTES = {
    "ulong(simd_ballot(lane % 3 == 0))": lambda v, i: sum(1 << lane for lane in LANES[::3]),
    "simd_all(lane % 3 == 0)": lambda v, i: 0,
    "simd_any(lane % 3 == 0)": lambda v, i: 1,
    "simd_all(true)": lambda v, i: 1,
    "simd_any(false)": lambda v, i: 0,
    "simd_ballot(true).all()": lambda v, i: 1,
    "ulong(simd_active_threads_mask())": lambda v, i: 2**32 - 1,
    "simd_is_first()": lambda v, i: i == 0,
    "quad_any(lane == 5)": lambda v, i: i // 4 == 1,
    "quad_all(lane / 4 == 3)": lambda v, i: i // 4 == 3,
}
PRODUCTS = {
    "simd_product(x)": over(operator.mul),
    "simd_prefix_inclusive_product(x)": prefix(operator.mul, 1, True),
    "simd_prefix_exclusive_product(x)": prefix(operator.mul, 1, False),
}


@pytest.mark.parametrize(
    "models, values, type_name",
    [
        (SHUFFLES, torch.arange(32.0) * 3 + 1, "float"),
        (REDUCTIONS | BITWISE, (torch.arange(32) * 37 % 23 + 1).int(), "int"),
        (REDUCTIONS, (torch.arange(32) % 3).float(), "float"),
        (REDUCTIONS, (torch.arange(32) % 3).half(), "half"),
        (PRODUCTS, torch.tensor([1.0] * 3 + [2] + [1] * 13 + [3] + [1] * 13 + [5]), "float"),
        (VOTES, torch.arange(32), "long"),
    ],
    ids=["shuffles", "int", "float", "half", "products", "votes"],
)
def test_shuffles_reductions_and_votes_match_a_model(models, values, type_name):
    v = values.tolist()
    expected = {name: [model(v, i) for i in LANES] for name, model in models.items()}
    assert lane_values(models, values, type_name) == expected


@pytest.mark.parametrize(
    "type_name,dtype,size",
    [("float4", torch.float32, 4), ("long4", torch.int64, 4), ("half2", torch.float16, 2)],
)
def test_simd_functions_work_on_each_element_of_a_vector(type_name, dtype, size):
    values = (torch.arange(32 * size) % 7).to(dtype).view(32, size)
    body = "o[lane] = simd_sum(a[lane]); o[lane + 32] = simd_shuffle_xor(a[lane], 9);"
    out = on_lanes(body, torch.zeros(64, size, dtype=dtype), values, type_name)
    assert torch.equal(out[:32], values.sum(0, keepdim=True).expand(32, size).to(dtype))
    assert torch.equal(out[32:], values[[i ^ 9 for i in LANES]])


def test_a_partial_simdgroup_reduces_over_the_lanes_it_has():
    out = on_lanes("o[lane] = simd_sum(1.0f);", torch.zeros(32), lanes=20)
    assert out.tolist() == [20.0] * 20 + [0.0] * 12


def test_sums_follow_a_tree_of_halves():
    values = torch.randn(32, generator=torch.Generator().manual_seed(5))
    tree = values.clone()
    while len(tree) > 1:
        tree = tree[: len(tree) // 2] + tree[len(tree) // 2 :]
    expected = {"simd_sum(x)": tree.expand(32).tolist()}
    assert lane_values(expected, values) == expected


TYPES = {"float": torch.float32, "half": torch.float16, "bfloat": torch.bfloat16}
COMBINATIONS = [
    ("float", "float", "float"),
    ("float", "half", "half"),
    ("float", "bfloat", "bfloat"),
    ("float", "float", "half"),
    ("float", "float", "bfloat"),
    ("half", "half", "half"),
    ("bfloat", "bfloat", "bfloat"),
]


def model_of_multiply(a, b, c):
    """A B + C as the simulator rounds it, in float32 with one fused multiply-add per k."""
    total = c.float().double()
    for k in range(8):
        product = a.double()[:, k : k + 1] * b.double()[k : k + 1]
        total = (product + total).float().double()
    return total.to(c.dtype)


MULTIPLY = """
template <typename D, typename A, typename B>
void multiply(device void* o, const device void* a, const device void* b, const device void* c) {
  simdgroup_matrix<A, 8, 8> left; simdgroup_matrix<B, 8, 8> right; simdgroup_matrix<D, 8, 8> sum;
  simdgroup_load(left, (const device A*)a); simdgroup_load(right, (const device B*)b);
  simdgroup_load(sum, (const device D*)c); simdgroup_multiply_accumulate(sum, left, right, sum);
  simdgroup_store(sum, (device D*)o);
}
"""


@pytest.mark.parametrize("check", (False, True))
def test_matrix_multiply_accumulate_matches_a_model(check):
    calls = choice(f"multiply<{', '.join(names)}>(o, a, b, c);" for names in COMBINATIONS)
    parameters = "device void* o, const device void* a, const device void* b, const device void* c,"
    library = compiled(calls, f"{parameters} constant int& which", MULTIPLY, check=check)
    generator = torch.Generator().manual_seed(1)
    for which, names in enumerate(COMBINATIONS):
        add, left, right = (
            torch.randn(8, 8, generator=generator).to(TYPES[name]) for name in names
        )
        out = torch.zeros_like(add)
        arguments = out, left, right, add, which
        library.k(*arguments, threads=32, group_size=32, arg_casts="int32")
        assert torch.equal(out, model_of_multiply(left, right, add)), names


COPY = """
template <typename T, typename Source, typename Target>
void copy(Source source, Target target) {
  simdgroup_matrix<T, 8, 8> m;
  simdgroup_load(m, source, 20, ulong2(3, 5), false);
  simdgroup_store(m, target, 17, ulong2(1, 2));
  simdgroup_load(m, source, 20, ulong2(3, 5), true);
  simdgroup_store(m, target, 17, ulong2(1, 12));
  simdgroup_store(m, target, 17, ulong2(9, 12), true);
}
"""


@pytest.mark.parametrize("element", TYPES)
def test_matrices_are_loaded_and_stored_at_strides_and_origins(element):
    places = [(source, target) for source in "as" for target in "ot"]
    fill = "for (uint n = lane; n < 400; n += 32) { s[n] = a[n]; t[n] = o[n]; }"
    copy = "if (which & 1) for (uint n = lane; n < 400; n += 32) o[n] = t[n];"
    barrier = "threadgroup_barrier(mem_flags::mem_device | mem_flags::mem_threadgroup);"
    calls = choice(f"copy<{element}>({source}, {target});" for source, target in places)
    library = compiled(
        f"threadgroup {element} s[400]; threadgroup {element} t[400]; {fill} {barrier}"
        f" {calls} {barrier} {copy}",
        f"device {element}* o, const device {element}* a, constant int& which,"
        " uint lane [[thread_index_in_simdgroup]]",
        COPY,
        check=True,
    )
    values = torch.arange(400).to(TYPES[element])
    block = values.view(20, 20)[5:13, 3:11]
    expected = torch.zeros(400, dtype=TYPES[element])
    rows = expected[: 17 * 23].view(23, 17)
    rows[2:10, 1:9], rows[12:20, 1:9], rows[12:20, 9:17] = block, block.T, block
    for which, place in enumerate(places):
        out = torch.zeros(400, dtype=TYPES[element])
        library.k(out, values, which, threads=32, group_size=32, arg_casts="int32")
        assert torch.equal(out, expected), place


def test_lanes_hold_apples_elements():
    body = (
        "simdgroup_float8x8 m; simdgroup_load(m, a); o[2 * lane] = m.thread_elements()[0];"
        " o[2 * lane + 1] = m.thread_elements()[1];"
    )
    out = on_lanes(body, torch.zeros(32, 2), torch.arange(64.0))
    for lane in LANES:
        quad = lane // 4
        row, column = (quad & 4) + lane // 2 % 4, (quad & 2) * 2 + lane % 2 * 2
        assert out[lane].tolist() == [row * 8 + column, row * 8 + column + 1]


def test_filled_and_diagonal_matrices_have_their_elements():
    body = (
        "simdgroup_half8x8 d(2.0h), p; simdgroup_half8x8 f ="
        " make_filled_simdgroup_matrix<half, 8, 8>(3.0h); simdgroup_multiply(p, d, f);"
        " simdgroup_store(d, o); simdgroup_store(p, o + 64);"
    )
    out = on_lanes(body, torch.zeros(2, 8, 8).half(), type_name="half")
    assert torch.equal(out[0], 2 * torch.eye(8).half())
    assert torch.equal(out[1], torch.full((8, 8), 6).half())

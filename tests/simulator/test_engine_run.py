"""How the engine runs a dispatch: its grid, order, counters, atomics and host threads."""

import math
import os
import resource
import threading
from concurrent.futures import ThreadPoolExecutor
from itertools import product

import pytest
import torch

from tests.helpers.forks import in_child
from torch_metal_attn.simulator import Counters, SimulatorFault
from torch_metal_attn.simulator.llvm.operations import COUNTS

from .planted import choice, compiled

BARRIER = "BARRIER(threadgroup)"


ONE_THREAD = "device float* o [[buffer(0)]], uint g [[threadgroup_position_in_grid]]"
ATTRIBUTES = {
    "thread_position_in_grid": "uint3",
    "threadgroup_position_in_grid": "uint3",
    "thread_position_in_threadgroup": "ushort3",
    "threads_per_threadgroup": "uint3",
    "dispatch_threads_per_threadgroup": "uint3",
    "threadgroups_per_grid": "uint3",
    "threads_per_grid": "uint3",
    "thread_index_in_threadgroup": "ushort",
    "thread_index_in_simdgroup": "uint",
    "simdgroup_index_in_threadgroup": "uint",
    "simdgroups_per_threadgroup": "uint",
    "threads_per_simdgroup": "uint",
    "thread_index_in_quadgroup": "uint",
    "quadgroup_index_in_threadgroup": "uint",
    "quadgroups_per_threadgroup": "uint",
}


@pytest.mark.parametrize("seed", (0, 3))
@pytest.mark.parametrize("grid,group", [((10, 1, 1), (4, 1, 1)), ((7, 5, 3), (4, 3, 2))])
def test_attributes_are_right_in_edge_threadgroups_too(grid, group, seed):
    names = list(ATTRIBUTES)
    parameters = "device int* o [[buffer(0)]], uint3 at [[thread_position_in_grid]], "
    parameters += "uint3 size [[threads_per_grid]], "
    parameters += ", ".join(f"{t} v{i} [[{n}]]" for i, (n, t) in enumerate(ATTRIBUTES.items()))
    stores = []
    for i, name in enumerate(names):
        wide = ATTRIBUTES[name].endswith("3")
        stores += [f"o[n++] = v{i}.{c};" for c in "xyz"] if wide else [f"o[n++] = v{i};"]
    body = f"uint n = ((at.z * size.y + at.y) * size.x + at.x) * {len(stores)};" + "".join(stores)
    out = torch.full((grid[2], grid[1], grid[0], len(stores)), -1, dtype=torch.int32)
    compiled(body, parameters).k(out, threads=grid, group_size=group, seed=seed)
    groups = [-(-g // t) for g, t in zip(grid, group, strict=True)]
    for x, y, z in product(*map(range, grid)):
        outer, inner = zip(*map(divmod, (x, y, z), group), strict=True)
        here = [min(t, g - u * t) for g, t, u in zip(grid, group, outer, strict=True)]
        index = (inner[2] * here[1] + inner[1]) * here[0] + inner[0]
        count = math.prod(here)
        expected = [x, y, z, *outer, *inner, *here, *group, *groups, *grid]
        expected += [index, index % 32, index // 32, -(-count // 32), 32]
        expected += [index % 4, index // 4, -(-count // 4)]
        assert out[z, y, x].tolist() == expected


def test_the_largest_threadgroup_runs():
    library = compiled(
        f"threadgroup float s[1024]; s[i] = i; {BARRIER} o[i] = s[1023 - i] + simd_max(float(i));",
        "device float* o [[buffer(0)]], uint i [[thread_index_in_threadgroup]]",
        check=True,
    )
    out = torch.zeros(1024)
    library.k(out, threads=1024, group_size=1024)
    i = torch.arange(1024.0)
    assert torch.equal(out, 1023 - i + torch.arange(31.0, 1024, 32).repeat_interleave(32))


def test_counters_equal_counts_by_hand():
    body = """
        threadgroup float s[64];
        s[i] = a[g * 64 + i];                            // device load, threadgroup store
        threadgroup_barrier(mem_flags::mem_threadgroup);
        float x = s[63 - i];                             // threadgroup load
        x = simd_sum(x);                                 // reduction
        x += simd_shuffle_xor(x, 1);                     // shuffle
        x += simd_shuffle(x, 2);                         // shuffle
        bool any = simd_any(x > 0);                      // vote
        simdgroup_barrier(mem_flags::mem_none);
        simdgroup_float8x8 m(1.0f);
        simdgroup_multiply(m, m, m);                     // matrix operation
        simdgroup_multiply_accumulate(m, m, m, m);       // matrix operation
        half h = half(x);                                // convert
        o[g * 64 + i] = exp2(x) + float(h) + any + m.thread_elements()[0] + c.x;
                                            // constant load, exp, convert, device store
    """
    parameters = """device float* o [[buffer(0)]], const device float* a [[buffer(1)]],
        constant float4& c [[buffer(2)]], uint i [[thread_index_in_threadgroup]],
        uint g [[threadgroup_position_in_grid]]"""
    library = compiled(body, parameters, check=True)
    library.k(torch.zeros(128), torch.zeros(128), [0.0] * 4, threads=128, group_size=64, workers=2)
    counted = library.last_counters
    threads, simdgroups, groups = 128, 4, 2
    assert counted.threadgroups == groups
    assert counted.threadgroup_barriers == groups
    assert counted.threadgroup_bytes == 256
    assert counted.reductions == counted.votes == counted.simdgroup_barriers == simdgroups
    assert counted.shuffles == counted.matrix_operations == 2 * simdgroups
    assert counted.loads["device"] == counted.stores["device"] == threads
    assert counted.load_bytes["device"] == counted.store_bytes["device"] == 4 * threads
    assert counted.loads["threadgroup"] == counted.stores["threadgroup"] == threads
    assert counted.load_bytes["threadgroup"] == counted.store_bytes["threadgroup"] == 4 * threads
    assert counted.loads["constant"] == threads
    assert counted.stores["constant"] == 0
    assert counted.exps == threads
    assert counted.converts == 2 * threads


def test_arithmetic_is_counted_on_request():
    body = """
        float x = a[i];                                  // address
        uint bits = ((i ^ n) * 3 + (i << n)) / n;        // 5 integers
        float y = fma(x, x, 1.0f) / x;                   // 2 floats
        #pragma unroll
        for (uint j = 0; j < 4; ++j) y = y * x + n;      // convert, 4 floats: no compare, no sum
        y = max(-y, n > i ? x : 1.0f);                   // 3 selects: the negation is free
        o[i] = sqrt(y) + float(bits);                    // function, convert, float, address
    """
    parameters = """device float* o [[buffer(0)]], const device float* a [[buffer(1)]],
        constant uint& n [[buffer(2)]], uint i [[thread_index_in_threadgroup]]"""
    counters = []
    for build in ("count", "check"):
        library = compiled(body, parameters, **{build: True})
        library.k(torch.zeros(64), torch.ones(64), 9, threads=64, group_size=64, arg_casts="int32")
        counters.append(library.last_counters)
    counted, checked = counters
    of_a_thread = {name: getattr(counted, name) / 64 for name in COUNTS}
    assert of_a_thread == {
        "converts": 2,
        "exps": 0,
        "float_operations": 7,
        "integer_operations": 5,
        "addresses": 2,
        "selects": 3,
        "functions": 1,
    }
    assert (Counters() + counted + counted).selects == 6 * 64
    assert checked.float_operations is checked.selects is (checked + counted).selects is None


POINTERS = {"float": 4, "float4": 16, "half4": 8, "uchar": 1, "ulong": 8}
# Each statement, with the loads, loaded bytes and stored bytes of its 32 lanes.
ACCESSES = {
    f"((device {p}*)o)[i] = ((const device {p}*)a)[i];": (32, 32 * size, 32 * size)
    for p, size in POINTERS.items()
} | {
    # A matrix load is one access per lane, or two if it is transposed.
    f"simdgroup_load(m, (const device half*)a, 8, 0, {transposed});"
    "simdgroup_store(m, (device half*)o);": (loads, 128, 128)
    for transposed, loads in (("false", 32), ("true", 64))
}


def test_an_access_counts_once_with_its_bytes():
    library = compiled(
        f"simdgroup_half8x8 m; {choice(f'{{ {access} }}' for access in ACCESSES)}",
        "device uchar* o [[buffer(0)]], const device uchar* a [[buffer(1)]],"
        " constant int& which [[buffer(2)]], uint i [[thread_index_in_threadgroup]]",
        check=True,
    )
    out, a = (torch.zeros(512, dtype=torch.uint8) for _ in range(2))
    for which, (loads, loaded, stored) in enumerate(ACCESSES.values()):
        library.k(out, a, which, threads=32, group_size=32, arg_casts="int32")
        counted = library.last_counters
        assert (counted.loads["device"], counted.stores["device"]) == (loads, 32)
        assert (counted.load_bytes["device"], counted.store_bytes["device"]) == (loaded, stored)


RACY = f"""
    threadgroup float s[1]; s[0] = i; {BARRIER} float first = s[0]; {BARRIER}
    s[0] = i; simd_sum(1.0f); {BARRIER}
    if (i == 0) o[g] = first * 1000 + s[0];
"""
RACY_PARAMETERS = """device float* o [[buffer(0)]], uint i [[thread_index_in_threadgroup]],
    uint g [[threadgroup_position_in_grid]]"""


def test_seeds_give_reproducible_and_different_orders():
    library = compiled(RACY, RACY_PARAMETERS)

    def outcome(seed: int, workers: int) -> list[float]:
        out = torch.zeros(16)
        library.k(out, threads=16 * 128, group_size=128, seed=seed, workers=workers)
        return out.tolist()

    seeds = range(1, 9)
    outcomes = [outcome(seed, 1) for seed in seeds]
    assert [outcome(seed, 1) for seed in seeds] == outcomes
    assert [outcome(seed, 2) for seed in seeds] == outcomes
    assert len({tuple(o) for o in outcomes}) == len(outcomes)
    assert len(set(outcomes[0])) > 8, "threadgroups are shuffled differently"
    assert outcome(0, 1) == outcome(0, 2)


ATOMICS = {
    # (operation, type, start): the result over operands 1 ... 6400
    ("add", "int", 0): lambda start, all: start + sum(all),
    ("add", "float", 0): lambda start, all: start + len(all),
    ("sub", "uint", 2**31 - 1): lambda start, all: start - sum(all),
    ("max", "int", 7): lambda start, all: max(start, *all),
    ("min", "int", 9999): lambda start, all: min(start, *all),
    ("max", "uint", 7): lambda start, all: max(start, *all),
    ("or", "uint", 0): lambda start, all: 8191,
    ("and", "uint", 8191): lambda start, all: 0,
    ("xor", "uint", 5): lambda start, all: start ^ (6400),
    ("max", "ulong", 7): lambda start, all: 2**32 + max(all),  # atomic_max returns nothing
}
OPERANDS = {"float": "1.0f", "ulong": "0x100000001ul + i"}
DTYPES = {"float": torch.float32, "ulong": torch.int64}


@pytest.mark.parametrize("check", (False, True))
def test_device_atomics_over_many_threadgroups_lose_no_value(check):
    calls = [
        f"atomic_{'' if of_type == 'ulong' else 'fetch_'}{operation}_explicit("
        f"(device atomic_{of_type}*)o, {OPERANDS.get(of_type, 'i + 1')}, memory_order_relaxed);"
        for operation, of_type, _ in ATOMICS
    ]
    library = compiled(
        choice(calls),
        "device int* o [[buffer(0)]], constant int& which [[buffer(1)]],"
        " uint i [[thread_position_in_grid]]",
        check=check,
    )
    for which, ((_, of_type, start), model) in enumerate(ATOMICS.items()):
        out = torch.tensor([start], dtype=DTYPES.get(of_type, torch.int32))
        options = {"group_size": 64, "workers": 2, "seed": 3, "arg_casts": "int32"}
        library.k(out.view(torch.int32), which, threads=6400, **options)
        assert out.item() == model(start, range(1, 6401)), calls[which]


@pytest.mark.parametrize("check", (False, True))
def test_threadgroup_atomics_and_exchanges_lose_no_value(check):
    body = f"""
        threadgroup atomic_uint total; threadgroup atomic_uint last;
        if (i == 0) {{ atomic_store_explicit(&total, 0u, memory_order_relaxed);
                       atomic_store_explicit(&last, 7u, memory_order_relaxed); }}
        {BARRIER}
        uint seen = atomic_load_explicit(&total, memory_order_relaxed);
        while (!atomic_compare_exchange_weak_explicit(&total, &seen, seen + i,
                   memory_order_relaxed, memory_order_relaxed)) {{}}
        uint before = atomic_exchange_explicit(&last, i + 100, memory_order_relaxed);
        {BARRIER}
        o[g * 65 + i] = before;
        if (i == 0) o[g * 65 + 64] = atomic_load_explicit(&total, memory_order_relaxed);
    """
    library = compiled(body, RACY_PARAMETERS.replace("float", "int"), check=check)
    out = torch.zeros(20, 65, dtype=torch.int32)
    library.k(out, threads=20 * 64, group_size=64, seed=2)
    assert (out[:, 64] == 64 * 63 // 2).all()
    for row in out[:, :64].tolist():
        # Each exchange returns the value of another exchange, or the initial value.
        assert len(set(row)) == 64
        assert set(row) <= {7, *range(100, 164)}


# Seconds, more than the limit for polling without progress.
LONG_WAIT = 3.5


def test_a_long_wait_that_ends_is_no_fault():
    """Threadgroup 1 continues after its wait without a barrier, so threadgroup 2 may wait."""
    library = compiled(
        """while (atomic_load_explicit(n, memory_order_relaxed) < g) {}
           while (g < 2 && ((volatile device int*)go)[g] == 0) {}
           atomic_fetch_add_explicit(n, 1, memory_order_relaxed);""",
        """device atomic_int* n [[buffer(0)]], device int* go [[buffer(1)]],
           int g [[threadgroup_position_in_grid]]""",
    )
    ended, go = torch.zeros(1, dtype=torch.int32), torch.zeros(2, dtype=torch.int32)
    for g in range(2):
        threading.Timer(LONG_WAIT + 0.5 * g, go[g].fill_, (1,)).start()
    library.k(ended, go, threads=3, group_size=1, workers=3)
    assert ended.item() == 3


def test_threads_that_alternate_are_no_fault():
    library = compiled(
        """for (int turn = i; ((volatile device int*)stop)[0] == 0; turn += 2) {
             while (atomic_load_explicit(n, memory_order_relaxed) < turn &&
                    ((volatile device int*)stop)[0] == 0) {}
             atomic_store_explicit(n, turn + 1, memory_order_relaxed);
           }""",
        """device atomic_int* n [[buffer(0)]], device int* stop [[buffer(1)]],
           int i [[thread_index_in_threadgroup]]""",
    )
    turns, stop = torch.zeros(1, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    threading.Timer(LONG_WAIT, stop.fill_, (1,)).start()
    library.k(turns, stop, threads=2, group_size=2)
    assert turns.item() > 2


def test_threadgroup_arguments_have_the_length_of_the_call():
    library = compiled(
        f"s[i] = i; t[i] = 2 * i; {BARRIER} o[i] = s[63 - i] + t[i];",
        """device float* o [[buffer(0)]], threadgroup float* s [[threadgroup(0)]],
           threadgroup float* t [[threadgroup(3)]], uint i [[thread_index_in_threadgroup]]""",
        check=True,
    )
    out = torch.zeros(64)
    library.k(out, threads=64, group_size=64, threadgroup_bytes={0: 256, 3: 256})
    assert torch.equal(out, 63 + torch.arange(64.0))
    assert library.last_counters.threadgroup_bytes == 512
    with pytest.raises(SimulatorFault, match=r"threadgroup\(3\).*252") as caught:
        library.k(out, threads=64, group_size=64, threadgroup_bytes={0: 256, 3: 252})
    assert caught.value.kind == "threadgroup_out_of_bounds"
    with pytest.raises(SimulatorFault) as caught:
        library.k(out, threads=64, group_size=64, threadgroup_bytes={0: 256, 3: 32768})
    assert caught.value.kind == "threadgroup_memory"
    for size in (32769, 2**63 - 1):
        message = rf"k: threadgroup_bytes\[3\] is {size}; a threadgroup has at most 32768 bytes"
        with pytest.raises(ValueError, match=message):
            library.k(out, threads=64, group_size=64, threadgroup_bytes={0: 256, 3: size})


@pytest.mark.parametrize("check", (False, True))
def test_two_python_threads_run_at_once(check):
    library = compiled(
        f"threadgroup float s[64]; s[i] = x; {BARRIER} o[g * 64 + i] = simd_sum(s[63 - i]);",
        """device float* o [[buffer(0)]], constant float& x [[buffer(1)]],
           uint i [[thread_index_in_threadgroup]], uint g [[threadgroup_position_in_grid]]""",
        check=check,
    )

    def is_right(number: int) -> bool:
        out = torch.zeros(640)
        library.k(out, float(number), threads=640, group_size=64)
        return bool((out == 32.0 * number).all())

    with ThreadPoolExecutor(3) as pool:
        assert all(pool.map(is_right, [1, 2, 3] * 20))


@pytest.mark.parametrize("most", (0, 16))
def test_an_error_says_that_the_system_starts_no_more_threads(most):
    library = compiled("for (int n = 0; n < 1000; n++) o[g] += 1;", ONE_THREAD)
    library.k(torch.zeros(1), threads=1, group_size=1)

    def run():
        resource.setrlimit(resource.RLIMIT_NPROC, (most, most))
        if os.getuid() == 0:  # the limit does not apply to root
            os.setuid(65534)
        out = torch.zeros(256)
        library.k(out, threads=256, group_size=1, workers=256)
        return out.tolist()

    refused = repr(ValueError("k: the system starts no more threads"))
    actual = in_child(run)
    if str(actual).startswith(("PermissionError", "OSError")):
        pytest.skip(f"root may not become another user here: {actual}")
    # With a limit of 16, the run fails too if the user already has 16 processes.
    assert actual == refused or (most > 0 and actual == [1000] * 256)


def test_a_run_starts_with_fresh_state():
    """Runs on one host thread share a region, even after a fault, but no memory and no counts."""
    parameters = "device float* o [[buffer(0)]], constant int& writes [[buffer(1)]]"
    parameters += ", uint i [[thread_index_in_threadgroup]]"
    body = f"threadgroup float s[64]; if (writes) s[i] = 1; {BARRIER} o[i] = s[63 - i];"
    library = compiled(body, parameters, check=True)
    counts = []
    for _ in range(2):
        library.k(torch.zeros(64), 1, threads=64, group_size=64)
        counts.append(library.last_counters)
        with pytest.raises(SimulatorFault, match="has not been written") as raised:
            library.k(torch.zeros(64), 0, threads=64, group_size=64)
        assert raised.value.kind == "uninitialised"
    assert counts[0] == counts[1]

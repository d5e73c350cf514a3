"""One planted fault for each checker of the engine, and its clean twin."""

import pytest
import torch

from torch_metal_attn.simulator import SimulatorFault, compile_shader

HEAD = "#include <metal_stdlib>\nusing namespace metal;\n"
BARRIER = "threadgroup_barrier(mem_flags::mem_threadgroup);"
# Statements of a kernel of 64 threads: k(device float* o, const device float* a, constant float& c,
# uint i, uint lane).
CASES = {
    # name: (kind, faulty statements, clean statements)
    "device_read_past_the_end": (
        "out_of_bounds",
        "o[i] = a[i + 1];",
        "o[i] = a[i];",
    ),
    "device_read_before_the_start": (
        "out_of_bounds",
        "o[i] = (a - 1)[i];",
        "o[i] = (a - 1)[i + 1];",
    ),
    "device_write_far_away": (
        "out_of_bounds",
        "o[i + (i == 63 ? 100000000 : 0)] = 1;",
        "o[i] = 1;",
    ),
    "threadgroup_index_past_the_end": (
        "threadgroup_out_of_bounds",
        f"threadgroup float s[64]; s[i + 1] = i; {BARRIER} o[i] = s[i ? i : 1];",
        f"threadgroup float s[65]; s[i + 1] = i; {BARRIER} o[i] = s[i ? i : 1];",
    ),
    "threadgroup_neighbour_overrun": (
        "threadgroup_out_of_bounds",
        f"threadgroup float s[64]; threadgroup float t[64]; s[i] = i; t[i] = i; {BARRIER}"
        " o[i] = s[i + 64] + t[i];",
        f"threadgroup float s[64]; threadgroup float t[64]; s[i] = i; t[i] = i; {BARRIER}"
        " o[i] = s[i] + t[i];",
    ),
    "uninitialised_threadgroup_read": (
        "uninitialised",
        f"threadgroup float s[65]; s[i] = i; {BARRIER} o[i] = s[i + 1];",
        f"threadgroup float s[65]; s[i] = i; if (i == 0) s[64] = 0; {BARRIER} o[i] = s[i + 1];",
    ),
    "write_then_read_by_another_simdgroup": (
        "race",
        f"threadgroup float s[64]; s[i] = 0; {BARRIER} s[i] = i; o[i] = s[63 - i];",
        f"threadgroup float s[64]; s[i] = 0; {BARRIER} s[i] = i; {BARRIER} o[i] = s[63 - i];",
    ),
    "write_then_read_by_another_lane": (
        "race",
        f"threadgroup float s[64]; s[i] = 0; {BARRIER} s[i] = i; o[i] = s[i ^ 1];",
        f"threadgroup float s[64]; s[i] = 0; {BARRIER} s[i] = i;"
        " simdgroup_barrier(mem_flags::mem_threadgroup); o[i] = s[i ^ 1];",
    ),
    "a_shuffle_is_no_barrier": (
        "race",
        f"threadgroup float s[64]; s[i] = 0; {BARRIER} s[i] = i;"
        " float t = simd_sum(1.0f); o[i] = s[i ^ 1] + t;",
        f"threadgroup float s[64]; s[i] = 0; {BARRIER} s[i] = i; float t = simd_sum(1.0f);"
        " simdgroup_barrier(mem_flags::mem_threadgroup); o[i] = s[i ^ 1] + t;",
    ),
    "simdgroup_barrier_orders_only_its_own": (
        "race",
        f"threadgroup float s[64]; s[i] = 0; {BARRIER} s[i] = i;"
        " simdgroup_barrier(mem_flags::mem_threadgroup); o[i] = s[63 - i];",
        f"threadgroup float s[64]; s[i] = 0; {BARRIER} s[i] = i;"
        " simdgroup_barrier(mem_flags::mem_threadgroup); o[i] = s[i ^ 31];",
    ),
    "a_barrier_without_mem_threadgroup": (
        "race",
        f"threadgroup float s[64]; s[i] = 0; {BARRIER} s[i] = i;"
        " threadgroup_barrier(mem_flags::mem_none); o[i] = s[63 - i];",
        f"threadgroup float s[64]; s[i] = 0; {BARRIER} s[i] = i;"
        " threadgroup_barrier(mem_flags::mem_device | mem_flags::mem_threadgroup);"
        " o[i] = s[63 - i];",
    ),
    "a_simdgroup_barrier_without_mem_threadgroup": (
        "race",
        f"threadgroup float s[64]; s[i] = 0; {BARRIER} s[i] = i;"
        " simdgroup_barrier(mem_flags::mem_none); o[i] = s[i ^ 1];",
        f"threadgroup float s[64]; s[i] = 0; {BARRIER} s[i] = i;"
        " simdgroup_barrier(mem_flags::mem_threadgroup); o[i] = s[i ^ 1];",
    ),
    "read_then_overwritten": (
        "race",
        f"threadgroup float s[64]; s[i] = i; {BARRIER} float x = s[63 - i]; s[i] = 0; o[i] = x;",
        f"threadgroup float s[64]; s[i] = i; {BARRIER} float x = s[63 - i]; {BARRIER}"
        " s[i] = 0; o[i] = x;",
    ),
    "read_by_two_simdgroups_then_overwritten": (
        "race",
        f"threadgroup float s[1]; if (i == 0) s[0] = 1; {BARRIER} o[i] = s[0];"
        " simdgroup_barrier(mem_flags::mem_threadgroup); if (i == 63) s[0] = 2;",
        f"threadgroup float s[1]; if (i == 0) s[0] = 1; {BARRIER} o[i] = s[0];"
        f" {BARRIER} if (i == 63) s[0] = 2;",
    ),
    "read_by_two_lanes_then_overwritten": (
        "race",
        f"threadgroup float s[1]; if (i == 0) s[0] = 1; {BARRIER}"
        " if (i < 32) { o[i] = s[0]; if (i == 31) s[0] = 2; }",
        f"threadgroup float s[1]; if (i == 0) s[0] = 1; {BARRIER}"
        " if (i == 31) { o[i] = s[0]; s[0] = 2; }",
    ),
    "two_writers": (
        "race",
        f"threadgroup float s[1]; s[0] = i; {BARRIER} o[i] = s[0];",
        f"threadgroup float s[1]; if (i == 0) s[0] = i; {BARRIER} o[i] = s[0];",
    ),
    "two_values_of_a_simdgroup": (
        "race",
        f"threadgroup float s[2]; s[i / 32] = lane / 31; {BARRIER} o[i] = s[i / 32];",
        f"threadgroup float s[2]; s[i / 32] = simd_max(i); {BARRIER} o[i] = s[i / 32];",
    ),
    "one_value_of_two_simdgroups": (
        "race",
        f"threadgroup float2 s[2]; s[0] = float2(a[1], 2); {BARRIER} o[i] = s[0].x;",
        f"threadgroup float2 s[2]; s[i / 32] = float2(a[1], 2); {BARRIER} o[i] = s[i / 32].y;",
    ),
    "barrier_in_both_branches": (
        "divergent_barrier",
        f"threadgroup float s[64]; s[i] = i; if (i < 40) {{ {BARRIER} o[i] = s[i ^ 1]; }}"
        f" else {{ {BARRIER} o[i] = s[i]; }}",
        f"threadgroup float s[64]; s[i] = i; {BARRIER} if (i < 40) o[i] = s[i ^ 1];"
        " else o[i] = s[i];",
    ),
    "barrier_after_an_early_return": (
        "divergent_barrier",
        f"if (i >= 40) return; {BARRIER} o[i] = 1;",
        f"{BARRIER} if (i >= 40) return; o[i] = 1;",
    ),
    "barrier_against_simd_operation": (
        "partial_simd",
        f"if (lane < 8) {{ {BARRIER} }} else {{ o[i] = simd_sum(1.0f); {BARRIER} }}",
        f"o[i] = simd_sum(1.0f); {BARRIER}",
    ),
    "divergent_simdgroup_barrier": (
        "divergent_barrier",
        "if (lane < 8) simdgroup_barrier(mem_flags::mem_threadgroup); o[i] = 1;",
        "simdgroup_barrier(mem_flags::mem_threadgroup); o[i] = 1;",
    ),
    "partial_reduction": (
        "partial_simd",
        "float x = i; if (lane < 8) x = simd_sum(x); o[i] = x;",
        "float x = simd_sum(float(i)); if (lane < 8) o[i] = x;",
    ),
    "partial_shuffle_after_an_early_return": (
        "partial_simd",
        "if (lane == 31) return; o[i] = simd_shuffle(a[i], 0);",
        "float x = simd_shuffle(a[i], 0); if (lane == 31) return; o[i] = x;",
    ),
    "partial_matrix_operation": (
        "partial_simd",
        "simdgroup_float8x8 x(1.0f), y(2.0f), z(0.0f);"
        " if (lane != 3) simdgroup_multiply_accumulate(z, x, y, z); simdgroup_store(z, o);",
        "simdgroup_float8x8 x(1.0f), y(2.0f), z(0.0f);"
        " simdgroup_multiply_accumulate(z, x, y, z); if (i < 32) simdgroup_store(z, o);",
    ),
    "too_much_threadgroup_memory": (
        "threadgroup_memory",
        f"threadgroup float s[8192]; threadgroup float t[1]; s[i] = i; if (i == 0) t[0] = 1;"
        f" {BARRIER} o[i] = s[i] + t[0];",
        f"threadgroup float s[8188]; threadgroup float t[1]; s[i] = i; if (i == 0) t[0] = 1;"
        f" {BARRIER} o[i] = s[i] + t[0];",
    ),
    "write_through_a_cast_of_constant": (
        "constant_write",
        "((device float*)(ulong)&c)[0] = i;",
        "o[i] = c;",
    ),
    "misaligned_vector": (
        "misaligned",
        "if (i < 8) ((device float4*)(o + 1))[i] = 1;",
        "if (i < 8) ((device float4*)(o + 4))[i] = 1;",
    ),
    "misaligned_threadgroup_vector": (
        "misaligned",
        f"threadgroup float s[68]; if (i < 8) ((threadgroup float2*)(s + 1))[i] = 1; {BARRIER}"
        " o[i] = i;",
        f"threadgroup float s[68]; if (i < 8) ((threadgroup float2*)(s + 2))[i] = 1; {BARRIER}"
        " o[i] = i;",
    ),
    "atomic_against_plain": (
        "race",
        f"threadgroup atomic_uint n; if (i == 0) atomic_store_explicit(&n, 0u,"
        f" memory_order_relaxed); {BARRIER} atomic_fetch_add_explicit(&n, 1u,"
        " memory_order_relaxed); o[i] = *(threadgroup uint*)&n;",
        f"threadgroup atomic_uint n; if (i == 0) atomic_store_explicit(&n, 0u,"
        f" memory_order_relaxed); {BARRIER} atomic_fetch_add_explicit(&n, 1u,"
        f" memory_order_relaxed); {BARRIER} o[i] = *(threadgroup uint*)&n;",
    ),
    "atomic_update_of_nothing": (
        "uninitialised",
        "threadgroup atomic_uint n;"
        " o[i] = atomic_fetch_add_explicit(&n, 1u, memory_order_relaxed);",
        f"threadgroup atomic_uint n; if (i == 0) atomic_store_explicit(&n, 0u,"
        f" memory_order_relaxed); {BARRIER} o[i] = atomic_fetch_add_explicit(&n, 1u,"
        " memory_order_relaxed);",
    ),
}
FAULTY_LINE = 6


def kernel(statements: str) -> str:
    return (
        f"{HEAD}kernel void k(device float* o [[buffer(0)]], const device float* a [[buffer(1)]],\n"
        "  constant float& c [[buffer(2)]], uint i [[thread_index_in_threadgroup]],\n"
        f"  uint lane [[thread_index_in_simdgroup]]) {{\n{statements}\n}}\n"
    )


def run(statements: str, check: bool = True, seed: int = 0, workers: int = 1) -> torch.Tensor:
    out, data = torch.zeros(64), torch.arange(64.0)
    library = compile_shader(kernel(statements), check=check)
    library.k(out, data, 1.0, threads=64, group_size=64, seed=seed, workers=workers)
    return out


@pytest.mark.parametrize("name", CASES)
def test_a_planted_fault_is_caught_with_its_line(name):
    kind, faulty, _ = CASES[name]
    with pytest.raises(SimulatorFault) as caught:
        run(faulty)
    assert caught.value.kind == kind, caught.value
    assert caught.value.line == FAULTY_LINE, caught.value
    assert caught.value.kernel == "k"
    assert caught.value.threadgroup == (0, 0, 0)


@pytest.mark.parametrize("seed", (0, 1, 2))
@pytest.mark.parametrize("name", CASES)
def test_the_clean_twin_is_not_reported(name, seed):
    run(CASES[name][2], seed=seed)


@pytest.mark.parametrize("seed", (1, 2, 3, 4))
@pytest.mark.parametrize(
    "name", [name for name, case in CASES.items() if case[0] in ("race", "divergent_barrier")]
)
def test_races_are_found_in_any_order(name, seed):
    kind, faulty, _ = CASES[name]
    with pytest.raises(SimulatorFault) as caught:
        run(faulty, seed=seed)
    assert caught.value.kind == kind


def test_a_race_names_both_places():
    text = f"threadgroup float s[64]; s[i] = 0; {BARRIER}\ns[i] = i;\no[i] = s[63 - i];"
    with pytest.raises(SimulatorFault) as caught:
        run(text)
    lines = {caught.value.line, caught.value.other_site[0].line}
    assert lines == {FAULTY_LINE + 1, FAULTY_LINE + 2}


def test_a_message_says_how_far_and_in_what():
    with pytest.raises(SimulatorFault, match=r"4 bytes at byte 256 of buffer\(1\), which has 256"):
        run("o[i] = a[i + 1];")
    with pytest.raises(
        SimulatorFault, match="index 10 of threadgroup variable small, a float\\[10"
    ):
        run("threadgroup float small[10]; if (i == 10) small[i] = 1;")
    with pytest.raises(SimulatorFault, match="at byte 40 of threadgroup variable small"):
        run("threadgroup float small[10]; if (i == 10) *(small + i) = 1;")
    with pytest.raises(SimulatorFault, match="at byte -4 of threadgroup variable t, which has 256"):
        run("threadgroup float s[64], t[64]; s[i] = 0; *(t + i - 1) = 1;", seed=0)


def test_the_fault_is_at_the_thread_that_made_it():
    with pytest.raises(SimulatorFault) as caught:
        run("if (i == 37) o[i + 64] = 1;")
    assert caught.value.thread == (37, 0, 0)


def test_nothing_is_written_once_there_is_a_fault():
    out, data = torch.zeros(64), torch.arange(64.0)
    library = compile_shader(kernel("o[i] = 5; o[i + 1] = 5;"), check=True)
    with pytest.raises(SimulatorFault):
        library.k(out, data, 1.0, threads=64, group_size=64)
    assert torch.equal(out, torch.zeros(64))


def test_the_storage_is_the_bound_of_a_view():
    whole = torch.arange(100.0)
    library = compile_shader(kernel("o[i] = a[i + 6];"), check=True)
    out = torch.zeros(64)
    library.k(out, whole[30:94], 1.0, threads=64, group_size=64)
    assert torch.equal(out, whole[36:100])
    with pytest.raises(SimulatorFault):
        library.k(out, whole[31:95], 1.0, threads=64, group_size=64)


def test_arguments_that_share_a_storage_share_it_in_checked_runs():
    whole = torch.arange(128.0)
    library = compile_shader(kernel("o[i] = a[i] + 1;"), check=True)
    library.k(whole[:64], whole[64:], 1.0, threads=64, group_size=64)
    assert torch.equal(whole[:64], torch.arange(65.0, 129.0))
    assert torch.equal(whole[64:], torch.arange(64.0, 128.0))


def test_one_buffers_overrun_is_not_another_buffer():
    source = kernel("o[i] = a[i + step];").replace("constant float& c", "constant long& step")
    data, other = torch.zeros(64), torch.arange(64.0)
    step = (other.data_ptr() - data.data_ptr()) // 4
    out = torch.zeros(64)
    compile_shader(source).k(out, data, step, threads=64, group_size=64)
    assert torch.equal(out, other), "unchecked, it reads the other tensor"
    with pytest.raises(SimulatorFault):
        compile_shader(source, check=True).k(out, data, step, threads=64, group_size=64)


def test_program_scope_tables_may_be_read_and_only_within_bounds():
    table = "constant float table[4] = {1, 2, 3, 4};\n"
    source = kernel("constant float* t = table; o[i] = t[uint(a[i]) % 4];")
    library = compile_shader(source.replace("kernel void", table + "kernel void", 1), check=True)
    out = torch.zeros(64)
    library.k(out, torch.arange(64.0), 1.0, threads=64, group_size=64)
    assert out[:5].tolist() == [1, 2, 3, 4, 1]


def test_threadgroup_memory_is_fresh_for_each_threadgroup():
    text = f"threadgroup float s[64]; if (a[i] < 64) s[i] = 1; {BARRIER} o[i] = s[i];"
    source = kernel(text).replace("thread_index_in_threadgroup", "thread_position_in_grid")
    source = source.replace("s[i]", "s[i % 64]")
    library = compile_shader(source, check=True)
    with pytest.raises(SimulatorFault) as caught:
        data = torch.arange(128.0)
        library.k(torch.zeros(128), data, 1.0, threads=128, group_size=64, workers=1)
    assert caught.value.kind == "uninitialised"
    assert caught.value.threadgroup == (1, 0, 0)


def test_unchecked_threadgroup_memory_starts_as_nan():
    out = run("threadgroup float s[64]; o[i] = s[i];", check=False)
    assert out.isnan().all()


@pytest.mark.parametrize(
    "name",
    [
        "barrier_in_both_branches",
        "barrier_after_an_early_return",
        "divergent_simdgroup_barrier",
        "too_much_threadgroup_memory",
    ],
)
def test_faults_that_end_an_unchecked_run(name):
    kind, faulty, clean = CASES[name]
    with pytest.raises(SimulatorFault) as caught:
        run(faulty, check=False)
    assert caught.value.kind == kind
    run(clean, check=False)


DEADLOCKS = {
    "barrier_for_some_lanes_and_simd_operation_for_the_rest": (
        f"if (lane < 8) {{ {BARRIER} }} else {{ o[i] = simd_sum(1.0f); }} o[i] += 1;"
    ),
    "barriers_in_a_loop_of_unequal_length": f"for (uint n = 0; n < i; ++n) {{ {BARRIER} }}",
    "barrier_in_one_simdgroup": f"if (i < 32) {{ {BARRIER} }}",
    "simdgroup_barrier_against_threadgroup_barrier": (
        f"if (lane < 16) {{ {BARRIER} }} else simdgroup_barrier(mem_flags::mem_none);"
    ),
}


@pytest.mark.parametrize("check", (False, True))
@pytest.mark.parametrize("seed", (0, 7))
@pytest.mark.parametrize("name", DEADLOCKS)
def test_a_deadlock_ends_as_a_fault(name, seed, check):
    with pytest.raises(SimulatorFault):
        run(DEADLOCKS[name], check=check, seed=seed)


def test_unchecked_partial_operations_work_on_the_lanes_that_reach_them():
    out = run("float x = 1; if (lane < 8) x = simd_sum(x); o[i] = x;", check=False)
    assert out.tolist() == ([8.0] * 8 + [1.0] * 24) * 2


def test_unchecked_lanes_at_different_operations_keep_their_values():
    text = "float x = a[i]; if (lane < 8) x = simd_sum(x); else x = simd_max(x); o[i] = x;"
    assert run(text, check=False).tolist() == [28.0] * 8 + [31.0] * 24 + [284.0] * 8 + [63.0] * 24


def test_operations_about_the_active_lanes_may_be_partial():
    text = (
        "float x = -1; if (lane >= 5 && lane < 9) { x = simd_broadcast_first(float(lane));"
        " if (simd_is_first()) x = ulong(simd_active_threads_mask()); } o[i] = x;"
    )
    # Metal's mask there is of the lanes inside the innermost branch: one.
    expected = [-1.0] * 5 + [float(1 << 5)] + [5.0] * 3 + [-1.0] * 23
    assert run(text).tolist() == expected * 2


@pytest.mark.parametrize("slow", (0, 1))
def test_of_several_faults_the_first_in_order_is_reported(slow):
    # Two host threads run threadgroups 0 and 1 at once; either may be the one that takes long.
    source = kernel(
        f"float x = 1; uint turns = group == {slow} ? 3000000 : 600000;"
        " for (uint n = 0; n < turns; ++n) x += a[n % 64]; o[i] = a[i + 64] + x;"
    ).replace("uint lane", "uint group [[threadgroup_position_in_grid]], uint lane")
    library = compile_shader(source, check=True)
    for _ in range(3):
        with pytest.raises(SimulatorFault) as caught:
            library.k(torch.zeros(64), torch.zeros(64), 1.0, threads=2, group_size=1, workers=2)
        assert caught.value.threadgroup == (0, 0, 0)


def test_the_fault_does_not_depend_on_the_number_of_host_threads():
    source = kernel("o[group * 64 + i] = a[i + (group == 7 || group == 31 ? 1 : 0)];").replace(
        "uint lane", "uint group [[threadgroup_position_in_grid]], uint lane"
    )
    library = compile_shader(source, check=True)
    for seed in (0, 1, 2):
        found = set()
        for workers in (1, 2, 5):
            with pytest.raises(SimulatorFault) as caught:
                library.k(
                    torch.zeros(64 * 50),
                    torch.zeros(64),
                    1.0,
                    threads=64 * 50,
                    group_size=64,
                    workers=workers,
                    seed=seed,
                )
            found.add(caught.value.threadgroup)
        assert len(found) == 1

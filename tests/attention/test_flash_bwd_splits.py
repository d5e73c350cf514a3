"""dk and dv where threadgroups share the query heads of a KV head, or SIMD groups share keys."""

from functools import partial

import pytest
import torch

from tests.attention.flash_bwd_check import (
    backward,
    check_flash_bwd,
    hold_gradients,
    make_gradients,
)
from tests.attention.flash_bwd_features import exchanging
from tests.attention.flash_fwd_check import make_packed, make_qkv
from tests.attention.held_cases import HOME
from tests.flex.flex_check import block_mask, check_flex_gradients, rand, tanh_softcap
from tests.helpers.mutants import mutant_tests
from torch_metal_attn import explain, simulate
from torch_metal_attn.tools.explain.ops import backward_launches

CPU = torch.device("cpu")
# More cores than any problem here fills. Problems with fewer than 512 keys are never split.
MANY = 1000
SHAPE = {"heads": 8, "kv_heads": 2, "q_length": 40, "kv_length": 520, "head_dim": HOME, "batch": 2}
# On tensor tiles, dk and dv are split only if a KV head has more query heads and queries.
TENSOR_SHAPE = SHAPE | {"kv_heads": 1, "batch": 1, "q_length": 70}


def splits(q_heads, kv_heads, length):
    q, k = (torch.empty(1, heads, length, 64).half() for heads in (q_heads, kv_heads))
    launches = backward_launches("flash_fwd", {"q": q, "k": k, "v": k.clone()})
    (plan,) = (launch for launch in launches if "dkv" in launch["kernel"])
    assert int(plan["defines"].get("HEAD_SPLITS", 1)) == plan["head_splits"]
    return plan["head_splits"]


@pytest.mark.parametrize("name", ["", "Apple M5"], ids=["8x8 tiles", "tensor tiles"])
def test_heads_are_split_only_if_cores_are_idle(name, cores, gpu):
    gpu(name)
    cores(8)
    assert splits(16, 4, 4096) == 1
    cores(176)
    assert splits(16, 4, 4096) > 1
    assert splits(4, 4, 4096) == 1  # no query heads to split
    assert splits(16, 4, 511) == 1
    cores(MANY)
    assert splits(14, 2, 4096) == 7  # the number of splits divides the 7 heads of a KV head


@pytest.fixture
def split(cores):
    """A GPU with so many cores that dk and dv are split."""
    cores(MANY)


def dense(device=CPU, shape=SHAPE):
    """dk has k's order of dimensions. Keys that no query sees have a dk of 0."""
    q, k, v = make_qkv(**shape, dtype=torch.float16)
    k = k.transpose(1, 2).contiguous().transpose(1, 2)
    options = {"causal": True, "q_offset": 300}
    dout, dlse = make_gradients(q, v, q.shape[:3])
    results = backward(q, k, v, dout, dlse, device, options)
    hold_gradients(q, k, v, dout, dlse, results, options)
    actual = results[2:5]
    assert actual[1].stride() == k.stride()
    assert (actual[1][:, :, 300 + q.shape[2] :] == 0).all()
    return actual


@pytest.mark.usefixtures("split")
def test_dense_gradients_of_split_heads(device):
    with simulate(check=True) as session:
        assert all(map(torch.equal, dense(device), dense(device)))
    kernels = [launch.kernel.removeprefix("flash_bwd_") for launch in session.launches]
    assert device != CPU or kernels == 2 * ["delta", "dq", "dkv", "sum", "sum"]


@pytest.mark.usefixtures("split", "m5")
def test_dense_gradients_of_split_heads_on_tensor_tiles():
    with simulate(check=True) as session:
        dense(CPU, TENSOR_SHAPE)
    kernels = [launch.kernel.removeprefix("flash_bwd_") for launch in session.launches]
    assert kernels == ["delta", "dq_tensor", "dkv_tensor", "sum", "sum"]


@pytest.mark.usefixtures("split")
def test_packed_gradients_of_split_heads(device):
    shape = {"heads": 8, "kv_heads": 2, "head_dim": HOME, "dtype": torch.float16}
    q, k, v, *packing = make_packed([40, 0, 30], [520, 3, 10], **shape)
    k, v = torch.cat([k, k[:5]]), torch.cat([v, v[:5]])
    plan = explain(q, k, v, *packing, backward=True).training
    assert "HEAD_SPLITS" in plan.kernels["flash_bwd_dkv"].specialisation
    with simulate(check=True):
        check_flash_bwd(q, k, v, *packing, device=device)


@pytest.mark.usefixtures("split")
def test_explain_counts_the_memory_of_the_splits():
    q, k, v = make_qkv(**SHAPE, dtype=torch.float16)
    training = explain(q, k, v, backward=True).training
    count = int(training.kernels["flash_bwd_dkv"].specialisation["HEAD_SPLITS"])
    assert count > 1
    for name in ("dk_parts", "dv_parts"):
        assert training.allocated[name] == count * k.numel() * 4


MUTANTS = {
    dense: """
        dkv: all parts in one place [race]: {~split * params.dk_split_stride => 0~}
        dkv: all parts of the first heads: {~keys.split * members + =>~} member
        sum: a part left out: int split = {~1 => 2~};
        sum: sums of the first head: {~head * params.part_strides.head + =>~}
        sum: sums of the first sequence: {~batch * params.part_strides.batch + =>~}
    """
}
TENSOR_MUTANTS = {
    partial(dense, shape=TENSOR_SHAPE): """
        all parts in one place [race]: {~split * params.dv_split_stride => 0~}
        all parts of the first heads: {~keys.split * members + =>~} member
    """
}

test_mutant_is_caught, test_the_unchanged_kernels_pass = mutant_tests(
    MUTANTS, "flash_bwd_{}", fixtures=["split"]
)
test_tensor_mutant_is_caught, test_the_unchanged_tensor_kernel_passes = mutant_tests(
    TENSOR_MUTANTS, "flash_bwd_dkv_tensor", fixtures=["split", "m5"]
)

# SIMD groups that share keys each compute a part of the weights and exchange the parts. With BOTH
# they divide the queries and the keys of a block, with ROWS only the queries.
BOTH = {"block": 16, "row_fragments": 4, "simdgroups": 8, "shared": 4}
ROWS = {"block": 8, "row_fragments": 2, "simdgroups": 4, "shared": 2}


@pytest.mark.parametrize("tile", [BOTH, ROWS])
def test_parts_of_queries_and_of_keys(device, tile):
    shape = {"q_length": 77, "kv_length": 101, "head_dim": 32, "dtype": torch.float16}
    with exchanging(**tile):
        check_flash_bwd(*make_qkv(heads=4, kv_heads=2, **shape), causal=True, device=device)


# Columns of q and k, of v, and of a slice. In the first case, one SIMD group's part of the last
# slice is after the last column. In the second case, a whole slice of v is.
SLICED = [(40, 40, 16), (64, 40, 16)]


@pytest.mark.parametrize("head_dim, v_head_dim, columns", SLICED)
def test_slices_after_the_last_column(device, head_dim, v_head_dim, columns):
    shape = {"q_length": 33, "kv_length": 65, "heads": 2, "dtype": torch.float16}
    with exchanging(columns=columns):
        operands = make_qkv(head_dim=head_dim, v_head_dim=v_head_dim, **shape)
        check_flash_bwd(*operands, device=device)


def test_packed_gradients_where_simd_groups_share_keys(device):
    shape = {"heads": 4, "kv_heads": 2, "head_dim": HOME, "dtype": torch.float16}
    packed = make_packed([40, 0, 77], [50, 3, 64], **shape)
    with exchanging():
        check_flash_bwd(*packed, window_size_left=40, causal=True, device=device)


def test_block_masks_where_simd_groups_share_keys():
    with exchanging():
        check_flex_gradients(*rand(), tanh_softcap, block_mask(), simulated=False)


SHARED_MUTANTS = {
    partial(test_parts_of_queries_and_of_keys, tile=BOTH): """
        only the first part: {~i / PART_ROWS * (COLUMNS / PART_COLUMNS) + j / PART_COLUMNS => 0~}
        other order: i / PART_ROWS {~* (COLUMNS / PART_COLUMNS) =>~} + j / PART_COLUMNS {~=> * 2~}
        first fragment of a part twice: {~i % PART_ROWS * PART_COLUMNS => 0~}
        parts of the first group: {~simdgroup / COLUMN_SIMDGROUPS * COLUMN_SIMDGROUPS => 0~}
        queries of the first part [race]: {~keys.part % QUERY_PARTS => 0~} * OWN_QUERY
        keys of the first part: {~keys.part / QUERY_PARTS => 0~} * OWN_ROW
        keys of one part loaded [uninitialised]: {~part_query => keys.part~} == 0
        columns of the first part: keys.slice * DK_SLICE {~+ keys.part * OWN_DK_COLUMNS =>~}
        the other row of a pair: {~=> !~}rows.odd ? Fragment
        no barrier before parts are read [race or uninitialised]:
            // Wait until all parts are written.
            {~threadgroup_barrier(mem_flags::mem_threadgroup); =>~}
        statistics of another query:
            weight_factors, {~part_query + =>~} column};
        visibility of the first part: lane_query = block + {~part_query + =>~} column
    """,
    **{
        partial(test_slices_after_the_last_column, head_dim=q, v_head_dim=v, columns=columns): """
            a fragment [threadgroup_out_of_bounds]: {~WHOLE ? d : min(d, rows.last) => d~}
            one after the last [threadgroup_out_of_bounds]: (COLUMNS - first) / FRAGMENT {~- 1 =>~}
        """
        for q, v, columns in SLICED
    },
}

test_mutant_of_shared_keys_is_caught, test_the_unchanged_shared_keys_pass = mutant_tests(
    SHARED_MUTANTS, "flash_bwd_dkv", run=lambda problem: problem(CPU)
)

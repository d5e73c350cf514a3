"""dk and dv where SIMD groups share keys: each computes a part of the weights, for all of them."""

from functools import partial

import pytest
import torch

from tests.attention.flash_bwd_check import check_flash_bwd
from tests.attention.flash_bwd_features import exchanging
from tests.attention.flash_fwd_check import make_packed, make_qkv
from tests.attention.head_dims import HOME
from tests.flex import gallery
from tests.flex.flex_check import block_mask, check_flex_gradients, home
from tests.helpers.mutants import mutant_tests

CPU = torch.device("cpu")
# Four SIMD groups divide the queries of a block, and the keys too: two of each. Two such groups.
BOTH = {"block": 16, "row_fragments": 4, "simdgroups": 8, "shared": 4}
ROWS = {"block": 8, "row_fragments": 2, "simdgroups": 4, "shared": 2}


def causal(device, tile=BOTH):
    shape = {"q_length": 77, "kv_length": 101, "head_dim": 32, "dtype": torch.float16}
    with exchanging(**tile):
        check_flash_bwd(*make_qkv(heads=4, kv_heads=2, **shape), causal=True, device=device)


@pytest.mark.parametrize("tile", [BOTH, ROWS])
def test_parts_of_queries_and_of_keys(tile, device):
    causal(device, tile)


# Columns of q and k, of v, and of a slice. One SIMD group's part of the last slice is behind the
# last column, and a whole slice of v is.
SLICED = [(40, 40, 16), (64, 40, 16)]


def sliced(device, head_dim, v_head_dim, columns):
    shape = {"q_length": 33, "kv_length": 65, "heads": 2, "dtype": torch.float16}
    with exchanging(columns=columns):
        operands = make_qkv(head_dim=head_dim, v_head_dim=v_head_dim, **shape)
        check_flash_bwd(*operands, device=device)


@pytest.mark.parametrize("head_dim, v_head_dim, columns", SLICED)
def test_slices_behind_the_last_column(head_dim, v_head_dim, columns, device):
    sliced(device, head_dim, v_head_dim, columns)


def test_packed(device):
    shape = {"heads": 4, "kv_heads": 2, "head_dim": HOME, "dtype": torch.float16}
    packed = make_packed([40, 0, 77], [50, 3, 64], **shape)
    with exchanging():
        check_flash_bwd(*packed, window_size_left=40, causal=True, device=device)


def test_lists_of_blocks():
    with exchanging():
        check_flex_gradients(*home(), gallery.tanh_softcap, block_mask(), simulated=False)


MUTANTS = {
    causal: """
        all parts are the first's:
            {~i / PART_ROWS * (COLUMNS / PART_COLUMNS) + j / PART_COLUMNS => 0~}
        parts in another order:
            i / PART_ROWS {~* (COLUMNS / PART_COLUMNS) =>~} + j / PART_COLUMNS {~=> * 2~}
        first fragment of a part twice: {~i % PART_ROWS * PART_COLUMNS => 0~}
        parts of the first group: {~simdgroup / COLUMN_SIMDGROUPS * COLUMN_SIMDGROUPS => 0~}
        queries of the first part [race]: {~keys.part % QUERY_PARTS => 0~} * OWN_QUERY
        keys of the first part: {~keys.part / QUERY_PARTS => 0~} * OWN_ROW
        keys of one part loaded [uninitialised]: {~part_query => keys.part~} == 0
        columns of the first part: keys.slice * DK_SLICE {~+ keys.part * OWN_DK_COLUMNS =>~}
        the other row of a pair: {~=> !~}rows.odd ? Fragment
        no barrier before parts are read [race or uninitialised]:
            // The parts are there.
            {~threadgroup_barrier(mem_flags::mem_threadgroup); =>~}
        score of another query's statistics:
            block_statistics.lane_query = {~part_query + =>~} column
        visibility of the first part: lane_query = block + {~part_query + =>~} column
    """,
    **{
        partial(sliced, head_dim=q, v_head_dim=v, columns=columns): """
            a fragment [threadgroup_out_of_bounds]: {~WHOLE ? d : min(d, rows.last) => d~}
            one more than the last [threadgroup_out_of_bounds]:
                (COLUMNS - first) / FRAGMENT {~- 1 =>~}
        """
        for q, v, columns in SLICED
    },
}

test_mutant_is_caught, test_the_unchanged_kernels_pass = mutant_tests(
    MUTANTS, "flash_bwd_dkv", run=lambda problem: problem(CPU)
)

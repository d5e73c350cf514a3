"""Planted faults in the gradient kernels. The checks of the tests must notice each one."""

from tests.attention.flash_bwd_features import packed, run
from tests.helpers.mutants import mutant_tests

MUTANTS = {
    "shared rows": """
        dq: own part twice: other = simdgroup {~^ 1 =>~}
        dq: columns of q or k of the first: {~queries.part => 0~} * OWN_QK_COLUMNS
        dq: columns of v or dout of the first: {~queries.part => 0~} * OWN_V_COLUMNS
        dq: no barrier before the sum [race or uninitialised or wrong]:
            {~// Wait until all parts are written.
            threadgroup_barrier(mem_flags::mem_threadgroup); =>~}
        dq: columns of dq [race or uninitialised or wrong]: {~queries.part => 0~} * OWN_DQ_COLUMNS
    """,
    "plain": """
        dq: dq without the scale: dq_tile.fragments[i][d] {~* scale =>~}
        dkv: dk without the scale: dk_tile.fragments[i][d] {~* params.softmax_scale =>~}
        dkv: dv with the scale: exists ? dv_tile.fragments[i][d]{~=> * params.softmax_scale~}
        dq: dq without delta: {~( =>~}gradients.fragments[i][j] {~- deltas[i]) =>~}
        dkv: dk without delta: {~( =>~}gradients.fragments[i][j] {~- delta) =>~}
        dq: delta added: (gradients.fragments[i][j] {~- => +~} deltas[i])
        delta: delta past the end [race]: if ({~row >= params.problem.q_total => false~})
        dq: log-sum-exp read in base 2: lse {~* M_LOG2E_F =>~}
        dq: log-sum-exp of another head:
            buffers.statistics(params.lse_strides, place.batch, place.{~head => kv_head~},
            sequence)
        dkv: lse of another query: exists ? statistics.lse_log2({~query => max(query - 1, 0)~})
        dkv: delta of another query: exists ? statistics.delta_of({~query => max(query - 1, 0)~})
        dkv: a query head skipped: int member = {~0 => 1~};
        dkv: only one query head: member < {~members => 1~}
        dkv: the first query head each time: keys.split * members {~+ member =>~}
        dkv: heads of another group:
            keys.kv_head {~* problem.queries_per_kv + keys.split * members + member => + member *
            2~}
        dq: wrong KV head: head {~/ => %~} params.queries_per_kv
        dkv: dout of another head:
            buffers.out_gradients(params.dout_strides, batch, {~head => keys.kv_head~}, sequence)
        dkv: q in k's place: columns.add_dk(dk_tile, {~gradients => weights~})
        dkv: pairs swapped: zip_pairs<T>({~even_row, odd_row => odd_row, even_row~}, low, high)
        dkv: statistics past the end [out_of_bounds]:
            {~exists ? =>~} statistics.lse_log2(query) {~: INFINITY =>~}
        dq, dkv: no barrier before staging [race]:
            // Wait until every SIMD group has read the previous tiles.
            {~threadgroup_barrier(mem_flags::mem_threadgroup); =>~} stage_pairs
        dq, dkv: no barrier after staging [uninitialised]:
            {~// Wait until the tiles are completely written.
            threadgroup_barrier(mem_flags::mem_threadgroup); =>~}
        dkv: barrier orders nothing [race]:
            {~// Wait until the tiles are completely written. =>~}
            threadgroup_barrier(mem_flags::{~mem_threadgroup =>
            mem_none~});
        dq: row past the end staged [out_of_bounds]: {~min(row + 1, end - 1) => row + 1~}
        dkv: row past the end staged [everywhere, out_of_bounds]:
            place = source.find({~min(row, end - 1) => row~})
        dq, dkv: row past the end read [out_of_bounds]:
            return {~min(row + i * FRAGMENT, last_row) => row + i * FRAGMENT~}
        dq: query past the end stored [race]: if ({~!queries.exists(i) => false~})
        dkv: key past the end stored [race]: if ({~key >= sequence.kv_rows => false~})
        dkv: half a tile staged [everywhere, uninitialised]:
            i < {~(UNITS + THREADS - 1) / THREADS => UNITS / THREADS / 2~}
    """,
    "dlse, unrefined": """
        delta: dlse added: sum {~-= => +=~} dlse
        delta: dlse ignored: {~#if DLSE => #if 0~} sum
        delta: dlse of the first row: {~row * params.dlse_strides.row => 0~}
        delta: dlse of the first head: {~head * params.dlse_strides.head => 0~}
    """,
    "mask, whole rows": """
        dq: weights of a row without a key: lse {~< LOWEST_LSE => == INFINITY~} ? INFINITY : lse
    """,
    "causal, top left": """
        dq, dkv: band never applied:
            {~block >= intersection_range.begin && block + count <= intersection_range.end => true~}
        dkv: offset ignored: key - q_offset - window_right{~=> + 24~})
        dkv: tile begins at the last key of all:
            visible.queries_of({~max(tile_key, sequence.first_key => last(~})).begin
        dkv: visibility of the next key: visible.apply<true>(scores, lane_key{~=> + 1~},
        dkv: visibility not transposed: visible.apply<{~true => false~}>(scores
    """,
    "window, causal": """
        dkv, dq: last visible columns skipped:
            block {~=> + 8~} < union_range.end && block + count > union_range.begin
        dkv: queries skipped: block < union_range.end && block + count > union_range.begin{~=> + 8~}
    """,
    "window": """
        dkv: left window one short: key - q_offset + window_left {~+ 1 =>~}
        dkv: left window one long: key - q_offset + window_left + {~1 => 2~}
        dkv: right window one short: key - q_offset - window_right{~=> + 1~})
        dkv: right window one long: key - q_offset - window_right{~=> - 1~})
        dkv: left edge never applied:
            block >= intersection_range.begin {~&& block + count <= intersection_range.end =>~}
        dkv: right edge never applied:
            block {~>= intersection_range.begin && block =>~} + count <= intersection_range.end
        dkv: tile ends at its first key:
            visible.queries_of({~min(tile_key + BLOCK_K - 1, last()) => tile_key~}).end : 0
    """,
    "chunk": """
        dkv: chunk begins one early: max(begin, chunk_start - q_offset{~=> - 1~})
        dkv: chunk ends one late: chunk_start - q_offset + chunk{~=> + 1~}
        dkv: chunk ends one early: chunk_start - q_offset + chunk{~=> - 1~}
    """,
    "seqused_k": """
        dkv: dk and dv after the keys unwritten: if (key {~>= sequence.kv_rows => > last()~})
    """,
    "nan outside": """
        dq: keys after the last not zeroed: if ({~ZEROED => false~})
        dq: keys before the first not zeroed: row {~>= begin && row =>~} < end ? even
        dkv: gradients of missing keys: {~key >= sequence.first_key && key <= last() => true~};
        dkv: gradients of keys before the first: key {~>= sequence.first_key && key =>~} <= last();
    """,
    "mask": """
        dkv: not transposed [out_of_bounds]: Offset({~TRANSPOSED ? strides.key : =>~} strides.query)
        dkv: mask of the KV head: rules.reset(inputs, batch, {~head => keys.kv_head~},
    """,
    "bias": """
        dkv: bias dropped: {~score += Fragment<float>(base_2(added.x), base_2(added.y)); =>~}
        dkv: bias of the next block: {~first_column + =>~} lane_column + column_offset(j);
    """,
    "softcap": """
        dq, dkv: slope of the cap dropped: {~gradients.multiply(slopes); =>~}
        dq: slope 1 - tanh: 1.0f - capped {~* capped =>~}
        dkv: slope of scaled cap: 1.0f - capped * capped{~=> * params.cap_log2 * params.cap_log2~}
        dq: cap ignored: capped * params.{~cap_log2 => scale_log2~};
    """,
    "alibi at an offset": """
        dkv: offset's sign not transposed:
            {~(TRANSPOSED ? -visible.q_offset : visible.q_offset) => visible.q_offset~}
        dkv: slope of the KV head: rules.reset(inputs, batch, {~head => keys.kv_head~},
    """,
    "rotary": """
        dkv: q not rotated in pairs:
            return {~rotary.rotated_chunk<COLUMNS>(tensor, place.row, place.position =>
            load_chunk<COLUMNS>(tensor, place.row~}, column);
        dkv, dq: own rows not rotated:
            ? {~rotary.rotated(tensor, offset(row), row, column) => tensor[offset(row) + column]~}
        dkv: tables of batch 0: params.q_cos_strides, q_sin, params.q_sin_strides, {~batch => 0~})
    """,
    "slices": """
        dq: slice not moved [race]: row_offset(strides, batch, head, start) {~+ slice * SLICE =>~}
        dq: slice of k not moved: {~queries.place.slice * DQ_SLICE + =>~} first_dq
        dkv: slice of q not moved: {~keys.slice * DK_SLICE + =>~} keys.part * OWN_DK_COLUMNS
        dkv: slice of dout not moved: {~keys.slice * DV_SLICE + =>~} keys.part * OWN_DV_COLUMNS
        dq: a fragment too many [threadgroup_out_of_bounds]: {~WHOLE ? d : min(d, rows.last) => d~}
    """,
    "wide rows": """
        dq, bias: values over keys being read [race]:
            // Wait until every SIMD group has read the keys.
            {~threadgroup_barrier(mem_flags::mem_threadgroup); =>~} stage_pairs
        dq: keys over values being read [race]:
            // Wait until every SIMD group has read the values. dq needs the keys again.
            {~threadgroup_barrier(mem_flags::mem_threadgroup); =>~} stage_pairs
        dq: values read before they are whole [race or uninitialised or wrong]:
            {~threadgroup_barrier(mem_flags::mem_threadgroup); =>~} if (seen) {
            multiply_transposed<ELEMENT, V_COLUMNS>(gradients, dout_tile, v_lane);
        dq: keys not staged again: QK_COLUMNS, THREADS, true>( {~k_pairs, keys => k_pairs, values~},
            block, sequence.first_key, sequence.kv_length, thread_index);
            threadgroup_barrier(mem_flags::mem_threadgroup); } }
        dkv: dout over queries being read [race]:
            // Wait until every SIMD group has read the queries.
            {~threadgroup_barrier(mem_flags::mem_threadgroup); =>~} stage_pairs
    """,
    "odd head dim": """
        dkv: column after the last stored [race]: if ({~column + 1 < columns => true~})
    """,
    "plain, unrefined": """
        delta: delta of one lane: {~sum = simd_sum(sum); =>~}
        delta: delta of the first columns: column < HEAD_DIM_V{~=> / 2~}; column += SIMD_LANES
    """,
    packed: """
        dq: delta of spare rows: if ({~EXACT_DELTA && place.slice == 0 => false~}) { delta_rows.fill
        dkv: sequence 0's dout: operand.reset(dout, strides, batch, head, {~sequence.q_start => 0~})
        dq: dq of the first sequence [race]:
            dq_rows.reset(dq, params.dq_strides, batch, head, {~first => 0~}, place.slice)
        dkv: dk of the first sequence [race]:
            params.dk_strides, batch, kv_head, {~sequence.kv_start => 0~}, slice)
        dq, dkv: lse of sequence 0: row_offset(strides, batch, head, 0) {~+ sequence.q_start =>~}
        dkv: spare rows unwritten: {~dk_rows.fill(value, first, sequence.kv_rows, step); =>~}
        dq: spare queries unwritten: {~dq_rows.fill(value, first, sequence.q_length, step); =>~}
    """,
}

test_mutant_is_caught, test_the_unchanged_kernels_pass = mutant_tests(
    MUTANTS, "flash_bwd_{}", run=run
)

"""Planted faults in flash_decode. The checks of the tests must notice each one."""

from tests.decode import flash_decode_problems as problems
from tests.helpers.mutants import mutant_tests

MUTANTS = {
    "plain": """
        columns of q's fragments reversed: UNIT_COLUMNS + 2 * {~f => (3 - f)~} +
        units of q reversed: {~row / 2 => (3 - row / 2)~} * UNIT_COLUMNS
        spans of q swapped:
            {~=> (~}lane.span(n / SPAN_FRAGMENTS) {~=> ^ 1)~} * SPAN_COLUMNS + span_column
        one unit of k for all:
            unit.load<HEAD_DIM_QK>(kv.keys, k_places[j], kv.column(s){~=> - kv.lane.unit_column~},
        one unit of v for all:
            v_units[j][s].load<HEAD_DIM_V>(kv.values, v_places[j], kv.column(s){~=> -
            kv.lane.unit_column~},
        units of out swapped [wrong or out_of_bounds]:
            span * SPAN_COLUMNS + {~lane.unit_column => (lane.unit_column ^ 8)~} + d %
        pairs of a unit swapped: fragments[i * PAIRS + {~j => (j ^ 1)~}] =
        last span's tail of k [out_of_bounds]: {~WHOLE || column + i * CHUNK < COLUMNS => true~}
        head of another KV head [race]: head = {~kv_head * heads + =>~} existing % heads
        one head's queries for all: head = kv_head * heads {~+ existing % heads =>~}
        one query for all: query = {~existing / heads => 0~}
        keys of the first KV head: inputs.keys(task.batch, {~task.kv_head => 0~}, task.sequence
        values of the first KV head: inputs.values(task.batch, {~task.kv_head => 0~}, task.sequence
        query past the last read [out_of_bounds]: {~min(row, rows - 1) => row~}
        key past the last read [out_of_bounds]: keys.find_in(max(pages[j], 0), {~readable => row~})
        value past the last [out_of_bounds]: values.find_in(max(pages[j], 0), {~readable => row~})
        keys of the first SIMD group for all: places.begin {~+ lane.key_simdgroup * BLOCK_K =>~}
        scores not transposed:
            place = tile + (i * FRAGMENT + lane.{~column => row~}) * SCORE_STRIDE + j * FRAGMENT +
            lane.{~row => column~}; place[0] = products.fragments[j][i].x; place[{~SCORE_STRIDE =>
            1~}] =
        one tile for all scores [race]: tile = tiles {~+ lane.simdgroup * SCORE_TILE =>~}
        correction dropped: sum {~* corrections[i] =>~} + products
        visibility never applied: if ({~hides => false~}) {
        visibility in the block at 0: const int column = {~block.first + =>~} lane.column;
        visibility of the first query: visible.apply<false>(scores, {~query => 0~}, column)
        a SIMD group's state left out: n < KEY_SIMDGROUPS{~=> - 1~}; n++) { const float2 state
        states joined as they are: state.y {~* fast::exp2(state.x - softmax.row_max) =>~}
        states of the first rows: states {~+ min(tile_row, ROWS - 1) =>~}
        shares not normalised: correction {~/ total.sum =>~}, sees_nothing
        shares without their maximum: {~correction => 1.0f~} / total.sum
        a SIMD group's out left out: if (current < KEY_SIMDGROUPS - 1{~=> && current != 1~}) {
        out of the fragment before: return (i * OWN_V_FRAGMENTS + d{~=> / 2~}) * SIMD_LANES
        sum of one lane: rows.softmax[i].{~row_sum() => lane_sum~}
        q not shared: {~=> q_tile.fill(ELEMENT(0));~}exchange_query_fragments(q_tile, pairs, lane);
        no barrier after q is shared [uninitialised]:
            } {~threadgroup_barrier(mem_flags::mem_threadgroup); =>~} UNROLL
            for (short n = 0; n < OWN_QK_SPANS
        no barrier before the exchange [race]:
            {~simdgroup_barrier(mem_flags::mem_threadgroup); =>~} } UNROLL for (short j
        no barrier after the exchange [race or uninitialised]:
            {~simdgroup_barrier(mem_flags::mem_threadgroup); =>~} } else {
        no barrier before states are joined [uninitialised]:
            {~threadgroup_barrier(mem_flags::mem_threadgroup); =>~} } }; // A row's maximum
        no barrier between sums of out [race or uninitialised]:
            {~threadgroup_barrier(mem_flags::mem_threadgroup);
            // the next SIMD group reads the sums =>~}
    """,
    "splits": """
        splits overlap by a step: min((split + 1) * split_steps{~=> + 1~}, shared_steps)
        a step between splits left out: min((split + 1) * split_steps{~=> - 1~}, shared_steps)
        every split from the first key: keys.begin + {~min(split * split_steps, shared_steps) => 0~}
        out of splits in one place [race]: all {~+ split * params.out_split_stride =>~}
        a split's lse where the first has its own [race]: params.lse_strides.row {~+ split =>~};
    """,
    "columns": """
        a part of the scores left out: part < COLUMN_SIMDGROUPS{~=> - 1~}; part++
        spans of the first SIMD group for all: first_span = {~simdgroup % COLUMN_SIMDGROUPS => 0~}
        scores of the SIMD group alone [race]: {~tile = sums; =>~}
        one lane's sums left out [uninitialised]: n < ROWS * BLOCK_K{~=> - 1~};
        no barrier before the sums [race or uninitialised]:
            {~threadgroup_barrier(mem_flags::mem_threadgroup); =>~} for (int n = (lane.simdgroup
        no barrier after the sums [race or uninitialised]:
            {~threadgroup_barrier(mem_flags::mem_threadgroup); =>~} tile = sums;
    """,
    problems.row_groups: """
        rows of the first SIMD groups: group_row {~+ lane.row_simdgroup * ROWS =>~}
        sums of the first SIMD groups [wrong or race or uninitialised]:
            const int group = {~lane.row_simdgroup => 0~};
        keys read before they are shared [race or uninitialised]:
            kv.lane.span(s)); } } } {~threadgroup_barrier(mem_flags::mem_threadgroup); =>~}
        missing spans [uninitialised]: if ({~!span_exists(kv.lane.span(s), QK_SPANS) => false~}) {
        values shared with the keys [wrong or race or uninitialised]:
            loaded_pairs + {~KEY_PAIRS + =>~}
        values of the first span [wrong or race]:
            return loaded_pairs + KEY_PAIRS + (({~lane.first_span => 0~} * KEY_FRAGMENTS
        lse of the first group: {~key_simdgroup == 0 && first_span => simdgroup~} == 0 && column
        tiles of one group's rows [wrong or race]: first + list_group * ROWS {~* ROW_SIMDGROUPS =>~}
    """,
    "row_groups_of_codes": """
        keys of one scale:
            *kv.scale_of(kv.key_unit(j, s)) = kv.keys.span_scale(k_places[j], {~kv.lane.span(s) =>
            0~})
        values of one scale: span_scale(v_places[j], {~kv.lane.span(s) => 0~})
        scales of keys [uninitialised]: v_scales[j] = *kv.scale_of(kv.{~value_unit => key_unit~}(j
        scales where the codes are [wrong or race]: (unit + {~SPAN_FRAGMENTS => 0~} * SIMD_LANES)
        products without their scale: {~chain.scale(*kv.scale_of(kv.key_unit(j, begin))); =>~}
        scales of missing spans [uninitialised]:
            K_SPAN_SCALES && {~span_exists(kv.lane.span(begin), QK_SPANS) => true~}
        codes that are not loaded [uninitialised]: if (!V_IN_K {~&& ROW_SIMDGROUPS == 1 =>~})
    """,
    problems.vectors: """
        units of one lane [wrong or race or uninitialised]: u * LANES {~+ lane.index % LANES =>~}
        values of first keys: blocks.row(block.first + n * LOAD_KEYS {~+ lane.index / LANES =>~})
        first weights: weights[{~(n * LOAD_KEYS + lane.index / LANES) => n * LOAD_KEYS~} * ROWS + r]
        values outside the lengths not cleared: {~&& kv.is_valid(key) =>~}
        values after the length not cleared: {~kv.is_valid(key) => key >= kv.sequence.first_key~}
        nothing seen where a share is 0: share {~< => <=~} 0.0f
        nothing seen, something shared: {~share < 0.0f ? 0.0f : =>~} sums[n] * share
        correction of the first row: weights[BLOCK_K * ROWS {~+ r =>~}]
        correction left out: {~* corrections[r] =>~} + block[r]
        half of the lanes' sums left out: sums[n] = kept {~+ simd_shuffle_xor(passed, bit) =>~};
        two lower halves [wrong or race or uninitialised]: first += {~upper => false~} ? count
        share of the first row: share = shares[{~r => 0~}]
        no barrier after the weights [race or uninitialised]:
            {~simdgroup_barrier(mem_flags::mem_threadgroup); =>~} add_block
        no barrier after out [race or uninitialised]:
            V_PADDED); {~threadgroup_barrier(mem_flags::mem_threadgroup); =>~}
        a SIMD group's sums left out: part < SIMDGROUPS{~=> - 1~}; part++
    """,
    "vector_scales": """
        first chain of products dropped: products[i] {~+= => =~} chain
        scale of another span: {~column / SPAN_COLUMNS => 0~}) : 0.0f
        scales not cleared: scales[n][u] = {~exists ? scale : 0.0f => scale~}
    """,
    "columns_unevenly": """
        span past the last stored [race]: if ({~span_exists(span, V_SPANS) => true~})
        extra span [everywhere, out_of_bounds]: {~span_exists(kv.lane.span(s), QK_SPANS) => true~}
        span past the last of v read [out_of_bounds]:
            if ({~!span_exists(lane.span(s), V_SPANS) => false~}) { continue; } block.load
        values of one span loaded [uninitialised]: block.load_values({~s => 0~}, kv
    """,
    "tiles": """
        every tile the first [race]: rows[i].reset({~first_row + =>~} min(
        q of the first tile: row.reset({~first_row + =>~} i * FRAGMENT
        results of the first tile [race]: MANY_ROWS ? {~simd_broadcast(tile_row, ushort(0)) => 0~} :
        results of split 0 [race]: MANY_ROWS ? {~simd_broadcast(task.split, ushort(0)) => 0~} :
        tile of the first query: keys_of({~last_row / problem.queries_per_kv => 0~})
    """,
    "lengths": """
        values that do not exist not zeroed: {~exists ? chunk : uint4(0) => chunk~}
        values of the padding not zeroed: {~row >= sequence.first_key && =>~}
    """,
    problems.infinite_value: """
        values after the length not zeroed: {~&& row < sequence.kv_length =>~};
    """,
    "windows": """
        window begins a block late: seen.begin / BLOCK * BLOCK{~=> + BLOCK~}
        window ends at the first query's: : {~sequence.q_length - 1 => 0~};
        left edge never applied:
            block.first {~< seen_by_last.begin || block.first =>~} + BLOCK_K > seen_by_first.end
        right edge never applied:
            block.first < seen_by_last.begin {~|| block.first + BLOCK_K > seen_by_first.end =>~}
        left edge of the first query:
            block.first < {~seen_by_last => seen_by_first~}.begin || block.first + BLOCK_K >
            seen_by_first.end
        right edge of the last query:
            block.first < seen_by_last.begin || block.first + BLOCK_K > {~seen_by_first =>
            seen_by_last~}.end
    """,
    "no_visible_key": """
        nothing seen, something shared: {~row_sums[i] == 0.0f => false~};
    """,
    "sinks": """
        sink dropped: if ({~!SINK || SPLIT => true~})
        sink counted by every split: if (!SINK {~|| SPLIT =>~})
        sink of the KV head: total.add_sink(inputs, {~result.rows[i].head => task.kv_head~})
        sum not lowered to the sink: sum = sum {~* fast::exp2(keys_max - softmax.row_max) =>~} +
    """,
    "large_sinks": """
        sink rounded: {~(scaled - other) + rounded_off(float(logit), scaled) => scaled - other~}
    """,
    "rules": """
        rules of the first query: batch, rows[i].head, {~rows[i].query => 0~}, lane.column
        rules of the KV head: batch, {~rows[i].head => task.kv_head~}, rows[i].query, lane.column
        rules dropped:
            {~apply<false>(scores, scores, first_column, masked, params) =>
            scores.scale(params.scale_log2)~};
    """,
    "latent": """
        values from another span: v_units[j][{~s => 0~}].fragments
        values from another key: v_units[{~j => 0~}][s].fragments
        keys that do not exist not zeroed: {~!V_IN_K || exist[j] => true~}
    """,
    "rotary": """
        q's row of the first query:
            queries.{~element(row.query => rotary.rotated(queries.tensor, queries.offset(row.query),
            0~}, d)
    """,
    "pages": """
        window not moved [simd_lane]: {~=> (window >= 0 ||~}last_place < window + SIMD_LANES{~=> )~}
        page window of the values never moved [simd_lane]: {~values.use_pages_of(keys); =>~}
        eight keys in one page: : page_of(row{~=> / 8 * 8~})
        no lookup [simd_lane]: {~move_to(kv.keys, kv.values, first, BLOCK_K, kv.lane.index); =>~}
        one page of a block [simd_lane]: move_to(kv.keys, kv.values, {~first, BLOCK_K => 0, 8~}
        table of sequence 0: block_table {~+ batch * params.block_table_stride =>~}, sequence
    """,
    "whole_pages": """
        page of the first lanes' window [simd_lane]: uint(first) / PAGE_ROWS {~- window =>~}
        one page for a block: page_among(readable, kv.readable_row({~first_row => first~}))
        values in the page of the first keys: block.pages[{~n * LOAD_KEYS / FRAGMENT => 0~}]
    """,
    problems.missing_pages: """
        keys of missing pages as those of the first: {~pages[j] >= 0 => true~} ? product
        values of missing pages not zeroed: exist[j] = {~pages[j] >= 0 && =>~}
        values of missing pages, not zeroed, of lanes: exists = {~page >= 0 && =>~}
    """,
    problems.no_pages: """
        first page read without pages [out_of_bounds]: {~problem.cache_size == 0 => false~}
    """,
    "scales_of_spans": """
        products of span 0: span_scale(k_places[j], {~min(kv.lane.span(begin), QK_SPANS - 1) => 0~})
        weights of one scale: span_scale(v_places[j], {~kv.lane.span(s) => 0~})
        scale of the even key for both: ? vec<T, 2>(number, {~other => number~})
        scale of the lane's own row: {~column_numbers(v_scales[j], lane_index) => v_scales[j]~}
        scale of a key 4 rows off: {~(row & 4) == (column & 4) => true~}
        scale of a key 2 rows off: {~(row & 2) == (column & 2) => true~}
        scales of the padding not zeroed: {~exist[j] ? scale : 0.0f => scale~}
        odd codes before even ones: codes[i] >> ({~=> 8 -~}j * BITS)
    """,
    "codes_of_odd_rows": """
        columns after the last read [everywhere, out_of_bounds]:
            {~COLUMNS % FRAGMENT == 0 || column + i < COLUMNS => true~}
    """,
    problems.packed_lists: """
        lists of the first sequence: PACKED_Q ? {~task.sequence.q_start + =>~} min(
        one list of a sequence: {~min(list, task.sequence.q_length) => 0~}
    """,
    "packed": """
        out of sequence 0 [race]: row.reset(out, params.out_strides, batch, head, {~first => 0~}, 0)
        lse of the first sequence [race]: batch + {~first * params.lse_strides.row => 0~} +
        as many rows as the longest [race]:
            rows = {~sequence => params.problem~}.q_length * params.problem.queries_per_kv
        rows of no sequence left:
            {~result.fill(value, task, inputs, thread_index, params); =>~} return; } task.load_tree
        sink twice: if ({~!SPLIT && !isnan(value) => false~})
    """,
    problems.impossible_packed: """
        impossible ends as clamped: {~begin != q_start || end != q_start + q_length || =>~}
        ends not clamped [out_of_bounds]:
            q_length = max({~clamp(end, 0, params.q_total) => end~} - q_start, 0)
    """,
    problems.packed_steps: """
        new rows of the first sequence: inputs.new_k + {~added.begin => 0~} *
        new values of the first sequence: inputs.new_v + {~added.begin => 0~} *
        ends of the queries: {valid ? begin : 0, {~valid ? end : - => begin +~}1};
    """,
    problems.impossible_packed_step: """
        ends of new rows not tested [out_of_bounds]:
            {~begin >= 0 && begin <= end && end <= params.new_keys => true~}
        impossible new rows as none: {~PACKED_NEW_K && added.end < 0 => false~}
    """,
    problems.lists: """
        list of the first query [wrong or race]: {~row_group / params.list_groups => 0~}
        list of KV head 0: INDICES ? {~task.kv_head => 0~} : task.kv_head * problem.queries_per_kv
        list of sequence 0: first = {~Offset(batch) => 0~} * Offset(params.index_strides.batch)
        rows of the next list [wrong or race]: {~min(first + params.list_rows, rows) => rows~}
        first tile of a list only [wrong or race]: {~row_group % params.list_groups => 0~}
        neighbours: blocks.row({~first_row + kv.lane.row) => first + kv.lane.row) + j * FRAGMENT~}
        values of neighbours [wrong or out_of_bounds]:
            blocks.row(block.first {~=> )~} + n * LOAD_KEYS + lane.index / LANES{~) =>~}
        places after the list read [wrong or out_of_bounds]: {~place < count * BLOCK => true~} ?
        -1 as the first key [wrong or out_of_bounds]: {~max(row, 0) => row~} : row
        rows of columns swapped: ? vec<T, 2>({~number, other => other, number~})
    """,
    "lists_of_blocks": """
        rows of a block: {~int(uint(place) % BLOCK) => 0~}
        blocks of one key: entry {~* BLOCK =>~} + int
        one query's keys for all of a list:
            hide_listed(scores, block, lane.index, task.visible.keys_of({~query => 0~}))
        first query's keys: INDICES ? {~(share.end - 1) => share.begin~} / problem.queries_per_kv
        last query's keys: INDICES ? {~share.begin => (share.end - 1)~} / problem.queries_per_kv : 0
        hidden keys of a query shown: {~keys[e] >= seen.begin && keys[e] < seen.end => true~}
    """,
    "lists_in_pages": """
        page of the list's place: existing(numbers[{~uint(row) / PAGE_ROWS => 0~}])
    """,
    problems.lists_of_hidden_keys: """
        hidden keys shown: {~row >= seen.begin && row < seen.end => true~} ?
        rows that are not listed as the first: ? row : {~NO_ROW => 0~}
    """,
    problems.impossible_entries: """
        impossible entries as none: {~keys[e] == IMPOSSIBLE_ROW ? NAN : =>~} -INFINITY
        impossible entries read: {~entry < NO_ENTRY || entry >= existing => false~}
    """,
    problems.impossible: """
        impossible sequences as clamped: || PAGED) && ({~sequence.impossible || =>~} no_page)
        out of the first head: place(out_row, {~row.head => task.kv_head~}, params); out_row.fill
        as many rows as threads: n < {~task.rows => 1~}; n +=
        lse left [race]: {~=> row.query = 0;~}store_lse(row, row_lse
    """,
    problems.step: """
        no barrier after the new keys [race]: {~threadgroup_barrier(mem_flags::mem_device); =>~}
        a barrier that orders nothing after the new keys [race]:
            threadgroup_barrier(mem_flags::{~mem_device => mem_none~});
        a barrier for threadgroup memory after the new keys [race]:
            threadgroup_barrier(mem_flags::{~mem_device => mem_threadgroup~});
        new keys not counted: used {~+ max(added.end - added.begin, 0) =>~}
        appended one key late: place.first = old_length{~=> + 1~};
        appended to the first KV head [race]: append_rows(buffers, place, batch, {~kv_head => 0~}
        half appended: 0, {~added.end - added.begin => (added.end - added.begin) / 2~}, thread_index
        padding ignored:
            {~place.first_rotary -= params.rotary_from_leftpad != 0 ? inputs.leftpad_k[batch] : 0;
            =>~}
        padding of new keys never ignored: -= {~params.rotary_from_leftpad != 0 => true~} ?
        padding of q never ignored:
            {~(params.append.rotary_from_leftpad != 0 ? sequence.first_key : 0) =>
            sequence.first_key~}
        q rotated at the first row: start_at({~task.first_rotary => 0~},
        q rotated without padding: start_at(task.first_rotary{~=> + task.sequence.first_key~},
        q always by token: start_at(task.first_rotary, {~params.rotate_q_by_token != 0 => true~})
        q never by token: start_at(task.first_rotary, {~params.rotate_q_by_token != 0 => false~})
    """,
    problems.impossible_step: """
        rows before the tables [out_of_bounds]: {~first_rotary < 0 || =>~}
        rows after the tables [out_of_bounds]:
            {~first_rotary + rotary_rows > params.append.table_rows => false~}
        one row after the tables [out_of_bounds]:
            first_rotary + rotary_rows > params.append.table_rows{~=> + 1~}
        negative lengths counted from: {~used < 0 ? used : =>~}
    """,
    problems.step_of_splits: """
        last split does not take the rest: {~split == splits - 1 ? keys.end : =>~} min
        new keys in a step that is shared [race]:
            {~=> (~}max(old_length - keys.begin, 0) {~=> + STEP_K - 1)~} / STEP_K
        appended by the first split [race]: if (split == {~splits - 1 => 0~}) { write_new_rows
    """,
    "step_of_tiles": """
        one tile of rows a threadgroup: if ({~!ROW_LOOP => true~})
    """,
    "step_in_pages": """
        pages of sequence 0: inputs.block_table {~+ batch * params.block_table_stride =>~}
    """,
    "step_of_indices": """
        appended to the sequence's own batch [race]:
            place.cache_batch = {~CACHE_BATCH_IDX ? inputs.cache_batch_idx[batch] : =>~} batch;
    """,
}

test_mutant_is_caught, test_the_unchanged_kernels_pass = mutant_tests(
    MUTANTS, "flash_decode", run=problems.run
)

"""Planted faults in flash_fwd, and small problems that must notice them."""

import torch

from tests.attention.flash_fwd_check import check_flash_fwd, check_large_sinks, make_qkv
from tests.attention.held_cases import FORWARD, PACKED, SIZES, case, rotated
from tests.cache.kv_caches import fp8_pages, with_nan_tails
from tests.helpers.judged import judge
from tests.helpers.mutants import mutant_tests
from torch_metal_attn.testing.judge import ints

CPU = torch.device("cpu")
FEW = {"q_length": 33, "kv_length": 90}
PADDED = {f"{tensor}_layout": ("padded 3",) for tensor in "qkv"}


def dense(**fields):
    """A case with GQA, two query tiles or more, and a partial last block of keys."""
    return case(**SIZES | FORWARD | fields)


def large_sinks():
    qkv = make_qkv(**SIZES, head_dim=16)
    check_large_sinks(*qkv, causal=True, q_offset=-2, device=CPU)


def scales_of_fp8():
    lengths = [90, 50]
    q, k, v = make_qkv(**SIZES | FEW, head_dim=11, dtype=torch.float16)
    k, v = (with_nan_tails(x, lengths) for x in (k, v))
    scale = torch.tensor([[0.5, 2.0], [1.0, 30.0]])
    k, v, cache = fp8_pages(k, v, scale, lengths, 16)
    check_flash_fwd(q, k, v, cache=cache, device=CPU, seqused_k=ints(*lengths))


def codes_of_fp8():
    data = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).view(16, 1, 1, 16)
    q, k, _ = make_qkv(batch=16, heads=1, q_length=33, kv_length=1, head_dim=16)
    out, _ = torch.ops.metal_attn.flash_fwd(q, k.to(torch.float8_e4m3fn), data)
    torch.testing.assert_close(out, data.float().expand_as(out), rtol=0.0, atol=0.0, equal_nan=True)


PROBLEMS = {
    # The diagonal does not end in the corner.
    "plain": [dense(batch=1, head_dim=64, causal=True, q_offset=30)],
    "windows": [
        dense(window_size_left=left, window_size_right=right, q_offset=offset)
        for left, right, offset in ((20, 13, None), (30, 45, None), (20, 13, 5))
    ],
    # Chunks that begin after the padding, and queries before the first chunk.
    "chunks": [
        dense(attention_chunk=21, leftpad_k=(7, 40), **visible)
        for visible in ({}, {"causal": True, "q_offset": 0})
    ],
    "lengths": [dense(seqused_k=(90, 50), leftpad_k=(5, 35))],
    # The key stride of the first mask is not 1. Rows of even length are read in pairs.
    "masks": [
        dense(attn_mask="bool bhqk", mask_layout=("order 3210",)),
        *(dense(attn_mask="bool bhqk", kv_length=keys) for keys in (100, 101)),
    ],
    "biases": [dense(attn_bias="float32 bhqk"), dense(attn_mask="float16 bhqk", kv_length=100)],
    "softcap": [dense(softcap=1.5, softmax_scale=0.5)],
    "alibi": [dense(dtype="float32", alibi_slopes="bh", q_offset=offset) for offset in (None, 60)],
    "sinks": [dense(dtype="float32", learnable_sink="float32", causal=True, q_offset=-2)],
    "large sinks": large_sinks,
    # Both pairings, with wide and narrow loads. In a head dim of 24, one fragment has columns of
    # the first half only, and another one is not rotated.
    "rotary": [
        dense(**rotated(columns, interleaved), dtype="float32", head_dim=head_dim)
        for columns, interleaved, head_dim in (
            *((8, False, 16), (14, False, 16), (16, False, 24)),
            *((8, True, 16), (14, True, 16), (16, True, 16)),
        )
    ],
    "slices of v": [dense(batch=1, v_head_dim=264, causal=True)],
    # Two SIMD groups share rows, and each group has half of the columns.
    "shared rows": [dense(batch=1, head_dim=208, causal=True)],
    # There is NaN around each row.
    "odd head dims": [
        dense(head_dim=11, v_head_dim=5, **PADDED, **rotary)
        for rotary in ({}, {"rotary": "q", "rotary_columns": 8})
    ],
    # There are an empty sequence and spare rows. The options count rows from a sequence's start.
    "packed": [case(**PACKED | FORWARD | rotated(8), attn_mask="bool bqk", window_size_left=40)],
    # A sequence has more pages of 3 keys than a SIMD group holds page numbers. k is rotated.
    "pages": [
        dense(
            q_length=20,
            kv_length=320,
            seqused_k=(31, 300),
            cache="paged",
            page=3,
            rotary="k",
            rotary_columns=16,
        )
    ],
    # Because of the window, loops begin after the first pages.
    "pages of packed": [
        case(
            **PACKED | FORWARD | {"packed": ((40, 50), (77, 300)), "dtype": "float32"},
            cache="paged",
            page=24,
            window_size_left=30,
        )
    ],
    "indices": [dense(cache="indexed")],
    # With float32 queries, 4 columns are read at a time: half of a word of codes.
    "halves of words": [dense(**FEW, dtype="float32", head_dim=64, format="q2_g64")],
    "formats": [
        dense(**FEW, head_dim=64, cache="paged", format=kv_format, seqused_k=(90, 50))
        for kv_format in ("q8_0", "q4_0", "q3_g32")
    ],
    "scales of fp8": scales_of_fp8,
    "codes of fp8": codes_of_fp8,
}


def run(problem):
    problem = PROBLEMS.get(problem, problem)
    if callable(problem):
        problem()
    else:
        judge(*problem)


MUTANTS = {
    "plain": """
        scale by 0.98: score = score * {~=> 0.98f *~} params.scale_log2;
        diagonal hidden: position + window_right {~+ 1 =>~}
        one key past the diagonal: position + window_right + {~1 => 2~}
        offset ignored: position = query {~+ q_offset =>~}
        key past the length: existing.end = sequence.kv_length{~=> + 1~}
        band never applied: if ({~seen_keys.hides_in(kv_block, BLOCK_K) => false~})
        last visible keys skipped: block {~=> + 8~} < union_range.end
        tile ends a query early:
            visible.keys_of({~min(place.first_query + BLOCK - 1, last_query) =>
            place.first_query~}).end
        output not rescaled: sum.fragments[i][d] {~* corrections[i] =>~} +
        sum not rescaled: {~lane_sum *= correction; =>~}
        maximum of one lane: {~fragment_row_max(block_max) => block_max~}
        sum of one lane: return {~fragment_row_sum(lane_sum) => lane_sum~}
        maximum not carried: max({~row_max => MASKED_ROW_MAX~}, fragment_row_max
        logarithm in base 2: log2(row_sum)) {~* M_LN2_F =>~};
        wrong KV head: head {~/ => %~} params.queries_per_kv
        keys of a pair swapped: zip_pairs<T>({~even_row, odd_row => odd_row, even_row~}, low, high)
        no barrier before staging [race]:
            {~// Wait until every SIMD group has read the previous tiles.
            threadgroup_barrier(mem_flags::mem_threadgroup); =>~}
        no barrier after staging [uninitialised]:
            {~// Wait until the tiles are completely written.
            threadgroup_barrier(mem_flags::mem_threadgroup); =>~}
        barrier orders nothing [race]:
            {~// Wait until the tiles are completely written. =>~}
            threadgroup_barrier(mem_flags::{~mem_threadgroup =>
            mem_none~});
        key past the end read [out_of_bounds]: source.find({~min(row + 1, end - 1) => row + 1~})
        value past the end read [everywhere, out_of_bounds]:
            place = source.find({~min(row, end - 1) => row~})
        query past the end read [out_of_bounds]:
            return {~min(row + i * FRAGMENT, last_row) => row + i * FRAGMENT~}
        query past the end stored [race or out_of_bounds]: if ({~query > tile.last_query => false~})
        half a tile staged [everywhere, uninitialised]:
            i < {~(UNITS + THREADS - 1) / THREADS => UNITS / THREADS / 2~}
        tile rows not padded [threadgroup_out_of_bounds]:
            constexpr int padded(int columns) { return columns {~| => -~} 8; }
    """,
    "windows": """
        left window one short: position - window_left{~=> + 1~}
        left window one long: position - window_left{~=> - 1~}
        right window one short: position + window_right {~+ 1 =>~}
        right window one long: position + window_right + {~1 => 2~}
        left window dropped [everywhere]: {~BAND && window_left != NO_WINDOW => false~}
        right window dropped [everywhere]: {~BAND && window_right != NO_WINDOW => false~}
        top-left where bottom-right: {~params.bottom_right => false~} ?
        bottom-right where an offset: {~params.bottom_right => true~} ?
        left edge never applied:
            block {~< intersection_range.begin || block =>~} + count > intersection_range.end
        right edge never applied:
            block < intersection_range.begin {~|| block + count > intersection_range.end =>~}
        left edge of the first query: intersection_range.begin = {~last_range => first_range~}
        first visible keys skipped: block + count > union_range.begin{~=> + 8~}
        tile begins at its last query:
            visible.keys_of({~place.first_query => min(place.first_query + BLOCK - 1,
            last_query)~}).begin
    """,
    "chunks": """
        chunk begins one late: max(begin, chunk_start{~=> + 1~})
        chunk ends one late: chunk_start + chunk{~=> + 1~})
        chunk ends one early: chunk_start + chunk{~=> - 1~})
        chunks from key 0: uint(position {~- existing.begin); return existing.begin + => ); return~}
        queries before the first chunk see it: {~outside ? chunk_start : =>~} chunk_start + chunk
    """,
    "lengths": """
        one key past seqused_k: clamp(used{~=> + 1~}, 0, kv_length)
        one key short of seqused_k: clamp(used{~=> - 1~}, 0, kv_length)
        leftpad_k ignored: first_key = {~clamp(padding, 0, kv_length) => 0~}
        one key before leftpad_k: first_key = clamp(padding{~=> - 1~}, 0, kv_length)
        values before the padding's end not zeroed: row {~>= begin && row =>~} < end ? values
        lengths of the first sequence [everywhere]: seqused_k[{~batch => 0~}]
        paddings of the first sequence: leftpad_k[{~batch => 0~}]
    """,
    "masks": """
        mask dropped:
            {~Fragment<float>(shown.x ? score.x : -INFINITY, shown.y ? score.y : -INFINITY) =>
            score~}
        mask inverted: shown.x ? {~score.x : -INFINITY => -INFINITY : score.x~}
        mask of the even key: shown.{~y => x~} ? score.y
        mask's query stride ignored: last_row)) {~* row_stride =>~}
        mask's key stride ignored [everywhere]: last_column)) {~* column_stride =>~}
        mask of the first batch:
            Offset({~batch) * Offset(strides.batch) + Offset( =>~}head) * Offset(strides.head);
        mask of the first head:
            Offset(batch) * Offset(strides.batch) {~+ Offset(head) * Offset(strides.head) =>~};
        pair's second byte lost: uchar(both {~>> 8 => & 0xff~})
        mask's query past the end read [out_of_bounds]:
            Offset({~min(row + i * FRAGMENT, last_row) => row + i * FRAGMENT~}) * row_stride
        mask's key past the end [out_of_bounds]: {~min(column + 1, last_column => (column + 1~})
        mask's pair past the end read [out_of_bounds]: {~min(column, last_column - 1) => column~}
    """,
    "biases": """
        bias dropped: {~score += Fragment<float>(base_2(added.x), base_2(added.y)); =>~}
        bias read as bool:
            Fragment<float>({~base_2(added.x), base_2(added.y) => added.x != 0 ? 0.0f : -INFINITY,
            added.y != 0 ? 0.0f : -INFINITY~})
        bias in base 2: value {~* M_LOG2E_F =>~}
        bias subtracted: {~+= => -=~} Fragment<float>(base_2(added.x)
    """,
    "softcap": """
        softcap dropped: {~precise::tanh =>~}(score * params.scale_over_cap)
        cap of scores in base 2: tanh(score * params.scale_over_cap{~=> * M_LOG2E_F~})
        capped scores not in base 2: capped * params.cap_log2{~=> / M_LOG2E_F~};
    """,
    "alibi": """
        ALiBi dropped: score -= {~slope_log2 => 0.0f~}
        ALiBi's sign flipped: score {~-= => +=~} slope_log2
        slope of the KV head: alibi_batch_stride + head{~=> / params.queries_per_kv~}]
        slope of the first batch: {~batch * params.alibi_batch_stride => 0~}
        slope in base 2: alibi_batch_stride + head] {~* M_LOG2E_F =>~}
        ALiBi's offset ignored: {~(TRANSPOSED ? -visible.q_offset : visible.q_offset) => 0~}
        ALiBi's distance in the first block: distance {~- first_column =>~}
        distance without its sign taken: {~fabs(first), fabs(first - 1.0f) => first, first - 1.0f~}
        distance of the even key: fabs(first {~- 1.0f =>~})
    """,
    "sinks": """
        sink dropped: {~SINK ? keys_sum + sink_weight : =>~} keys_sum
        sink in base 2:
            {~base_2_less(learnable_sink[head], row_max) => float(learnable_sink[head]) - row_max~}
        sink of the KV head: softmax.sink_weight(i, inputs, {~head => tile.place.kv_head~})
        sink once a lane: return {~=> 4.0f *~} fast::exp2(base_2_less(
        maximum without the sink: {~max(sink_log2, MASKED_ROW_MAX) => MASKED_ROW_MAX~}
    """,
    "large sinks": """
        sink rounded: {~(scaled - other) + rounded_off(float(logit), scaled) => scaled - other~}
        log2(e) in one float: {~+ value * LOG2E_REST =>~}
    """,
    "rotary": """
        rotated the other way: (is_x ? {~-sine : => sine : -~} sine)
        rotation of both alike: {~(is_x ? -sine : sine) => sine~}
        rotation of pairs the other way:
            x * cosine {~- y * sine, y * cosine + => + y * sine, y * cosine -~} x * sine
        partner in the row's half [misaligned]:
            return column {~< pairs ? column + pairs : column - pairs => ^ 1~};
        partner of an interleaved column: return column {~^ 1 =>~};
        q's row of the first query: rotary.rotated(tensor, offset(row), {~row => 0~}, column)
        pairs of q not rotated:
            return {~rotary.rotated_pair(tensor, offset(row), row, first, lane_column) =>
            Fragment<T>(tensor[offset(row) + column], tensor[offset(row) + column + 1])~}
        pairs of the first query's row: rotary.rotated_pair(tensor, offset(row), {~row => 0~}, first
        pairs after the last [wrong or out_of_bounds]: (whole_row || {~is_rotated(column) => true~})
        entry of the fragment: (first - ROTARY_FIRST) / 2 {~+ lane_column / 2 =>~};
        every fragment of the first half [wrong or out_of_bounds]:
            is_x = {~first < ROTARY_FIRST + ROTARY_PAIRS => true~};
        partner of a whole fragment: first + (is_x ? {~ROTARY_PAIRS => 0~} : -ROTARY_PAIRS);
        entry of the second half's columns [wrong or out_of_bounds]:
            pair = {~min(first, partner) => first~} - ROTARY_FIRST
        entry of the column before: float(cosine[pair {~+ 1 =>~}])
        fragments after the last [wrong or out_of_bounds]: (halves && {~is_rotated(first) => true~})
        row of every other key: Offset(position{~=> / 2~}) * cosines_stride
        sine's row of every other key: Offset(position{~=> / 2~}) * sines_stride
        q's first tables: q_cos, params.q_cos_strides, q_sin, params.q_sin_strides, {~batch => 0~}
        k's tables of the first sequence: {~Offset(batch) * Offset(sin_strides.batch) => 0~}
        q not rotated:
            {~rotary.rotated(tensor, offset(row), row, column) => tensor[offset(row) + column]~}
        k not rotated:
            return {~rotary.rotated_chunk<COLUMNS>(tensor, place.row, place.position =>
            load_chunk<COLUMNS>(tensor, place.row~}, column)
        columns after the rotated ones rotated [out_of_bounds]:
            if ({~!is_rotated(column) => false~}) { return tensor[row + column];
    """,
    "slices of v": """
        slice of v not moved [everywhere]: first_value_column = {~slice * V_SLICE => 0~}
        out's slice not moved [race]: row_offset(strides, batch, head, start) {~+ slice * SLICE =>~}
        read after the last slice [out_of_bounds]:
            if ({~ROW_COLUMNS == GRID_SLICES * COLUMNS || column < ROW_COLUMNS => true~})
    """,
    "shared rows": """
        own part twice: other = simdgroup {~^ 1 =>~}
        columns of q of the first: return {~simdgroup % COLUMN_SIMDGROUPS => 0~} * OWN_QK_FRAGMENTS
        v's columns [race or wrong]: return {~simdgroup % COLUMN_SIMDGROUPS => 0~} * OWN_V_FRAGMENTS
        no barrier before the sum [race]:
            {~and written its part of the scores. threadgroup_barrier(mem_flags::mem_threadgroup);
            =>~}
        no barrier after v [race or uninitialised]:
            stage_values(); {~threadgroup_barrier(mem_flags::mem_threadgroup); =>~}
    """,
    "odd head dims": """
        q's columns after the last not zeroed: {~exists => true~} ? tensor[offset(row) + column]
        rotated q's columns after the last not zeroed:
            {~exists => true~} ? rotary.rotated(tensor, offset(row), row, column)
        even columns not zeroed: {~whole || column < COLUMNS => true~} ? bits[row + column]
        odd columns not zeroed: {~whole || column + 1 < COLUMNS => true~} ? bits[row + column + 1]
        column after the last stored [race]: if ({~column + 1 < columns => true~})
    """,
    "packed": """
        q of sequence 0: operand.reset(q, params.q_strides, batch, head, {~sequence.q_start => 0~})
        first key of the first sequence:
            {~place(operand, k, params.k_strides, batch, kv_head, sequence, params) => operand = {k
            + kv_head * params.k_strides.head, params.k_strides.row}~}
        first value of the first sequence:
            {~place(operand, v, params.v_strides, batch, kv_head, sequence, params) => operand = {v
            + kv_head * params.v_strides.head, params.v_strides.row}~}
        out of the first sequence [race]:
            params.out_strides, place.batch, place.head, {~sequence.q_start => 0~}
        lse of the first sequence [race]: place.batch, place.head, 0) {~+ sequence.q_start =>~}
        queries of no sequence left out: no_sequence ? {~params.q_total => begin~} :
        one key of the next sequence: kv_length = no_sequence ? 0 : kv_rows{~=> + 1~};
    """,
    "pages": """
        page's stride of rows: Offset(page) * {~page_stride => PAGE_SIZE * row_stride~}
        page of every second [simd_lane]: uint(row) / PAGE_ROWS {~=> / 2~} - window
        page by another divisor [simd_lane]: uint(row) / {~PAGE_ROWS => (PAGE_ROWS + 1)~} - window
        row not within its page [out_of_bounds]: uint(row) {~% PAGE_ROWS =>~}
        row as if pages were powers of two: {~uint(row) % PAGE_ROWS => row & (PAGE_ROWS - 1)~}
        pairs of keys in one page: pages.page_of(row{~=> & ~1~})
        window not moved [simd_lane]: {~=> (window >= 0 ||~}last_place < window + SIMD_LANES{~=> )~}
        window moved late [simd_lane]: {~last_place => first_place~} < window + SIMD_LANES{~=> + 1~}
        numbers of the window before: numbers[place{~=> % SIMD_LANES~}]
        every lane the first number: window {~+ lane =>~};
        numbers after the last block read [out_of_bounds]:
            {~place < count ? numbers[place] : NO_PAGE => numbers[place]~}
        table of the first sequence: block_table {~+ batch * params.block_table_stride =>~}
        pages of the first head: operand.reset(tensor, strides, kv_batch(batch), {~kv_head => 0~},
        rotated by the row of the page: place.position = {~row => page_row~};
    """,
    "pages of packed": """
        keys of the sequences before: int64_t(kv_end) {~- kv_begin =>~}
        row not within its page: uint(row) % {~PAGE_ROWS => 16~}
    """,
    "indices": """
        batch not looked up: CACHE_BATCH_IDX ? {~cache_batch_idx[batch] => batch~}
        batch of the first sequence: CACHE_BATCH_IDX ? cache_batch_idx[{~batch => 0~}]
    """,
    "halves of words": """
        first half for the second: word {~>> (column % 8 * kv_bits(FORMAT)) =>~}
    """,
    "formats": """
        nibbles swapped: >> ({~i => (BITS == 4 ? i ^ 1 : i)~} * BITS % 32)
        a byte of 3 bits too low: uint(unit[2]) << {~16 => 8~}
        no minimum: value {~+ group.minimum =>~}
        scale for a minimum: float(numbers[{~1 => 0~}])
        nibbles from 0 up: float(int(code & 15) {~- 8 =>~})
        bytes without a sign: float({~as_type<char>(uchar(code & 0xff)) => code & 0xff~})
        scale of the first block: place.scales + {~column / kv_scale_columns(FORMAT) => 0~} *
        blocks of 16: place.scales + {~column / kv_scale_columns(FORMAT => min(column / 16, 1~}) *
        scales of the first page: scales.row({~page => 0~}, page_row)
        scales of a page's first row: scales.row(page, {~page_row => 0~})
        k's scales for v:
            operand.reset_scale({~v_scale, params.v_scale_strides => k_scale,
            params.k_scale_strides~}
        no scale: number<FORMAT>(codes, i) {~* group.scale =>~}
    """,
    "scales of fp8": """
        scale of the first sequence: float(tensor[{~batch * strides.batch + =>~}
        scale of the first head: {~+ head * strides.head =>~}]);
        columns after the last read [everywhere, out_of_bounds]:
            {~COLUMNS % FRAGMENT == 0 || column + i < COLUMNS => true~}
    """,
    "codes of fp8": """
        small numbers as normal ones: magnitude < {~8 => 0~} ?
        larger ones as small: magnitude < {~8 => 32~} ?
        no NaN: {~magnitude == 0x7f ? NAN : =>~} finite
        no sign: {~(code & 0x80) != 0 ? -value : =>~} value
    """,
}

test_mutant_is_caught, test_the_unchanged_kernels_pass = mutant_tests(MUTANTS, "flash_fwd", run=run)

"""Planted faults in the text of flash_fwd: the tests' own check must see every one of them."""

import torch

from tests.attention import flash_fwd_problems as problems
from tests.attention.flash_fwd_check import make_qkv
from tests.helpers.mutants import mutant_tests, plant, repeated
from torch_metal_attn import simulate

HIDES = "block < by_all.begin || block + count > by_all.end"
TILE_END = "visible.keys_of(min(place.first_query + BLOCK - 1, last_query))"
BARRIER = "threadgroup_barrier(mem_flags::mem_threadgroup);\n    "
PARTS_WRITTEN = "and written its part of the scores.\n      "
READ = "// Every SIMD group has read the tiles of the block before.\n    "
WHOLE = "// The tiles are whole.\n    "
MASK_START = "Offset(batch) * Offset(strides.batch) + Offset(head) * Offset(strides.head);"
IN_WINDOW = "uint(row) / PAGE_ROWS - window"
Q_ROTATED = "rotary.rotated(tensor, offset(row), row, column)"

# By the problem that shows them: what a fault changes in the shader's text, and where numbers do
# not show it the fault that the simulator reports.
MUTANTS = {
    problems.plain: {
        "scale by 0.98": (
            repeated("scores.scale(params.scale_log2)"),
            "scores.scale(0.98f * params.scale_log2)",
        ),
        "diagonal hidden": ("position + window_right + 1", "position + window_right"),
        "one key past the diagonal": ("position + window_right + 1", "position + window_right + 2"),
        "offset ignored": ("position = query + q_offset", "position = query"),
        "key past the length": (
            "existing.end = sequence.kv_length",
            "existing.end = sequence.kv_length + 1",
        ),
        "band never applied": ("if (seen_keys.hides_in(kv_block, BLOCK_K))", "if (false)"),
        "last visible keys skipped": ("block < by_any.end", "block + 8 < by_any.end"),
        "tile ends a query early": (f"{TILE_END}.end", "visible.keys_of(place.first_query).end"),
        "output not rescaled": ("sum.fragments[i][d] * corrections[i] +", "sum.fragments[i][d] +"),
        "sum not rescaled": ("lane_sum *= correction;", ""),
        "maximum of one lane": ("fragment_row_max(block_max)", "block_max"),
        "sum of one lane": ("return fragment_row_sum(lane_sum)", "return lane_sum"),
        "maximum not carried": (
            "max(row_max, fragment_row_max",
            "max(MASKED_ROW_MAX, fragment_row_max",
        ),
        "logarithm in base 2": ("log2(row_sum)) * M_LN2_F", "log2(row_sum))"),
        "wrong KV head": ("head / params.queries_per_kv", "head % params.queries_per_kv"),
        "keys of a pair swapped": (
            "interleave<T>(even_row, odd_row, low, high)",
            "interleave<T>(odd_row, even_row, low, high)",
        ),
        "no barrier before staging": (READ + BARRIER.strip(), "", "race"),
        "no barrier after staging": (WHOLE + BARRIER.strip(), "", "uninitialised"),
        "barrier orders nothing": (
            WHOLE + BARRIER.strip(),
            BARRIER.strip().replace("mem_threadgroup", "mem_none"),
            "race",
        ),
        "key past the end read": (
            "source.find(min(row + 1, end - 1))",
            "source.find(row + 1)",
            "out_of_bounds",
        ),
        "value past the end read": (
            repeated("place = source.find(min(row, end - 1))"),
            "place = source.find(row)",
            "out_of_bounds",
        ),
        "query past the end read": (
            "return min(row + i * FRAGMENT, last_row)",
            "return row + i * FRAGMENT",
            "out_of_bounds",
        ),
        "query past the end stored": (
            "if (query > tile.last_query)",
            "if (false)",
            ("race", "out_of_bounds"),
        ),
        "half a tile staged": (
            repeated("i < (UNITS + THREADS - 1) / THREADS"),
            "i < UNITS / THREADS / 2",
            "uninitialised",
        ),
        "tile rows not padded": (
            "constexpr int padded(int columns) { return columns | 8; }",
            "constexpr int padded(int columns) { return columns - 8; }",
            "threadgroup_out_of_bounds",
        ),
    },
    problems.windows: {
        "left window one short": ("position - window_left", "position - window_left + 1"),
        "left window one long": ("position - window_left", "position - window_left - 1"),
        "right window one short": ("position + window_right + 1", "position + window_right"),
        "right window one long": ("position + window_right + 1", "position + window_right + 2"),
        "left window dropped": (repeated("BAND && window_left != NO_WINDOW"), "false"),
        "right window dropped": (repeated("BAND && window_right != NO_WINDOW"), "false"),
        "top-left where bottom-right": ("params.bottom_right ?", "false ?"),
        "bottom-right where an offset": ("params.bottom_right ?", "true ?"),
        "left edge never applied": (HIDES, "block + count > by_all.end"),
        "right edge never applied": (HIDES, "block < by_all.begin"),
        "left edge of the first query": ("by_all.begin = of_last", "by_all.begin = of_first"),
        "first visible keys skipped": (
            "block + count > by_any.begin",
            "block + count > by_any.begin + 8",
        ),
        "tile begins at its last query": (
            "visible.keys_of(place.first_query).begin",
            f"{TILE_END}.begin",
        ),
    },
    problems.chunks: {
        "chunk begins one late": ("max(begin, chunk_start)", "max(begin, chunk_start + 1)"),
        "chunk ends one late": ("chunk_start + chunk)", "chunk_start + chunk + 1)"),
        "chunk ends one early": ("chunk_start + chunk)", "chunk_start + chunk - 1)"),
        "chunks from key 0": (
            "uint(position - existing.begin);\n    return existing.begin +",
            "uint(position);\n    return",
        ),
        "queries before the first chunk see it": (
            "none ? chunk_start : chunk_start + chunk",
            "chunk_start + chunk",
        ),
    },
    problems.lengths: {
        "one key past seqused_k": ("clamp(used, 0, kv_length)", "clamp(used + 1, 0, kv_length)"),
        "one key short of seqused_k": (
            "clamp(used, 0, kv_length)",
            "clamp(used - 1, 0, kv_length)",
        ),
        "leftpad_k ignored": ("first_key = clamp(padding, 0, kv_length)", "first_key = 0"),
        "one key before leftpad_k": (
            "first_key = clamp(padding, 0, kv_length)",
            "first_key = clamp(padding - 1, 0, kv_length)",
        ),
        "values before the padding's end not zeroed": (
            "row >= begin && row < end ? values",
            "row < end ? values",
        ),
        "lengths of the first sequence": (repeated("seqused_k[batch]"), "seqused_k[0]"),
        "paddings of the first sequence": ("leftpad_k[batch]", "leftpad_k[0]"),
    },
    problems.masks: {
        "mask dropped": (
            "Fragment<float>(shown.x ? score.x : -INFINITY, shown.y ? score.y : -INFINITY)",
            "score",
        ),
        "mask inverted": ("shown.x ? score.x : -INFINITY", "shown.x ? -INFINITY : score.x"),
        "mask of the even key": ("shown.y ? score.y", "shown.x ? score.y"),
        "mask's query stride ignored": ("last_row)) * row_stride", "last_row))"),
        "mask's key stride ignored": (repeated("last_column)) * column_stride"), "last_column))"),
        "mask of the first batch": (MASK_START, "Offset(head) * Offset(strides.head);"),
        "mask of the first head": (MASK_START, "Offset(batch) * Offset(strides.batch);"),
        "pair's second byte lost": ("uchar(both >> 8)", "uchar(both & 0xff)"),
        "mask's query past the end read": (
            "Offset(min(row + i * FRAGMENT, last_row)) * row_stride",
            "Offset(row + i * FRAGMENT) * row_stride",
            "out_of_bounds",
        ),
        "mask's key past the end read": (
            "min(column + 1, last_column)",
            "(column + 1)",
            "out_of_bounds",
        ),
        "mask's pair past the end read": (
            "min(column, last_column - 1)",
            "column",
            "out_of_bounds",
        ),
    },
    problems.biases: {
        "bias dropped": (
            "score += Fragment<float>(base_2(added.x), base_2(added.y));",
            "",
        ),
        "bias taken for a bool": (
            "Fragment<float>(base_2(added.x), base_2(added.y))",
            "Fragment<float>(added.x != 0 ? 0.0f : -INFINITY, added.y != 0 ? 0.0f : -INFINITY)",
        ),
        "bias in base 2": ("value * M_LOG2E_F", "value"),
        "bias subtracted": (
            "+= Fragment<float>(base_2(added.x)",
            "-= Fragment<float>(base_2(added.x)",
        ),
        "bias of the first head": (MASK_START, "Offset(batch) * Offset(strides.batch);"),
    },
    problems.softcap: {
        "softcap dropped": (
            "    tanh(scores, params);\n",
            "    scores.scale(params.scale_over_cap);\n",
        ),
        "cap of scores in base 2": (
            "tanh(scores.fragments[i][j] * params.scale_over_cap)",
            "tanh(scores.fragments[i][j] * params.scale_over_cap * M_LOG2E_F)",
        ),
        "capped scores not in base 2": (
            "scores.scale(params.cap_log2)",
            "scores.scale(params.cap_log2 / M_LOG2E_F)",
        ),
    },
    problems.alibi: {
        "ALiBi dropped": ("scores.fragments[i][j] -= slope_log2", "scores.fragments[i][j] -= 0.0f"),
        "ALiBi's sign flipped": (
            "scores.fragments[i][j] -= slope_log2",
            "scores.fragments[i][j] += slope_log2",
        ),
        "slope of the KV head": (
            "alibi_batch_stride + head]",
            "alibi_batch_stride + head / params.queries_per_kv]",
        ),
        "slope of the first batch": ("batch * params.alibi_batch_stride", "0"),
        "slope in base 2": ("alibi_batch_stride + head] * M_LOG2E_F", "alibi_batch_stride + head]"),
        "ALiBi's offset ignored": ("(TRANSPOSED ? -visible.q_offset : visible.q_offset)", "0"),
        "ALiBi's distance in the first block": ("distance - first_column", "distance"),
        "distance without its sign taken": (
            "fabs(first), fabs(first - 1.0f)",
            "first, first - 1.0f",
        ),
        "distance of the even key": ("fabs(first - 1.0f)", "fabs(first)"),
    },
    problems.sinks: {
        "sink dropped": ("SINK ? keys_sum + sink_weight : keys_sum", "keys_sum"),
        "sink in base 2": (
            "base_2_less(learnable_sink[head], row_max)",
            "float(learnable_sink[head]) - row_max",
        ),
        "sink of the KV head": (
            "softmax.sink_weight(i, inputs, head)",
            "softmax.sink_weight(i, inputs, tile.place.kv_head)",
        ),
        "sink once a lane": (
            "return fast::exp2(base_2_less(",
            "return 4.0f * fast::exp2(base_2_less(",
        ),
        "maximum without the sink": ("max(sink_log2, MASKED_ROW_MAX)", "MASKED_ROW_MAX"),
    },
    problems.large_sinks: {
        "sink rounded in base 2": (
            "(scaled - other) + rounded_off(float(logit), scaled)",
            "scaled - other",
        ),
        "log2(e) in one float": ("+ value * LOG2E_REST", ""),
    },
    problems.rotary: {
        "rotated the other way": ("(is_x ? -sine : sine)", "(is_x ? sine : -sine)"),
        "rotation of both alike": ("(is_x ? -sine : sine)", "sine"),
        "rotation of pairs the other way": (
            "x * cosine - y * sine, y * cosine + x * sine",
            "x * cosine + y * sine, y * cosine - x * sine",
        ),
        "partner in the row's half": (
            "return column < pairs ? column + pairs : column - pairs;",
            "return column ^ 1;",
            "misaligned",
        ),
        "partner of an interleaved column": ("return column ^ 1;", "return column;"),
        "q's row of the first query": (Q_ROTATED, Q_ROTATED.replace("row, column", "0, column")),
        "row of every other key": (
            "Offset(position) * cosines_stride",
            "Offset(position / 2) * cosines_stride",
        ),
        "sine's row of every other key": (
            "Offset(position) * sines_stride",
            "Offset(position / 2) * sines_stride",
        ),
        "q's tables of the first sequence": (
            "q_cos, params.q_cos_strides, q_sin, params.q_sin_strides, batch",
            "q_cos, params.q_cos_strides, q_sin, params.q_sin_strides, 0",
        ),
        "k's tables of the first sequence": ("Offset(batch) * Offset(sin_strides.batch)", "0"),
        "q not rotated": (
            Q_ROTATED,
            "tensor[offset(row) + column]",
        ),
        "k not rotated": (
            "return rotary.rotated_chunk<COLUMNS>(tensor, place.row, place.position, column)",
            "return load_chunk<COLUMNS>(tensor, place.row, column)",
        ),
        "columns behind the rotated ones rotated": (
            "if (!is_rotated(column)) {\n      return tensor[row + column];",
            "if (false) {\n      return tensor[row + column];",
            "out_of_bounds",
        ),
    },
    problems.slices_of_v: {
        "slice of v not moved": (
            repeated("first_value_column = slice * V_SLICE"),
            "first_value_column = 0",
        ),
        "slice of out not moved": (
            "row_offset(strides, batch, head, start) + slice * SLICE",
            "row_offset(strides, batch, head, start)",
            "race",
        ),
        "read behind the last slice": (
            "if (ROW_COLUMNS == GRID_SLICES * COLUMNS || column < ROW_COLUMNS)",
            "if (true)",
            "out_of_bounds",
        ),
    },
    problems.shared_rows: {
        "own part twice": ("other = simdgroup ^ 1", "other = simdgroup"),
        "columns of q of the first": (
            "return simdgroup % COLUMN_SIMDGROUPS * OWN_QK_FRAGMENTS",
            "return 0 * OWN_QK_FRAGMENTS",
        ),
        "columns of v of the first": (
            "return simdgroup % COLUMN_SIMDGROUPS * OWN_V_FRAGMENTS",
            "return 0 * OWN_V_FRAGMENTS",
            ("race", None),
        ),
        "no barrier before the sum": (PARTS_WRITTEN + BARRIER.strip(), "\n", "race"),
        "no barrier after v": (
            "stage_values();\n      " + BARRIER.strip(),
            "stage_values();",
            ("race", "uninitialised"),
        ),
    },
    problems.odd_head_dims: {
        "q's columns behind the last not zeroed": (
            "exists ? tensor[offset(row) + column]",
            "true ? tensor[offset(row) + column]",
        ),
        "rotated q's columns behind the last not zeroed": (
            f"exists ? {Q_ROTATED}",
            f"true ? {Q_ROTATED}",
        ),
        "k's even columns behind the last not zeroed": (
            "whole || column < COLUMNS ? bits[row + column]",
            "true ? bits[row + column]",
        ),
        "k's odd columns behind the last not zeroed": (
            "whole || column + 1 < COLUMNS ? bits[row + column + 1]",
            "true ? bits[row + column + 1]",
        ),
        "column behind the last stored": (
            "if (column + 1 < columns)",
            "if (true)",
            "race",
        ),
    },
    problems.packed: {
        "first query of the first sequence": (
            "operand.reset(q, params.q_strides, batch, head, sequence.q_start)",
            "operand.reset(q, params.q_strides, batch, head, 0)",
        ),
        "first key of the first sequence": (
            "place(operand, k, params.k_strides, batch, kv_head, sequence, params)",
            "operand = {k + kv_head * params.k_strides.head, params.k_strides.row}",
        ),
        "first value of the first sequence": (
            "place(operand, v, params.v_strides, batch, kv_head, sequence, params)",
            "operand = {v + kv_head * params.v_strides.head, params.v_strides.row}",
        ),
        "out of the first sequence": (
            "params.out_strides, place.batch, place.head, sequence.q_start",
            "params.out_strides, place.batch, place.head, 0",
            "race",
        ),
        "lse of the first sequence": (
            "place.batch, place.head, 0) + sequence.q_start",
            "place.batch, place.head, 0)",
            "race",
        ),
        "queries of no sequence left out": ("none ? params.q_total :", "none ? begin :"),
        "one key of the next sequence": (
            "kv_length = none ? 0 : kv_rows;",
            "kv_length = none ? 0 : kv_rows + 1;",
        ),
        "mask of the first sequence": (MASK_START, "Offset(head) * Offset(strides.head);"),
        "tables from the first packed row": (
            Q_ROTATED,
            Q_ROTATED.replace("row, column", "0, column"),
        ),
    },
    problems.pages: {
        "page's stride of rows": (
            "Offset(page) * page_stride",
            "Offset(page) * PAGE_SIZE * row_stride",
        ),
        "page of every second": (IN_WINDOW, "uint(row) / PAGE_ROWS / 2 - window", "simd_lane"),
        "page by another divisor": (
            IN_WINDOW,
            "uint(row) / (PAGE_ROWS + 1) - window",
            "simd_lane",
        ),
        "row not within its page": ("uint(row) % PAGE_ROWS", "uint(row)", "out_of_bounds"),
        "row as if pages were powers of two": ("uint(row) % PAGE_ROWS", "row & (PAGE_ROWS - 1)"),
        "pairs of keys in one page": ("pages.page_of(row)", "pages.page_of(row & ~1)"),
        "window never moved": (
            "last_place < window + SIMD_LANES",
            "(window >= 0 || last_place < window + SIMD_LANES)",
            "simd_lane",
        ),
        "window moved too late": (
            "last_place < window + SIMD_LANES",
            "first_place < window + SIMD_LANES + 1",
            "simd_lane",
        ),
        "numbers of the window before": ("numbers[place]", "numbers[place % SIMD_LANES]"),
        "every lane the first number": ("window + lane;", "window;"),
        "numbers behind the last block read": (
            "place < count ? numbers[place] : NO_PAGE",
            "numbers[place]",
            "out_of_bounds",
        ),
        "table of the first sequence": (
            "block_table + batch * params.block_table_stride",
            "block_table",
        ),
        "pages of the first head": (
            "operand.reset(tensor, strides, kv_batch(batch), kv_head,",
            "operand.reset(tensor, strides, kv_batch(batch), 0,",
        ),
        "rotated by the row of the page": ("place.position = row;", "place.position = page_row;"),
    },
    problems.pages_of_packed: {
        "keys of the sequences before": (
            "int64_t(kv_end) - kv_begin",
            "int64_t(kv_end)",
        ),
        "row not within its page": ("uint(row) % PAGE_ROWS", "uint(row) % 16"),
    },
    problems.indices: {
        "batch not looked up": (
            "CACHE_BATCH_IDX ? cache_batch_idx[batch]",
            "CACHE_BATCH_IDX ? batch",
        ),
        "batch of the first sequence": (
            "CACHE_BATCH_IDX ? cache_batch_idx[batch]",
            "CACHE_BATCH_IDX ? cache_batch_idx[0]",
        ),
    },
    problems.halves_of_words: {
        "first half for the second": ("word >> (column % 8 * kv_bits(FORMAT))", "word"),
    },
    problems.formats: {
        "nibbles swapped": (
            ">> (i * BITS % 32)",
            ">> ((BITS == 4 ? i ^ 1 : i) * BITS % 32)",
        ),
        "a byte of 3 bits too low": ("uint(bytes[2]) << 16", "uint(bytes[2]) << 8"),
        "no minimum": ("value + group.minimum", "value"),
        "scale for a minimum": ("float(numbers[1])", "float(numbers[0])"),
        "nibbles from 0 up": ("float(int(code & 15) - 8)", "float(int(code & 15))"),
        "bytes without a sign": ("float(as_type<char>(uchar(code & 0xff)))", "float(code & 0xff)"),
        "scale of the first block": (
            "place.scales + column / kv_scale_columns(FORMAT) *",
            "place.scales + 0 *",
        ),
        "scale of blocks of 16": (
            "place.scales + column / kv_scale_columns(FORMAT) *",
            "place.scales + min(column / 16, 1) *",
        ),
        "scales of the first page": ("scales.row(page, page_row)", "scales.row(0, page_row)"),
        "scales of a page's first row": ("scales.row(page, page_row)", "scales.row(page, 0)"),
        "scale of the first sequence": (
            "float(tensor[batch * strides.batch +",
            "float(tensor[",
        ),
        "scale of the first head": (" + head * strides.head]);", "]);"),
        "k's scales for v": (
            "operand.reset_scale(v_scale, params.v_scale_strides",
            "operand.reset_scale(k_scale, params.k_scale_strides",
        ),
        "columns behind the last read": (
            repeated("COLUMNS % FRAGMENT == 0 || column + i < COLUMNS"),
            "true",
            "out_of_bounds",
        ),
        "no scale": ("number<FORMAT>(codes, i) * group.scale", "number<FORMAT>(codes, i)"),
    },
    problems.codes_of_fp8: {
        "small numbers as normal ones": ("magnitude < 8 ?", "magnitude < 0 ?"),
        "larger ones as small": ("magnitude < 8 ?", "magnitude < 32 ?"),
        "no NaN": ("magnitude == 0x7f ? NAN : finite", "finite"),
        "no sign": ("(code & 0x80) != 0 ? -value : value", "value"),
    },
}


test_mutant_is_caught, test_the_unchanged_kernels_pass = mutant_tests(
    MUTANTS, "flash_fwd", run=lambda problem: problem("cpu")
)


def test_zeroed_tail_of_v_matters(monkeypatch):
    """Without it, weights of 0 meet what the last key's row holds, and 0 * inf is NaN."""
    q, k, v = make_qkv(q_length=8, kv_length=33, head_dim=8)
    v[:, :, 32] = torch.inf
    plant(monkeypatch, "flash_fwd", "row >= begin && row < end ? values : uint4(0)", "values")
    with simulate(check=True):
        out, _ = torch.ops.metal_attn.flash_fwd(q, k, v)
    assert out.isnan().any()

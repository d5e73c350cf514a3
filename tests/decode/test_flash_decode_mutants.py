"""Planted faults in the text of flash_decode: the tests' own checks must see every one of them."""

from tests.decode import flash_decode_problems as problems
from tests.helpers.mutants import mutant_tests, repeated

BARRIER = "threadgroup_barrier(mem_flags::mem_threadgroup);\n"
DEVICE_BARRIER = "threadgroup_barrier(mem_flags::mem_device);"
SIMD_BARRIER = "simdgroup_barrier(mem_flags::mem_threadgroup);\n"
Q_COLUMN = "own.span(n / SPAN_FRAGMENTS) * SPAN_COLUMNS + span_column"
HIDES = "kv_block < seen_by_last.begin || kv_block + BLOCK_K > seen_by_first.end"
SHARE = "fast::exp2(tile.softmax[i].row_max - total.row_max) / total_sum"
FIRST_SPLIT_KEY = "keys.begin + min(split * split_steps, shared_steps)"
LAST_SPLIT_KEY = "min((split + 1) * split_steps, shared_steps)"
PRODUCTS = """place = tile + (i * FRAGMENT + column) * SCORE_STRIDE + j * FRAGMENT + row;
      place[0] = products.fragments[j][i].x;
      place[SCORE_STRIDE] ="""

# By the problem that shows them: what a fault changes in the shader's text, and where numbers do
# not show it the fault that the simulator reports.
MUTANTS = {
    problems.plain: {
        "scale by 0.98": (
            repeated("scores.scale(params.scale_log2)"),
            "scores.scale(0.98f * params.scale_log2)",
        ),
        "columns of q's fragments reversed": (
            "UNIT_COLUMNS + 2 * f +",
            "UNIT_COLUMNS + 2 * (3 - f) +",
        ),
        "units of q reversed": ("row / 2 * UNIT_COLUMNS", "(3 - row / 2) * UNIT_COLUMNS"),
        "spans of q swapped": (
            Q_COLUMN,
            Q_COLUMN.replace("own.span(n / SPAN_FRAGMENTS)", "(own.span(n / SPAN_FRAGMENTS) ^ 1)"),
        ),
        "one unit of k for all": (
            "load_key(units[s - first], j, keys, own.span(s) * SPAN_COLUMNS + own.unit_column)",
            "load_key(units[s - first], j, keys, own.span(s) * SPAN_COLUMNS)",
        ),
        "one unit of v for all": (
            "column = span * SPAN_COLUMNS + own.unit_column",
            "column = span * SPAN_COLUMNS",
        ),
        "units of out swapped": (
            "span * SPAN_COLUMNS + own.unit_column + d %",
            "span * SPAN_COLUMNS + (own.unit_column ^ 8) + d %",
            (None, "out_of_bounds"),
        ),
        "pairs of a unit swapped": (
            "fragments[i * PAIRS + j] =",
            "fragments[i * PAIRS + (j ^ 1)] =",
        ),
        "last span's tail of k read": (
            "WHOLE || column + i * CHUNK < COLUMNS",
            "true",
            "out_of_bounds",
        ),
        "head of another KV head": (
            "head = kv_head * heads + existing % heads",
            "head = existing % heads",
            "race",
        ),
        "one head's queries for all": (
            "head = kv_head * heads + existing % heads",
            "head = kv_head * heads",
        ),
        "one query for all": ("query = existing / heads", "query = 0"),
        "keys of the first KV head": (
            "inputs.keys(batch, kv_head, sequence",
            "inputs.keys(batch, 0, sequence",
        ),
        "values of the first KV head": (
            "inputs.values(batch, kv_head, sequence",
            "inputs.values(batch, 0, sequence",
        ),
        "query past the last read": (
            "min(row, rows - 1)",
            "row",
            "out_of_bounds",
        ),
        "key past the last read": (
            "keys.find_in(max(pages[j], 0), readable)",
            "keys.find_in(max(pages[j], 0), row)",
            "out_of_bounds",
        ),
        "value past the last read": (
            "values.find_in(max(pages[j], 0), readable)",
            "values.find_in(max(pages[j], 0), row)",
            "out_of_bounds",
        ),
        "keys of the first SIMD group for all": (
            "places.begin + own.key_simdgroup * BLOCK_K",
            "places.begin",
        ),
        "scores not transposed": (
            PRODUCTS,
            PRODUCTS.replace("+ column)", "+ row)")
            .replace("FRAGMENT + row;", "FRAGMENT + column;")
            .replace("[SCORE_STRIDE]", "[1]"),
        ),
        "scores of all SIMD groups in one tile": (
            "tile = tiles + simdgroup * SCORE_TILE",
            "tile = tiles",
            "race",
        ),
        "correction dropped": ("sum * corrections[i] + products", "sum + products"),
        "visibility never applied": ("if (hides) {", "if (false) {"),
        "visibility in the block at 0": (
            "rows[i].query, kv_block + column",
            "rows[i].query, column",
        ),
        "visibility of the first query": (
            "visible.apply<false>(scores[i], rows[i].query,",
            "visible.apply<false>(scores[i], 0,",
        ),
        "a SIMD group's state left out": (
            "n < KEY_SIMDGROUPS; n++) {\n      const float2 state",
            "n < KEY_SIMDGROUPS - 1; n++) {\n      const float2 state",
        ),
        "states joined as they are": (
            "state.y * fast::exp2(state.x - row_max)",
            "state.y",
        ),
        "states of the first rows": (
            repeated("states + min(i * FRAGMENT + row, ROWS - 1)"),
            "states",
        ),
        "shares not normalised": (SHARE, SHARE.replace(" / total_sum", "")),
        "shares without their maximum": (SHARE, "1.0f / total_sum"),
        "a SIMD group's out left out": (
            "if (giver < KEY_SIMDGROUPS - 1) {",
            "if (giver < KEY_SIMDGROUPS - 1 && giver != 1) {",
        ),
        "out of the fragment before": (
            "return (i * OWN_V_FRAGMENTS + d) * SIMD_LANES",
            "return (i * OWN_V_FRAGMENTS + d / 2) * SIMD_LANES",
        ),
        "sum of one lane": ("tile.softmax[i].row_sum()", "tile.softmax[i].lane_sum"),
        "logarithm in base 2": ("log2(row_sum)) * M_LN2_F", "log2(row_sum))"),
        "q not shared": (
            "share(q_tile, pairs, own.key_simdgroup",
            "q_tile.fill(ELEMENT(0)); share(q_tile, pairs, own.key_simdgroup",
        ),
        "no barrier after q is shared": (
            "  }\n  " + BARRIER + "  UNROLL\n  for (short n",
            "  }\n  UNROLL\n  for (short n",
            "uninitialised",
        ),
        "no barrier before the exchange": (
            SIMD_BARRIER + "  }\n  UNROLL\n  for (short j",
            "  }\n  UNROLL\n  for (short j",
            "race",
        ),
        "no barrier after the exchange": (
            SIMD_BARRIER + "  } else {",
            "  } else {",
            ("race", "uninitialised"),
        ),
        "no barrier before states are joined": (
            BARRIER + "    }\n    UNROLL\n    for (short i",
            "    }\n    UNROLL\n    for (short i",
            "uninitialised",
        ),
        "no barrier between givers of out": (
            BARRIER.strip() + "  // for the next one",
            "",
            ("race", "uninitialised"),
        ),
    },
    problems.splits: {
        "splits overlap by a step": (
            LAST_SPLIT_KEY,
            LAST_SPLIT_KEY.replace("split_steps,", "split_steps + 1,"),
        ),
        "a step between splits left out": (
            LAST_SPLIT_KEY,
            LAST_SPLIT_KEY.replace("split_steps,", "split_steps - 1,"),
        ),
        "every split from the first key": (FIRST_SPLIT_KEY, "keys.begin + 0"),
        "a split's out where the first has its own": (
            "all + split * params.out_split_stride",
            "all",
            "race",
        ),
        "a split's lse where the first has its own": (
            "split * params.lse_split_stride",
            "0",
            "race",
        ),
    },
    problems.columns: {
        "a part of the scores left out": (
            "part < COLUMN_SIMDGROUPS; part++",
            "part < COLUMN_SIMDGROUPS - 1; part++",
        ),
        "spans of the first SIMD group for all": (
            "first_span = simdgroup % COLUMN_SIMDGROUPS",
            "first_span = 0",
        ),
        "scores of the SIMD group alone": ("tile = sums;", "", "race"),
        "one lane's sums left out": (
            "n < ROWS * BLOCK_K;",
            "n < ROWS * BLOCK_K - 1;",
            "uninitialised",
        ),
        "no barrier before the sums": (
            BARRIER + "    for (int n = (simdgroup",
            "    for (int n = (simdgroup",
            ("race", "uninitialised"),
        ),
        "no barrier after the sums": (
            BARRIER + "    tile = sums;",
            "    tile = sums;",
            ("race", "uninitialised"),
        ),
    },
    problems.row_groups: {
        "rows of the first SIMD groups": ("group_row + own.row_simdgroup * ROWS", "group_row"),
        "sums of the first SIMD groups": (
            "? simdgroup / COLUMN_SIMDGROUPS : 0;\n    const int first =",
            "? 0 : 0;\n    const int first =",
            (None, "race", "uninitialised"),
        ),
        "keys read before they are shared": (
            "own));\n      }\n    }\n    threadgroup_barrier(mem_flags::mem_threadgroup);",
            "own));\n      }\n    }\n",
            ("race", "uninitialised"),
        ),
        "spans of keys that nobody has": (
            "if (!span_exists(own.span(s), QK_SPANS)) {",
            "if (false) {",
            "uninitialised",
        ),
        "values shared with the keys": (
            "pairs + KEY_PAIRS +",
            "pairs +",
            (None, "race", "uninitialised"),
        ),
        "values of the first span": (
            "return pairs + KEY_PAIRS +\n           ((own.first_span * KEY_FRAGMENTS",
            "return pairs + KEY_PAIRS +\n           ((0 * KEY_FRAGMENTS",
            (None, "race"),
        ),
        "log-sum-exp of the first SIMD group alone": (
            "own.key_simdgroup == 0 && own.first_span == 0",
            "simdgroup == 0",
        ),
        "tiles of one SIMD group's rows": (
            "first + list_group * ROWS * ROW_SIMDGROUPS",
            "first + list_group * ROWS",
            (None, "race"),
        ),
    },
    problems.vectors: {
        "units of one lane for all": (
            "u * LANES + own.lane % LANES",
            "u * LANES",
            (None, "race", "uninitialised"),
        ),
        "values of the first keys": (
            "blocks.row(kv_block + n * LOAD_KEYS + own.lane / LANES)",
            "blocks.row(kv_block + n * LOAD_KEYS)",
        ),
        "weights of the first keys": (
            "weights[(n * LOAD_KEYS + own.lane / LANES) * ROWS + r]",
            "weights[n * LOAD_KEYS * ROWS + r]",
        ),
        "values outside the lengths not cleared": (
            " && key >= sequence.first_key && key < sequence.kv_length",
            "",
        ),
        "values behind the length not cleared": (
            "key >= sequence.first_key && key < sequence.kv_length",
            "key >= sequence.first_key",
        ),
        "nothing seen where a share is 0": ("share < 0.0f", "share <= 0.0f"),
        "nothing seen, something shared": (
            "share < 0.0f ? 0.0f : sums[n] * share",
            "sums[n] * share",
        ),
        "correction of the first row": (
            "weights[BLOCK_K * ROWS + r]",
            "weights[BLOCK_K * ROWS]",
        ),
        "correction left out": ("* corrections[r] + block[r]", "+ block[r]"),
        "half of the lanes' sums left out": (
            "sums[n] = kept + simd_shuffle_xor(given, bit);",
            "sums[n] = kept;",
        ),
        "both lanes keep the lower half": (
            "first += upper ? count",
            "first += false ? count",
            (None, "race", "uninitialised"),
        ),
        "share of the first row": ("share = shares[r]", "share = shares[0]"),
        "no barrier after the weights": (
            SIMD_BARRIER + "    add_block",
            "add_block",
            ("race", "uninitialised"),
        ),
        "no barrier after out": (
            "V_PADDED);\n    " + BARRIER,
            "V_PADDED);\n",
            ("race", "uninitialised"),
        ),
        "a SIMD group's sums left out": (
            "part < SIMDGROUPS; part++",
            "part < SIMDGROUPS - 1; part++",
        ),
    },
    problems.vector_scales: {
        "first chain of products dropped": (
            "products.fragments[j][i] += chain",
            "products.fragments[j][i] = chain",
        ),
        "scale of another span": ("column / SPAN_COLUMNS) : 0.0f", "0) : 0.0f"),
        "scales not cleared": ("scales[n][u] = exists ? scale : 0.0f", "scales[n][u] = scale"),
    },
    problems.columns_unevenly: {
        "span past the last stored": (
            "if (span_exists(span, V_SPANS))",
            "if (true)",
            "race",
        ),
        "span past the last read": (
            repeated("span_exists(own.span(s), QK_SPANS)"),
            "true",
            "out_of_bounds",
        ),
        "span past the last of v read": (
            "if (span_exists(own.span(s), V_SPANS)) {\n        block.load",
            "if (true) {\n        block.load",
            "out_of_bounds",
        ),
        "values of one span loaded": (
            "block.load_values(s, own",
            "block.load_values(0, own",
            "uninitialised",
        ),
    },
    problems.tiles: {
        "every tile the first": (
            "rows[i].reset(first_row + min(",
            "rows[i].reset(min(",
            "race",
        ),
        "q of the first tile": (
            "other.reset(first_row + i * FRAGMENT",
            "other.reset(i * FRAGMENT",
        ),
        "tile of the first query": (
            "keys_of(last_row / problem.queries_per_kv)",
            "keys_of(0)",
        ),
    },
    problems.lengths: {
        "values that do not exist not zeroed": ("exists ? chunk : uint4(0)", "chunk"),
        "values of the padding not zeroed": ("row >= sequence.first_key &&", ""),
    },
    problems.infinite_value: {
        "values behind the length not zeroed": ("&& row < sequence.kv_length;", ";"),
    },
    problems.windows: {
        "window begins a block late": (
            "seen.begin / BLOCK * BLOCK",
            "seen.begin / BLOCK * BLOCK + BLOCK",
        ),
        "window ends at the first query's": (
            ": sequence.q_length - 1)",
            ": 0)",
        ),
        "left edge never applied": (HIDES, "kv_block + BLOCK_K > seen_by_first.end"),
        "right edge never applied": (HIDES, "kv_block < seen_by_last.begin"),
        "left edge of the first query": (HIDES, HIDES.replace("seen_by_last", "seen_by_first")),
        "right edge of the last query": (HIDES, HIDES.replace("seen_by_first", "seen_by_last")),
    },
    problems.nothing: {
        "nothing seen, something shared": ("row_sums[i] == 0.0f;", "false;"),
    },
    problems.sinks: {
        "sink dropped": ("if (SINK && !SPLIT)", "if (false)"),
        "sink counted by every split": ("if (SINK && !SPLIT)", "if (SINK)"),
        "sink of the KV head": ("sink_weight(head, total", "sink_weight(kv_head, total"),
        "sum not lowered to the sink": (
            "total_sum * fast::exp2(keys_max - total.row_max) +",
            "total_sum +",
        ),
    },
    problems.large_sinks: {
        "sink rounded in base 2": (
            "(scaled - other) + rounded_off(float(logit), scaled)",
            "scaled - other",
        ),
    },
    problems.rules: {
        "rules of the first query": (
            "batch, rows[i].head, rows[i].query, own.column",
            "batch, rows[i].head, 0, own.column",
        ),
        "rules of the KV head": (
            "batch, rows[i].head, rows[i].query, own.column",
            "batch, kv_head, rows[i].query, own.column",
        ),
        "rules dropped": (repeated("apply_bias_and_mask(scores, first_column, masked);"), ""),
    },
    problems.latent: {
        "values from another span": ("v_units[j][s].fragments", "v_units[j][0].fragments"),
        "values from another key": ("v_units[j][s].fragments", "v_units[0][s].fragments"),
        "keys that do not exist not zeroed": ("!V_IN_K || exist[j]", "true"),
    },
    problems.rotary: {
        "q not rotated": (
            "rotary.rotated(tensor, offset(row), row, column)",
            "tensor[offset(row) + column]",
        ),
        "q's row of the first query": (
            "queries.element(other.query, d)",
            "queries.rotary.rotated(queries.tensor, queries.offset(other.query), 0, d)",
        ),
    },
    problems.pages: {
        "page window never moved": (
            "last_place < window + SIMD_LANES",
            "(window >= 0 || last_place < window + SIMD_LANES)",
            "simd_lane",
        ),
        "page window of the values never moved": (
            "values.use_pages_of(keys);",
            "",
            "simd_lane",
        ),
        "eight keys in one page": (": page_of(row)", ": page_of(row / 8 * 8)"),
        "pages never looked up": (
            "move_to(keys, values, kv_block, BLOCK_K, lane);",
            "",
            "simd_lane",
        ),
        "one page of a block": (
            "move_to(keys, values, kv_block, BLOCK_K",
            "move_to(keys, values, 0, 8",
            "simd_lane",
        ),
        "table of the first sequence": (
            "block_table + batch * params.block_table_stride, sequence",
            "block_table, sequence",
        ),
    },
    problems.whole_pages: {
        "page window never moved": (
            "last_place < window + SIMD_LANES",
            "(window >= 0 || last_place < window + SIMD_LANES)",
            "simd_lane",
        ),
        "page of the first lanes' window": (
            "uint(first) / PAGE_ROWS - window",
            "uint(first) / PAGE_ROWS",
            "simd_lane",
        ),
        "one page of all keys of a block": (
            "page_among(readable, readable_row(first, sequence))",
            "page_among(readable, readable_row(kv_block, sequence))",
        ),
        "values in the page of the first keys": (
            "block.pages[n * LOAD_KEYS / FRAGMENT]",
            "block.pages[0]",
        ),
    },
    problems.missing_pages: {
        "keys of missing pages as those of the first": (
            "pages[j] >= 0 ? product",
            "true ? product",
        ),
        "values of missing pages not zeroed": ("exist[j] = pages[j] >= 0 && ", "exist[j] = "),
        "values of missing pages, not zeroed, of lanes": ("exists = page >= 0 && ", "exists = "),
    },
    problems.no_pages: {
        "the first page read where there is none": (
            "problem.cache_size == 0",
            "false",
            "out_of_bounds",
        ),
    },
    problems.scales_of_spans: {
        "products of one scale": (
            "span_scale(k_places[j], min(own.span(first), QK_SPANS - 1))",
            "span_scale(k_places[j], 0)",
        ),
        "weights of one scale": ("span_scale(v_places[j], span)", "span_scale(v_places[j], 0)"),
        "scale of the even key for both": (
            "vec<T, 2>(number, other) : vec<T, 2>(other, number)",
            "vec<T, 2>(number, number) : vec<T, 2>(other, other)",
        ),
        "scale of the lane's own row": (
            "of_columns(v_scales[j], lane)",
            "Fragment<float>(v_scales[j], v_scales[j])",
        ),
        "scale of a key 4 rows off": ("(row & 4) == (column & 4)", "true"),
        "scale of a key 2 rows off": ("(row & 2) == (column & 2)", "true"),
        "scales of the padding not zeroed": ("exist[j] ? scale : 0.0f", "scale"),
        "odd codes before even ones": (
            "codes[i] >> (j * BITS)",
            "codes[i] >> (8 - j * BITS)",
        ),
    },
    problems.codes_of_odd_rows: {
        "columns behind the last read": (
            repeated("COLUMNS % FRAGMENT == 0 || column + i < COLUMNS"),
            "true",
            "out_of_bounds",
        ),
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
    problems.packed_lists: {
        "lists of the first sequence": ("PACKED_Q ? sequence.q_start + min(", "PACKED_Q ? min("),
        "one list of a sequence": ("min(share.list, sequence.q_length)", "0"),
    },
    problems.packed: {
        "q of the first sequence": (
            "operand.reset(q, params.q_strides, batch, head, sequence.q_start)",
            "operand.reset(q, params.q_strides, batch, head, 0)",
        ),
        "out of the first sequence": (
            "row.reset(out, params.out_strides, batch, head, first, 0)",
            "row.reset(out, params.out_strides, batch, head, 0, 0)",
            "race",
        ),
        "lse of the first sequence": (
            "batch + first_row * params.lse_strides.row +",
            "batch + 0 * first_row +",
            "race",
        ),
        "as many rows as the longest": (
            "rows = sequence.q_length * problem.queries_per_kv",
            "rows = problem.q_length * problem.queries_per_kv",
            "race",
        ),
        "rows of no sequence left": ("sequence.impossible ? NAN : 0.0f, rows", "0.0f, 0"),
        "sink twice": ("if (!SPLIT && !isnan(value))", "if (false)"),
    },
    problems.impossible_packed: {
        "impossible ends as clamped": (
            "begin != q_start || end != q_start + q_length ||",
            "",
        ),
        "ends not clamped": (
            "q_length = max(clamp(end, 0, params.q_total) - q_start, 0)",
            "q_length = max(end - q_start, 0)",
            "out_of_bounds",
        ),
    },
    problems.packed_steps: {
        "new rows of the first sequence": ("inputs.new_k + rows.begin *", "inputs.new_k + 0 *"),
        "new values of the first sequence": ("inputs.new_v + rows.begin *", "inputs.new_v + 0 *"),
        "ends of the queries": ("rows.end = valid ? end : -1;", "rows.end = begin + 1;"),
    },
    problems.impossible_packed_step: {
        "ends of new rows not tested": (
            "begin >= 0 && begin <= end && end <= params.new_keys",
            "true",
            "out_of_bounds",
        ),
        "impossible new rows as none": ("PACKED_NEW_K && added.end < 0", "false"),
    },
    problems.lists: {
        "list of the first query": ("row_group / params.list_groups", "0", (None, "race")),
        "list of the first KV head": (
            "batch, INDICES ? kv_head : kv_head * problem.queries_per_kv",
            "batch, INDICES ? 0 : kv_head * problem.queries_per_kv",
        ),
        "list of the first sequence": (
            "first = Offset(batch) * Offset(params.index_strides.batch)",
            "first = 0 * Offset(params.index_strides.batch)",
        ),
        "rows of the next list written": (
            "min(first + params.list_rows, rows)",
            "rows",
            (None, "race"),
        ),
        "first tile of a list only": ("row_group % params.list_groups", "0", (None, "race")),
        "listed rows as neighbours": (
            "blocks.row(first + own_row)",
            "blocks.row(kv_block + own_row) + j * FRAGMENT",
        ),
        "values of neighbours": (
            "blocks.row(kv_block + n * LOAD_KEYS + own.lane / LANES)",
            "blocks.row(kv_block) + n * LOAD_KEYS + own.lane / LANES",
            (None, "out_of_bounds"),
        ),
        "places behind the list read": (
            "place < count * BLOCK ?",
            "true ?",
            (None, "out_of_bounds"),
        ),
        "-1 as the first key": ("max(row, 0) : row", "row : row", (None, "out_of_bounds")),
        "rows of columns swapped": (
            "vec<T, 2>(number, other) : vec<T, 2>(other, number)",
            "vec<T, 2>(other, number) : vec<T, 2>(number, other)",
        ),
    },
    problems.lists_of_blocks: {
        "rows of a block": ("int(uint(place) % BLOCK)", "0"),
        "blocks of one key": ("entry * BLOCK + int", "entry + int"),
        "one query's keys for all of a list": (
            "hide_listed(scores[i], block, lane, visible.keys_of(rows[i].query))",
            "hide_listed(scores[i], block, lane, visible.keys_of(0))",
        ),
        "keys of the list's first query": (
            "keys_of(INDICES ? (share.end - 1) / problem.queries_per_kv",
            "keys_of(INDICES ? share.begin / problem.queries_per_kv",
        ),
        "keys of the list's last query": (
            "keys_of(INDICES ? share.begin / problem.queries_per_kv : 0)",
            "keys_of(INDICES ? (share.end - 1) / problem.queries_per_kv : 0)",
        ),
        "hidden keys of a query shown": (
            "keys[e] >= seen.begin && keys[e] < seen.end",
            "true",
        ),
    },
    problems.lists_in_pages: {
        "page of the list's place": (
            "existing(numbers[uint(row) / PAGE_ROWS])",
            "existing(numbers[0])",
        ),
    },
    problems.lists_of_hidden_keys: {
        "hidden keys shown": ("found >= seen.begin && found < seen.end ?", "true ?"),
        "rows that are not listed as the first": ("? found : NO_ROW", "? found : 0"),
    },
    problems.impossible_entries: {
        "impossible entries as none": ("keys[e] == IMPOSSIBLE_ROW ? NAN : -INFINITY", "-INFINITY"),
        "impossible entries read": (
            "entry < NO_ENTRY || entry >= existing",
            "false",
        ),
    },
    problems.impossible: {
        "impossible sequences as clamped": (
            "|| PAGED) &&\n      sequence.impossible)",
            "|| PAGED) &&\n      false)",
        ),
        "out of the first head alone": (
            "result.place(out_row, one.head, params);\n    out_row.fill",
            "result.place(out_row, kv_head, params);\n    out_row.fill",
        ),
        "as many rows as threads": ("n < rows; n += step", "n < 1; n += step"),
        "lse left": (
            "result.store_lse(one, lse",
            "one.query = 0;\n    result.store_lse(one, lse",
            "race",
        ),
    },
    problems.step: {
        "no barrier after the new keys": (DEVICE_BARRIER, "", "race"),
        "a barrier that orders nothing after the new keys": (
            DEVICE_BARRIER,
            DEVICE_BARRIER.replace("mem_device", "mem_none"),
            "race",
        ),
        "a barrier for threadgroup memory after the new keys": (
            DEVICE_BARRIER,
            DEVICE_BARRIER.replace("mem_device", "mem_threadgroup"),
            "race",
        ),
        "new keys not counted": ("used + max(added.end - added.begin, 0)", "used"),
        "appended one key late": ("place.first = length;", "place.first = length + 1;"),
        "appended to the first KV head": (
            "append_rows(buffers, place, batch, kv_head",
            "append_rows(buffers, place, batch, 0",
            "race",
        ),
        "half of them appended": (
            "0, rows.end - rows.begin, thread_index",
            "0, (rows.end - rows.begin) / 2, thread_index",
        ),
        "padding ignored": (
            "place.first_rotary -= params.rotary_from_leftpad != 0 ? inputs.leftpad_k[batch] : 0;",
            "",
        ),
        "padding of new keys never ignored": (
            "-= params.rotary_from_leftpad != 0 ?",
            "-= true ?",
        ),
        "padding of q never ignored": (
            "(params.append.rotary_from_leftpad != 0 ? sequence.first_key : 0)",
            "sequence.first_key",
        ),
        "q not rotated": (
            "rotary.rotated(tensor, offset(row), row, column)",
            "tensor[offset(row) + column]",
        ),
        "q rotated at the first row": ("start_at(first_rotary,", "start_at(0,"),
        "q rotated as if without a padding": (
            "start_at(first_rotary,",
            "start_at(first_rotary + sequence.first_key,",
        ),
        "q's tokens always counted": (
            "start_at(first_rotary, params.q_advances != 0)",
            "start_at(first_rotary, true)",
        ),
        "q's tokens never counted": (
            "start_at(first_rotary, params.q_advances != 0)",
            "start_at(first_rotary, false)",
        ),
    },
    problems.impossible_step: {
        "rows before the tables": ("first_rotary < 0 ||", "", "out_of_bounds"),
        "rows behind the tables": (
            "first_rotary + rotary_rows > params.append.table_rows",
            "false",
            "out_of_bounds",
        ),
        "one row behind the tables": (
            "first_rotary + rotary_rows > params.append.table_rows",
            "first_rotary + rotary_rows > params.append.table_rows + 1",
            "out_of_bounds",
        ),
        "lengths below nothing counted from": ("used < 0 ? used :", ""),
    },
    problems.step_of_splits: {
        "last split does not take the rest": ("split == splits - 1 ? keys.end : min", "min"),
        "new keys in a step that is shared": (
            "max(old_length - keys.begin, 0) / STEP_K",
            "(max(old_length - keys.begin, 0) + STEP_K - 1) / STEP_K",
            "race",
        ),
        "appended by the first split": (
            "if (split == splits - 1) {\n      append",
            "if (split == 0) {\n      append",
            "race",
        ),
    },
    problems.step_of_tiles: {
        "one tile of rows a threadgroup": ("if (!ROW_LOOP)", "if (true)"),
    },
    problems.step_in_pages: {
        "appended to the first sequence's pages": (
            "inputs.block_table + batch * params.block_table_stride",
            "inputs.block_table",
        ),
    },
    problems.step_of_indices: {
        "appended to the sequence's own batch": (
            "place.cache_batch = CACHE_BATCH_IDX ? inputs.cache_batch_idx[batch] : batch;",
            "place.cache_batch = batch;",
            "race",
        ),
    },
}


test_mutant_is_caught, test_the_unchanged_kernels_pass = mutant_tests(MUTANTS, "flash_decode")

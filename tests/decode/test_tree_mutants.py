"""Planted faults in what the kernels do with trees: the problems must see every one of them."""

from tests.decode import tree_problems as problems
from tests.helpers.mutants import mutant_tests

# As in test_flash_decode_mutants.
MUTANTS = {
    problems.trees: """
        ancestors not seen: own = {~parent => -1~};
        a mask's row of another token:
            const bool shown = rows[{~token => (token > 2 ? token - 1 : token)~} * row_stride + i]
            != 0;
        tree of the first sequence: first = {~batch => 0~} * params.tree_batch_stride
        parents of the first packed sequence: (TREE_PARENTS ? first {~+ sequence.q_start =>~} : 0)
        mask of the first packed sequence: first + {~sequence.q_start => 0~} * given.row_stride
        tokens a key late: kv_block + column, visible.existing.end - tree.count{~=> + 1~}
        the even key for both: column + column_offset(j) {~+ e =>~}
        tree of the tile's first row: tree.token({~rows[i].query => 0~})
        tree never applied: } else if (TREE && {~hides => false~})
        tree of the diagonal: {~seen_by_first.end = visible.existing.end - tree.count; =>~}
    """,
    problems.large_trees: """
        tokens of one word: {~token < 32 ? uint2(bit, 0) : uint2(0, bit => uint2(bit, 0~})
        the first word for both: word = {~token < 32 ? bits.x : bits.y => bits.x~}
        tokens of the second word counted: int(popcount(bits.{~x) + popcount(bits. =>~}y & mask))
        no token of the second word dropped: bits.y {~&= bits.y - 1u => |= 0u~}
        tokens of both words dropped: if ({~bits.x != 0 => false~}) {
    """,
    problems.windows: """
        window by the row: visible.keys_of({~max(token.depth, 0) => i~}).begin
        window without the path:
            {~token.seen.drop_first(token.begin - (visible.existing.end - given.count)); =>~}
        window without old keys: key < first_new ? {~key >= token.begin => true~}
        a token's own place left out: mask = {~( =>~}1u << (token % 32){~) - 1u =>~}
        window of the tile's rows: visible.keys_of({~tree.count - 1 => 0~});
    """,
    problems.rotated_steps: """
        no barrier after the tokens [race or uninitialised]:
            } {~threadgroup_barrier(mem_flags::mem_threadgroup); =>~} } // A lane's rows
        keys rotated by their row: {~TREE && ROTATED ? place.tree.depth_of(row) : =>~} row
        queries rotated by their row: {~queries.rotary.start_at(depth - other.query, true); =>~}
    """,
    problems.impossible_trees: """
        impossible tokens as if possible:
            if ({~TREE && tree.depth_of(result_rows[i].query) < 0 => false~})
        later parents followed: possible = parent {~>= -1 && parent =>~} < own;
        a mask's later tokens: (i == token ? shown : {~i < token || !shown => true~})
        a mask's token itself: (i {~== token ? shown : i < => <=~} token || !shown)
    """,
    problems.impossible_lengths: """
        more tokens than keys:
            {~sequence.kv_length - sequence.q_length < sequence.first_key => false~};
    """,
    problems.impossible_step: """
        keys in no tree as the first:
            {~possible ? =>~} result.seen.count_before(index) {~: NO_DEPTH =>~}
    """,
}


test_mutant_is_caught, test_the_unchanged_kernels_pass = mutant_tests(MUTANTS, "flash_decode")

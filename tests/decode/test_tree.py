"""Decoding with trees of new tokens, as in speculative decoding."""

import torch

from tests.attention.held_cases import case
from tests.decode import tree_problems as problems
from tests.helpers.judged import arguments
from tests.helpers.mutants import mutant_tests
from torch_metal_attn import explain, simulate
from torch_metal_attn.testing.judge import ints, on
from torch_metal_attn.tuned import tiles

ops = torch.ops.metal_attn


def test_sinks_caps_and_biases_with_trees():
    """test_the_unchanged_kernels_pass runs the other problems."""
    with simulate(check=True):
        problems.rules()


def test_trees_on_the_cpu_kernels():
    """Without the simulator, the CPU kernels compute trees by masks."""
    problems.trees()
    problems.windows()
    problems.rules()
    problems.rotated_steps()


def test_many_rows_of_a_kv_head(device):
    shape = {"heads": 8, "kv_heads": 1, "head_dim": 64, "dtype": torch.float16}
    both = problems.random_tree(64), problems.random_tree(9)
    problems.check_tree(both, (70, 90), device, shape=shape, num_splits=2)


def test_trees_fit_in_threadgroup_memory(device):
    """A tree and the keys that SIMD groups exchange would need 28 bytes more than there are."""
    tile = "ROW_FRAGMENTS=2 KEY_FRAGMENTS=2 SPANS=1 VECTOR_ROWS=0"
    shape = {"heads": 8, "kv_heads": 1, "head_dim": 128, "dtype": torch.float32}
    with tiles.forced({"flash_decode": tile}):
        problems.check_tree((problems.FORK,), (20,), device, shape=shape)


def test_trees_of_latents(device):
    shape = {"heads": 16, "kv_heads": 1, "head_dim": 192, "dtype": torch.bfloat16}
    both = (problems.FORK, problems.FOREST)
    problems.check_tree(both, (50, 6), device, shape=shape, latent=True)


def test_strides_of_trees_do_not_change_results(device):
    (q, k, v), options = problems.packed_q((6, 6), (60, 70))
    q = q.unflatten(0, (2, 6)).transpose(1, 2)
    tensors = {"q": q, "k": k, "v": v, "seqused_k": options["seqused_k"]}
    for form in ("parents", "tree_mask"):
        tree = problems.tree_of((problems.FORK, problems.FOREST), form, "each")[form]
        wide = torch.ones(2, *(size + 5 for size in tree.shape[1:]), dtype=tree.dtype)
        part = wide[(slice(None), *(slice(2, 8) for _ in tree.shape[1:]))]
        part.copy_(tree)
        there = on(device, tensors)
        expected = ops.flash_decode(**there, **on(device, {form: tree}))
        actual = ops.flash_decode(**there, **{form: part if device == "cpu" else part.to(device)})
        assert all(map(torch.equal, actual, expected))


def test_zero_queries(device):
    for lengths, used in (((0, 0), (5, 6)), ((), ())):
        q, (k, v) = torch.zeros(0, 4, 64), torch.zeros(2, len(lengths), 2, 8, 64)
        packing = {"cu_seqlens_q": torch.zeros(len(lengths) + 1).int(), "seqused_k": ints(*used)}
        for tree in ({}, {"parents": ints()}, {"tree_mask": torch.zeros(0, 0, dtype=torch.bool)}):
            out, lse = ops.flash_decode(**on(device, {"q": q, "k": k, "v": v} | packing | tree))
            assert (out.shape, lse.shape) == (q.shape, (4, 0))


def test_explain_mentions_trees():
    sizes = {"heads": 4, "kv_heads": 2, "head_dim": 64, "q_length": 4, "num_splits": 1}
    tensors = arguments(case(call="flash_decode", **sizes))
    text = str(explain(ops.flash_decode, **tensors, parents=ints(*problems.FORK[:4])))
    assert "a query sees the new tokens that parents allows" in text
    assert "new tokens" not in str(explain(ops.flash_decode, **tensors))


MUTANTS = {
    problems.trees: """
        ancestors not seen: next = {~parent => -1~};
        a mask's row of another token:
            const bool shown = rows[{~token => (token > 2 ? token - 1 : token)~} * row_stride + i]
            != 0;
        tree of the first sequence: first = {~batch => 0~} * params.tree_batch_stride
        parents of the first packed sequence: (TREE_PARENTS ? first {~+ sequence.q_start =>~} : 0)
        mask of the first packed sequence: first + {~sequence.q_start => 0~} * input.row_stride
        tokens a key late: column, task.visible.existing.end - task.tree.count{~=> + 1~}
        the even key for both: column + column_offset(j) {~+ e =>~}
        tree of the tile's first row: tree.token({~query => 0~})
        tree never applied: } else if (TREE && {~hides => false~})
        tree as a diagonal: {~seen_by_first.end = task.visible.existing.end - task.tree.count; =>~}
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
            {~token.seen.drop_first(token.begin - (visible.existing.end - tree.count)); =>~}
        window without old keys: key < first_new ? {~key >= token.begin => true~}
        a token's own place left out: mask = {~( =>~}1u << (token % 32){~) - 1u =>~}
        window of the tile's rows: visible.keys_of({~task.tree.count - 1 => 0~});
    """,
    problems.rotated_steps: """
        no barrier after the tokens [race or uninitialised]:
            } {~threadgroup_barrier(mem_flags::mem_threadgroup); =>~} sequence.impossible =
        keys rotated by their row: {~TREE && ROTATED ? place.tree.depth_of(row) : =>~} row
        queries rotated by their row: {~queries.rotary.start_at(depth - row.query, true); =>~}
    """,
    problems.impossible_trees: """
        impossible tokens: if ({~TREE && task.tree.depth_of(result.rows[i].query) < 0 => false~})
        later parents followed: possible = parent {~>= -1 && parent =>~} < next;
        a mask's later tokens: (i == token ? shown : {~i < token || !shown => true~})
        a mask's token itself: (i {~== token ? shown : i < => <=~} token || !shown)
    """,
    problems.impossible_lengths: """
        too few keys: {~sequence.kv_length - sequence.q_length < sequence.first_key => false~};
    """,
    problems.impossible_sequences: """
        a token more [uninitialised]: return token {~< => <=~} count ? int(tokens[token].w)
    """,
    problems.impossible_step: """
        keys in no tree:
            {~possible ? =>~} seen.count_before(index) {~: NO_DEPTH =>~}
    """,
}

test_mutant_is_caught, test_the_unchanged_kernels_pass = mutant_tests(MUTANTS, "flash_decode")

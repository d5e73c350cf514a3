"""Small problems that notice faults of flash_decode and decode_step with trees of new tokens.

The oracle has no trees. A token's row is attention to the old keys and to the token's path.
"""

from functools import partial
from itertools import accumulate

import pytest
import torch

from tests.attention.flash_fwd_check import hold
from tests.attention.test_flash_fwd_device_lengths import results_of
from tests.decode.flash_decode_problems import check_1_is_nan, packed_q, zero_results
from tests.helpers.judged import arguments
from tests.helpers.steps import check_step, step, tensors_of
from torch_metal_attn.reference import attention
from torch_metal_attn.testing.judge import ints, near, near_statistic, normal, on, worst_of

ops = torch.ops.metal_attn

FORK = [-1, 0, 0, 1, 2, 2]  # 0 has the children 1 and 2; 1 has 3, and 2 has 4 and 5
FOREST = [-1, -1, 0, 2, 1, -1]


def random_tree(size, seed=0):
    """Parents that are any earlier token, or -1 for roots."""
    generator = torch.Generator().manual_seed(seed)
    return [int(torch.randint(-1, i, (), generator=generator)) for i in range(size)]


def path_of(tree, token):
    path = []
    while token >= 0:
        path.insert(0, token)
        token = tree[token]
    return path


def mask_of(tree, columns=None):
    shown = torch.zeros(len(tree), columns or len(tree), dtype=torch.bool)
    for token in range(len(tree)):
        shown[token, path_of(tree, token)] = True
    return shown


def tree_of(trees, form, layout):
    """The trees of all sequences, as an argument of the ops. layout: packed, each or shared."""
    if form == "parents":
        tensors = [ints(*tree) for tree in trees]
    else:
        tensors = [mask_of(tree, max(map(len, trees))) for tree in trees]
    join = {"packed": torch.cat, "each": torch.stack, "shared": lambda x: x[0]}[layout]
    return {form: join(tensors)}


def by_paths(q, k, v, trees, used, dtype=None, leftpad_k=None, attn_bias=None, **options):
    """out (T, H, D) and lse (H, T) of packed q, computed token by token."""
    ends = [0, *accumulate(map(len, trees))]
    out = torch.zeros(*q.shape[:2], v.shape[-1], dtype=dtype or q.dtype)
    lse = torch.full(q.shape[:2], -torch.inf, dtype=torch.float64)
    for b, tree in enumerate(trees):
        old = used[b] - len(tree)
        for token in range(len(tree)):
            rows = [*range(old), *(old + seen for seen in path_of(tree, token))]
            row = ends[b] + token
            own = {} if leftpad_k is None else {"leftpad_k": leftpad_k[b : b + 1]}
            if attn_bias is not None:
                own["attn_bias"] = attn_bias[..., token : token + 1, rows]
            row_out, row_lse = attention(
                q[row : row + 1, :, None].contiguous(),
                *(x[b : b + 1, :, rows] for x in (k, v)),
                causal=True,
                compute_dtype=dtype,
                **own | options,
            )
            out[row], lse[row] = row_out[0, :, 0], row_lse[0, :, 0]
    return out, lse.t()


def check_tree(
    trees, used, device="cpu", form="parents", layout="packed", shape=None, num_splits=1, **rules
):
    """Checks flash_decode with trees against float64."""
    (q, k, v), options = packed_q([len(tree) for tree in trees], used, shape=shape)
    if rules.pop("latent", False):
        v = k[..., : v.shape[-1] * 3 // 4]
    queries = q
    if layout != "packed":
        queries = q.unflatten(0, (len(trees), -1)).transpose(1, 2)
        del options["cu_seqlens_q"], options["max_seqlen_q"]
    options |= tree_of(trees, form, layout) | rules
    there = on(device, {"q": queries, "k": k, "v": v} | options)
    out, lse = (x.cpu() for x in ops.flash_decode(**there, num_splits=num_splits))
    if layout != "packed":
        out, lse = out.transpose(1, 2).flatten(0, 1), lse.transpose(1, 0).flatten(1)
    k, v = k.nan_to_num(0), v.nan_to_num(0)
    rules.pop("causal", None)
    exact, exact_lse = by_paths(q, k, v, trees, used, torch.float64, **rules)
    composed, _ = by_paths(q, k, v, trees, used, **rules)
    assert (lse.dtype, lse.shape) == (torch.float32, exact_lse.shape)
    lse_measure = near_statistic("softmax_lse", lse, exact_lse, 1e-5)
    hold([near("out", out, exact, worst_of([(composed, exact)])), lse_measure])


TREES = (FORK, [], FOREST[:4], [-1])
USED = 60, 5, 70, 1


def trees():
    """Sequences have different trees, several roots or no old keys. A tree is parents or a mask."""
    for form in ("parents", "tree_mask"):
        check_tree(TREES, USED, form=form)
        for layout in ("each", "shared"):
            both = (FORK, FORK if layout == "shared" else FOREST)
            check_tree(both, (50, 6), form=form, layout=layout)
    check_tree((FORK, FOREST), (50, 90), num_splits=3)


def large_trees():
    """Trees have more tokens than a word has bits. Tiles are partial."""
    both = random_tree(64, 1), random_tree(40, 2)
    for form in ("parents", "tree_mask"):
        check_tree(both, (100, 60), form=form, causal=True)
    # Paths have more tokens than a word has bits. A window hides the first tokens of a path.
    deep = [-1, *(max(i - 1 - i % 5 // 4, 0) for i in range(1, 64))]
    check_tree((deep,), (70,), window_size_left=9)


def windows():
    """Windows count the tokens of the path. The old keys end in the middle of a block."""
    chain = [*range(-1, 9)]
    deep = [-1, 0, 0, 1, 2, 3, 4, 5, 6, 7]
    for left in (2, 5, 30):
        check_tree((deep, chain, random_tree(10)), (47, 10, 70), window_size_left=left)
    first = ints(3, 0, 33)
    check_tree((deep, chain, FORK), (47, 10, 70), attention_chunk=16, leftpad_k=first)


def rules():
    sink = torch.tensor([3.0, 1.0, -1.0, 5.0])
    check_tree((FORK, FOREST), (50, 6), learnable_sink=sink, softcap=3.0, num_splits=2)
    bias = normal(4, 6, 50, seed=3)
    check_tree((FORK,), (50,), layout="shared", attn_bias=bias)


def rotated_steps():
    """New rows are appended in the order of the tokens and rotated by their depth."""
    for form in ("parents", "tree_mask"):
        options = {"tree": form, "rotary_columns": 32}
        check_step(length=6, leftpad_k=(0, 5), tree_by_sequence=True, **options)
        check_step(packed=((3, 3), (0, 0), (5, 5), (1, 1)), lengths=(13, 20, 2, 9), **options)


def impossible_trees():
    """If only the kernel sees that trees are invalid, only rows of tokens in no tree are NaN."""
    (q, k, v), options = packed_q((6, 3), (60, 70))
    two = (FORK, FORK[:3])
    for form, changes in (
        ("parents", ((2, -2), (2, 2), (2, 5), (2, 2**31 - 1), (2, -(2**31)))),
        ("tree_mask", (((2, 2), False), ((2, 3), True))),
    ):
        tree_options = tree_of(two, form, "packed")
        tree = tree_options[form]
        run = partial(ops.flash_decode, q, k, v, **options, **tree_options)
        expected, _ = run()
        for place, value in changes:
            broken = tree.clone()
            broken[place] = value
            out, lse = results_of(run, tree, broken.tolist())
            bad = [2, 4, 5] if form == "parents" else [2]  # 4 and 5 are children of 2
            others = [i for i in range(9) if i not in bad]
            assert out[bad].isnan().all()
            assert lse[:, bad].isnan().all()
            assert torch.equal(out[others], expected[others])


def impossible_lengths():
    (q, k, v), options = packed_q((6, 6), (60, 70))
    q = q.unflatten(0, (2, 6)).transpose(1, 2)
    used = options["seqused_k"]
    with pytest.MonkeyPatch.context() as patch:
        zero_results(patch)
        run = partial(ops.flash_decode, q, k, v, seqused_k=used, parents=ints(*FORK))
        check_1_is_nan(run, used, 5)


def impossible_step():
    """A token in no tree has no position, so only its key is NaN."""
    tensors = tensors_of(length=6, rotary_columns=32)
    lengths = tensors["cache_seqlens"].tolist()
    tree = ints(*FORK)
    step = partial(ops.decode_step, **tensors, parents=tree)
    out, _ = results_of(step, tree, [-1, 0, 0, 7, 2, 2])
    assert out[:, :, 3].isnan().all()
    assert out[:, :, [0, 1, 2, 4, 5]].isfinite().all()
    for b, length in enumerate(lengths):
        new = tensors["k_cache"][b, :, length : length + 6]
        assert new[:, 3, :32].isnan().all()
        assert new[:, [0, 1, 2, 4, 5]].isfinite().all()
        assert tensors["v_cache"][b, :, length : length + 6].isfinite().all()


def impossible_sequences():
    """Rows past max_seqlen_q, which only the kernel sees, have no token: their keys are NaN."""
    tensors = arguments(step(packed=((2, 2), (5, 5)), tree="parents", rotary_columns=32))
    ends, first = tensors["cu_seqlens_q"], tensors["cache_seqlens"][0].item()
    out, _ = results_of(partial(ops.decode_step, **tensors), ends, [0, 7, 7])
    assert out.isnan().all()
    new = tensors["k_cache"][0, :, first : first + 7, :32]
    assert new[:, 5:].isnan().all()
    assert new[:, :5].isfinite().all()

"""torch_metal_attn.masks and scores, compared with their definitions."""

import copy
import math
import pickle

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask, create_mask
from transformers.models.t5.modeling_t5 import T5Attention

from tests.flex.flex_check import check_flex, rand
from tests.helpers.cases import each_case
from torch_metal_attn import block_mask, flex_attention, masks, scores
from torch_metal_attn.testing.judge import normal

N = 24
LENGTHS = torch.tensor([5, 11])
DOCUMENTS = torch.tensor([0, 7, 7, 20])
PARENTS = torch.tensor([-1, 0, 0, 1, 3, -1, 5, 2])


def ancestors(node):
    return {node} | (ancestors(PARENTS[node].item()) if PARENTS[node] >= 0 else set())


def earlier(b, h, q_idx, kv_idx):
    return kv_idx <= q_idx


def document_of(token):
    return sum(token >= end for end in DOCUMENTS[1:].tolist())


def natten_window(i, size, width, dilation):
    left = width // 2
    right = left + width % 2 - 1
    group = list(range(i % dilation, size, dilation))
    place = group.index(i)
    start = max(place - left, 0)
    start += max(place + right - len(group) + 1, 0) * -1
    return group[start : start + width]


def natten(q, kv, shape, window, dilation):
    seen = True
    for size, width, step in reversed(list(zip(shape, window, dilation, strict=True))):
        seen = seen and kv % size in natten_window(q % size, size, width, step)
        q, kv = q // size, kv // size
    return seen


GRIDS = [((24,), (5,), (1,)), ((24,), (4,), (5,)), ((4, 6), (3, 4), (1, 1))]
GRIDS.append(((2, 3, 4), (1, 3, 2), (2, 1, 2)))
MASKS = {
    "causal": (masks.causal(), lambda b, q, kv: kv <= q),
    "causal offset": (masks.causal(3), lambda b, q, kv: kv <= q + 3),
    "window": (masks.sliding_window(4), lambda b, q, kv: q - 4 <= kv <= q),
    "window of both sides": (masks.sliding_window(4, 2), lambda b, q, kv: q - 4 <= kv <= q + 2),
    "prefix": (masks.prefix_lm(LENGTHS), lambda b, q, kv: kv <= q or kv < LENGTHS[b]),
    "document": (
        masks.document(DOCUMENTS, N),
        lambda b, q, kv: document_of(q) == document_of(kv) and q < 20,
    ),
    "chunked": (masks.chunked(7), lambda b, q, kv: q // 7 == kv // 7),
    "dilated": (masks.dilated(2, 3), lambda b, q, kv: abs(q - kv) in (0, 3, 6)),
    "and": (masks.chunked(7) & masks.causal(), lambda b, q, kv: q // 7 == kv // 7 and kv <= q),
    "or": (masks.chunked(7) | masks.causal(), lambda b, q, kv: q // 7 == kv // 7 or kv <= q),
    "a function and": (earlier & masks.chunked(7), lambda b, q, kv: q // 7 == kv // 7 and kv <= q),
    "a function or": (earlier | masks.chunked(7), lambda b, q, kv: q // 7 == kv // 7 or kv <= q),
    "not": (~masks.causal(), lambda b, q, kv: kv > q),
    **{
        f"neighbourhood {grid}": (
            masks.neighbourhood(*grid),
            lambda b, q, kv, grid=grid: natten(q, kv, *grid),
        )
        for grid in GRIDS
    },
}


def mask_by(seen, queries=N, keys=N):
    cases = [[[seen(b, q, kv) for kv in range(keys)] for q in range(queries)] for b in range(2)]
    return torch.tensor(cases, dtype=torch.bool)[:, None]


@each_case("name", MASKS)
def test_masks_equal_their_definitions(name):
    mask, seen = MASKS[name]
    for one in (mask, pickle.loads(pickle.dumps(mask))):
        assert torch.equal(create_mask(one, 2, 1, N, N, device="cpu"), mask_by(seen))


def test_tree_masks_show_the_context_and_ancestors():
    tree = pickle.loads(pickle.dumps(masks.tree(PARENTS, context=9)))
    mask = create_mask(tree, 2, 1, 8, 17, device="cpu")
    assert torch.equal(mask, mask_by(lambda b, q, kv: kv < 9 or kv - 9 in ancestors(q), 8, 17))


def t5_bucket(distance, bidirectional, buckets, max_distance):
    buckets_of = T5Attention._relative_position_bucket
    return buckets_of(torch.tensor(distance), bidirectional, buckets, max_distance)


SLOPES, BIAS, TABLE = normal(2).abs(), normal(2, 11, seed=1), normal(8, 2, seed=2)
SCORES = {
    "alibi": (scores.alibi(SLOPES), lambda s, h, q, kv: s - SLOPES[h] * abs(q - kv)),
    "relative": (
        scores.relative_bias(BIAS),
        lambda s, h, q, kv: s + BIAS[h, min(max(kv - q, -5), 5) + 5],
    ),
    "cap": (scores.soft_cap(1.5), lambda s, h, q, kv: 1.5 * math.tanh(s / 1.5)),
    "t5": (
        scores.t5_buckets(TABLE, max_distance=20),
        lambda s, h, q, kv: s + TABLE[t5_bucket(kv - q, True, 8, 20), h],
    ),
    "t5 decoder": (
        scores.t5_buckets(TABLE, bidirectional=False, max_distance=20),
        lambda s, h, q, kv: s + TABLE[t5_bucket(kv - q, False, 8, 20), h],
    ),
}


@each_case("name", SCORES)
def test_scores_equal_their_definitions(name):
    mod, definition = SCORES[name]
    again = pickle.loads(pickle.dumps(mod))
    score = torch.tensor(0.7)
    for q, kv in ((0, 0), (3, 9), (9, 3), (0, 23), (23, 0), (17, 5), (5, 17)):
        for h in (0, 1):
            position = [torch.tensor(x) for x in (0, h, q, kv)]
            actual = mod(score, *position)
            torch.testing.assert_close(actual, torch.as_tensor(definition(score, h, q, kv)))
            assert torch.equal(actual, again(score, *position))


def test_a_copied_model_has_separate_slopes():
    model = torch.nn.Module()
    model.slopes = torch.nn.Parameter(SLOPES.clone())
    model.mod = scores.alibi(model.slopes)
    copied = copy.deepcopy(model)
    position = [torch.tensor(x) for x in (0, 1, 3, 9)]
    copied.mod(torch.tensor(0.7), *position).backward()
    assert model.slopes.grad is None
    assert copied.slopes.grad.tolist() == [0.0, -6.0]


def test_masks_and_scores_in_the_kernel():
    mask = masks.document(torch.tensor([0, 30, 70]), 96) & masks.neighbourhood((8, 12), (5, 5))
    block_mask = create_block_mask(mask, None, None, 80, 96, device="cpu", BLOCK_SIZE=16)
    check_flex(*rand(), scores.t5_buckets(TABLE), block_mask)


def test_a_default_device_is_not_used():
    """Nothing runs on the default device, which may be mps and have no float64."""
    parents, seen = torch.tensor([-1, 0, 0, 2]), torch.ones(8, 8, dtype=torch.bool).tril()
    table = TABLE.clone().requires_grad_()
    q, k, v = (normal(1, 2, 8, 16, seed=i) for i in range(3))
    at = torch.arange(4)

    def result():
        mod = scores.t5_buckets(table, max_distance=6)
        out = flex_attention(q, k, v, lambda s, *at: 2.0 * mod(s, *at), block_mask(seen, 8))
        tree = masks.tree(parents)(None, None, at[:, None], at)
        return out, tree, *torch.autograd.grad(out.square().sum(), table)

    expected = result()
    with torch.device("meta"):
        actual = result()
    assert all(map(torch.equal, actual, expected))


INVALID_CALLS = {
    "left is -1": lambda: masks.sliding_window(-1),
    "size is 0": lambda: masks.chunked(0),
    "dilation is 0": lambda: masks.dilated(1, 0),
    "length is 19; it must be at least 20": lambda: masks.document(DOCUMENTS, 19),
    "lengths has dtype torch.float32; it must be int32 or int64": lambda: masks.prefix_lm(SLOPES),
    "same length, 1 to 3": lambda: masks.neighbourhood((4, 4), (3,)),
    r"parents\[1\] is 1": lambda: masks.tree(torch.tensor([-1, 1])),
    r"cu_seqlens is \[0, 5, 3\]; it must begin with 0": lambda: masks.document(
        torch.tensor([0, 5, 3])
    ),
    r"bias has shape \(2, 10\)": lambda: scores.relative_bias(BIAS[:, 1:]),
    r"table has shape \(2, 2\)": lambda: scores.t5_buckets(TABLE[:2]),
    "q_offset is nan; it must be an int": lambda: masks.causal(math.nan),
    "right is None": lambda: masks.sliding_window(1, None),
    "cu_seqlens is on meta": lambda: masks.document(DOCUMENTS.to("meta")),
    "parents is on meta": lambda: masks.tree(PARENTS.to("meta")),
    f"length is {2**62}; it must be in": lambda: masks.document(DOCUMENTS, 2**62),
    "mask_mod is 3; it must be a mask_mod": lambda: masks.Mask(3),
    f"max_distance is {2**62}; it must be in": lambda: scores.t5_buckets(TABLE, True, 2**62),
    "size is True": lambda: masks.chunked(True),
    "steps is 'a'": lambda: masks.dilated("a", 1),
    "window is 3; it must be a sequence": lambda: masks.neighbourhood((9,), 3),
    "context is nan": lambda: masks.tree(PARENTS, math.nan),
    "the operand of & is None; it must be a mask_mod": lambda: masks.causal() & None,
    "slopes is a list": lambda: scores.alibi([1.0]),
    "bias is an int": lambda: scores.relative_bias(1),
    "table is None": lambda: scores.t5_buckets(None),
    "bidirectional is 'a'; it must be a bool": lambda: scores.t5_buckets(TABLE, "a"),
    "max_distance is nan": lambda: scores.t5_buckets(TABLE, True, math.nan),
}


@each_case("message", INVALID_CALLS)
def test_invalid_arguments_are_refused(message):
    with pytest.raises((TypeError, ValueError), match=message):
        INVALID_CALLS[message]()

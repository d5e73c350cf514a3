"""The plan of a ring: each visible pair of query and key is in one call of one process."""

from itertools import accumulate, pairwise, product

import pytest
import torch

from torch_metal_attn.distributed.calls import Visible, calls
from torch_metal_attn.distributed.layout import in_packed, rows, shares, shares_of_all

VISIBLE = {
    "whole": Visible(False, -1, -1),
    "causal": Visible(True, -1, -1),
    "causal, right ignored": Visible(True, 3, 5),
    "left": Visible(False, 2, -1),
    "both": Visible(False, 3, 1),
    "ALiBi": Visible(False, -1, -1, alibi=True),
    "causal ALiBi": Visible(True, -1, -1, alibi=True),
}


def visible_pairs(bounds, visible):
    right = 0 if visible.causal else visible.right
    return {
        (q, k)
        for start, end in pairwise(bounds)
        for q in range(start, end)
        for k in range(start, end)
        if (visible.left < 0 or q - visible.left <= k) and (right < 0 or k <= q + right)
    }


def pairs_of(call, queries, keys):
    """(query, key) rows that the kernel sees. queries, keys: rows of the two processes."""
    if call.packing is None:
        bounds = [[0, len(queries[call.q])], [0, len(keys[call.k])]]
    else:
        bounds = [cu.tolist() for cu in call.packing[:2]]
        longest = tuple(max((b - a for a, b in pairwise(cu)), default=0) for cu in bounds)
        assert call.packing[2:] == longest
    queries, keys = queries[call.q], keys[call.k]
    left = call.options.get("window_size_left", -1)
    right = 0 if "causal" in call.options else call.options.get("window_size_right", -1)
    for (q_start, q_end), (k_start, k_end) in zip(*map(pairwise, bounds), strict=True):
        offset = call.options.get("q_offset", (k_end - k_start) - (q_end - q_start))
        for i in range(q_end - q_start):
            for j in range(k_end - k_start):
                p = i + offset
                if (left < 0 or p - left <= j) and (right < 0 or j <= p + right):
                    apart = queries[q_start + i] - keys[k_start + j]
                    assert "q_offset" not in call.options or p - j == apart
                    yield queries[q_start + i], keys[k_start + j]


def planned(bounds, processes, layout, visible, packed):
    """For each process: its number of calls for each owner of keys, and the pairs in them."""
    spans = [shares(bounds, processes, rank, layout) for rank in range(processes)]
    held = [[row for span in in_packed(s, bounds) for row in span] for s in spans]
    assert sorted(row for each in held for row in each) == list(range(bounds[-1]))
    for rank in range(processes):
        pairs, number = [], []
        for owner in range(processes):
            order = (owner == rank, owner < rank)
            plan = calls(spans[rank], spans[owner], visible, *order, packed, torch.device("cpu"))
            number.append(len(plan))
            for call in plan:
                pairs += pairs_of(call, held[rank], held[owner])
        yield number, pairs


@pytest.mark.parametrize("visible", VISIBLE.values(), ids=VISIBLE)
@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
@pytest.mark.parametrize("lengths", [[16], [3], [5, 0, 17, 2], []], ids=str)
def test_every_visible_pair_is_in_one_call(lengths, layout, visible):
    bounds = [0, *accumulate(lengths)]
    for processes, packed in product((1, 2, 3, 4), (False, True)):
        if len(lengths) != 1 and not packed:
            continue
        all_pairs = []
        for number, pairs in planned(bounds, processes, layout, visible, packed):
            all_pairs += pairs
            if not visible.by_distance:
                assert max(number) <= 1
        assert sorted(all_pairs) == sorted(visible_pairs(bounds, visible))


@pytest.mark.parametrize("packed", [False, True])
def test_zigzag_balances_a_causal_mask(packed):
    work = {
        layout: [len(pairs) for _, pairs in planned([0, 64], 4, layout, VISIBLE["causal"], packed)]
        for layout in ("contiguous", "zigzag")
    }
    assert work["contiguous"] == [136, 392, 648, 904]
    assert work["zigzag"] == [520, 520, 520, 520]


def test_contiguous_shares_have_any_lengths():
    spans = shares_of_all("q", [3, 0, 7], "contiguous", None)
    places = [in_packed(each, [0, 10]) for each in spans]
    assert places == [[range(3)], [range(3, 3)], [range(3, 10)]]
    assert [rows(each) for each in spans] == [3, 0, 7]


@pytest.mark.parametrize(
    "lengths, bounds, message",
    [
        ([4, 2], None, "q has 4 rows on rank 0; its zigzag share of the sequence has 3"),
        ([4, 4], [0, 2, 7], "q has 4 rows on rank 1; .* share of the sequences of cu_seqlens"),
    ],
)
def test_lengths_that_do_not_match_the_layout_are_refused(lengths, bounds, message):
    with pytest.raises(ValueError, match=message):
        shares_of_all("q", lengths, "zigzag", bounds)

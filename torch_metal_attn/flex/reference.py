"""Flex attention on CPU tensors without kernels, and the evaluation of a program's graphs."""

import torch
from torch import Tensor

from torch_metal_attn.flex.block_mask import Blocks
from torch_metal_attn.flex.graph import Node, ordered
from torch_metal_attn.flex.program import Program
from torch_metal_attn.flex.table import OPS
from torch_metal_attn.ops.layout import empty_like_query

# `check_indices` checks chunks of at most about this many positions.
_CHUNK = 1 << 20


def evaluate(
    node: Node, inputs: dict[str, Tensor], program: Program, seen: Tensor | None = None
) -> Tensor:
    """The value of a graph. Score and captures have no gradient where `seen` is False."""
    values: dict[int, Tensor] = {}
    for each in ordered(node):
        arguments = [values[id(a)] for a in each.args]
        if each.op == "input":
            value = inputs[each.value].to(each.dtype)
        elif each.op == "constant":
            value = torch.tensor(each.value, dtype=each.dtype, device="cpu")
        elif each.op == "cast":
            value = arguments[0].to(each.dtype)
        elif each.op == "load":
            value = _loaded(program, each.value, arguments).to(each.dtype)
        else:
            row = each.value if each.op == "composed" else OPS[each.op]
            value = row.evaluate(*arguments)
        if seen is not None and value.requires_grad and each.op in ("input", "load"):
            # A product with 0 would be NaN where a hidden score has an infinite derivative.
            value = torch.where(seen, value, value.detach())
        values[id(each)] = value
    return values[id(node)]


def _loaded(program: Program, capture: int, indices: list[Tensor]) -> Tensor:
    tensor, name = program.captures[capture], program.captured.names[capture]
    if not indices:
        return tensor
    try:
        index = tuple(index.long() for index in indices)
        if not (torch.is_grad_enabled() and tensor.requires_grad):
            return tensor[index]
        # index_select sums each element's gradient in a fixed order. The sum is float32.
        numbers = torch.arange(tensor.numel(), device=tensor.device).view(tensor.shape)[index]
        selected = tensor.reshape(-1).float().index_select(0, numbers.reshape(-1))
        return selected.view(numbers.shape).to(tensor.dtype)
    except IndexError as error:
        raise IndexError(f"{name}, of shape {tuple(tensor.shape)}: {error}") from None


def attention(
    query: Tensor, key: Tensor, value: Tensor, scale: float, program: Program, blocks: Blocks | None
) -> tuple[Tensor, Tensor]:
    groups = query.shape[1] // max(key.shape[1], 1)
    keys, values = (x.float().repeat_interleave(groups, 1) for x in (key, value))
    scores = query.float() @ keys.transpose(-1, -2) * scale
    inputs = positions(scores.shape, query.device)
    seen = torch.ones((), dtype=torch.bool, device=query.device)
    if program.mask is not None:
        seen = evaluate(program.mask, inputs, program)
    if blocks is not None:
        partial, full = blocks.dense(*scores.shape[2:])
        seen = (partial & seen) | full
    if program.score is not None:
        arguments = {"score": scores} | inputs
        scores = evaluate(program.score, arguments, program, seen).expand(scores.shape)
    scores = scores.masked_fill(~seen, -torch.inf)
    sees_nothing = (scores == -torch.inf).all(-1, keepdim=True)
    # A row of -inf is replaced by zeros, whose softmax is then masked.
    safe = scores.masked_fill(sees_nothing, 0.0)
    weights = safe.softmax(-1).masked_fill(sees_nothing, 0.0)
    lse = safe.logsumexp(-1) if scores.shape[-1] > 0 else scores.new_zeros(scores.shape[:-1])
    lse = lse.masked_fill(sees_nothing[..., 0], -torch.inf)
    # The result has the memory order of the kernels' result.
    return empty_like_query(query, value.shape[-1]).copy_(weights @ values), lse


def positions(shape: torch.Size, device: torch.device) -> dict[str, Tensor]:
    """The position of every score, (B, H, Lq, Lk), as tensors that broadcast."""
    results = {}
    for dim, (name, size) in enumerate(zip(("b", "h", "q_idx", "kv_idx"), shape, strict=True)):
        sizes = [-1 if i == dim else 1 for i in range(4)]
        results[name] = torch.arange(size, device=device).view(sizes)
    return results


def check_indices(shape: tuple[int, ...], program: Program, blocks: Blocks | None) -> None:
    """Raise IndexError for an index past the end of a captured tensor; the kernels give NaN."""
    batch, heads, queries, keys = shape
    rows = max(_CHUNK // max(batch * heads * keys, 1), 1)
    for first in range(0, queries, rows):
        chunk = positions(torch.Size(shape), torch.device("cpu"))
        chunk["q_idx"] = chunk["q_idx"][:, :, first : first + rows]
        tile = (batch, heads, chunk["q_idx"].shape[2], keys)
        visited = torch.ones(tile, dtype=torch.bool, device="cpu")
        masked = visited
        if blocks is not None:
            partial, full = (x[:, :, first : first + rows] for x in blocks.dense(queries, keys))
            visited, masked = visited & (partial | full), visited & partial
        for name, node, where in (
            ("score_mod", program.score, visited),
            ("mask_mod", program.mask, masked),
        ):
            if node is None:
                continue
            inputs = {n: x.expand(where.shape)[where] for n, x in chunk.items()}
            inputs["score"] = torch.zeros(inputs["b"].shape, device="cpu")
            try:
                with torch.no_grad():
                    evaluate(node, inputs, program)
            except IndexError as error:
                raise IndexError(f"{name} indexes {error}") from None

"""How the results of ops lie in memory."""

from torch import SymInt, Tensor


def empty_like_query(q: Tensor, head_dim: int) -> Tensor:
    """An uninitialised dense tensor of q's shape but for its last size, in memory in q's order.

    So a (B, L, H, D) tensor seen as (B, H, L, D) gives a result that is contiguous when seen as (B,
    L, H, Dv).
    """

    def step_of(dim: int) -> tuple[bool, int]:
        # A broadcast dimension says nothing about the order and goes outermost, as in C++.
        stride: int = q.stride(dim)
        return bool(stride == 0), stride

    order = sorted(range(q.dim() - 1), key=step_of, reverse=True)
    strides: list[int | SymInt] = [1] * q.dim()
    step: int | SymInt = head_dim
    for dim in reversed(order):
        strides[dim] = step
        step = step * max(q.size(dim), 1)
    return q.new_empty_strided((*q.shape[:-1], head_dim), strides)

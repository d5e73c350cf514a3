"""The memory layout of the ops' results."""

from torch import SymInt, Tensor


def empty_like_query(q: Tensor, head_dim: int | None = None) -> Tensor:
    """An uninitialised dense tensor in q's memory order, with q's shape but another last size."""
    head_dim = q.shape[-1] if head_dim is None else head_dim
    strides: list[int | SymInt] = [1] * q.dim()
    step: int | SymInt = head_dim
    for dim in reversed(memory_order(q)):
        strides[dim] = step
        step = step * max(q.size(dim), 1)
    return q.new_empty_strided((*q.shape[:-1], head_dim), strides)


def memory_order(q: Tensor) -> list[int]:
    """q's dimensions except for the last, by decreasing stride."""

    def step_of(dim: int) -> tuple[bool, int]:
        # A broadcast dimension has stride 0, so it is put outermost, as in C++.
        stride: int = q.stride(dim)
        return bool(stride == 0), stride

    return sorted(range(q.dim() - 1), key=step_of, reverse=True)

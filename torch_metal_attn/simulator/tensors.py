"""The properties of Metal 4's tensor operations that differ between GPUs."""

from dataclasses import dataclass, replace

from .diagnostics import hides_frames
from .wording import value_text

__tracebackhide__ = hides_frames
FAMILIES = ("apple10", "apple9")
LANE_MAPS = (*FAMILIES, "random")  # as in csrc/simulator/engine.h
RELAXED = ("truncate", "round")


@dataclass(frozen=True)
class TensorModel:
    """How tensor operations behave in a run.

    lane_map: which lane holds which element of a cooperative tensor.
    seed: the seed of the lane map "random".
    rounds: whether relaxed precision rounds float operands or truncates them.
    """

    lane_map: str = "apple10"
    seed: int = 0
    rounds: bool = False


DEFAULT_MODEL = TensorModel()


def tensor_model(
    lane_map: object = None, relaxed_precision: object = None, default: TensorModel = DEFAULT_MODEL
) -> TensorModel:
    """`default` with the given options. Raises TypeError or ValueError if an option is invalid."""
    if relaxed_precision is not None:
        if not isinstance(relaxed_precision, str) or relaxed_precision not in RELAXED:
            names = " or ".join(f'"{name}"' for name in RELAXED)
            raise ValueError(
                f"relaxed_precision is {value_text(relaxed_precision)}; it must be {names}"
            )
        default = replace(default, rounds=relaxed_precision == "round")
    if lane_map is None:
        return default
    names = ", ".join(f'"{name}"' for name in FAMILIES)
    message = f"lane_map is {value_text(lane_map)}; it must be {names} or the seed of a random "
    message += "map, an int from 0 to 2**63 - 1"
    if isinstance(lane_map, bool) or not isinstance(lane_map, (int, str)):
        raise TypeError(message)
    if isinstance(lane_map, str) and lane_map in FAMILIES:
        return replace(default, lane_map=lane_map, seed=0)
    if isinstance(lane_map, int) and 0 <= lane_map < 2**63:
        return replace(default, lane_map="random", seed=lane_map)
    raise ValueError(message)

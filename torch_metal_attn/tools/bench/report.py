"""The measurements as plain data, for a JSON file."""

import dataclasses
from typing import Any

from torch_metal_attn.tools.bench.run import CountedShapes, Timed

FORMAT = 1  # of the file; a reader can refuse those that it does not know


def of_times(timed: Timed, machine: dict[str, str]) -> dict[str, Any]:
    """Raw seconds per call, shares of ceilings by the median, and ratio: torch's median by ours."""
    results = []
    for found in timed.compared:
        ceilings = timed.ceilings.get(found.shape.dtype)
        calls = {
            name: {
                "seconds": list(times.seconds),
                "error": times.error or None,
                "median": None if times.error else times.median,
                "spread": None if times.error else times.spread,
                "shares": None if ceilings is None else found.shares(name, ceilings),
            }
            for name, times in found.times.items()
        }
        results.append(
            {
                "shape": dataclasses.asdict(found.shape),
                "least": dataclasses.asdict(found.shape.cost),
                "ratio": found.ratio,
                "difference": found.difference,
                "agree": found.agree,
                **calls,
            }
        )
    return {
        "format": FORMAT,
        "what": "times",
        "machine": machine,
        "rounds": timed.rounds,
        "ceilings": {name: dataclasses.asdict(x) for name, x in timed.ceilings.items()},
        "ceilings_missing": timed.trouble,
        "interrupted": timed.interrupted,
        "results": results,
    }


def of_counts(found: CountedShapes, machine: dict[str, str]) -> dict[str, Any]:
    """Counters by kernel, also relative to the fewest operations that the shape needs."""
    results = []
    for one in found.counted:
        counts: dict[str, Any] = {"error": one.error or None}
        if not one.error:
            counts |= {
                "flops": one.flops,
                "flops_share": one.flops_share,
                "device_bytes": one.device_bytes,
                "bytes_share": one.bytes_share,
                "per_32_keys_and_8_queries": one.per_block(),
                "kernels": {name: c.as_dict() for name, c in one.kernels.items()},
            }
        results.append(
            {
                "shape": dataclasses.asdict(one.shape),
                "counted": dataclasses.asdict(one.on),
                "least": dataclasses.asdict(one.on.cost),
                **counts,
            }
        )
    return {
        "format": FORMAT,
        "what": "counts",
        "machine": machine,
        "interrupted": found.interrupted,
        "results": results,
    }

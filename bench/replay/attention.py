"""Times of forward and backward beside the peers', and their errors, on the GPU.

For each kernel: its time at each number of registers a thread may use, on the whole GPU and on 32
multiprocessors. Every result is compared with float64, and may have at most twice torch's own error
in that dtype; products of float32 are of tf32 here, so float32 gets that dtype's error.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from . import manifest, timing
from .driver import Launch, Programs, part_of_gpu, synchronise
from .manifest import OURS, OURS_FLOAT, Candidate, Dispatch, Problem

PART = 32  # multiprocessors
ROUNDS = 5
# Of products of tf32, which drops 13 of 23 bits, relative to the largest result.
TF32_ERROR = 2**-7


@dataclass
class Found:
    """What was measured of one candidate.

    times: microseconds by number of registers. limited: the same of the best of at most 128, again
    and in rotation with the other candidates, and on 32 multiprocessors. free: with any number.
    """

    times: dict[int, float]
    uses: dict[int, str]
    error: float
    limited: float = 0.0
    part: float = 0.0
    free: float = 0.0
    memory: dict[str, Tensor] = field(default_factory=dict)
    launches: dict[int, list[Launch]] = field(default_factory=dict)

    def best(self, most: int) -> int:
        """The fastest number of registers of at most `most`."""
        return min((n for n in self.times if n <= most), key=lambda n: self.times[n])


def make(sizes: Mapping[str, Any]) -> dict[str, Tensor]:
    """q, k, v and dout, and the results that kernels write."""
    torch.manual_seed(0)
    dtype, head_dim, keys = getattr(torch, sizes["dtype"]), sizes["head_dim"], sizes["length"]
    queries = sizes.get("queries", keys)

    def tensor(heads: int, length: int) -> Tensor:
        return torch.randn(1, heads, length, head_dim, device="cuda").to(dtype)

    heads, kv_heads = sizes["heads"], sizes["kv_heads"]
    t = {"q": tensor(heads, queries), "k": tensor(kv_heads, keys), "v": tensor(kv_heads, keys)}
    t |= {"dout": tensor(heads, queries), "out": torch.empty_like(t["q"])}
    t |= {"lse": torch.empty(1, heads, queries, device="cuda")}
    t |= {f"d{name}": torch.empty_like(t[name]) for name in "qkv"}
    return t | {"delta": torch.empty_like(t["lse"])}


def reference(t: Mapping[str, Tensor], causal: bool, gradients: bool) -> dict[str, Tensor]:
    """out, lse and perhaps gradients in float64, head by head, which bounds the memory."""
    heads, kv_heads = t["q"].shape[1], t["k"].shape[1]
    wide = {name: t[name].double() for name in ("q", "k", "v", "dout")}
    found = {"out": torch.empty_like(wide["q"]), "lse": torch.empty_like(t["lse"])}
    found |= {f"d{name}": torch.zeros_like(wide[name]) for name in "qkv"}
    visible = causal_mask(t) if causal else None
    for head in range(heads):
        kv_head = head * kv_heads // heads
        places = {"q": head, "k": kv_head, "v": kv_head}
        own = {n: wide[n][0, i].detach().requires_grad_(gradients) for n, i in places.items()}
        scores = own["q"] @ own["k"].T * own["q"].shape[1] ** -0.5
        if visible is not None:
            scores = scores.masked_fill(~visible, -torch.inf)
        out = scores.softmax(1) @ own["v"]
        found["out"][0, head] = out.detach()
        found["lse"][0, head] = scores.detach().logsumexp(1)
        if gradients:
            parts = torch.autograd.grad(out, list(own.values()), wide["dout"][0, head])
            for (name, place), part in zip(places.items(), parts, strict=True):
                found[f"d{name}"][0, place] += part
    return found


def causal_mask(t: Mapping[str, Tensor]) -> Tensor:
    """The keys that each query sees: the last query sees them all."""
    queries, keys = t["q"].shape[2], t["k"].shape[2]
    return torch.ones(queries, keys, dtype=torch.bool, device="cuda").tril(keys - queries)


def torchs(t: Mapping[str, Tensor], causal: bool, gradients: bool) -> dict[str, Tensor]:
    """torch's own results in the dtype of the tensors."""
    own = {n: t[n].detach().clone().requires_grad_(gradients) for n in "qkv"}
    q, k, v = own.values()
    square = q.shape[2] == k.shape[2]
    mask = causal_mask(t) if causal and not square else None
    out = scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=causal and square, enable_gqa=True
    )
    if not gradients:
        return {"out": out}
    out.backward(t["dout"])
    return {f"d{name}": tensor.grad for name, tensor in own.items() if tensor.grad is not None}


def error(results: Mapping[str, Tensor], exact: Mapping[str, Tensor], names: list[str]) -> float:
    """The largest error of any result, relative to that result's largest number."""

    def one(name: str) -> float:
        difference = (results[name].double() - exact[name]).abs().max() / exact[name].abs().max()
        return float(torch.nan_to_num(difference, nan=torch.inf))

    return max(one(name) for name in names)


def measure(programs: Programs, candidate: Candidate, t: dict[str, Tensor]) -> Found:
    """Times at every number of registers. The result keeps the memory that is not in `t`."""
    scratch = {
        name: torch.empty(max(size, 16), dtype=torch.uint8, device="cuda")
        for name, size in candidate.scratch.items()
    }
    pointers = {name: tensor.data_ptr() for name, tensor in (t | scratch).items()}
    found = Found({}, {}, 0.0, memory=scratch)
    for limit in timing.limits(programs, candidate):
        work = timing.launches(programs, candidate, limit, pointers)
        found.times[limit] = timing.by_events(work)
        found.uses[limit] = timing.use_of(work[0])
        found.launches[limit] = work
    return found


def forward(programs: Programs, problem: Problem, stream: int) -> dict[str, Found]:
    """Every candidate of a problem."""
    t = make(problem.sizes)
    exact = reference(t, problem.sizes["causal"], gradients=False)
    allowed = bound(t, exact, problem, ["out"])
    found = {}
    for candidate in problem.candidates:
        name = f"{candidate.party} {candidate.label}".strip()
        one = measure(programs, candidate, t)
        for work in one.launches.values():
            t["out"].fill_(torch.nan)
            for launch in work:
                launch.enqueue()
            synchronise()
            one.error = max(one.error, error(t, exact, ["out"]))
        judge(problem.name, name, one.error, allowed)
        found[name] = one
    rotate(list(found.values()), stream)
    return found


def backward(programs: Programs, problem: Problem, stream: int) -> dict[str, Found]:
    """Each kernel by itself, as each may have another best number of registers."""
    (candidate,) = problem.candidates
    t = make(problem.sizes)
    exact = reference(t, problem.sizes["causal"], gradients=True)
    t["out"].copy_(exact["out"])
    t["lse"].copy_(exact["lse"])
    names = ["dq", "dk", "dv"]
    allowed = bound(t, exact, problem, names)
    found = {}
    for dispatches in with_sums(programs, candidate):
        kernel = programs.manifest.programs[dispatches[0].program].entry
        one = Candidate(candidate.party, "", dispatches, candidate.scratch)
        found[kernel] = measure(programs, one, t)
        for work in found[kernel].launches.values():
            for name in names if "delta" not in kernel else []:
                if (name == "dq") == ("dq" in kernel):
                    t[name].fill_(torch.nan)
            for launch in work:
                launch.enqueue()
            synchronise()
            written = ["dq"] if "dq" in kernel else ["dk", "dv"] if "dkv" in kernel else []
            if written:
                found[kernel].error = max(found[kernel].error, error(t, exact, written))
        judge(problem.name, kernel, found[kernel].error, allowed)
    rotate(list(found.values()), stream)
    return found


def with_sums(programs: Programs, candidate: Candidate) -> list[list[Dispatch]]:
    """The dispatches one by one, but for sums of parts, which belong to the kernel before them."""
    groups: list[list[Dispatch]] = []
    for dispatch in candidate.dispatches:
        if "flash_bwd_sum" in programs.manifest.programs[dispatch.program].entry:
            groups[-1].append(dispatch)
        else:
            groups.append([dispatch])
    return groups


def bound(
    t: dict[str, Tensor], exact: dict[str, Tensor], problem: Problem, names: list[str]
) -> float:
    """The largest relative error that a result may have."""
    gradients = "dq" in names
    own = error(torchs(t, problem.sizes["causal"], gradients), exact, names)
    return max(2 * own, TF32_ERROR if problem.sizes["dtype"] == "float32" else 0.0)


wrong: list[str] = []


def judge(problem: str, name: str, found: float, allowed: float) -> None:
    """Note a result that is wrong."""
    if not found <= allowed:
        wrong.append(f"{problem}, {name}: error {found:.2e}, allowed is {allowed:.2e}")
        print(f"WRONG {wrong[-1]}", flush=True)


def rotate(found: list[Found], stream: int) -> None:
    """Time the best of each candidate again, in rotation, so that all see the same clocks."""
    limited: list[list[float]] = [[] for _ in found]
    free: list[list[float]] = [[] for _ in found]
    for _ in range(ROUNDS):
        for index, one in enumerate(found):
            for times, most in ((limited[index], timing.M1_REGISTERS), (free[index], 255)):
                most = max(most, min(one.times))
                times.append(timing.by_events(one.launches[one.best(most)], 3))
    for index, one in enumerate(found):
        one.limited, one.free = statistics.median(limited[index]), statistics.median(free[index])
        most = max(timing.M1_REGISTERS, min(one.times))
        one.part = timing.by_clock([one.launches[one.best(most)]], stream, 0.003, 2)


def _peers(found: Mapping[str, Found]) -> list[Found]:
    return [one for name, one in found.items() if name not in (OURS, OURS_FLOAT)]


def ratio(found: Mapping[str, Found], name: str, which: str) -> str:
    """A time relative to the best peer's."""
    if name not in found:
        return ""
    return f"{getattr(found[name], which) / min(getattr(p, which) for p in _peers(found)):.2f}"


def forward_row(name: str, found: Mapping[str, Found]) -> list[str]:
    """Ratios to the better peer: at most 128 registers, float products too, 32 SMs, any number."""
    one = found[OURS]
    return [
        name.removeprefix("forward-"),
        ratio(found, OURS, "limited"),
        ratio(found, OURS_FLOAT, "limited"),
        ratio(found, OURS, "part"),
        ratio(found, OURS, "free"),
        f"{one.limited:.0f}",
        f"{min(p.limited for p in _peers(found)):.0f}",
        f"{one.error:.1e}",
    ]


def backward_row(name: str, results: Mapping[str, Mapping[str, Found]]) -> list[str]:
    """The sum of the kernels, at most 128 registers, also relative to the forward; and each."""
    kernels = results[name]
    total = sum(one.limited for one in kernels.values())
    forwards = results.get(name.replace("backward", "forward"), {})
    return [
        name.removeprefix("backward-"),
        f"{total:.0f}",
        f"{total / forwards[OURS].limited:.2f}" if OURS in forwards else "",
        " ".join(f"{k.rpartition('_')[2]} {one.limited:.0f}" for k, one in kernels.items()),
        f"{max(one.error for one in kernels.values()):.1e}",
    ]


def few_row(name: str, found: Mapping[str, Found]) -> list[str]:
    """Both kernels on the whole GPU and on a part of it, at most 128 registers."""
    decode, forward = (found[f"{OURS} {op}"] for op in ("flash_decode", "flash_fwd"))
    return [
        name.removeprefix("few-"),
        *(f"{us:.0f}" for us in (decode.limited, forward.limited)),
        f"{decode.limited / forward.limited:.2f}",
        f"{decode.part / forward.part:.2f}",
        f"{max(decode.error, forward.error):.1e}",
    ]


def main() -> None:
    """Measure every problem of FOLDER, print tables, and write all times to a file."""
    parser = argparse.ArgumentParser(prog="bench.replay.attention", description=__doc__)
    parser.add_argument("folder", type=Path, help="with the programs, assembled")
    parser.add_argument("--save", type=Path, help="a JSON file for every time")
    arguments = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.zeros(1, device="cuda")
    contents = manifest.read(arguments.folder)
    programs = Programs(arguments.folder, contents)
    stream = part_of_gpu(PART)
    timing.print_device()
    results: dict[str, dict[str, Found]] = {}
    kinds = {"forward": forward, "few": forward, "backward": backward}
    for problem in contents.problems:
        if problem.kind in kinds:
            found = kinds[problem.kind](programs, problem, stream)
            results[problem.name] = found
            for name, one in found.items():
                times = " ".join(f"{n}:{us:.0f}({one.uses[n]})" for n, us in one.times.items())
                print(f"  {problem.name}, {name}: {times}", flush=True)
            torch.cuda.empty_cache()
    print()
    headings = ["problem", "ours / better peer", "float products", "32 SMs", "any registers"]
    headings += ["ours, us", "peer, us", "error"]
    rows = [forward_row(n, f) for n, f in results.items() if n.startswith("forward")]
    timing.print_table(headings, rows)
    rows = [backward_row(n, results) for n in results if n.startswith("backward")]
    timing.print_table(["problem", "us", "times own forward", "kernels, us", "error"], rows)
    rows = [few_row(n, f) for n, f in results.items() if n.startswith("few")]
    headings = ["queries-KV heads-keys", "flash_decode, us", "flash_fwd, us", "ratio", "32 SMs"]
    timing.print_table([*headings, "error"], rows)
    if arguments.save:
        kept = ("times", "uses", "error", "limited", "part", "free")
        data = {
            p: {n: {k: getattr(o, k) for k in kept} for n, o in f.items()}
            for p, f in results.items()
        }
        arguments.save.write_text(json.dumps(data))
    if wrong:
        sys.exit("\n".join(wrong))


if __name__ == "__main__":
    main()

"""`warm_up`: compiles the kernels of later calls."""

import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from torch_metal_attn.call.arguments import as_bool
from torch_metal_attn.kv_cache.pages import unwritten
from torch_metal_attn.runtime import extension, mps
from torch_metal_attn.runtime.refusals import as_value_errors
from torch_metal_attn.tools.explain import ops
from torch_metal_attn.tools.explain.model import blank_result
from torch_metal_attn.wording import count_text, type_text

# A kernel, its defines, and True if its grid is divided into pieces.
Program = tuple[str, tuple[tuple[str, str], ...], bool]

_MOST_THREADS = 8


@dataclass(frozen=True)
class WarmUp:
    """The result of `warm_up`.

    Attributes: kernels: the number of programs of each kernel, by its name. compiled: number of
        programs that were compiled now. already: number of programs that were compiled before.
        failed: the errors of op calls whose kernels do not compile; the calls themselves will raise
        the same errors. seconds: the time taken, including the model's work.
    """

    kernels: dict[str, int]
    compiled: int
    already: int
    failed: tuple[str, ...]
    seconds: float

    def __str__(self) -> str:
        if not self.kernels and not self.failed:
            return "no op of torch_metal_attn ran, so there is nothing to compile"
        listed = ", ".join(f"{name} {count}" for name, count in sorted(self.kernels.items()))
        lines = [
            f"{count_text(sum(self.kernels.values()), 'program')} ({listed}): {self.compiled} "
            f"compiled, {self.already} compiled before, {count_text(len(self.failed), 'call')} "
            f"failed; {self.seconds:.1f} s"
        ]
        return "\n".join([*lines, *(f"failed: {error.splitlines()[0]}" for error in self.failed)])


def warm_up(
    *arguments: Any,
    prompt_lengths: Sequence[int] = (64,),
    backward: bool = False,
    threads: int | None = None,
    **options: Any,
) -> WarmUp:
    """Compile the kernels that later calls need on mps, in parallel.

        warm_up(model)                                   # a model of transformers
        warm_up(model.generate, input_ids, max_new_tokens=2)
        warm_up(lambda: [step(batch) for batch in batches])
        warm_up(q, k, v, causal=True, backward=True)     # tensors, which may be on "meta"

    Args: the first argument is one of
        a model of transformers, without further arguments: it generates two tokens after a prompt
            of each length in `prompt_lengths`, without a padding mask.
        a callable, such as a model, one of its methods or a function that makes several calls,
            followed by its arguments. It runs under no_grad. Our ops do not run: each returns zeros
            of the right shape and writes nothing, so decisions that depend on values may differ.
            Compiled parts run uncompiled. The callable's state changes: lengths of caches grow, so
            pass it a separate cache, and random generators advance.
        q: followed by the other arguments of `torch.ops.metal_attn.flash_fwd`.
        backward: also compile the gradients of q, k and v, and of tensors that flex_attention
            captures.
        threads: number of programs compiled at once; by default the number of cores, up to 8.

    Nothing of ours is encoded on torch's stream, except the trials that a first launch makes too.

    Returns: a `WarmUp`, whose str() is a summary.

    Raises:
        RuntimeError: the kernels cannot run on mps here. In the simulator nothing is warmed up.
        TypeError: the first argument is none of these, or an argument of the call is wrong.
        ValueError: an op refuses its call.
    """
    backward = as_bool("backward", backward)
    begun = time.perf_counter()
    problem = mps.problem()
    if problem:
        raise RuntimeError(
            f"warm_up compiles kernels for mps, which cannot be used: {problem}. Call it on a Mac "
            "with an Apple GPU; the simulator compiles kernels as they run and keeps them in its "
            "cache (python -m torch_metal_attn info)"
        )
    target = arguments[0] if arguments else None
    collector = _Collector(backward)
    with torch.compiler.set_stance("force_eager"), torch.no_grad(), unwritten():
        if isinstance(target, Tensor):
            collector.note("flash_fwd", arguments, options)
        elif isinstance(target, nn.Module) and len(arguments) == 1 and not options:
            with collector:
                _generate(target, prompt_lengths)
        elif callable(target):
            with collector:
                target(*arguments[1:], **options)
        else:
            raise TypeError(
                f"warm_up's first argument is {type_text(target)}; it must be a model, a "
                "callable, or the tensor q"
            )
    return _compile(collector.calls, threads, begun)


def _generate(model: nn.Module, lengths: Iterable[int]) -> None:
    generate: Any = getattr(model, "generate", None)
    if generate is None:
        raise TypeError(
            f"warm_up got {type_text(model)}, which has no generate(), and no arguments for "
            "it; pass the inputs too: warm_up(model, **inputs)"
        )
    device = next(model.parameters()).device
    for length in lengths:
        prompt = torch.ones(1, length, dtype=torch.long, device=device)
        generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            do_sample=False,
            min_new_tokens=2,
            max_new_tokens=2,
        )


_Call = Callable[[], list[dict[str, Any]]]


class _Collector(TorchDispatchMode):
    def __init__(self, backward: bool) -> None:
        super().__init__()
        self.calls: list[_Call] = []
        self._backward = backward
        self._known: set[Program] = set()

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        name = ops.explained_name(func)
        if name is None:
            return func(*args, **kwargs)
        self.note(name, args, kwargs)
        return blank_result(func, args, kwargs)

    def note(self, name: str, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
        """Keep the call if it needs a program that no earlier call needs."""
        op = ops.recording_op(name)

        def call() -> list[dict[str, Any]]:
            launches = extension.launches(op(*arguments, **options))
            if self._backward and name.endswith("fwd"):
                launches += ops.backward_launches(name, ops.bound(name, arguments, options))
            return launches

        with as_value_errors():
            programs = set(_programs(call()))
        if programs - self._known:
            self._known |= programs
            self.calls.append(call)


def _programs(launches: Iterable[dict[str, Any]]) -> Iterator[Program]:
    for launch in launches:
        yield launch["kernel"], tuple(sorted(launch["defines"].items())), launch["pieces"] > 1


def _compile(calls: Sequence[_Call], threads: int | None, begun: float) -> WarmUp:
    library = extension.load()

    def compiled(call: _Call) -> list[dict[str, Any]] | str:
        library.metal_attn_compile_recorded(1)
        try:
            return call()
        except Exception as error:
            return str(error)
        finally:
            library.metal_attn_compile_recorded(0)

    with ThreadPoolExecutor(threads or min(os.cpu_count() or 1, _MOST_THREADS)) as pool:
        outcomes = list(pool.map(compiled, calls))
    is_new: dict[Program, bool] = {}
    for launches in outcomes:
        if not isinstance(launches, str):
            for launch, program in zip(launches, _programs(launches), strict=True):
                is_new[program] = is_new.get(program, False) or bool(launch["compiled"])
    kernels = dict(Counter(kernel for kernel, *_ in is_new))
    new = sum(is_new.values())
    failed = tuple(outcome for outcome in outcomes if isinstance(outcome, str))
    return WarmUp(kernels, new, len(is_new) - new, failed, time.perf_counter() - begun)

"""An override of ComfyUI's attention (`optimized_attention_override`).

ComfyUI passes the override its own attention function and that function's arguments.
"""

import logging
from collections.abc import Callable
from typing import Any

from torch import Tensor

from torch_metal_attn.call.arguments import as_bool, as_int_at_least, check_rank, check_tensor
from torch_metal_attn.integrations.sdpa_replacement import count_reason, problem_or_reason
from torch_metal_attn.sdpa import Problem
from torch_metal_attn.wording import type_text

LOG = logging.getLogger(__name__)
OVERRIDE = "optimized_attention_override"  # its name in a model's transformer_options
_SAMPLER_RUN = "outer_sample"  # ComfyUI's name for a whole run of a sampler
# Arguments without an effect here, because scores and sums are float32 in the kernels.
_PRECISION = ("attn_precision", "low_precision_attention")
_WRAPPER_ARGUMENTS = ("transformer_options", "_inside_attn_wrapper")
_PASSED_ON = ("scale", "enable_gqa")


class Attention:
    """The override, which counts its calls.

    Attributes: replaced: number of calls that ran on the kernels. left_alone: number of calls that
        ComfyUI's function ran, by reason; reasons that differ only in numbers count as one.
    """

    def __init__(self) -> None:
        self.replaced = 0
        self.left_alone: dict[str, int] = {}

    def __call__(self, function: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
        """Run a call of ComfyUI's attention, or let `function` run it and log the reason once."""
        try:
            problem, reason, by_heads = convert_call(*args, **kwargs)
        except (RuntimeError, TypeError, ValueError) as error:
            problem, reason, by_heads = None, str(error), False
        if problem is not None:
            out, reason = problem.run_or_refusal()
            if out is not None:
                self.replaced += 1
                return out if by_heads else out.transpose(1, 2).flatten(2)
        assert reason is not None
        if count_reason(self.left_alone, reason):
            LOG.warning("metal_attn leaves calls of attention to ComfyUI: %s", reason)
        return function(*args, **kwargs)

    def run_sampler(self, executor: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run a sampler, and log the counts of its attention."""
        before, alone = self.replaced, sum(self.left_alone.values())
        result = executor(*args, **kwargs)
        replaced, alone = self.replaced - before, sum(self.left_alone.values()) - alone
        if replaced:
            LOG.info("metal_attn ran %d calls of attention, ComfyUI %d", replaced, alone)
        else:
            LOG.warning(
                "metal_attn ran no attention of this model: %s",
                "see the reasons above"
                if alone
                else "another node has replaced the override, or the model does not use overrides; "
                "if it does not, start ComfyUI with --use-pytorch-cross-attention and "
                "TORCH_METAL_ATTN_COMFYUI=all",
            )
        return result


def convert_call(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    heads: int,
    mask: Tensor | None = None,
    attn_precision: Any = None,
    skip_reshape: bool = False,
    skip_output_reshape: bool = False,
    **options: Any,
) -> tuple[Problem | None, str | None, bool]:
    """Convert a call of ComfyUI's attention for the kernels, or say why they cannot run it.

    Args:
        q: (B, Lq, heads * D); with skip_reshape (B, heads, Lq, D).
        k, v: in the layout of q. With enable_gqa they may have fewer heads.
        mask: (Lq, Lk), (B, Lq, Lk) or (B, heads, Lq, Lk). Any size but the last may be 1.
            Bool: False hides the key. Floating: added to the scores.
        options: scale, enable_gqa, and arguments that ComfyUI passes to its wrappers.

    Returns: the call for the kernels or None, the reason or None, and True if the result must be
        (B, heads, Lq, D), False if it must be (B, Lq, heads * D).

    Raises:
        TypeError: an option is unknown, or an argument has the wrong type.
        ValueError: a tensor has the wrong number of dimensions or of heads.
    """
    unknown = sorted(set(options).difference(_PASSED_ON, _PRECISION, _WRAPPER_ARGUMENTS))
    if unknown:
        raise TypeError(f"attention has no option {', '.join(unknown)}")
    by_heads = as_bool("skip_reshape", skip_reshape)
    layout = "(B, heads, L, D)" if by_heads else "(B, L, heads * D)"
    for name, x in (("q", q), ("k", k), ("v", v)):
        check_rank(name, x, layout)
    if not by_heads:
        width = q.shape[-1] // as_int_at_least("heads", heads, 1)
        for name, x in (("q", q), ("k", k), ("v", v)):
            columns = x.shape[-1]
            grouped = name != "q" and as_bool("enable_gqa", options.get("enable_gqa", False))
            if columns != heads * width and (not grouped or columns % width):
                allowed = f"a multiple of {width}" if grouped else heads * width
                raise ValueError(
                    f"{name} has {columns} columns; with {heads} heads of {width} columns it must "
                    f"have {allowed}"
                )
        q, k, v = (x.unflatten(-1, (-1, width)).transpose(1, 2) for x in (q, k, v))
    if mask is not None:
        check_tensor("mask", mask)
        mask = mask[(None,) * (3 - mask.dim())]
        mask = mask.unsqueeze(1) if mask.dim() == 3 else mask
    passed_on = {name: options[name] for name in _PASSED_ON if name in options}
    result_by_heads = as_bool("skip_output_reshape", skip_output_reshape)
    return (*problem_or_reason((q, k, v, mask), passed_on), result_by_heads)


def patch(model: Any) -> Any:
    """A clone of a ComfyUI model (a ModelPatcher) whose attention runs on these kernels.

    `model_options["transformer_options"]["optimized_attention_override"]` of the clone is an
    `Attention`, which counts the calls.

    Raises:
        TypeError: `model` is not a ModelPatcher.
        ValueError: another node has set the override, which would be lost.
    """
    if not hasattr(model, "clone") or not hasattr(model, "model_options"):
        raise TypeError(f"model is {type_text(model)}; it must be ComfyUI's ModelPatcher")
    patched = model.clone()
    options = patched.model_options.setdefault("transformer_options", {})
    if not isinstance(options.get(OVERRIDE), Attention | None):
        raise ValueError(
            f"another node has set the model's attention override to {options[OVERRIDE]!r}; "
            "remove that node"
        )
    options[OVERRIDE] = Attention()
    patched.remove_wrappers_with_key(_SAMPLER_RUN, "metal_attn")
    patched.add_wrapper_with_key(_SAMPLER_RUN, "metal_attn", options[OVERRIDE].run_sampler)
    return patched

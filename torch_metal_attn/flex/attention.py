"""torch's `flex_attention` on `metal_attn::flex_fwd`."""

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from typing_extensions import Never

from torch_metal_attn.call.arguments import as_bool
from torch_metal_attn.call.keywords import check_keywords, without_unknown
from torch_metal_attn.flex import in_graph
from torch_metal_attn.flex.call import Call, plan
from torch_metal_attn.runtime.refusals import untraced
from torch_metal_attn.wording import value_text


@without_unknown
def flex_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: Callable[..., Any] | None = None,
    block_mask: Any = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    kernel_options: dict[str, Any] | None = None,
    *,
    return_aux: Any = None,
    **unknown: Never,
) -> Any:
    """Attention with the arguments of `torch.nn.attention.flex_attention.flex_attention`.

    Args:
        query: (B, Hq, Lq, D), float32, float16 or bfloat16; D up to 576.
        key: (B, Hkv, Lk, D), or (1, Hkv, Lk, D) for all batches. In query's dtype; or key and value
            in float16 or bfloat16 with float32 queries, without gradients.
        value: (B, Hkv, Lk, Dv), or (1, Hkv, Lk, Dv); Dv up to 512.
        score_mod: a function (score, b, h, q_idx, kv_idx) of scalar tensors, float32 and int32,
            which returns the score for the softmax. It is traced on the first call, and again when
            anything that it depends on has changed.
        block_mask: torch's BlockMask, with block sizes that are multiples of 8 from 8 to 1024.
            mask_mod is applied in partial blocks. Blocks that it does not list are skipped.
        scale: factor of the scores; D ** -0.5 if None.
        enable_gqa: let Hkv be a divisor of Hq.
        return_lse: return (out, lse), with the log-sum-exp of each row (B, Hq, Lq), float32.
        kernel_options: torch's FlexKernelOptions. Options that tune other GPUs' kernels are
            ignored, with one warning.
        return_aux: torch's AuxRequest; lse only. The result is then (out, AuxOutput).

    Returns:
        (B, Hq, Lq, Dv). A row that sees no key is 0, and its log-sum-exp is -inf. Autocast casts
        inputs and result to autocast's dtype.

    Gradients of query, key, value and floating tensors that score_mod captures are computed by
    kernels that visit the same blocks, each with the same bits every time.

    Raises:
        ValueError: shapes, dtypes, devices, block sizes and lengths that have no kernel.
        TypeError: a score_mod or mask_mod with the wrong arguments or result dtype.
        NotImplementedError: an op without Metal text in score_mod or mask_mod; nested tensors;
            max_scores of return_aux.
        RuntimeError: control flow on the scalars' values; a sliced block_mask without its mask_mod.
        IndexError: on the CPU, an index past the end of a captured tensor. On mps such scores are
            NaN.
    """
    if unknown:
        check_keywords("flex_attention", unknown)
    _check_results(return_lse, return_aux)
    operands = query, key, value
    options = {"enable_gqa": enable_gqa, "kernel_options": kernel_options}
    if torch.compiler.is_dynamo_compiling():
        out, lse = in_graph.attend(operands, score_mod, block_mask, scale, **options)
    else:
        out, lse = _attend(*operands, score_mod, block_mask, scale, **options)
    if return_aux is not None:
        from torch.nn.attention.flex_attention import AuxOutput

        return out, AuxOutput(lse=lse if return_aux.lse else None)
    return (out, lse) if return_lse else out


@untraced
def _attend(*arguments: Any, **options: Any) -> tuple[Tensor, Tensor]:
    """out and the log-sum-exp of a call that is not in a graph, for example after a graph break."""
    return plan(*arguments, **options).run()


def planned(*arguments: Any, **options: Any) -> Call:
    """The plan of a call of `flex_attention`, or its error. It runs no kernel."""
    bound = inspect.signature(flex_attention).bind(*arguments, **options)
    bound.apply_defaults()
    results = {name: bound.arguments.pop(name) for name in ("return_lse", "return_aux")}
    _check_results(**results)
    return plan(**bound.arguments)


def _check_results(return_lse: bool, return_aux: Any) -> None:
    if as_bool("return_lse", return_lse) and return_aux is not None:
        raise ValueError("return_lse and return_aux are both given; pass only one")
    if return_aux is not None and not hasattr(return_aux, "max_scores"):
        raise TypeError(
            f"return_aux is {value_text(return_aux)}; it must be torch's AuxRequest or None"
        )
    if return_aux is not None and return_aux.max_scores:
        raise NotImplementedError("return_aux asks for max_scores, which are not computed here")

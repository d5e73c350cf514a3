"""torch's `flex_attention` on `metal_attn::flex_fwd`."""

import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from torch_metal_attn.call.arguments import flag, number
from torch_metal_attn.call.autocast import autocast
from torch_metal_attn.flex import in_graph, reference
from torch_metal_attn.flex.block_mask import Blocks, blocks_of, mask_mod_of
from torch_metal_attn.flex.program import Program, compiled
from torch_metal_attn.ops.differentiation import refuse_nested, transforming
from torch_metal_attn.ops.flex import of_two_dtypes
from torch_metal_attn.ops.refusals import untraced
from torch_metal_attn.runtime import session
from torch_metal_attn.sdpa import WORDING
from torch_metal_attn.with_kvcache import DECODE_QUERIES

# Promises about the mask, and choices between kernels of which there is one here: results do not
# depend on them. Everything else tunes torch's own kernels.
_KEPT_OPTIONS = frozenset(
    ("ROWS_GUARANTEED_SAFE", "BLOCKS_ARE_CONTIGUOUS", "FORCE_USE_FLEX_ATTENTION", "WRITE_DQ")
)
_DEFAULT_OPTIONS = {"BACKEND": "AUTO", "PRESCALE_QK": False, "USE_TMA": False}


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
) -> Any:
    """Attention with the arguments of `torch.nn.attention.flex_attention.flex_attention`.

    Args:
        query: (B, Hq, Lq, D), float32, float16 or bfloat16; D up to 576.
        key: (B, Hkv, Lk, D), or (1, Hkv, Lk, D) for all batches. In query's dtype; or key and value
            in float16 or bfloat16 with float32 queries, without gradients.
        value: (B, Hkv, Lk, Dv), or (1, Hkv, Lk, Dv); Dv up to 512.
        score_mod: a function (score, b, h, q_idx, kv_idx) of scalar tensors, float32 and int32,
            which returns the score that goes into the softmax. It is traced, and again if
            anything that it depends on has changed.
        block_mask: torch's BlockMask, with block sizes that are multiples of 8 from 8 to 1024.
            mask_mod is applied in partial blocks, and blocks that are not listed cost nothing.
        scale: factor of the scores; D ** -0.5 if None.
        enable_gqa: let Hkv be a divisor of Hq.
        return_lse: return (out, lse), with the log-sum-exp of each row (B, Hq, Lq), float32.
        kernel_options: promises of torch's FlexKernelOptions; what tunes torch's kernels raises.
        return_aux: torch's AuxRequest; lse only. The result is then (out, AuxOutput).

    Returns:
        (B, Hq, Lq, Dv). A row that sees no key is 0, and its log-sum-exp -inf. Autocast casts
        inputs and result to its dtype.

    Gradients of query, key, value and floating tensors that score_mod captures are computed by
    kernels that visit the same blocks, each with the same bits every time.

    Raises:
        ValueError: shapes, dtypes, devices, block sizes and lengths that have no kernel.
        TypeError: a score_mod or mask_mod of other arguments or of another result dtype.
        NotImplementedError: an op without Metal text in score_mod or mask_mod; nested tensors;
            max_scores of return_aux.
        RuntimeError: control flow on values of scalars; a sliced block_mask without its mask_mod.
        IndexError: on the CPU, an index past the end of a captured tensor. On mps such scores are
            NaN.
    """
    _check_results(return_lse, return_aux)
    given = query, key, value, score_mod, block_mask, scale, enable_gqa, kernel_options
    if torch.compiler.is_dynamo_compiling():
        out, lse = in_graph.attend(*given)
    else:
        out, lse = _attend(*given)
    if return_aux is not None:
        from torch.nn.attention.flex_attention import AuxOutput

        return out, AuxOutput(lse=lse if return_aux.lse else None)
    return (out, lse) if return_lse else out


@dataclass(frozen=True)
class Call:
    """A call whose functions are traced, checked except for what the op checks."""

    query: Tensor
    key: Tensor
    value: Tensor
    scale: float
    program: Program
    blocks: Blocks | None

    @property
    def operands(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.query, self.key, self.value

    def options(self, backward: bool = False) -> dict[str, Any]:
        """The op's. backward: query, key and value have gradients, whether they require them."""
        options = self.program.options() | {"softmax_scale": self.scale}
        inputs = (*self.operands, *options["captures"])
        required = torch.is_grad_enabled() and any(x.requires_grad for x in inputs)
        differentiated = backward or required
        if self.blocks is not None:
            options |= self.blocks.options(transposed=differentiated)
            if differentiated and "q_num_blocks" not in self.blocks.lists:
                raise ValueError(
                    "block_mask has no q_num_blocks, which gradients need: make it with "
                    "compute_q_blocks=True"
                )
            # flash_decode's threadgroups share the lists evenly.
            many = self.query.shape[2] > DECODE_QUERIES
            options |= self.blocks.ordered(over_keys=many, over_queries=differentiated)
        return options

    def run(self) -> tuple[Tensor, Tensor]:
        """out and the log-sum-exp."""
        options = self.options()
        on_cpu = self.query.device.type == "cpu"
        if on_cpu and not session.active():
            WORDING.run(torch.ops.metal_attn_explain.flex_fwd, self.operands, options)
            given = (*self.operands, self.scale, self.program, self.blocks)
            if self.query.dtype == self.key.dtype or not torch.is_grad_enabled():
                return reference.attention(*given)
            inputs = (*self.operands, *self.program.captures)
            mixed: tuple[Tensor, Tensor] = of_two_dtypes(
                inputs, lambda: reference.attention(*given)
            )
            return mixed
        out, lse = self.launch(options)
        if on_cpu and self.program.captures and bool(lse.isnan().any()):
            shape = (*self.query.shape[:3], self.key.shape[2])
            reference.check_indices(shape, self.program, self.blocks)
        return out, lse

    def launch(self, options: dict[str, Any]) -> tuple[Tensor, Tensor]:
        found: tuple[Tensor, Tensor] = WORDING.run(
            torch.ops.metal_attn.flex_fwd, self.operands, options
        )
        return found


@untraced
def _attend(*given: Any) -> tuple[Tensor, Tensor]:
    """out and the log-sum-exp of a call that is not part of a graph, such as after its break."""
    return plan(*given).run()


def planned(*arguments: Any, **options: Any) -> Call:
    """What a call of `flex_attention` runs, or its error. Runs nothing."""
    given = inspect.signature(flex_attention).bind(*arguments, **options)
    given.apply_defaults()
    results = {name: given.arguments.pop(name) for name in ("return_lse", "return_aux")}
    _check_results(**results)
    return plan(**given.arguments)


def plan(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: Callable[..., Any] | None,
    block_mask: Any,
    scale: float | None,
    enable_gqa: bool,
    kernel_options: dict[str, Any] | None,
) -> Call:
    """The same, of what a call computes."""
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{name} is a {type(tensor).__name__}; it must be a tensor")
        refuse_nested(name, tensor)
    if transforming():
        _refuse_vmap()
    _check_options(kernel_options)
    query, key, value = autocast(query, key, value)
    key, value = _check_shapes(query, key, value, enable_gqa)
    # As torch's own function, which takes any strides.
    query, key, value = (
        x if x.stride(-1) == 1 or x.shape[-1] <= 1 else x.contiguous() for x in (query, key, value)
    )
    if scale is None:
        scale = 1.0 / math.sqrt(max(query.shape[-1], 1))
    else:
        scale = number("scale", scale)
    blocks, mask_mod = None, None
    if block_mask is not None:
        mask_mod = mask_mod_of(block_mask)
        blocks = blocks_of(block_mask, query, key)
    program = compiled(score_mod, mask_mod, query.device)
    return Call(query, key, value, scale, program, blocks)


def _check_results(return_lse: bool, return_aux: Any) -> None:
    if flag("return_lse", return_lse) and return_aux is not None:
        raise ValueError("return_lse and return_aux are both given; give one")
    if return_aux is not None and not hasattr(return_aux, "max_scores"):
        raise TypeError(f"return_aux is {return_aux!r}; it must be torch's AuxRequest or None")
    if return_aux is not None and return_aux.max_scores:
        raise NotImplementedError("return_aux asks for max_scores, which are not computed here")


def _refuse_vmap() -> None:
    for level in torch._C._functorch.get_interpreter_stack() or ():
        if level.key() == torch._C._functorch.TransformType.Vmap:
            raise NotImplementedError(
                "flex_attention has no batching rule for torch.vmap: make the mapped dimension a "
                "part of the batch, and index what score_mod and mask_mod capture with b"
            )


def _check_shapes(
    query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool
) -> tuple[Tensor, Tensor]:
    """key and value with query's batch, as views."""
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if tensor.dim() != 4:
            raise ValueError(
                f"{name} has shape {tuple(tensor.shape)}; it must be (batch, heads, length, "
                "head_dim)"
            )
    heads, kv_heads = query.shape[1], key.shape[1]
    if not flag("enable_gqa", enable_gqa) and heads != kv_heads:
        raise ValueError(
            f"query has {heads} heads and key {kv_heads}; they must be equal: pass enable_gqa=True "
            "if key's divide query's"
        )
    batch = query.shape[0]
    if key.shape[0] == 1 != batch and value.shape[0] == 1:
        key, value = (x.expand(batch, -1, -1, -1) for x in (key, value))
    return key, value


def _check_options(kernel_options: dict[str, Any] | None) -> None:
    if kernel_options is not None and not isinstance(kernel_options, dict):
        raise TypeError(f"kernel_options is {kernel_options!r}; it must be a dict or None")
    for name, value in (kernel_options or {}).items():
        plain = name.removeprefix("fwd_").removeprefix("bwd_")
        if plain in _KEPT_OPTIONS or (
            plain in _DEFAULT_OPTIONS and value == _DEFAULT_OPTIONS[plain]
        ):
            continue
        raise ValueError(
            f"kernel_options has {name}={value!r}, which tunes torch's own kernels; allowed are "
            f"{', '.join(sorted(_KEPT_OPTIONS))}"
        )

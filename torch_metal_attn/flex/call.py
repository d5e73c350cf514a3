"""A call of `flex_attention`: traces its functions and checks its arguments."""

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from torch_metal_attn.call.arguments import as_bool, as_number, check_tensor
from torch_metal_attn.call.autocast import autocast
from torch_metal_attn.flex import reference
from torch_metal_attn.flex.block_mask import Blocks, blocks_of, mask_mod_of
from torch_metal_attn.flex.program import Program, compiled
from torch_metal_attn.integrations.sdpa_replacement import users_level
from torch_metal_attn.ops.differentiation import transforming
from torch_metal_attn.ops.flex import run_without_gradient
from torch_metal_attn.ops.layout import memory_order
from torch_metal_attn.runtime import session
from torch_metal_attn.sdpa import NAMES
from torch_metal_attn.with_kvcache import DECODE_QUERIES
from torch_metal_attn.wording import count_text, value_text

# Options that promise something about the mask, or choose among kernels of which we have only one.
_ALLOWED_OPTIONS = frozenset(
    ("ROWS_GUARANTEED_SAFE", "BLOCKS_ARE_CONTIGUOUS", "FORCE_USE_FLEX_ATTENTION", "WRITE_DQ")
)
# Options that tune torch's kernels for other GPUs and change results only by rounding: the
# names in FlexKernelOptions (torch 2.10 to 2.15), and names that only torch's templates have.
_IGNORED_OPTIONS = frozenset(
    "BACKEND BLOCK_M BLOCK_M1 BLOCK_M2 BLOCK_N BLOCK_N1 BLOCK_N2 PARTITION_SIZE PRESCALE_QK "
    "SPLIT_KV USE_TMA kpack matrix_instr_nonkdim num_buffers_warp_spec num_consumer_groups "
    "num_stages num_warps waves_per_eu".split()
)
_DEFAULT_OPTIONS = {"BACKEND": "AUTO", "PRESCALE_QK": False, "USE_TMA": False}
_BACKENDS = ("AUTO", "TRITON", "TRITON_DECODE", "FLASH")
_warned: list[str] = []


@dataclass(frozen=True)
class Call:
    """A call whose functions have been traced, and which passed all checks except the op's."""

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
        """The op's options. backward: as if query, key and value required gradients."""
        options = self.program.options() | {"softmax_scale": self.scale}
        inputs = (*self.operands, *options["captures"])
        required = torch.is_grad_enabled() and any(x.requires_grad for x in inputs)
        differentiated = backward or required
        if self.blocks is not None:
            options |= self.blocks.options(transposed=differentiated)
            if differentiated and "q_num_blocks" not in self.blocks.lists:
                raise ValueError(
                    "block_mask has no q_num_blocks, which gradients need: create it "
                    "with compute_q_blocks=True"
                )
            # Short calls run flash_decode, whose threadgroups share the lists evenly.
            is_long = self.query.shape[2] > DECODE_QUERIES
            options |= self.blocks.ordered(over_keys=is_long, over_queries=differentiated)
        return options

    def run(self) -> tuple[Tensor, Tensor]:
        options = self.options()
        on_cpu = self.query.device.type == "cpu"
        if on_cpu and not session.active():
            NAMES.run(torch.ops.metal_attn_explain.flex_fwd, self.operands, options)
            arguments = (*self.operands, self.scale, self.program, self.blocks)
            if self.query.dtype == self.key.dtype or not torch.is_grad_enabled():
                return reference.attention(*arguments)
            inputs = (*self.operands, *self.program.captures)
            return run_without_gradient(inputs, lambda: reference.attention(*arguments))
        out, lse = self.launch(options)
        if on_cpu and self.program.captures and bool(lse.isnan().any()):
            shape = (*self.query.shape[:3], self.key.shape[2])
            reference.check_indices(shape, self.program, self.blocks)
        return out, lse

    def launch(self, options: dict[str, Any]) -> tuple[Tensor, Tensor]:
        return NAMES.run(torch.ops.metal_attn.flex_fwd, self.operands, options)


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
    """The call with these arguments; raises its errors. Runs no kernel."""
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        check_tensor(name, tensor)
    if transforming():
        _refuse_vmap()
    _check_options(kernel_options)
    query, key, value = autocast(query, key, value)
    key, value = _check_shapes(query, key, value, enable_gqa)
    # torch's function accepts any strides, and out has query's memory order.
    query, key, value = (
        x if x.stride(-1) == 1 or x.shape[-1] <= 1 else with_contiguous_rows(x)
        for x in (query, key, value)
    )
    if scale is None:
        scale = 1.0 / math.sqrt(max(query.shape[-1], 1))
    else:
        scale = as_number("scale", scale)
    blocks, mask_mod = None, None
    if block_mask is not None:
        mask_mod = mask_mod_of(block_mask)
        blocks = blocks_of(block_mask, query, key)
    return Call(query, key, value, scale, compiled(score_mod, mask_mod, query.device), blocks)


def with_contiguous_rows(x: Tensor) -> Tensor:
    """A copy in the memory order of `x`, except that the last dimension is innermost."""
    order = [*memory_order(x), x.dim() - 1]
    return x.permute(order).contiguous().permute([order.index(i) for i in range(x.dim())])


def _refuse_vmap() -> None:
    for level in torch._C._functorch.get_interpreter_stack() or ():
        if level.key() == torch._C._functorch.TransformType.Vmap:
            raise NotImplementedError(
                "flex_attention has no batching rule for torch.vmap: make the mapped dimension a "
                "part of the batch, and index captured tensors with b in score_mod and mask_mod"
            )


def _check_shapes(
    query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool
) -> tuple[Tensor, Tensor]:
    for name, x in (("query", query), ("key", key), ("value", value)):
        if x.dim() != 4:
            raise ValueError(
                f"{name} has shape {tuple(x.shape)}; it must be (batch, heads, length, head_dim)"
            )
    heads, kv_heads = query.shape[1], key.shape[1]
    if not as_bool("enable_gqa", enable_gqa) and heads != kv_heads:
        raise ValueError(
            f"query has {count_text(heads, 'head')} and key {kv_heads}; they must be equal, or "
            "with enable_gqa=True the number of heads of key must divide that of query"
        )
    batch = query.shape[0]
    if key.shape[0] == 1 != batch and value.shape[0] == 1:
        key, value = (x.expand(batch, -1, -1, -1) for x in (key, value))
    return key, value


def _check_options(kernel_options: dict[str, Any] | None) -> None:
    if kernel_options is not None and not isinstance(kernel_options, dict):
        raise TypeError(
            f"kernel_options is {value_text(kernel_options)}; it must be a dict or None"
        )
    ignored = []
    for name, value in (kernel_options or {}).items():
        plain = str(name).removeprefix("fwd_").removeprefix("bwd_")
        shown = f"{name}={value_text(value)}"
        if plain not in _ALLOWED_OPTIONS | _IGNORED_OPTIONS:
            raise ValueError(
                f"kernel_options has {shown}; its keys are torch's FlexKernelOptions, of "
                f"which {', '.join(sorted(_ALLOWED_OPTIONS))} and those that tune other GPUs' "
                "kernels are accepted"
            )
        if plain == "BACKEND" and value not in _BACKENDS:
            raise ValueError(f"kernel_options has {shown}; it must be one of {_BACKENDS}")
        if plain in _IGNORED_OPTIONS and value not in (None, _DEFAULT_OPTIONS.get(plain)):
            ignored.append(shown)
    if ignored and not _warned:
        _warned.extend(ignored)
        warnings.warn(
            f"kernel_options has {', '.join(ignored)}, which tunes torch's kernels for other GPUs "
            "and is ignored here; this warning is not repeated",
            stacklevel=users_level(),
        )

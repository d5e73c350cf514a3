"""The backend "metal_attn" in diffusers' registry of attention backends."""

import functools
import sys
import warnings
from typing import Any

from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask

from torch_metal_attn.call.arguments import as_bool, check_rank, refuse_layout
from torch_metal_attn.flex.attention import flex_attention
from torch_metal_attn.integrations import diffusers_functional
from torch_metal_attn.integrations.copies import with_contiguous_rows
from torch_metal_attn.integrations.diffusers.reach import has_attention
from torch_metal_attn.integrations.imports import when_imported

_REQUIREMENT = (
    "torch_metal_attn.integrations.diffusers needs diffusers 0.42 or later "
    "(pip install 'diffusers>=0.42')"
)

try:
    from diffusers import __version__
    from diffusers.models import attention_dispatch as dispatch
except ImportError as error:
    raise ImportError(f"{_REQUIREMENT}: {error}") from error
if tuple(map(int, __version__.split(".")[:2])) < (0, 42):
    raise ImportError(f"{_REQUIREMENT}: this is {__version__}")

BACKEND = "metal_attn"
_MEMBER = "METAL_ATTN"  # our member of diffusers' enumeration of backends
_MODELS = "diffusers.models.modeling_utils"


def metal_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | BlockMask | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    _parallel_config: Any = None,
) -> Tensor:
    """Attention with the signature of diffusers' dispatcher. It has gradients.

    Args:
        query: (B, Lq, Hq, D); float32, float16 or bfloat16; D up to 576.
        key: (B, Lk, Hkv, D).
        value: (B, Lk, Hkv, Dv); Dv up to 512.
        attn_mask: (B, Lk), or broadcastable to (B, Hq, Lq, Lk). Bool: False hides the key.
            Floating: added to the scores. Or a BlockMask, as for `torch_metal_attn.flex_attention`;
            then dropout_p must be 0.0 and is_causal False.
        dropout_p: probability to drop a weight.
        is_causal: query i sees key j only if j <= i.
        scale: factor of the scores; D ** -0.5 if None.
        enable_gqa: let Hkv be a divisor of Hq.

    Returns:
        (B, Lq, Hq, Dv). Operands whose last dimension is not contiguous are copied first.

    Raises:
        ValueError: return_lse is True, there is a parallel config, or a BlockMask comes with
            dropout or is_causal. `torch_metal_attn.flex_attention` (for a BlockMask) and
            `torch_metal_attn.scaled_dot_product_attention` raise further errors.
    """
    if as_bool("return_lse", return_lse):
        raise ValueError("return_lse is True; the metal_attn backend returns no log-sum-exp")
    if _parallel_config is not None:
        raise ValueError(
            "the model has a parallel config, and the metal_attn backend does not support context "
            'parallelism: set the backend "native"'
        )
    operands = {"query": query, "key": key, "value": value}
    for name, x in operands.items():
        check_rank(name, x, "(B, L, H, D)")
    if isinstance(attn_mask, Tensor):
        refuse_layout("attn_mask", attn_mask)
        if attn_mask.shape == (query.shape[0], key.shape[1]):
            attn_mask = attn_mask[:, None, None]
    if isinstance(attn_mask, BlockMask):
        if dropout_p != 0.0 or as_bool("is_causal", is_causal):
            raise ValueError(
                f"attn_mask is a BlockMask, dropout_p is {dropout_p} and is_causal is {is_causal}; "
                "with a BlockMask they must be 0.0 and False"
            )
        if diffusers_functional.replaces_scores():
            raise ValueError(
                "attn_mask is a BlockMask, and a guidance hook of diffusers is active; the hook "
                "intercepts torch's scaled_dot_product_attention, which takes no BlockMask"
            )
        query, key, value = (
            with_contiguous_rows(name, x.transpose(1, 2)) for name, x in operands.items()
        )
        grouped = as_bool("enable_gqa", enable_gqa)
        blocked: Tensor = flex_attention(
            query, key, value, block_mask=attn_mask, scale=scale, enable_gqa=grouped
        )
        return blocked.transpose(1, 2)
    query, key, value = (x.transpose(1, 2) for x in operands.values())
    out = diffusers_functional.metal_attention(
        query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
    )
    return out.transpose(1, 2)


def activate() -> None:
    """Make "metal_attn" the backend of calls that do not name one."""
    dispatch._AttentionBackendRegistry.set_active_backend(dispatch.AttentionBackendName(BACKEND))


def register() -> None:
    """Add the backend to diffusers, and warn later if a model has no attention that it can run."""
    names: Any = dispatch.AttentionBackendName
    if BACKEND not in names._value2member_map_:
        _add_member(names)
    checks = [dispatch._check_device, dispatch._check_shape]
    dispatch._AttentionBackendRegistry.register(names(BACKEND), constraints=checks)(metal_attention)
    when_imported(_MODELS, _warn_of_models_without_attention)


def _add_member(names: Any) -> None:
    """Add a member to diffusers' enumeration of str, which has no public way to do it."""
    member = str.__new__(names, BACKEND)
    member._name_, member._value_ = _MEMBER, BACKEND
    setattr(names, _MEMBER, member)  # first: setattr refuses names that are in _member_map_
    names._member_map_[_MEMBER] = member
    names._member_names_.append(_MEMBER)
    names._value2member_map_[BACKEND] = member


def _warn_of_models_without_attention() -> None:
    """Let `model.set_attention_backend` warn if the model has no attention that we can run."""
    models = sys.modules[_MODELS].ModelMixin
    choose = models.set_attention_backend
    if hasattr(choose, "__wrapped__"):
        return  # already wrapped

    @functools.wraps(choose)
    def set_attention_backend(self: nn.Module, backend: str) -> None:
        choose(self, backend)
        if backend.lower() == BACKEND and not has_attention(self):
            warnings.warn(
                f"{type(self).__name__} never calls diffusers' attention dispatcher or torch's "
                f'scaled_dot_product_attention, so the backend "{BACKEND}" has no effect on it',
                stacklevel=2,
            )

    models.set_attention_backend = set_attention_backend

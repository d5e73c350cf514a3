"""`ring_attention`: attention over a sequence on several processes, by flash-attn's arguments."""

from typing import Any

import torch
from torch import Tensor
from typing_extensions import Never

from torch_metal_attn.call.arguments import (
    Window,
    as_bool,
    as_number,
    check_rank,
    check_tensors,
    check_values,
    only_given,
    window,
)
from torch_metal_attn.call.autocast import autocast
from torch_metal_attn.call.keywords import check_keywords, without_unknown
from torch_metal_attn.call.options import score_options
from torch_metal_attn.distributed import group as groups
from torch_metal_attn.distributed.calls import Visible
from torch_metal_attn.distributed.layout import bounds_of, check_layout, checksum, shares_of_all
from torch_metal_attn.distributed.ring import Problem, RingAttention
from torch_metal_attn.ops.differentiation import transforming
from torch_metal_attn.ops.names import ArgumentNames
from torch_metal_attn.runtime.refusals import untraced
from torch_metal_attn.wording import count_text

_NAMES = ArgumentNames(blhd=True)


@untraced
@without_unknown
def ring_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    group: Any = None,
    *,
    causal: bool = False,
    layout: str = "contiguous",
    cu_seqlens: Tensor | None = None,
    softmax_scale: float | None = None,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    learnable_sink: Tensor | None = None,
    dropout_p: float = 0.0,
    return_lse: bool = False,
    **unknown: Never,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention over a sequence that is split over the processes of a group.

    Every process of the group must call it, and all must call `backward` if one does. The result is
    this process' share of that of `flash_attn_func` for the whole sequence. Gradients of q, k, v
    and learnable_sink are supported, also through the log-sum-exp. The gradient of learnable_sink
    is for this process' rows: add up those of all processes. Two runs give the same bits.

    Args:
        q, k, v: this process' share, as from `shard_sequence`: (B, L, Hq, D), (B, L, Hkv, D) and
            (B, L, Hkv, Dv), or with cu_seqlens (T, Hq, D), (T, Hkv, D) and (T, Hkv, Dv). L and T
            may differ between the processes, and may be 0.
        group: a ProcessGroup whose backend sends CPU tensors (gloo), or a DeviceMesh with one
            dimension. None is the default group.
        causal: a query sees its own key and earlier ones.
        layout: "contiguous" or "zigzag", as in the call of `shard_sequence`. With causal,
            "zigzag" gives each process the same work; "contiguous" leaves the first idle.
        cu_seqlens: (sequences + 1,), the bounds of the WHOLE concatenated sequences, the same on
            every process. Each sequence is split over the processes. The host waits for its values.
        softmax_scale: factor of the scores; D ** -0.5 if None.
        window_size: (left, right) as in `flash_attn_func`, in positions of the whole sequence.
        softcap: c > 0 makes a score c * tanh(score / c).
        alibi_slopes: (Hq,), or (B, Hq) or with cu_seqlens (sequences, Hq), float32: slope *
            |distance| is subtracted from the scores. The same on every process; has no gradient.
        learnable_sink: (Hq,), a logit without a value, which each query sees once. The same on
            every process.
        dropout_p: must be 0.0.
        return_lse: also return the log-sum-exp.

    Returns:
        out, in q's shape with v's head dim; with return_lse (out, lse): lse (B, Hq, L), or packed
        (Hq, T), float32.

    Raises:
        NotImplementedError: dropout_p is not 0.0, alibi_slopes requires grad, the call is inside a
            transform of torch.func, or (from `backward`) a second derivative is requested.
        TypeError: an argument has the wrong type.
        ValueError: a value is not supported, here or on another process, or it differs between the
            processes. Arguments are exchanged first, so every process raises.
    """
    ring = groups.ring(group)
    packed = cu_seqlens is not None
    with groups.Agreement(ring, "ring_attention") as agreement:
        check_keywords("ring_attention", unknown)
        for name, tensor in (("q", q), ("k", k), ("v", v)):
            check_rank(name, tensor, "(T, H, D)" if packed else "(B, L, H, D)")
            check_values(name, tensor)
        if transforming():
            raise NotImplementedError(
                "ring_attention does not work in torch.func's transforms: for gradients use "
                "autograd, such as loss.backward()"
            )
        check_layout(layout)
        q, k, v = autocast(q, k, v)
        return_lse = as_bool("return_lse", return_lse)
        left, right = window(window_size)
        visible = Visible(as_bool("causal", causal), left, right, alibi_slopes is not None)
        options = score_options({"softcap": softcap})
        if softmax_scale is not None:
            options["softmax_scale"] = float(as_number("softmax_scale", softmax_scale))
        if as_number("dropout_p", dropout_p) != 0.0:
            raise NotImplementedError(
                f"dropout_p is {dropout_p}; ring_attention has no dropout, because which weights "
                "are dropped would depend on the number of processes: pass 0.0"
            )
        bounds = None if cu_seqlens is None else bounds_of(cu_seqlens)
        sequences = None if bounds is None else len(bounds) - 1
        added = _score_tensors(alibi_slopes, learnable_sink, sequences)
        _check_operands(q, k, v, packed, options | added)
        agreement.number = q.shape[0 if packed else 1]
        agreement.same = {
            "q's dtype": q.dtype,
            "q's batch": None if packed else q.shape[0],
            "q's number of heads": q.shape[-2],
            "q's head dim": q.shape[-1],
            "k's number of heads": k.shape[-2],
            "v's head dim": v.shape[-1],
            "causal": visible.causal,
            "layout": layout,
            "window_size": (left, right),
            "softmax_scale": options.get("softmax_scale"),
            "softcap": options.get("softcap", 0.0),
            "cu_seqlens (here its checksum)": checksum(bounds),
            "alibi_slopes (here its checksum)": _checksum_of(alibi_slopes),
            "learnable_sink (here its checksum)": _checksum_of(learnable_sink),
            "whether q, k, v or learnable_sink requires grad": (
                _requires_grad(q, k, v, learnable_sink)
            ),
        }
    spans = shares_of_all("q", agreement.numbers, layout, bounds)
    # (B, H, L, D), packed tensors with B = 1.
    q, k, v = ((x[None] if packed else x).transpose(1, 2) for x in (q, k, v))
    problem = Problem(ring, spans, visible, packed, options, alibi_slopes)
    out, lse = RingAttention.apply(problem, q, k, v, learnable_sink)
    out = out.transpose(1, 2)
    if packed:
        out, lse = out[0], lse[0]
    return (out, lse) if return_lse else out


def _requires_grad(*tensors: Tensor | None) -> bool:
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)


def _checksum_of(tensor: Tensor | None) -> str | None:
    return None if tensor is None else checksum([str(tensor.dtype), *tensor.tolist()])


def _score_tensors(
    alibi_slopes: Tensor | None, learnable_sink: Tensor | None, sequences: int | None
) -> dict[str, Tensor]:
    """alibi_slopes and learnable_sink as options of `flash_fwd` for one sequence."""
    added = only_given(alibi_slopes=alibi_slopes, learnable_sink=learnable_sink)
    check_tensors(**added)
    if alibi_slopes is not None:
        if _requires_grad(alibi_slopes):
            raise NotImplementedError(
                "alibi_slopes requires grad; ring_attention has no gradient for it: detach it"
            )
        if sequences is not None and alibi_slopes.dim() == 2:
            if alibi_slopes.shape[0] != sequences:
                raise ValueError(
                    f"alibi_slopes has {count_text(alibi_slopes.shape[0], 'row')}; cu_seqlens has "
                    f"{count_text(sequences, 'sequence')}, and each sequence needs one row"
                )
            # Without sequences there is no first row, but the number of columns is still checked.
            added["alibi_slopes"] = (
                alibi_slopes[:1] if sequences else alibi_slopes.new_zeros(1, alibi_slopes.shape[1])
            )
    return added


def _check_operands(q: Tensor, k: Tensor, v: Tensor, packed: bool, options: dict[str, Any]) -> None:
    """Raise the kernels' errors before any process waits for another."""
    length = 0 if packed else 1
    for name, tensor in (("k", k), ("v", v)):
        if tensor.dtype != q.dtype:
            raise ValueError(f"{name} has dtype {tensor.dtype}; it must be {q.dtype}, as q has")
        if tensor.shape[length] != q.shape[length]:
            raise ValueError(
                f"{name} has {count_text(tensor.shape[length], 'row')} and q {q.shape[length]}; "
                "they must be the same share of a sequence"
            )
    operands = [(x[None] if packed else x).transpose(1, 2) for x in (q, k, v)]
    _NAMES.run(torch.ops.metal_attn_explain.flash_fwd, tuple(operands), options)
    if _requires_grad(q, k, v, options.pop("learnable_sink", None)):
        # Tensors without rows suffice, because only the head dims matter.
        empty = [x.detach()[:, :, :0] for x in operands]
        out = empty[0].new_empty(*empty[0].shape[:3], v.shape[-1])
        lse = out.new_empty(out.shape[:3], dtype=torch.float32)
        _NAMES.run(torch.ops.metal_attn_explain.flash_bwd, (out, None, *empty, out, lse), options)

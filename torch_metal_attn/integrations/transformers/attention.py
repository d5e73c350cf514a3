"""The attention function for transformers. Each call runs one op of `metal_attn`."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.fx.experimental.symbolic_shapes import statically_known_true

from torch_metal_attn.call import philox
from torch_metal_attn.call.arguments import (
    as_int,
    as_number,
    check_integers,
    check_rank,
    check_tensor,
)
from torch_metal_attn.call.autocast import autocast
from torch_metal_attn.integrations.copies import with_contiguous_rows
from torch_metal_attn.integrations.transformers import band as bands
from torch_metal_attn.integrations.transformers.latent import HeldRows, Latents
from torch_metal_attn.integrations.transformers.packing import (
    SEQUENCES,
    Packing,
    packing_of,
    positions_restart,
    separates,
)
from torch_metal_attn.integrations.transformers.refusals import PADDED, refuse_weights
from torch_metal_attn.integrations.transformers.routes import record
from torch_metal_attn.integrations.transformers.unrotated import Unrotated
from torch_metal_attn.ops.differentiation import call
from torch_metal_attn.with_kvcache import DECODE_QUERIES
from torch_metal_attn.wording import count_text, type_text, value_text

# The arguments for packed sequences: their bounds and the longest lengths.
BOUNDS = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")
# Arguments that reach attention functions from a model's **kwargs and do not affect attention.
# Every kernel is `deterministic`. CTC models pass the options of `generate`, and LFM3-VL passes the
# grid of a picture's patches for its convolutions. Trainers and tokenizers put labels and facts
# about the text into batches.
_HARMLESS = frozenset(
    "assistant_masks bos_token_id cache_implementation cache_position completion_mask "
    "deterministic disable_compile do_sample eos_token_id grid_thw labels length logits_indices "
    "logits_processor_args logits_to_keep max_length max_new_tokens mm_token_type_ids n_items "
    "num_beams num_items_in_batch num_truncated_tokens offset_mapping output_hidden_states "
    "output_logits output_router_logits output_scores overflow_to_sample_mapping pad_token_id "
    "position_ids return_dict return_dict_in_generate return_loss shift_labels "
    "special_tokens_mask token_type_ids use_cache".split()
)


def metal_attention(
    module: nn.Module,
    query: Tensor | Unrotated,
    key: Tensor | Latents | HeldRows,
    value: Tensor | Latents | HeldRows,
    attention_mask: Tensor | None,
    *,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    sinks: Tensor | None = None,
    position_bias: Tensor | None = None,
    indices: Tensor | None = None,
    **keywords: Any,
) -> tuple[Tensor, None]:
    """Compute the same as transformers' `eager_attention_forward`, or raise NotImplementedError.

    Args:
        module: the attention module.
        query: (B, Hq, Sq, D), or (1, Hq, Sq, D) for queries shared by the batch; an `Unrotated` if
            a fused module leaves the rotation to the kernel.
        key, value: (B, Hkv, Sk, D) and (B, Hkv, Sk, Dv); or a `Latents` from an absorbed module.
        attention_mask: the result of `metal_attention_mask`, or a bool or additive mask
            broadcastable to (B, Hq, Sq, Sk), which includes causality. None masks nothing out, as
            in eager attention, even if the module's `is_causal` is True.
        is_causal: used only if there is no mask.
        sliding_window: only checked, because the mask already has the window.
        sinks: (B, Hq, Sq, 1), a sink per query.
        position_bias: floating, broadcastable to (B, Hq, Sq, Sk), added to the scores.
        indices: (B, Sq, n) integers, the distinct keys that an indexer selected for each query.
        keywords: these are supported. Keywords that are None or known to be harmless are ignored,
            and all others are refused.
            dropout: probability to drop a weight while the module is in training.
            softcap: scores become softcap * tanh(scores / softcap).
            s_aux: (Hq,), attention sinks.
            cu_seq_lens_q, cu_seq_lens_k, max_length_q, max_length_k: all four or none of them; the
                bounds of sequences packed in a batch of 1, each of which attends to itself.
            seq_idx, packed_seq_lengths, cu_seqlens: only checked, because the bounds or the mask
                must separate the sequences that these keywords describe.

    Returns:
        out (B, Sq, Hq, Dv), contiguous, and None for the attention weights, which are never
        computed. A query that sees no key gets 0. Under autocast, as in torch's own attention,
        query, key, value and tensors that are added to the scores are cast to autocast's dtype,
        which is also the dtype of out.
    """
    per_query = {"sinks": sinks, "position_bias": position_bias, "indices": indices}
    tensors = {"attention_mask": attention_mask, "s_aux": keywords.get("s_aux"), **per_query}
    q = query.q if isinstance(query, Unrotated) else query
    _check_arguments(module, {"query": q, "key": key, "value": value}, tensors)
    if isinstance(key, Latents):
        keywords |= {"is_causal": is_causal, "sliding_window": sliding_window, **per_query}
        return _attend_to_latents(module, query, key, attention_mask, keywords), None
    assert not isinstance(value, Latents)

    q_length, kv_length = q.shape[2], key.shape[2]
    bounds = {name: keywords.pop(name) for name in BOUNDS if keywords.get(name) is not None}
    sequences = {name: keywords.pop(name, None) for name in SEQUENCES}
    options = score_options(module, q.device, **keywords)

    mask, causal = attention_mask, bool(is_causal)
    if mask is not None and bands.is_causal(mask):
        if mask.shape[2] != q_length or q_length == 1:
            raise _wrong_size(module, q_length, kv_length, count_text(mask.shape[2], "query"))
        mask, causal = None, True
    packing = packing_of(mask, q_length, kv_length)
    bounds = _bounds(
        module, q, key, attention_mask, packing, bounds, sequences, per_query, keywords
    )

    if isinstance(query, Unrotated):
        if bounds:
            # The kernel would start at the first row of the tables for each sequence.
            q = query.rotated()
        else:
            options |= query.options()
    q = with_contiguous_rows("q", q)
    if isinstance(key, Tensor) and isinstance(value, Tensor):
        key, value = with_contiguous_rows("k", key), with_contiguous_rows("v", value)
        if bounds:
            _check_packed(module, q, key, bounds, per_query)
            window = _packed_window(module, key, mask, packing, causal, sliding_window, bounds)
            return flash_varlen(module, q, key, value, bounds, **window, **options), None

    if q.shape[0] == 1 and key.shape[0] > 1:
        q = q.expand(key.shape[0], -1, -1, -1)
    route, visible, detail = _visibility(module, q, key, mask, packing, causal, sliding_window)
    if indices is not None and indices.shape[2] < kv_length:
        # Each query reads its list separately, so a mask costs less if there are many queries.
        by_lists = _can_read_lists(q, key, value, **options)
        visible = _restrict_to_indices(module, indices, kv_length, visible, by_lists)
        route, detail = "dense", f"{detail}, {indices.shape[2]} keys of each query"
    options |= visible
    if position_bias is not None:
        route, detail = "dense", f"{detail} with bias {tuple(position_bias.shape)}"
        # The kernel takes only one tensor that is added to the scores.
        if (added := options.get("attn_mask")) is not None and added.dtype != torch.bool:
            position_bias, options["attn_mask"] = position_bias + added, None
        options["attn_bias"] = position_bias
    record(route, module, q, key, detail)
    out = _flash(q, key, value, sinks=sinks, **options)
    return out.transpose(1, 2).contiguous(), None


def _check_arguments(
    module: nn.Module, operands: dict[str, Any], others: dict[str, Tensor | None]
) -> None:
    if not isinstance(module, nn.Module):
        raise TypeError(f"module is {type_text(module)}; it must be an nn.Module")
    for name, x in operands.items():
        if not isinstance(x, (Latents, HeldRows)):
            check_rank(name, x, "(B, H, S, D)")
    for name, x in others.items():
        if x is not None:
            check_tensor(name, x)
    sinks, indices, form = others["sinks"], others["indices"], ""
    if sinks is not None and (sinks.dim() != 4 or sinks.shape[3] != 1):
        form = "(B, Hq, Sq, 1), a sink per query; pass a sink per head as s_aux"
    elif indices is not None and (
        indices.dim() != 3 or indices.shape[1] != operands["query"].shape[2]
    ):
        form = "(B, Sq, n), the keys of each query"
    if form:
        shown = _shown({"sinks": sinks if "sink" in form else None, "indices": indices})
        raise NotImplementedError(f"{shown} in {type(module).__name__}: it must be {form}")


def _attend_to_latents(
    module: nn.Module, query: Any, latents: Latents, mask: Tensor | None, keywords: dict[str, Any]
) -> Tensor:
    """Few queries read the latent rows directly. For many queries the rows are expanded."""
    is_packed = any(keywords.get(name) is not None for name in BOUNDS)
    if is_packed or query.shape[2] > DECODE_QUERIES:
        return metal_attention(module, query, *latents.expanded(), mask, **keywords)[0]
    out, _ = metal_attention(module, *latents.absorbed(query), mask, **keywords)
    return latents.values(out)


def score_options(
    module: nn.Module,
    device: torch.device,
    *,
    dropout: float = 0.0,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    output_attentions: bool | None = None,
    **unknown: Any,
) -> dict[str, Any]:
    """The op's options except visibility. Raises NotImplementedError for unknown arguments."""
    refuse_weights(module, output_attentions)
    for name, value in unknown.items():
        if value is not None and name not in _HARMLESS:
            raise NotImplementedError(
                f"{_shown({name: value})} in {type(module).__name__}: metal_attn does not know "
                f"{name}. If {name} decides which keys a token sees, pass an attention_mask or "
                f"cu_seq_lens_* instead; otherwise leave {name} out"
            )
    options = {
        "softmax_scale": None if scaling is None else as_number("scaling", scaling),
        "softcap": 0.0 if softcap is None else as_number("softcap", softcap),
        "learnable_sink": s_aux,
    }
    if module.training and dropout:  # as in transformers' own functions
        options["dropout_p"] = dropout
        options["rng_state"] = philox.draw_rng_state(dropout, device)
    return options


def _flash(
    query: Tensor,
    key: Tensor | HeldRows,
    value: Tensor | HeldRows,
    *,
    sinks: Tensor | None = None,
    **options: Any,
) -> Tensor:
    """Run the kernel for many or for few queries. sinks: (B, Hq, Sq, 1), a score without value."""
    (query,) = autocast(query)
    added = {name: options.get(name) for name in ("attn_mask", "attn_bias")}
    options |= {name: autocast(one)[0] for name, one in added.items() if one is not None}
    ops = torch.ops.metal_attn
    out: Tensor
    if isinstance(key, HeldRows):
        out, lse = key.attend(query, options)
    else:
        assert isinstance(value, Tensor)
        key, value = autocast(key, value)
        op = ops.flash_decode if "indices" in options else ops.flash_fwd
        out, lse = call(op, (query, key, value), options)
    if sinks is None:
        return out
    # exp(lse) is the sum over the keys, so this is the keys' share of the sum with the sink.
    share = torch.sigmoid(lse[..., None] - sinks)
    return (out * share).to(out.dtype)


def _can_read_lists(query: Tensor, key: Any, value: Any, **options: Any) -> bool:
    """True if the kernel can read `indices`: few queries, no gradients and no dropout."""
    tensors = (query, key, value, *options.values())
    trains = torch.is_grad_enabled() and any(
        isinstance(tensor, Tensor) and tensor.requires_grad for tensor in tensors
    )
    # A graph for any number of queries must not contain the op for few. Traced sizes are tensors.
    tracing = torch.jit.is_tracing()  # type: ignore[attr-defined]
    few = not tracing and statically_known_true(query.shape[2] <= DECODE_QUERIES)
    return few and not trains and "dropout_p" not in options


def _restrict_to_indices(
    module: nn.Module, indices: Tensor, kv_length: int, visible: dict[str, Any], by_lists: bool
) -> dict[str, Any]:
    """The options `visible`, restricted to the keys in each query's `indices`."""
    mask = visible.get("attn_mask")
    if mask is not None and (mask.dtype != torch.bool or mask.dim() != 4 or mask.shape[1] != 1):
        raise NotImplementedError(
            f"indices with {_shown({'attention_mask': mask})} in {type(module).__name__}: it must "
            "be bool, (B, 1, Sq, Sk)"
        )
    entries = indices.long()
    if by_lists:
        if mask is not None:
            shown = mask[:, 0].expand(*indices.shape[:2], kv_length).gather(2, entries)
            indices = indices.masked_fill(~shown, -1)
        rest = {name: value for name, value in visible.items() if name != "attn_mask"}
        return rest | {"indices": indices.int()[:, None]}
    selected = torch.zeros(
        (*indices.shape[:2], kv_length), dtype=torch.bool, device=indices.device
    ).scatter(2, entries, True)[:, None]
    return visible | {"attn_mask": selected if mask is None else mask & selected}


def _visibility(
    module: nn.Module,
    query: Tensor,
    key: Tensor | HeldRows,
    mask: Tensor | None,
    packing: Packing | None,
    causal: bool,
    sliding_window: int | None,
) -> tuple[str, dict[str, Any], str]:
    """The keys that each query sees: the route, the op's options, and a description."""
    q_length, kv_length = query.shape[2], key.shape[2]
    if mask is None:
        # A single query is the last one, so it sees every key.
        causal = causal and q_length > 1
        _check_window(module, sliding_window, min(q_length, kv_length) if causal else kv_length)
        # With more keys than queries, the call is the prefill of a static cache, whose trailing
        # keys are still empty. So the diagonal is aligned top-left.
        return "plain", {"causal": causal, "q_offset": 0}, "causal" if causal else "full"
    if packing is not None:
        return "dense", {"attn_mask": bands.expand(mask, q_length, kv_length)}, "packed rows"
    if not bands.is_descriptor(mask, kv_length):
        if mask.dtype != torch.bool and not mask.is_floating_point():
            raise NotImplementedError(
                f"attention_mask in {type(module).__name__} is {type_text(mask)} for "
                f"{count_text(q_length, 'query')} and {count_text(kv_length, 'key')}; it must be "
                "bool or floating"
            )
        dtype = str(mask.dtype).removeprefix("torch.")
        return "dense", {"attn_mask": mask}, f"{dtype} mask {tuple(mask.shape)}"
    if torch.compiler.is_compiling():
        if not bands.is_for(mask, q_length):
            raise _wrong_size(module, q_length, kv_length, count_text(mask.shape[1], "query"))
        if q_length == 1:
            return "compact", bands.lengths(mask), "descriptor"
        return "dense", {"attn_mask": bands.expand(mask, q_length, kv_length)}, "descriptor"
    band = bands.unpack(mask)
    queries_agree = band.q_length == q_length or band.is_same_for_all_queries
    if band.kv_length != kv_length or not queries_agree:
        sizes = f"{count_text(band.q_length, 'query')} and {count_text(band.kv_length, 'key')}"
        raise _wrong_size(module, q_length, kv_length, sizes)
    return "compact", band.options(), str(band)


def _bounds(
    module: nn.Module,
    query: Tensor,
    key: Any,
    mask: Tensor | None,
    packing: Packing | None,
    bounds: dict[str, Any],
    sequences: dict[str, Any],
    per_query: dict[str, Tensor | None],
    keywords: dict[str, Any],
) -> dict[str, Any]:
    """The bounds of packed sequences, or {}. ValueError if nothing separates the sequences."""
    for name, sequence in sequences.items():
        if sequence is not None:
            _check_sequences(module, name, sequence, query, key, mask, packing, bounds)
    if bounds:
        return bounds
    if positions_restart(mask, keywords.get("position_ids")):
        raise ValueError(
            f"position_ids in {type(module).__name__} restart at 0, as those of packed sequences "
            "do, and transformers made a mask that does not separate the sequences. Pass "
            "use_cache=False (to a Trainer, TrainingArguments(use_cache=False)): without a cache "
            "most models make masks from position_ids. If this model does not, pass cu_seq_lens_* "
            "and max_length_* as well, which "
            "DataCollatorWithFlattening(return_flash_attn_kwargs=True) makes"
        )
    if packing is None or query.shape[0] > 1 or any(x is not None for x in per_query.values()):
        return {}
    return packing.bounds()


def _check_packed(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    bounds: dict[str, Any],
    per_query: dict[str, Tensor | None],
) -> None:
    name, shown = type(module).__name__, _shown(bounds)
    for argument, tensor in per_query.items():
        if tensor is not None:
            raise NotImplementedError(
                f"{argument} together with cu_seq_lens_q in {name}: pass the sequences as a padded "
                "batch, with an attention_mask"
            )
    missing = [bound for bound in BOUNDS if bound not in bounds]
    if missing:
        raise NotImplementedError(
            f"{shown} in {name} without {', '.join(missing)}: all four are needed"
        )
    if query.shape[0] != 1 or key.shape[0] != 1:
        raise NotImplementedError(
            f"{shown} in {name} with a batch of {max(query.shape[0], key.shape[0])}: packed "
            "sequences must be in a batch of 1"
        )


def _packed_window(
    module: nn.Module,
    key: Tensor,
    mask: Tensor | None,
    packing: Packing | None,
    causal: bool,
    sliding_window: int | None,
    bounds: dict[str, Any],
) -> dict[str, int]:
    """The window in each packed sequence; ValueError if the mask describes other sequences."""
    name, length = type(module).__name__, key.shape[2]
    left, right = -1, 0 if causal else -1
    if mask is None:
        _check_window(module, sliding_window, int(bounds["max_length_k"]))
    elif packing is not None:
        known = packing.cu_seqlens
        if not all(
            ends is known or separates("cu_seqlens", ends, (1, length), known, None)
            for ends in (bounds[side] for side in BOUNDS[:2])
        ):
            raise ValueError(
                f"{_shown(bounds)} in {name} and position_ids disagree about where sequences "
                "begin; pass only one of them, or the same bounds in both"
            )
        left, right = packing.window_size_left, packing.window_size_right
    else:
        band = bands.unpack(mask) if bands.is_descriptor(mask, length) else None
        if band is None or band.attention_chunk or band.q_offset or band.is_padded:
            raise NotImplementedError(
                f"{_shown(bounds)} in {name} together with a mask ({band or tuple(mask.shape)}): "
                "pass position_ids and use_cache=False instead, without cu_seq_lens_* and without "
                "attention_mask. In a compiled graph pass cu_seq_lens_* and use_cache=True "
                "(TrainingArguments(use_cache=True)), because transformers then makes no mask"
            )
        left, right = band.window_size_left, band.window_size_right
    return {"window_size_left": left, "window_size_right": right}


def flash_varlen(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bounds: dict[str, Any],
    **options: Any,
) -> Tensor:
    """Attention of sequences packed in one row, aligned bottom-right: (1, Sq, Hq, Dv)."""
    for name in ("cu_seq_lens_q", "cu_seq_lens_k"):
        check_integers(name, bounds[name], "(sequences + 1)")
    longest = [as_int(name, bounds[name]) for name in ("max_length_q", "max_length_k")]
    query, key, value = autocast(query, key, value)
    record("packed", module, query, key, f"in {len(bounds['cu_seq_lens_q']) - 1} sequences")
    packed = (x[0].transpose(0, 1) for x in (query, key, value))
    ends = (bounds[name].to(torch.int32) for name in ("cu_seq_lens_q", "cu_seq_lens_k"))
    op = torch.ops.metal_attn.flash_varlen_fwd
    out: Tensor = call(op, (*packed, *ends, *longest), options)[0]
    return out[None].contiguous()


def _check_sequences(
    module: nn.Module,
    name: str,
    sequence: Any,
    query: Tensor,
    key: Any,
    mask: Tensor | None,
    packing: Packing | None,
    bounds: dict[str, Any],
) -> None:
    shape = (max(query.shape[0], key.shape[0]), query.shape[2])
    check_tensor(name, sequence)
    shown = f"{_shown({name: sequence})} in {type(module).__name__}"
    if sequence.is_floating_point() or (name == SEQUENCES[0] and sequence.shape != shape):
        form = f" of shape {shape}" if name == SEQUENCES[0] else ""
        raise ValueError(f"{shown}: it must be a tensor of integers{form}")
    ends = [bounds[side] for side in BOUNDS[:2] if isinstance(bounds.get(side), Tensor)]
    if not ends and packing is not None:
        ends = [packing.cu_seqlens]
    dense = mask if mask is not None and mask.dtype != torch.int32 else None
    if all(separates(name, sequence, shape, one, None) for one in ends) and (
        ends or separates(name, sequence, shape, None, dense)
    ):
        return
    if ends:
        says = "cu_seq_lens_*" if bounds else "position_ids"
        raise ValueError(
            f"{shown} and {says} disagree about where sequences begin; pass the same sequences in "
            f"both, or leave {name} out"
        )
    raise ValueError(
        f"{shown} describes sequences that no bounds and no mask separate. Pass cu_seq_lens_* and "
        "max_length_* as well, which DataCollatorWithFlattening(return_flash_attn_kwargs=True) "
        f"makes. No attention of transformers reads {name}, so all of them would mix the sequences"
    )


def _wrong_size(
    module: nn.Module, q_length: int, kv_length: int, made_for: str
) -> NotImplementedError:
    return NotImplementedError(
        f"{type(module).__name__} has {count_text(q_length, 'query')} and "
        f"{count_text(kv_length, 'key')}, but its mask is for {made_for}: the model uses the mask "
        f'in a way that metal_attn does not know; use attn_implementation="sdpa"{PADDED}'
    )


def _check_window(module: nn.Module, sliding_window: int | None, reach: int) -> None:
    """Refuse a window that would hide keys, because only a mask says which side it is on."""
    if sliding_window is not None and reach > as_int("sliding_window", sliding_window):
        raise NotImplementedError(
            f"sliding_window={sliding_window} in {type(module).__name__} would hide some of "
            f"{count_text(reach, 'key')}, and no mask says which: pass an attention_mask"
        )


def _shown(values: dict[str, Any]) -> str:
    """The name and text of the first value that is not None."""
    name, value = next((name, value) for name, value in values.items() if value is not None)
    return f"{name}={type_text(value) if isinstance(value, Tensor) else value_text(value)}"

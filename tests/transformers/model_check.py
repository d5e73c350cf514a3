"""Tiny models with attn_implementation="metal_attn" against their own eager attention."""

import torch
from transformers import DataCollatorWithFlattening

from tests.transformers import tiny_models as tiny
from tests.transformers.tiny_families import FAMILIES
from torch_metal_attn.integrations.transformers import enable, record_routes
from torch_metal_attn.simulator import runs
from torch_metal_attn.testing.judge import normal

TOLERANCE = 1e-5
LENGTHS = (17, 1, 13)  # of packed sequences
# T5 adds a bias, Gemma 4 slices masks, PaliGemma's prefix is no band, and indexers read masks.
DENSE = {"T5", "Gemma4", "PaliGemma", "DeepSeek-V3.2", "GLM-MoE-DSA"}


def difference(actual, expected, where=None):
    assert actual.shape == expected.shape
    apart = (actual - expected).abs()
    return (apart if where is None else apart[where]).max().item()


def compare(name, side="none", device=None, model=None, fuse_rope=False, inputs=None, **changes):
    """The largest difference from eager outside the padding, and the routes."""
    model, inputs = model or tiny.build(name, **changes), inputs or tiny.inputs(name, side)
    expected = tiny.answer(model, **inputs)
    enable(model, fuse_rope=fuse_rope)
    with record_routes() as routes:
        actual = tiny.answer(model if device is None else model.to(device), **inputs)
    return difference(actual, expected, tiny.present(inputs)), routes


def compare_compiled(name, fuse_rope=False, **changes):
    model, inputs = tiny.build(name, **changes), tiny.inputs(name, "left")
    if FAMILIES[name].generates:
        inputs["use_cache"] = False
    expected = tiny.answer(model, **inputs)
    torch.compiler.reset()  # models share code, and torch limits its number of compilations
    enable(model, fuse_rope=fuse_rope).compile(fullgraph=True, backend="eager")
    return difference(tiny.answer(model, **inputs), expected, tiny.present(inputs))


def bounds(*ends, dtype=torch.int32):
    """The bounds of packed sequences, as transformers passes them to attention."""
    ends = torch.tensor(ends, dtype=dtype)
    longest = dict.fromkeys(("max_length_q", "max_length_k"), int(ends.diff().max()))
    return {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends.clone(), **longest}


def packed_batch(model):
    """A batch of sequences packed in one row, and the answer to each sequence alone."""
    parts = tiny.tokens(sum(LENGTHS), batch=1).split(LENGTHS, 1)
    collate = DataCollatorWithFlattening(return_flash_attn_kwargs=True, return_seq_idx=True)
    batch = collate([{"input_ids": part[0].tolist()} for part in parts])
    del batch["labels"]
    return batch, torch.cat([tiny.answer(model, input_ids=part) for part in parts], 1)


def compare_generated(name, side="left", fuse_rope=False, device="cpu", **options):
    model, inputs = tiny.build(name), tiny.inputs(name, side)
    options = {"disable_compile": True, "max_new_tokens": 6} | options
    expected, expected_scores = tiny.generate(model, inputs, **options)
    enable(model, fuse_rope=fuse_rope).to(device)
    actual, scores = tiny.generate(model, inputs, **options)
    assert actual.tolist() == expected.tolist()
    return difference(scores, expected_scores)


def gradients(model, inputs):
    """The gradient of every parameter, in training without dropout."""
    model.train()
    for module in model.modules():
        for name in ("p", "dropout", "attention_dropout", "activation_dropout", "layerdrop"):
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)
    answers, where = tiny.run(model, **inputs), tiny.present(inputs)
    weights = normal(*answers.shape)
    (answers * weights)[slice(None) if where is None else where].sum().backward()
    grads = {name: parameter.grad for name, parameter in model.named_parameters()}
    return {name: grad for name, grad in grads.items() if grad is not None and grad.numel()}


def assert_same_gradients(actual, expected):
    assert actual.keys() == expected.keys()
    largest = max(gradient.abs().max() for gradient in expected.values())
    for name, gradient in expected.items():
        # Some gradients, such as that of k's bias, are exactly 0 apart from rounding.
        scale = torch.maximum(gradient.abs().max(), 1e-2 * largest)
        torch.testing.assert_close(actual[name], gradient, rtol=1e-4, atol=1e-4 * scale, msg=name)


def launches():
    run = runs.current()
    return 0 if run is None else len(run.launches)

"""Assisted generation and prompt lookup give the tokens of greedy generation in fewer calls."""

import pytest
import torch

transformers = pytest.importorskip("transformers", minversion="5.20")

from tests.transformers import tiny_models as tiny  # noqa: E402
from torch_metal_attn.integrations.transformers import enable, record_routes  # noqa: E402
from torch_metal_attn.simulator import runs  # noqa: E402

NEW_TOKENS, LAYERS, DRAFT = 12, 2, 4
OPTIONS = {"max_new_tokens": NEW_TOKENS, "min_new_tokens": NEW_TOKENS, "do_sample": False}
NAME = "Gemma2"  # half of its layers have a window


def prompt():
    ids = tiny.tokens(5, batch=1).repeat(1, 3)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def count_queries(model):
    queries = []
    model.register_forward_hook(
        lambda module, args, kwargs, result: queries.append(result.logits.shape[1]),
        with_kwargs=True,
    )
    return model, queries


def assistant(device, noise):
    model = tiny.build(NAME)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(noise * torch.randn(parameter.shape, generator=generator))
    model.generation_config.assistant_confidence_threshold = 0
    model.generation_config.num_assistant_tokens = DRAFT
    model.generation_config.num_assistant_tokens_schedule = "constant"
    return enable(model).to(device)


# noise: added to the assistant's weights. If it is 0, all drafts are accepted. None: prompt lookup.
@pytest.mark.parametrize(
    "noise, most_forwards",
    [(0.0, 3), (1.0, NEW_TOKENS), (None, 8)],
    ids=["assisted", "assisted by another model", "prompt lookup"],
)
def test_tokens_match_greedy(noise, most_forwards, device):
    expected = tiny.build(NAME).generate(**prompt(), **OPTIONS)
    model, queries = count_queries(enable(tiny.build(NAME)).to(device))
    drafts = []
    if noise is None:
        options = {"prompt_lookup_num_tokens": DRAFT}
    else:
        draft_model, drafts = count_queries(assistant(device, noise))
        options = {"assistant_model": draft_model}
    inputs = {key: x.to(device) for key, x in prompt().items()}
    with record_routes() as routes:
        actual = model.generate(**inputs, **OPTIONS, **options)
    assert actual.tolist() == expected.tolist()
    assert len(queries) <= most_forwards
    assert any(1 < n <= DRAFT + 1 for n in queries[1:])
    assert routes.kernel.total() == LAYERS * (len(queries) + len(drafts))
    assert routes.dense.total() == 0
    if (run := runs.current()) is not None:
        kernels = [one.kernel for one in run.launches if one.kernel.startswith("flash")]
        # Prompts, drafts and verification have at most 32 queries.
        assert kernels == ["flash_decode"] * routes.kernel.total()

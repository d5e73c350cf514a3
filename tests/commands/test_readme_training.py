"""Real training through the kernels: the same losses as with eager attention, step by step.

`demo` trains a Llama (test_cli.py).
"""

from pathlib import Path

import pytest
import torch
from torch.nn.functional import cross_entropy, normalize

from torch_metal_attn.runtime.device import best_device

TOLERANCE = 1e-4


@pytest.fixture
def device():
    """As the suite's, with nothing checked but the losses: the same launches are elsewhere."""
    with best_device() as best:
        yield best


def losses_of(model, optimiser, batches, loss_of):
    """The loss before each step."""
    losses = []
    for batch in batches:
        optimiser.zero_grad(set_to_none=True)
        loss = loss_of(model, batch)
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    return losses


def assert_same_course(actual, expected):
    """The same losses at every step, of a training that learns something."""
    assert len(actual) == len(expected)
    assert max(abs(a - e) for a, e in zip(actual, expected, strict=True)) <= TOLERANCE
    fifth = max(1, len(expected) // 5)
    assert sum(expected[-fifth:]) < 0.9 * sum(expected[:fifth])


def test_fine_tuning_minilm(device):
    """5 steps of contrastive learning on pairs of sentences that say the same."""
    demo = pytest.importorskip("torch_metal_attn.tools.demo")
    integration = pytest.importorskip("torch_metal_attn.integrations.transformers")
    text = (Path(__file__).parent / "data" / "weather.txt").read_text(encoding="utf-8")
    pairs = [line.split("\t") for line in text.splitlines()]

    def embed(model, tokens):
        hidden = model(**tokens.to(model.device)).last_hidden_state
        present = tokens["attention_mask"].to(model.device)[..., None]
        return normalize((hidden * present).sum(1) / present.sum(1), dim=-1)

    def train(implementation, device):
        tokenizer, model = demo._load_embedder()
        model.embeddings.requires_grad_(False)  # half of the weights, and far from attention
        if implementation is not None:
            implementation(model)
        model.to(device)
        optimiser = torch.optim.SGD(model.parameters(), lr=0.1)

        def loss_of(model, batch):
            first, second = (
                embed(model, tokenizer(list(side), padding=True, return_tensors="pt"))
                for side in zip(*batch, strict=True)
            )
            target = torch.arange(len(batch), device=model.device)
            return cross_entropy(first @ second.T / 0.3, target)

        batches = [pairs[:3] if step % 2 else pairs[3:6] for step in range(5)]
        return losses_of(model, optimiser, batches, loss_of)

    assert_same_course(train(integration.enable, device), train(None, "cpu"))


@pytest.mark.parametrize("family", ["gpt-oss", "Gemma2"])
def test_language_model(family, device):
    """6 steps with sinks and windows, and with a softcap."""
    tiny_models = pytest.importorskip("tests.transformers.tiny_models")
    integration = pytest.importorskip("torch_metal_attn.integrations.transformers")
    tokens = torch.randint(3, 99, (2, 24), generator=torch.Generator().manual_seed(1))

    def train(implementation, device):
        model = tiny_models.build(family)
        if implementation is not None:
            implementation(model)
        model.to(device).train()
        optimiser = torch.optim.SGD(model.parameters(), lr=0.02)

        def loss_of(model, batch):
            return model(input_ids=batch.to(device), labels=batch.to(device), use_cache=False).loss

        return losses_of(model, optimiser, [tokens] * 6, loss_of)

    assert_same_course(train(integration.enable, device), train(None, "cpu"))

"""Real training through the kernels: the same losses as with eager attention, step by step."""

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, normalize

import torch_metal_attn
from torch_metal_attn.runtime.device import best_device

ROOT = Path(__file__).parents[2]
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


class CharacterModel(nn.Module):
    """Two layers of causal attention and a feed-forward net over characters."""

    WIDTH, HEADS, CONTEXT = 32, 2, 32

    def __init__(self, characters, attention):
        super().__init__()
        self.attention = attention
        self.tokens = nn.Embedding(characters, self.WIDTH)
        self.positions = nn.Embedding(self.CONTEXT, self.WIDTH)
        self.layers = nn.ModuleList(
            nn.ModuleDict(
                {
                    "norm": nn.LayerNorm(self.WIDTH),
                    "qkv": nn.Linear(self.WIDTH, 3 * self.WIDTH),
                    "out": nn.Linear(self.WIDTH, self.WIDTH),
                    "mlp": nn.Sequential(
                        nn.LayerNorm(self.WIDTH),
                        nn.Linear(self.WIDTH, 4 * self.WIDTH),
                        nn.GELU(),
                        nn.Linear(4 * self.WIDTH, self.WIDTH),
                    ),
                }
            )
            for _ in range(2)
        )
        self.head = nn.Linear(self.WIDTH, characters)

    def forward(self, tokens):
        x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        for layer in self.layers:
            qkv = layer["qkv"](layer["norm"](x)).unflatten(-1, (3, self.HEADS, -1))
            q, k, v = (part.transpose(1, 2) for part in qkv.unbind(2))
            x = x + layer["out"](self.attention(q, k, v).transpose(1, 2).flatten(-2))
            x = x + layer["mlp"](x)
        return self.head(x)


def eager(q, k, v):
    scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
    hidden = torch.ones(q.shape[2], q.shape[2], device=q.device).triu(1).bool()
    return scores.masked_fill(hidden, -torch.inf).softmax(-1) @ v


def metal(q, k, v):
    return torch_metal_attn.scaled_dot_product_attention(q, k, v, is_causal=True)


def test_character_model(device):
    """30 steps on the README."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    alphabet = sorted(set(text))
    data = torch.tensor([alphabet.index(character) for character in text])
    generator = torch.Generator().manual_seed(0)
    length = CharacterModel.CONTEXT + 1
    starts = torch.randint(len(data) - length, (30, 4), generator=generator)
    batches = [torch.stack([data[s : s + length] for s in row]) for row in starts.tolist()]

    def train(attention, device):
        torch.manual_seed(0)
        model = CharacterModel(len(alphabet), attention).to(device)
        optimiser = torch.optim.AdamW(model.parameters(), lr=3e-3)

        def loss_of(model, batch):
            batch = batch.to(device)
            return cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())

        return losses_of(model, optimiser, batches, loss_of)

    assert_same_course(train(metal, device), train(eager, "cpu"))


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

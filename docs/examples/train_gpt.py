"""Train a small GPT on documents of many lengths, packed into one row without padding.

    python docs/examples/train_gpt.py --text FILE --steps 200

Empty lines separate documents, and bytes are the tokens. `flash_attn_varlen_func` takes the offsets
of the documents, so documents do not see each other, and there is no padding.
"""

import argparse
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from torch_metal_attn import flash_attn_varlen_func
from torch_metal_attn.runtime.device import best_device

HEADS, HEAD_DIM, VOCABULARY = 4, 16, 256


class Block(nn.Module):
    """Causal attention and a feed-forward layer, for tokens of several documents (T, width)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.qkv = nn.Linear(width, 3 * HEADS * HEAD_DIM)
        self.out = nn.Linear(HEADS * HEAD_DIM, width)
        self.feed = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor, bounds: Tensor, longest: int) -> Tensor:
        q, k, v = self.qkv(self.norms[0](x)).unflatten(-1, (3, HEADS, HEAD_DIM)).unbind(1)
        out: Any = flash_attn_varlen_func(q, k, v, bounds, bounds, longest, longest, causal=True)
        x = x + self.out(out.flatten(1))
        return x + self.feed(self.norms[1](x))


class GPT(nn.Module):
    """Logits (T, vocabulary) of packed tokens (T,)."""

    def __init__(self, width: int = 64, layers: int = 2, length: int = 512) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, width)
        self.positions = nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, tokens: Tensor, bounds: Tensor, longest: int) -> Tensor:
        lengths = bounds.diff()
        starts = torch.repeat_interleave(bounds[:-1], lengths)
        position = torch.arange(len(tokens), device=tokens.device) - starts
        x = self.tokens(tokens) + self.positions(position)
        for block in self.blocks:
            x = block(x, bounds, longest)
        logits: Tensor = self.head(x)
        return logits


def documents(text: str, length: int) -> list[Tensor]:
    """The paragraphs of a text as bytes, cut to `length`. Drops paragraphs of one byte."""
    parts = [part.strip().encode()[:length] for part in text.split("\n\n")]
    return [torch.tensor(list(part)) for part in parts if len(part) > 1]


def packed(chosen: list[Tensor], device: torch.device) -> tuple[Tensor, Tensor, Tensor, int]:
    """Inputs and targets (T,), the documents' bounds, and the longest document."""
    inputs, targets = torch.cat([d[:-1] for d in chosen]), torch.cat([d[1:] for d in chosen])
    lengths = torch.tensor([len(document) - 1 for document in chosen])
    bounds = nn.functional.pad(lengths.cumsum(0), (1, 0)).int()
    return inputs.to(device), targets.to(device), bounds.to(device), int(lengths.max())


def train(text: str, steps: int, batch: int, length: int) -> list[float]:
    """The loss of each step on the best device."""
    torch.manual_seed(0)
    losses, known = [], documents(text, length)
    with best_device() as device:
        model = GPT(length=length).to(device)
        optimiser = torch.optim.AdamW(model.parameters(), lr=3e-3)
        start = time.perf_counter()
        for step in range(1, steps + 1):
            chosen = [known[i] for i in torch.randint(len(known), (batch,)).tolist()]
            inputs, targets, bounds, longest = packed(chosen, device)
            loss = nn.functional.cross_entropy(model(inputs, bounds, longest), targets.long())
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
            losses.append(loss.item())
            seconds = time.perf_counter() - start
            print(
                f"step {step}/{steps}: loss {losses[-1]:.3f}, {len(inputs)} tokens of {batch} "
                f"documents, {seconds:.1f} s on {device}",
                flush=True,
            )
    return losses


def main(arguments: list[str] | None = None) -> list[float]:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--text", type=Path, help="a text file (default: this script)")
    parser.add_argument("--steps", type=int, default=20, help="default: 20")
    parser.add_argument("--batch", type=int, default=4, help="documents per step (default: 4)")
    parser.add_argument("--length", type=int, default=128, help="bytes per document (default: 128)")
    options = parser.parse_args(arguments)
    if min(options.steps, options.batch, options.length) < 1:
        parser.error("--steps, --batch and --length must be at least 1")
    file = options.text or Path(__file__)
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        parser.error(f"cannot read {file}: {error}")
    if not documents(text, options.length):
        parser.error(f"{file} has no document of two bytes or more")
    return train(text, options.steps, options.batch, options.length)


if __name__ == "__main__":
    main()

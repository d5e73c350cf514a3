"""Errors and perplexity by the format of the cache.

A tiny model of bytes is trained on the repository's own pages. Its keys and values are then rounded
to each format, as `append_kv` rounds them, and float64 attention reads them, or the last rows in
full precision as with `recent`. So these are the formats' own errors; kernels add those that
docs/numerics.md allows.
"""

import math
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bench.tables import print_table
from torch_metal_attn.quantisation import DTYPES, dequantise, quantise, sizes
from torch_metal_attn.with_kvcache import VERIFY_QUERIES

HEADS, HEAD_DIM, LAYERS, CONTEXT = 2, 64, 2, 256
STEPS, BATCH = 1600, 8
RECENT = 32
# Rows in full precision: those, and room for a step's.
KEPT = RECENT + VERIFY_QUERIES
# Of keys and of values, and the columns of a block in which rows are rotated.
Formats = tuple[str | None, str | None, int]
FORMATS = (
    *((None, None, 0), ("q8_0", "q8_0", 0), ("fp8_e4m3", "fp8_e4m3", 0), ("q4_0", "q4_0", 0)),
    *(("q4_g32", "q4_g32", 0), ("q4_g64", "q4_g64", 0), ("q3_g32", "q3_g32", 0)),
    *(("q3_g64", "q3_g64", 0), ("q2_g32", "q2_g32", 0), ("q2_g64", "q2_g64", 0)),
    *(
        ("q8_0", "q3_g32", 0),
        ("q4_g32", "q2_g32", 0),
        ("q4_0", "q4_0", 64),
        ("q4_g64", "q4_g64", 64),
    ),
    *(("q3_g32", "q3_g32", 32), ("q3_g64", "q3_g64", 64), ("q2_g32", "q2_g32", 32)),
    ("q2_g64", "q2_g64", 64),
)
# The factor of the first column of keys and of values, of which the second error is.
OUTLIER = 20


def rounded(x: Tensor, format: str | None, hadamard: int) -> Tensor:
    if format is None:
        return x
    data, scale = quantise(x.float(), format, hadamard=hadamard)
    return dequantise(data, scale, torch.float32, hadamard=hadamard).to(x.dtype)


def both(k: Tensor, v: Tensor, formats: Formats) -> tuple[Tensor, Tensor]:
    return rounded(k, formats[0], formats[2]), rounded(v, formats[1], formats[2])


def error(k: Tensor, v: Tensor, q: Tensor, formats: Formats) -> float:
    """Of attention: the root mean square, relative to that of the result."""
    exact = F.scaled_dot_product_attention(q, k, v)
    apart = F.scaled_dot_product_attention(q, *both(k, v, formats)) - exact
    return float((apart.square().mean() / exact.square().mean()).sqrt())


def row_bytes(format: str | None) -> int:
    """Bytes of a row of HEAD_DIM columns, with its scales; of float16 without a format."""
    if format is None:
        return 2 * HEAD_DIM
    elements, numbers = sizes(format, HEAD_DIM)
    return elements * DTYPES[format].itemsize + 2 * numbers


class Layer(nn.Module):
    """Attention and a feed-forward network, over keys and values in two formats."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))

    def forward(self, x: Tensor, formats: Formats, kept: int) -> Tensor:
        qkv = self.qkv(self.norms[0](x)).unflatten(-1, (3, HEADS, HEAD_DIM)).transpose(1, 3)
        q, k, v = qkv.unbind(2)
        if formats[0] is None:
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            far = torch.ones(CONTEXT, CONTEXT, dtype=torch.bool).tril(-kept)
            coded_k, coded_v = both(k, v, formats)
            scores = torch.where(far, q @ coded_k.mT, q @ k.mT) * HEAD_DIM**-0.5
            shares = scores.masked_fill(~torch.ones_like(far).tril(), -math.inf).softmax(-1)
            mixed = (shares * far) @ coded_v + (shares * ~far) @ v
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norms[1](x))))


class Model(nn.Module):
    """Predicts the next byte from those before it."""

    def __init__(self) -> None:
        super().__init__()
        width = HEADS * HEAD_DIM
        self.bytes, self.places = nn.Embedding(256, width), nn.Embedding(CONTEXT, width)
        self.layers = nn.ModuleList(Layer(width) for _ in range(LAYERS))
        self.head = nn.Linear(width, 256)

    def loss(self, text: Tensor, formats: Formats = (None, None, 0), kept: int = 0) -> Tensor:
        """Of each byte of text (B, CONTEXT + 1) but the first, in nats."""
        x = self.bytes(text[:, :-1]) + self.places.weight
        for layer in self.layers:
            x = layer(x, formats, kept)
        return F.cross_entropy(self.head(x).flatten(0, 1), text[:, 1:].flatten())


def trained(text: Tensor) -> Model:
    model = Model()
    optimiser = torch.optim.AdamW(model.parameters(), 3e-3)
    for _ in range(STEPS):
        starts = torch.randint(len(text) - CONTEXT - 1, (BATCH,))
        loss = model.loss(torch.stack([text[s : s + CONTEXT + 1] for s in starts.tolist()]))
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    return model.double()


def main() -> None:
    torch.manual_seed(0)
    pages = sorted((Path(__file__).parents[1] / "docs").glob("*.md"))
    text = torch.tensor(list("".join(page.read_text() for page in pages).encode()))
    cut = len(text) * 9 // 10
    model = trained(text[:cut])
    held = text[cut : cut + 40 * (CONTEXT + 1)].view(40, -1)
    q, k, v = (torch.randn(1, 8, n, HEAD_DIM, dtype=torch.float64) for n in (16, 512, 512))
    outliers = torch.ones(HEAD_DIM, dtype=torch.float64)
    outliers[0] = OUTLIER
    rows = []
    for formats in FORMATS:
        # The queries of a model are small where its keys are large.
        errors = error(k, v, q, formats), error(k * outliers, v * outliers, q / outliers, formats)
        with torch.no_grad():
            found = [math.exp(model.loss(held, formats, kept)) for kept in (0, KEPT)]
        share = sum(map(row_bytes, formats[:2])) / (2 * row_bytes(None))
        names = [f or "not quantised" for f in formats[:2]]
        cells = [f"{share:.3f}", *(f"{e:.4f}" for e in errors), *(f"{p:.3f}" for p in found)]
        rows.append((*names, formats[2], *cells))
    print_table(
        (
            *("keys", "values", "hadamard", "bytes / float16's", "error"),
            *("with outliers", "perplexity", f"with recent={RECENT}"),
        ),
        rows,
    )


if __name__ == "__main__":
    main()

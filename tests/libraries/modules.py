"""Attention as in libraries that are not installed: the same function, layout and options."""

import torch
from torch import nn
from torch.nn import functional

WIDTH, HEADS, LENGTH, WORDS = 32, 2, 9, 11


class NanoGPT(nn.Module):
    """nanoGPT's attention: is_causal, and dropout while it trains."""

    def __init__(self, dropout=0.0):
        super().__init__()
        self.c_attn = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.dropout = dropout

    def forward(self, x):
        parts = self.c_attn(x).split(WIDTH, dim=2)
        q, k, v = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in parts)
        out = functional.scaled_dot_product_attention(
            q, k, v, attn_mask=None, dropout_p=self.dropout if self.training else 0, is_causal=True
        )
        return out.transpose(1, 2).contiguous().flatten(2)


def nanochat_sdpa(q, k, v, causal=False, window_size=(-1, -1)):
    """nanochat's flash_attn_func without FlashAttention 3: a mask if there is a window."""
    assert causal
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    length, window = q.shape[2], window_size[0]
    options = {"enable_gqa": q.shape[1] != k.shape[1]}
    if window < 0 or window >= length:
        options["is_causal"] = True
    else:
        apart = torch.arange(length)[:, None] - torch.arange(length)
        options["attn_mask"] = (apart >= 0) & (apart <= window)
    return functional.scaled_dot_product_attention(q, k, v, **options).transpose(1, 2)


class NanoChat(nn.Module):
    """nanochat's attention: normalised queries and keys, grouped heads, sliding windows."""

    flash_attn_func = staticmethod(nanochat_sdpa)

    def __init__(self, window=4):
        super().__init__()
        self.c_q = nn.Linear(WIDTH, WIDTH, bias=False)
        self.c_kv = nn.Linear(WIDTH, WIDTH, bias=False)
        self.window = window

    def forward(self, x):
        q = self.c_q(x).unflatten(-1, (HEADS, -1))
        k, v = self.c_kv(x).unflatten(-1, (2, 1, -1)).unbind(2)
        q, k = (functional.rms_norm(each, each.shape[-1:]) for each in (q, k))
        out = self.flash_attn_func(q, k, v, causal=True, window_size=(self.window, 0))
        return out.flatten(2)


class FlashAttention(NanoChat):
    @staticmethod
    def flash_attn_func(*args, **options):
        from flash_attn import flash_attn_func

        return flash_attn_func(*args, **options)


class Language(nn.Module):
    """A language model with one block for each attention."""

    def __init__(self, *attentions):
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.attentions = nn.ModuleList(attentions)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, tokens):
        x = self.words(tokens)
        for attention in self.attentions:
            x = x + attention(functional.layer_norm(x, x.shape[-1:]))
            x = x + self.mlp(x)
        return self.head(x)


def tokens():
    return torch.randint(WORDS, (2, LENGTH + 1), generator=torch.Generator().manual_seed(2))


def loss_of(model, batch):
    logits = model(batch[:, :-1])
    return functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())


def train(model, steps=3):
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(steps):
        optimiser.zero_grad(set_to_none=True)
        loss = loss_of(model, tokens())
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    return losses

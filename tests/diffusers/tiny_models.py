"""Tiny random models of diffusers and their inputs, one for each way to call attention."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import diffusers
import torch
from torch import Tensor

TEXT = 7  # tokens of a prompt; the last two are padding if the model takes a mask
STATES = "encoder_hidden_states"


@dataclass(frozen=True)
class Family:
    """A class of diffusers and its options. calls: the attentions of one forward pass."""

    model: str
    options: dict[str, Any]
    inputs: Callable[[], dict[str, Any]]
    calls: int

    def build(self) -> torch.nn.Module:
        torch.manual_seed(0)
        return getattr(diffusers, self.model)(**self.options).eval()

    def arguments(self) -> dict[str, Any]:
        torch.manual_seed(1)
        return self.inputs()


def latents(*shape: int, **text: Any) -> dict[str, Any]:
    return {"hidden_states": torch.randn(*shape), "timestep": torch.tensor([500]), **text}


def prompt(channels: int, mask: str = "") -> dict[str, Tensor]:
    text = {STATES: torch.randn(1, TEXT, channels)}
    return text | ({mask: torch.arange(TEXT)[None] < TEXT - 2} if mask else {})


_TWO_HEADS = {"num_layers": 1, "attention_head_dim": 16, "num_attention_heads": 2}
FAMILIES = {
    "UNet XL": Family(
        "UNet2DConditionModel",
        {
            "layers_per_block": 1,
            "cross_attention_dim": 32,
            "norm_num_groups": 8,
            "block_out_channels": (32, 64),
            "attention_head_dim": (2, 4),
            "transformer_layers_per_block": (1, 2),
            "use_linear_projection": True,
            "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
            "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D"),
            "addition_embed_type": "text_time",
            "addition_time_embed_dim": 8,
            "projection_class_embeddings_input_dim": 80,
        },
        lambda: {
            "sample": torch.randn(1, 4, 8, 8),
            "timestep": 500,
            **prompt(32, "encoder_attention_mask"),
            "added_cond_kwargs": {"text_embeds": torch.randn(1, 32), "time_ids": torch.randn(1, 6)},
        },
        calls=16,
    ),
    "VAE": Family(
        "AutoencoderKL",
        {"block_out_channels": (512,), "norm_num_groups": 8},
        lambda: {"sample": torch.randn(1, 3, 8, 8)},
        calls=2,
    ),
    "Flux": Family(
        "FluxTransformer2DModel",
        {
            **_TWO_HEADS,
            "in_channels": 4,
            "num_single_layers": 1,
            "joint_attention_dim": 32,
            "pooled_projection_dim": 32,
            "axes_dims_rope": (4, 4, 8),
        },
        lambda: {
            **latents(1, 16, 4, **prompt(32), pooled_projections=torch.randn(1, 32)),
            "img_ids": torch.randn(16, 3),
            "txt_ids": torch.randn(TEXT, 3),
        },
        calls=2,
    ),
    "QwenImage": Family(
        "QwenImageTransformer2DModel",
        {
            **_TWO_HEADS,
            "in_channels": 16,
            "out_channels": 4,
            "joint_attention_dim": 16,
            "axes_dims_rope": (8, 4, 4),
        },
        lambda: latents(1, 16, 16, **prompt(16, f"{STATES}_mask"), img_shapes=[(1, 4, 4)]),
        calls=1,
    ),
    # Three query heads share a KV head.
    "Lumina 2": Family(
        "Lumina2Transformer2DModel",
        {
            "in_channels": 4,
            "hidden_size": 48,
            "num_layers": 1,
            "num_refiner_layers": 1,
            "num_attention_heads": 3,
            "num_kv_heads": 1,
            "multiple_of": 2,
            "axes_dim_rope": (8, 4, 4),
            "axes_lens": (64, 64, 64),
            "cap_feat_dim": 32,
        },
        lambda: latents(1, 4, 8, 8, **prompt(32, "encoder_attention_mask")),
        calls=3,
    ),
}


def answer(model: torch.nn.Module, arguments: dict[str, Any]) -> Tensor:
    result = model(**arguments, return_dict=False)[0]
    return torch.cat([x.flatten() for x in result]) if isinstance(result, list) else result

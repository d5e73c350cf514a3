"""Tiny pipelines of diffusers, from the prompt's embedding to pixels: one of each kind of decoder.

Every family's model alone is in tiny_models.py.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import diffusers
import torch
from torch import Tensor

from tests.diffusers.tiny_models import FAMILIES, TEXT, padded

STEPS = 2
FRAMES = {"num_frames": 3}


@dataclass(frozen=True)
class Pipeline:
    """The class, which model it runs and with which decoder, and its arguments.

    passes: of the model in each step. decoded: attentions of the decoder.
    """

    kind: Any
    family: str
    vae: Callable[[], torch.nn.Module]
    arguments: Callable[[], dict[str, Any]]
    passes: int = 1
    decoded: int = 1
    scheduler: Any = diffusers.FlowMatchEulerDiscreteScheduler
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def calls(self) -> int:
        return STEPS * self.passes * FAMILIES[self.family].calls + self.decoded

    def build(self) -> Any:
        """The pipeline without text encoders, and without anything else that it can spare."""
        parameters = inspect.signature(self.kind.__init__).parameters
        model = "unet" if "unet" in parameters else "transformer"
        given = {
            model: FAMILIES[self.family].build(),
            "vae": self.vae(),
            "scheduler": self.scheduler(),
        }
        absent = {
            name: None
            for name, parameter in parameters.items()
            if name != "self" and parameter.default is parameter.empty
        }
        pipeline = self.kind(**absent | given | self.options)
        pipeline.set_progress_bar_config(disable=True)
        return pipeline

    def run(self) -> Any:
        pipeline = self.build()
        torch.manual_seed(3)
        return pipeline(
            **{"height": 16, "width": 16} | self.arguments(),
            num_inference_steps=STEPS,
            output_type="np",
            generator=torch.Generator().manual_seed(4),
        )[0]


def seeded(kind: Any, **config: Any) -> Callable[[], torch.nn.Module]:
    def build() -> torch.nn.Module:
        torch.manual_seed(2)
        return kind(**config).eval()

    return build


def vae(**config: Any) -> Callable[[], torch.nn.Module]:
    """The decoder of images, which doubles height and width."""
    shape = {"block_out_channels": (16, 16), "norm_num_groups": 8, "latent_channels": 4}
    return seeded(
        diffusers.AutoencoderKL,
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        **shape | config,
    )


# Of the decoders of Wan and QwenImage, which double height and width.
CAUSAL_VAE = {
    "base_dim": 8,
    "z_dim": 4,
    "dim_mult": [1, 1],
    "num_res_blocks": 1,
    "temperal_downsample": [True],
    "latents_mean": [0.0] * 4,
    "latents_std": [1.0] * 4,
}


def video_vae(kind: Any, name: str, **config: Any) -> Callable[[], torch.nn.Module]:
    """The decoder of videos, of two blocks by this name, which doubles height and width."""
    return seeded(
        kind,
        down_block_types=(name.format("Down"),) * 2,
        up_block_types=(name.format("Up"),) * 2,
        block_out_channels=(8, 8),
        layers_per_block=1,
        norm_num_groups=4,
        latent_channels=4,
        **config,
    )


def embedded(channels: int, tokens: int = TEXT, pooled: int = 0, mask: str = "") -> dict[str, Any]:
    given = {"prompt_embeds": torch.randn(1, tokens, channels)}
    if pooled:
        given["pooled_prompt_embeds"] = torch.randn(1, pooled)
    return given | ({mask: padded(tokens)} if mask else {})


def with_negative(given: dict[str, Tensor]) -> dict[str, Tensor]:
    negative = {
        name: x if x.dtype == torch.bool else torch.randn_like(x) for name, x in given.items()
    }
    return given | {f"negative_{name}": x for name, x in negative.items()}


PIPELINES = {
    "Stable Diffusion 1.5": Pipeline(
        diffusers.StableDiffusionPipeline,
        "UNet 1.5",
        vae(),
        lambda: with_negative(embedded(32, tokens=77)),
        scheduler=diffusers.DDIMScheduler,
    ),
    "Flux": Pipeline(
        diffusers.FluxPipeline,
        "Flux",
        vae(latent_channels=1, shift_factor=0.0),
        lambda: embedded(32, pooled=32),
    ),
    "QwenImage": Pipeline(
        diffusers.QwenImagePipeline,
        "QwenImage",
        seeded(diffusers.AutoencoderKLQwenImage, **CAUSAL_VAE),
        lambda: with_negative(embedded(16, mask="prompt_embeds_mask")),
        passes=2,
    ),
    "Wan": Pipeline(
        diffusers.WanPipeline,
        "Wan",
        seeded(
            diffusers.AutoencoderKLWan,
            **CAUSAL_VAE,
            scale_factor_spatial=2,
            scale_factor_temporal=2,
        ),
        lambda: with_negative(embedded(16)) | FRAMES,
        passes=2,
        decoded=2,  # one for each frame of the latents
    ),
    "HunyuanVideo": Pipeline(
        diffusers.HunyuanVideoPipeline,
        "HunyuanVideo",
        video_vae(
            diffusers.AutoencoderKLHunyuanVideo,
            "HunyuanVideo{}Block3D",
            spatial_compression_ratio=2,
        ),
        lambda: embedded(16, pooled=8, mask="prompt_attention_mask") | FRAMES,
    ),
    "CogVideoX": Pipeline(
        diffusers.CogVideoXPipeline,
        "CogVideoX",
        video_vae(
            diffusers.AutoencoderKLCogVideoX,
            "CogVideoX{}Block3D",
            temporal_compression_ratio=2,
        ),
        lambda: with_negative(embedded(8)) | FRAMES,
        decoded=0,
        scheduler=diffusers.CogVideoXDDIMScheduler,
    ),
}

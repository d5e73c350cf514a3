"""The diffusion pipeline of the examples: the user's, or a tiny random one."""

from typing import Any

import diffusers
import torch
from torch import Tensor

TEXT_TOKENS, TEXT_WIDTH = 7, 32


def pipeline_of(name: str | None) -> Any:
    """A Stable Diffusion 1 or 2 by its name or folder; None makes a tiny random one."""
    if name is not None:
        return diffusers.StableDiffusionPipeline.from_pretrained(name)
    torch.manual_seed(0)
    unet = diffusers.UNet2DConditionModel(
        sample_size=8,
        layers_per_block=1,
        block_out_channels=(32, 64),
        attention_head_dim=(2, 4),
        cross_attention_dim=TEXT_WIDTH,
        norm_num_groups=8,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
    )
    vae = diffusers.AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        block_out_channels=(16, 16),
        norm_num_groups=8,
        latent_channels=4,
    )
    return diffusers.StableDiffusionPipeline(
        vae=vae.eval(),
        unet=unet.eval(),
        scheduler=diffusers.DDIMScheduler(clip_sample=False, steps_offset=1),
        text_encoder=None,
        tokenizer=None,
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )


def embedded(pipeline: Any, prompt: str, device: torch.device) -> Tensor:
    """The prompt (1, tokens, width); random numbers for a pipeline without a text encoder."""
    if pipeline.text_encoder is None:
        generator = torch.Generator().manual_seed(1)
        return torch.randn(1, TEXT_TOKENS, TEXT_WIDTH, generator=generator).to(device)
    with torch.no_grad():
        embeddings: Tensor = pipeline.encode_prompt(prompt, device, 1, False)[0]
    return embeddings

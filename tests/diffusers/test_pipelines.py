"""Whole pipelines, from the prompt's embedding to pixels, against torch's own attention."""

import diffusers
import numpy as np
import pytest
import torch
from diffusers.models.attention_dispatch import attention_backend

from tests.diffusers.test_families import TOLERANCE, launches
from tests.diffusers.tiny_models import FAMILIES, TEXT

STEPS = 2
WAN_FRAMES = 3
PIXELS = {"height": 16, "width": 16, "num_inference_steps": STEPS, "output_type": "np"}
NO_TEXT_ENCODER = {"text_encoder": None, "tokenizer": None}


def vae(**config):
    torch.manual_seed(2)
    shape = {"block_out_channels": (16, 16), "norm_num_groups": 8, "latent_channels": 4}
    return diffusers.AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        **shape | config,
    )


def wan_vae():
    torch.manual_seed(2)
    return diffusers.AutoencoderKLWan(
        base_dim=8,
        z_dim=4,
        dim_mult=[1, 1],
        num_res_blocks=1,
        temperal_downsample=[True],
        latents_mean=[0.0] * 4,
        latents_std=[1.0] * 4,
        scale_factor_spatial=2,
        scale_factor_temporal=2,
    )


def embedded(channels, tokens=TEXT, pooled=0):
    given = {"prompt_embeds": torch.randn(1, tokens, channels)}
    return given | ({"pooled_prompt_embeds": torch.randn(1, pooled)} if pooled else {})


def with_negative(given):
    return given | {f"negative_{name}": torch.randn_like(x) for name, x in given.items()}


# Of each: the pipeline, its arguments, and its attentions, those of the decoder last.
PIPELINES = {
    "Stable Diffusion 1.5": (
        lambda: diffusers.StableDiffusionPipeline(
            vae=vae(),
            unet=FAMILIES["UNet 1.5"].build(),
            scheduler=diffusers.DDIMScheduler(),
            safety_checker=None,
            feature_extractor=None,
            **NO_TEXT_ENCODER,
        ),
        lambda: with_negative(embedded(32, tokens=77)),
        STEPS * FAMILIES["UNet 1.5"].calls + 1,
    ),
    "Stable Diffusion XL": (
        lambda: diffusers.StableDiffusionXLPipeline(
            vae=vae(),
            unet=FAMILIES["UNet XL"].build(),
            scheduler=diffusers.EulerDiscreteScheduler(),
            text_encoder_2=None,
            tokenizer_2=None,
            **NO_TEXT_ENCODER,
        ),
        lambda: with_negative(embedded(32, pooled=32)),
        STEPS * FAMILIES["UNet XL"].calls + 1,
    ),
    "Stable Diffusion 3": (
        lambda: diffusers.StableDiffusion3Pipeline(
            vae=vae(shift_factor=0.0),
            transformer=FAMILIES["Stable Diffusion 3"].build(),
            scheduler=diffusers.FlowMatchEulerDiscreteScheduler(),
            text_encoder_2=None,
            tokenizer_2=None,
            text_encoder_3=None,
            tokenizer_3=None,
            **NO_TEXT_ENCODER,
        ),
        lambda: with_negative(embedded(32, pooled=32)),
        STEPS * FAMILIES["Stable Diffusion 3"].calls + 1,
    ),
    "Flux": (
        lambda: diffusers.FluxPipeline(
            vae=vae(latent_channels=1, shift_factor=0.0),
            transformer=FAMILIES["Flux"].build(),
            scheduler=diffusers.FlowMatchEulerDiscreteScheduler(),
            text_encoder_2=None,
            tokenizer_2=None,
            **NO_TEXT_ENCODER,
        ),
        lambda: embedded(32, pooled=32),
        STEPS * FAMILIES["Flux"].calls + 1,
    ),
    "Wan": (
        lambda: diffusers.WanPipeline(
            vae=wan_vae(),
            transformer=FAMILIES["Wan"].build(),
            scheduler=diffusers.FlowMatchEulerDiscreteScheduler(),
            **NO_TEXT_ENCODER,
        ),
        lambda: with_negative(embedded(16)) | {"num_frames": WAN_FRAMES},
        # With and without the prompt; the decoder has one for each frame of the latents.
        STEPS * 2 * FAMILIES["Wan"].calls + 2,
    ),
}


def run(name):
    make, arguments, _ = PIPELINES[name]
    pipeline = make()
    pipeline.set_progress_bar_config(disable=True)
    torch.manual_seed(3)
    generator = torch.Generator().manual_seed(4)
    return np.asarray(pipeline(**arguments(), **PIXELS, generator=generator)[0])


@pytest.mark.parametrize("name", PIPELINES)
def test_pixels(name, device, metal_attn):
    with attention_backend("native"):
        expected = run(name)
    before = launches()
    actual = run(name)
    assert launches() - before == PIPELINES[name][2]
    np.testing.assert_allclose(actual, expected, atol=TOLERANCE)
    assert expected.std() > 0.05, "nothing but grey"

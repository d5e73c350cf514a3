"""A whole pipeline, from the prompt's embedding to pixels, against torch's own attention."""

import diffusers
import numpy as np
import torch
from diffusers.models.attention_dispatch import attention_backend

from tests.diffusers.test_families import TOLERANCE, launches
from tests.diffusers.tiny_models import FAMILIES, TEXT, padded

STEPS = 2


def pixels():
    """Of QwenImage: its model has a mask and runs twice a step, its decoder is a VAE of another."""
    torch.manual_seed(2)
    decoder = diffusers.AutoencoderKLQwenImage(
        base_dim=8,
        z_dim=4,
        dim_mult=[1, 1],
        num_res_blocks=1,
        temperal_downsample=[True],
        latents_mean=[0.0] * 4,
        latents_std=[1.0] * 4,
    )
    pipeline = diffusers.QwenImagePipeline(
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(),
        vae=decoder.eval(),
        text_encoder=None,
        tokenizer=None,
        transformer=FAMILIES["QwenImage"].build(),
    )
    pipeline.set_progress_bar_config(disable=True)
    torch.manual_seed(3)
    return pipeline(
        height=16,
        width=16,
        prompt_embeds=torch.randn(1, TEXT, 16),
        prompt_embeds_mask=padded(TEXT),
        negative_prompt_embeds=torch.randn(1, TEXT, 16),
        negative_prompt_embeds_mask=padded(TEXT),
        num_inference_steps=STEPS,
        output_type="np",
        generator=torch.Generator().manual_seed(4),
    )[0]


def test_pixels(device, metal_attn):
    with attention_backend("native"):
        expected = np.asarray(pixels())
    before = launches()
    actual = np.asarray(pixels())
    assert launches() - before == STEPS * 2 * FAMILIES["QwenImage"].calls + 1
    np.testing.assert_allclose(actual, expected, atol=TOLERANCE)
    assert expected.std() > 0.05, "nothing but grey"

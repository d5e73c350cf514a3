"""Train a LoRA of a diffusion model on a few images, with the attention of metal_attn.

    python docs/examples/train_lora.py --model some/stable-diffusion --images FOLDER --out lora

Without --model the pipeline is tiny and random. Without --images the images are colour gradients.
"""

import argparse
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusers.models.attention_dispatch import attention_backend
from peft import LoraConfig, get_peft_model_state_dict
from PIL import Image
from tiny_pipeline import embedded, pipeline_of
from torch import Tensor

from torch_metal_attn.runtime.device import best_device

TARGETS = ["to_q", "to_k", "to_v", "to_out.0"]


def gradients_of_colour(size: int) -> Tensor:
    """Four images (4, 3, size, size) in -1..1."""
    ramp = torch.linspace(-1, 1, size).expand(size, size)
    one = torch.stack([ramp, ramp.T, torch.zeros(size, size)])
    return torch.stack([one, one.flip(1), one.flip(2), one.flip(0)])


def loaded(folder: Path, size: int) -> Tensor:
    """The images of a folder (N, 3, size, size) in -1..1, resized to squares."""
    if not folder.is_dir():
        raise SystemExit(f"{folder} is not a folder")
    paths = sorted(path for path in folder.iterdir() if path.suffix.lower() in (".png", ".jpg"))
    if not paths:
        raise SystemExit(f"{folder} has no .png or .jpg file")
    pixels = [np.array(Image.open(path).convert("RGB").resize((size, size))) for path in paths]
    return torch.from_numpy(np.stack(pixels)).permute(0, 3, 1, 2) / 127.5 - 1


def train(
    pipeline: Any, images: Tensor, text: str, steps: int, backend: str, out: Path | None
) -> list[float]:
    """The loss of each step on the best device."""
    torch.manual_seed(0)
    losses = []
    with best_device() as device, attention_backend(backend):
        pipeline.to(device)
        prompt = embedded(pipeline, text, device)
        with torch.no_grad():
            latents = pipeline.vae.encode(images.to(device)).latent_dist.mean
        latents = latents * pipeline.vae.config.scaling_factor
        unet = pipeline.unet.requires_grad_(False)
        unet.add_adapter(LoraConfig(r=4, target_modules=TARGETS, init_lora_weights="gaussian"))
        trained = [weight for weight in unet.parameters() if weight.requires_grad]
        optimiser = torch.optim.AdamW(trained, lr=1e-3)
        schedule = pipeline.scheduler
        start = time.perf_counter()
        for step in range(1, steps + 1):
            # Random numbers from the CPU are the same on every device.
            chosen = latents[torch.randint(len(latents), (1,)).to(device)]
            noise = torch.randn(chosen.shape).to(chosen)
            moment = torch.randint(schedule.config.num_train_timesteps, (1,)).to(device)
            noisy = schedule.add_noise(chosen, noise, moment)
            loss = torch.nn.functional.mse_loss(unet(noisy, moment, prompt).sample, noise)
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
            losses.append(loss.item())
            seconds = time.perf_counter() - start
            print(f"step {step}/{steps}: loss {losses[-1]:.4f}, {seconds:.1f} s on {device}")
        if out is not None:
            pipeline.save_lora_weights(out, unet_lora_layers=get_peft_model_state_dict(unet))
            print(f"wrote {out}")
    return losses


def main(arguments: list[str] | None = None) -> list[float]:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--model", help="a Stable Diffusion 1 or 2 (default: a tiny random one)")
    parser.add_argument("--images", type=Path, help="a folder (default: colour gradients)")
    parser.add_argument("--prompt", default="a colour gradient")
    parser.add_argument("--size", type=int, default=16, help="pixels of a side (default: 16)")
    parser.add_argument("--steps", type=int, default=4, help="default: 4")
    parser.add_argument("--backend", default="metal_attn", help='or "native", torch\'s attention')
    parser.add_argument("--out", type=Path, help="a folder for the LoRA")
    options = parser.parse_args(arguments)
    if options.images is None:
        images = gradients_of_colour(options.size)
    else:
        images = loaded(options.images, options.size)
    pipeline = pipeline_of(options.model)
    return train(pipeline, images, options.prompt, options.steps, options.backend, options.out)


if __name__ == "__main__":
    main()

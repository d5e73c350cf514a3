"""The node "Metal attention", which patches a model."""

import os
from typing import Any

from torch_metal_attn.integrations.comfyui.attention import patch
from torch_metal_attn.integrations.sdpa_replacement import sdpa_replaced
from torch_metal_attn.wording import value_text

VARIABLE = "TORCH_METAL_ATTN_COMFYUI"


class MetalAttention:
    """ComfyUI reads a node's inputs and outputs from these names."""

    RETURN_TYPES = ("MODEL",)
    FUNCTION = "patch"
    CATEGORY = "model_patches"
    DESCRIPTION = "Runs the model's attention on torch_metal_attn's kernels."

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {"required": {"model": ("MODEL",), "enabled": ("BOOLEAN", {"default": True})}}

    def patch(self, model: Any, enabled: bool) -> tuple[Any]:
        return (patch(model) if enabled else model,)


NODE_CLASS_MAPPINGS = {"MetalAttention": MetalAttention}
NODE_DISPLAY_NAME_MAPPINGS = {"MetalAttention": "Metal attention"}


def replace_everywhere() -> None:
    """If TORCH_METAL_ATTN_COMFYUI=all, run all of ComfyUI's calls of torch's attention on kernels.

    Raises: ValueError: the variable has another value.
    """
    value = os.environ.get(VARIABLE, "")
    if value == "all":
        sdpa_replaced(process_wide=True).__enter__()
    elif value:
        raise ValueError(f'{VARIABLE} is {value_text(value)}; it must be "all", or not set')

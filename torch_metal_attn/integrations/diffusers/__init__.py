"""diffusers' attention on these kernels: the backend "metal_attn".

`import torch_metal_attn` registers it, whether diffusers is imported before or after. Then
`model.set_attention_backend("metal_attn")`, `with attention_backend("metal_attn"):` and the
environment variable DIFFUSERS_ATTN_BACKEND=metal_attn work as with diffusers' own backends.

Models whose attention is older than diffusers' backends (UNets, VAEs, Stable Diffusion 3 and
others) call torch's `scaled_dot_product_attention` and ignore the backend of the model. They too
run here while "metal_attn" is diffusers' active backend, as in each of the three ways above.
"""

from torch_metal_attn.integrations.diffusers.backend import (
    BACKEND,
    activate,
    metal_attention,
    register,
)

register()

__all__ = ["BACKEND", "activate", "metal_attention"]

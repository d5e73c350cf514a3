"""Flash attention for PyTorch on Apple GPUs, with a simulator that runs its kernels on any CPU."""

# Imported first: it raises clear errors for an unbuilt package and a missing or too old torch.
from torch_metal_attn.runtime import extension

try:
    from torch_metal_attn import ops  # noqa: F401  (fake kernels, CPU kernels, autograd)
except (AttributeError, RuntimeError) as error:
    extension.refuse_older_build(error)
from torch_metal_attn import distributed, kv_cache, masks, rope, scores
from torch_metal_attn.call.philox import dropout_mask
from torch_metal_attn.flash_attn.installation import install_flash_attn
from torch_metal_attn.flex.attention import flex_attention
from torch_metal_attn.flex.dense_mask import block_mask
from torch_metal_attn.flex.replacement import flex_replaced
from torch_metal_attn.functional import (
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
)
from torch_metal_attn.integrations.registration import (
    register_with_diffusers,
    register_with_transformers,
)
from torch_metal_attn.integrations.sdpa_replacement import sdpa_replaced
from torch_metal_attn.runtime import device, mps, shaders, tensor_tiles
from torch_metal_attn.runtime.tensor_tiles import allow_tf32, tf32_allowed
from torch_metal_attn.runtime.version import VERSION
from torch_metal_attn.sdpa import scaled_dot_product_attention
from torch_metal_attn.simulator import SimulatorFault, simulate
from torch_metal_attn.tools.explain import Explanation, ModelExplanation, explain
from torch_metal_attn.tools.warm_up import WarmUp, warm_up
from torch_metal_attn.tuned import loading
from torch_metal_attn.with_kvcache import flash_attn_with_kvcache

__version__ = VERSION

if mps.available():
    device.warn_of_torch()
    shaders.serve(extension.load())  # the simulator reads the shaders in Python
    extension.tell_gpu(extension.load())
    tensor_tiles.configure(extension.load(), __version__)
register_with_transformers()
register_with_diffusers()
loading.install_on_import()

__all__ = [
    "Explanation",
    "ModelExplanation",
    "SimulatorFault",
    "WarmUp",
    "allow_tf32",
    "block_mask",
    "distributed",
    "dropout_mask",
    "explain",
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
    "flex_attention",
    "flex_replaced",
    "install_flash_attn",
    "kv_cache",
    "masks",
    "mps",
    "rope",
    "scaled_dot_product_attention",
    "scores",
    "sdpa_replaced",
    "simulate",
    "tf32_allowed",
    "warm_up",
]

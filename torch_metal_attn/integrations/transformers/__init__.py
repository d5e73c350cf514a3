"""Hugging Face transformers with `attn_implementation="metal_attn"`.

`import torch_metal_attn` registers the attention function and its mask function once transformers
is imported too. Then `from_pretrained(..., attn_implementation="metal_attn")` accepts the name, and
`enable(model)` switches an existing model. Both refuse models that would ignore the implementation
or give wrong results with it.

Every call runs one op of `metal_attn`. A mask is passed in the smallest form that can express it:
nothing for full or plain causal attention; a compact descriptor for windows, chunks, padding and
caches (see `masks`); a dense mask for everything else.

`continuous_batching(model)` switches the attention of `model.generate_batch`.
"""

import inspect

_REQUIREMENT = (
    "torch_metal_attn.integrations.transformers needs transformers 5.4 or later "
    "(pip install 'transformers>=5.4')"
)

try:
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import (
        bidirectional_mask_function,  # noqa: F401
        sdpa_mask,
        sliding_window_bidirectional_overlay,  # noqa: F401
    )
except ImportError as error:
    raise ImportError(f"{_REQUIREMENT}: {error}") from error
if "q_length" not in inspect.signature(sdpa_mask).parameters:
    raise ImportError(f"{_REQUIREMENT}: older versions call mask functions in another way")

from torch_metal_attn.integrations.transformers.attention import metal_attention  # noqa: E402
from torch_metal_attn.integrations.transformers.continuous import (  # noqa: E402
    FLASH_NAME,
    continuous_batching,
    metal_flash_attention,
)
from torch_metal_attn.integrations.transformers.enable import enable  # noqa: E402
from torch_metal_attn.integrations.transformers.latent import latent_cache  # noqa: E402
from torch_metal_attn.integrations.transformers.masks import metal_attention_mask  # noqa: E402
from torch_metal_attn.integrations.transformers.refusals import NAME, guard_models  # noqa: E402
from torch_metal_attn.integrations.transformers.routes import Routes, record_routes  # noqa: E402

AttentionInterface.register(NAME, metal_attention)
AttentionMaskInterface.register(NAME, metal_attention_mask)
# Without a mask function, so that transformers makes no masks.
AttentionInterface.register(FLASH_NAME, metal_flash_attention)
guard_models()

__all__ = [
    "FLASH_NAME",
    "NAME",
    "Routes",
    "continuous_batching",
    "enable",
    "latent_cache",
    "metal_attention",
    "metal_attention_mask",
    "metal_flash_attention",
    "record_routes",
]

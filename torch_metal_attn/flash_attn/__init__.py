"""flash-attn's functions and import paths on the kernels of this package.

Use `import torch_metal_attn.flash_attn as flash_attn`, or, for code that cannot be changed,
`torch_metal_attn.install_flash_attn()`.
"""

from torch_metal_attn.flash_attn.flash_attn_interface import *  # noqa: F403

# The version of flash-attn with these signatures, for code that checks it.
__version__ = "2.8.4"

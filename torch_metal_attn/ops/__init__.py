"""The Python side of each op of csrc/library.cpp: fake kernel, CPU kernel and autograd.

There is one module per family, and some shared modules. Importing the package registers all ops.
"""

from torch_metal_attn.ops import append_kv as append_kv
from torch_metal_attn.ops import copy_pages as copy_pages
from torch_metal_attn.ops import decode_step as decode_step
from torch_metal_attn.ops import flash_bwd as flash_bwd
from torch_metal_attn.ops import flash_bwd_bias as flash_bwd_bias
from torch_metal_attn.ops import flash_decode as flash_decode
from torch_metal_attn.ops import flash_fwd as flash_fwd
from torch_metal_attn.ops import flash_fwd_autograd as flash_fwd_autograd
from torch_metal_attn.ops import flex as flex
from torch_metal_attn.ops import index_scores as index_scores
from torch_metal_attn.ops import merge as merge
from torch_metal_attn.ops import rope as rope
from torch_metal_attn.ops import softmax as softmax

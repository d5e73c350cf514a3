"""KV caches for serving: the tensors stay on the device, and the bookkeeping is on the host.

`PagedKVCache` stores sequences of any length in pages, which forks and equal prefixes share.
`StaticKVCache` has one row of fixed length per sequence. `flash_attn_with_kvcache` and
`flash_attn_varlen_func` accept the tensors of both. `append_kv` writes new rows.
`LatentCache` and `StaticLatentCache` are their forms for multi-head latent attention (MLA).
With `recent`, a quantised cache also keeps its last rows in full precision.
A `CascadePlan` lets a batch read shared pages once, not once for each sequence.
"""

from torch_metal_attn.kv_cache.cascade import CascadePlan
from torch_metal_attn.kv_cache.latent import LatentCache, StaticLatentCache
from torch_metal_attn.kv_cache.paged import PagedKVCache
from torch_metal_attn.kv_cache.pages import CacheFull
from torch_metal_attn.kv_cache.static import StaticKVCache
from torch_metal_attn.kv_cache.storage import LayerCache

__all__ = [
    "CacheFull",
    "CascadePlan",
    "LatentCache",
    "LayerCache",
    "PagedKVCache",
    "StaticKVCache",
    "StaticLatentCache",
]

"""Caches of keys and values for serving, on `append_kv`: whose rows are whose is kept on the host.

`PagedKVCache` has sequences of any length in pages that forks and equal prefixes share;
`StaticKVCache` has one row of fixed length a sequence. Both hand their tensors to
`flash_attn_with_kvcache` and `flash_attn_varlen_func`.
"""

from torch_metal_attn.kv_cache.paged import PagedKVCache
from torch_metal_attn.kv_cache.pages import CacheFull
from torch_metal_attn.kv_cache.static import StaticKVCache
from torch_metal_attn.kv_cache.storage import LayerCache

__all__ = ["CacheFull", "LayerCache", "PagedKVCache", "StaticKVCache"]

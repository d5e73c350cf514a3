"""Attention over a sequence that is split over processes or Macs, with torch.distributed."""

from torch_metal_attn.distributed.functional import ring_attention
from torch_metal_attn.distributed.sequence import shard_sequence, unshard_sequence

__all__ = ["ring_attention", "shard_sequence", "unshard_sequence"]

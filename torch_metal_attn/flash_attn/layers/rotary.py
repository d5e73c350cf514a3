"""`flash_attn.layers.rotary`: its function. Its modules and its packed forms are not here."""

from torch_metal_attn.rope import apply_rotary_emb

apply_rotary_emb_func = apply_rotary_emb  # flash-attn keeps the old name

__all__ = ["apply_rotary_emb", "apply_rotary_emb_func"]

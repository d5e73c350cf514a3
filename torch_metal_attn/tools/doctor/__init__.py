"""`python -m torch_metal_attn doctor`: where the attention of a script goes, and what to change."""

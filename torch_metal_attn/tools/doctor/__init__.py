"""`python -m torch_metal_attn doctor`: what runs the attention of a script, and what to change."""

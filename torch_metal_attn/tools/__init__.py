"""The commands of `python -m torch_metal_attn`: each one a module or a folder."""

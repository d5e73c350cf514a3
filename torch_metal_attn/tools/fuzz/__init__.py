"""`python -m torch_metal_attn fuzz`: random calls of `testing`, in supervised processes."""

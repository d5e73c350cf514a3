"""The lint of this project's kernels: `python -m torch_metal_attn.tools.lint shaders`."""

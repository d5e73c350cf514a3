"""The command line of the simulator: `python -m torch_metal_attn.simulator run | check`."""

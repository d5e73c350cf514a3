"""Small problems of every kernel under compute-sanitizer, on an NVIDIA GPU.

There is no Apple GPU here. What an NVIDIA GPU says is whether results are right when thousands of
threads run at once, and whether the sanitizer's tools find a fault. It says nothing of times.

    python -m tests.outside.sanitizer.pack FILE         # here: records and compiles to PTX; no GPU
    python3 -m tests.outside.sanitizer.sanitize FILE    # on the machine with the GPU

The machine with the GPU needs this folder at its path, numpy and CUDA's ptxas and
compute-sanitizer, but neither torch nor torch_metal_attn.
"""

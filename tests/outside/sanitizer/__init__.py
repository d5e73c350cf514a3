"""Small problems of every kernel under compute-sanitizer, on an NVIDIA GPU.

An NVIDIA GPU shows whether results are right when thousands of threads run at once, and whether
the sanitizer finds a fault. It shows nothing about times on an Apple GPU.

    python -m tests.outside.sanitizer.pack FILE         # records and compiles to PTX; needs no GPU
    python3 -m tests.outside.sanitizer.sanitize FILE    # on the machine with the GPU

The machine with the GPU needs this folder at its path, numpy and CUDA's ptxas and
compute-sanitizer, but neither torch nor torch_metal_attn.
"""

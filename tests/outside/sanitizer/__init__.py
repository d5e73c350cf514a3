"""Small problems of every kernel under compute-sanitizer, on an NVIDIA GPU.

    python -m tests.outside.sanitizer.pack FOLDER       # here: records and compiles to PTX; no GPU
    python3 -m tests.outside.sanitizer.assemble FOLDER  # on the machine with the GPU
    python3 -m tests.outside.sanitizer.sanitize FOLDER

The machine with the GPU needs this folder at its path, numpy and CUDA's ptxas and
compute-sanitizer, but neither torch nor torch_metal_attn.
"""

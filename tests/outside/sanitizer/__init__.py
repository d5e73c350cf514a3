"""Small problems of every kernel under compute-sanitizer, on an NVIDIA GPU.

    python -m tests.outside.sanitizer.pack FOLDER       # here: records and compiles to PTX; no GPU
    python3 -m bench.replay.assemble FOLDER             # on the machine with the GPU
    python3 -m tests.outside.sanitizer.sanitize FOLDER

The machine with the GPU needs `bench/replay` and this folder at their paths, torch, numpy and
CUDA's ptxas and compute-sanitizer, but not torch_metal_attn.
"""

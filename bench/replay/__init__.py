"""Replays recorded launches, and the peers' kernels, on an NVIDIA GPU.

There is no Apple GPU here to measure. What an NVIDIA GPU says is which part of its memory's speed
decoding takes, and whether results are right. It says nothing of times on Apple's GPUs.
tests/outside/sanitizer does the same for compute-sanitizer.

    python -m bench.replay FOLDER            # here: records, compiles to PTX and packs; no GPU
    python3 -m bench.replay.assemble FOLDER  # on the machine with the GPU
    python3 -m bench.replay.decode FOLDER

The machine with the GPU needs this folder, torch, numpy and CUDA's ptxas, but not torch_metal_attn.
"""

"""Replays recorded launches, and the peers' kernels, on an NVIDIA GPU.

There is no Apple GPU here to measure. What an NVIDIA GPU says is how kernels that were compiled in
the same way compare with each other in one run, whether their results are right, and whether
compute-sanitizer finds a fault. It says nothing of times on Apple's GPUs.

    python -m bench.replay FOLDER            # here: records, compiles to PTX and packs; no GPU
    sh bench/replay/device.sh FOLDER OUT     # on the machine with the GPU: all that follows

    python3 -m bench.replay.assemble FOLDER/timed
    python3 -m bench.replay.attention FOLDER/timed
    python3 -m bench.replay.decode FOLDER/timed
    python3 -m bench.replay.assemble FOLDER/small
    python3 -m bench.replay.sanitize FOLDER/small

The machine with the GPU needs this folder, torch, numpy and CUDA's ptxas and compute-sanitizer, but
not torch_metal_attn.
"""

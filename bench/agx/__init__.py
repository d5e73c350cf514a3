"""Compiles the kernels with Mesa's compiler for the GPU of M1 and M2: SPIR-V, driver, listing."""

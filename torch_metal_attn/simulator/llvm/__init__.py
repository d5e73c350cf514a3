"""Passes over the LLVM IR of compiled kernels: checks, counts, and batches of products."""

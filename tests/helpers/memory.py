"""Reads all bytes of a tensor's storage, so that a test sees writes outside the tensor."""

import torch


def memory_of(tensor):
    whole = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return whole.set_(tensor.untyped_storage())


def same_memory(tensor):
    storage = tensor.untyped_storage().clone()
    copy = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return copy.set_(storage, tensor.storage_offset(), tensor.shape, tensor.stride())


def check_equal(tensors, after):
    for name in tensors:
        assert torch.equal(memory_of(tensors[name]), memory_of(after[name])), name

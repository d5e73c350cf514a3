"""Installs the fake of torch's shims for mps in a process; import it before the package."""

import torch

from tests.runtime.fake_mps.build import FakeMps


def fake_mac(name, cores, library):
    """Replaces the extension by `library`, which has the fake shim, and names the GPU."""
    torch.backends.mps.is_available = lambda: True
    torch.backends.mps.get_name = lambda: name
    torch.backends.mps.get_core_count = lambda: cores
    torch.mps.recommended_max_memory = lambda: 2**34
    from torch_metal_attn.runtime import extension, shaders

    fake = FakeMps("bytes", library, insist=False)
    shaders.serve(fake.library)
    extension.tell_gpu(fake.library)
    extension.load = lambda: fake.library
    return fake


def outcome(op, *arguments, **options):
    """The error text of an op, or "launched"."""
    try:
        op(*arguments, **options)
        return "launched"
    except RuntimeError as error:
        return str(error)


def kernels(fake):
    return [line.split()[1] for line in fake.log() if line.startswith("start")]

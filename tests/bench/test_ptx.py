"""Metal text compiled for NVIDIA's back end."""

import pytest

from bench.front_end import Source
from bench.replay.ptx import compile_ptx
from tests.bench.test_agx import TEXT
from torch_metal_attn.simulator.build import ShaderCompileError


def test_ptx_has_the_buffers_and_threads() -> None:
    ptx = compile_ptx(Source(TEXT, "products", 64, {"COUNT": 2, "ELEMENT": "half"}))
    assert ptx.buffers == [0, 1, 3]
    assert ptx.symbol == "gpu_products"
    for part in (".maxntid 64, 1, 1", "bar.sync", "shfl.sync.bfly", "f32.f16.f16"):
        assert part in ptx.text


def test_a_fault_of_the_text_is_its_compilers_message() -> None:
    with pytest.raises(ShaderCompileError, match="COUNT"):
        compile_ptx(Source(TEXT, "products", 64))


def test_a_kernel_that_is_not_there() -> None:
    with pytest.raises(ValueError, match="no kernel sums; it has products"):
        compile_ptx(Source(TEXT, "sums", 64, {"COUNT": 2}))

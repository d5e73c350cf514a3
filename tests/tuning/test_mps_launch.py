"""Tables and launches on mps, on the fake of torch's shims (tests/runtime/fake_mps/)."""

import pytest
import torch

from tests.runtime.test_launch import any_fake, fakes, libraries, pytestmark  # noqa: F401
from torch_metal_attn import extension, shaders
from torch_metal_attn.tuning import tiles

ops = torch.ops.metal_attn


@pytest.fixture
def fake(any_fake):  # noqa: F811
    shaders.serve(any_fake.library)
    yield any_fake
    any_fake.library.metal_attn_use_tiles(None)


CALLS = {
    "flash_fwd": lambda q: (q, q, q),
    "flash_decode": lambda q: (q[:, :, :1], q, q),
    "flash_bwd": lambda q: (q, None, q, q, q, q, torch.zeros(1, 2, 40)),
}


@pytest.mark.parametrize(
    "op, kernel, word, define",
    [
        ("flash_fwd", "flash_fwd", "BLOCK_K=24", "BLOCK_K 24"),
        ("flash_decode", "flash_decode", "KEY_FRAGMENTS=1", "KEY_FRAGMENTS 1"),
        ("flash_bwd", "flash_bwd_dkv", "BLOCK=24", "BLOCK_Q 24"),
    ],
)
def test_a_launch_has_the_tables_tile(op, kernel, word, define, fake):
    arguments = CALLS[op](torch.zeros(1, 2, 40, 64))
    told = extension.told(getattr(ops, f"{op}_explain")(*arguments))
    told = told.get(kernel, told)["tuning"]
    tile = next(tile for tile in told["candidates"] if f"{word} " in f"{tile} ")
    getattr(fake.ops, op)(*arguments)
    assert f"#define {define}\n" not in fake.last_text()
    rows = [(told["key"], tile, "tuned on this machine")]
    fake.library.metal_attn_use_tiles(tiles.make(rows, fake.library))
    getattr(fake.ops, op)(*arguments)
    assert f"#define {define}\n" in fake.last_text()

"""Tables and launches on mps, on the fake of torch's shims (tests/runtime/fake_mps/)."""

import pytest
import torch

from tests.runtime.conftest import any_fake, fakes, libraries  # noqa: F401
from torch_metal_attn.runtime import extension, shaders
from torch_metal_attn.tuned import tiles

ops = torch.ops.metal_attn


@pytest.fixture
def fake(any_fake):  # noqa: F811
    shaders.serve(any_fake.library)
    yield any_fake
    any_fake.library.metal_attn_use_tiles(None)


def arguments_of(op):
    q = torch.zeros(1, 2, 40, 40)  # a head dim of which no other test compiles a text
    new = q[:, :, :1].contiguous()
    return {
        "flash_fwd": (q, q, q),
        "flash_decode": (q[:, :, :1], q, q),
        "decode_step": (new, new, new, q.clone(), q.clone(), torch.tensor([3], dtype=torch.int32)),
        "flash_bwd": (q, None, q, q, q, q, torch.zeros(1, 2, 40)),
    }[op]


def key_and_tile(op, arguments, kernel, word):
    """Of a call, and a tile with this word that its kernel can run."""
    launches = extension.launches(getattr(torch.ops.metal_attn_explain, op)(*arguments))
    (tuning,) = (launch["tuning"] for launch in launches if launch["kernel"] == kernel)
    return tuning["key"], next(tile for tile in tuning["candidates"] if f"{word} " in f"{tile} ")


@pytest.mark.parametrize(
    "op, kernel, word, define",
    [
        ("flash_fwd", "flash_fwd", "BLOCK_K=8", "BLOCK_K 8"),
        ("flash_decode", "flash_decode", "KEY_FRAGMENTS=2", "KEY_FRAGMENTS 2"),
        ("decode_step", "flash_decode", "KEY_FRAGMENTS=2", "KEY_FRAGMENTS 2"),
        ("flash_bwd", "flash_bwd_dkv", "BLOCK=8", "BLOCK_Q 8"),
    ],
)
def test_a_tables_tile_that_does_not_compile(op, kernel, word, define, fake, capfd):
    """It is what a launch takes. Its row is dropped, which is said once: the default tile runs."""
    arguments = arguments_of(op)
    key, tile = key_and_tile(op, arguments, kernel, word)
    fake.refuse(f"#define {define}\n")
    # As tune does, which leaves the tile out.
    fake.library.metal_attn_use_tiles(tiles.make([(kernel, tile, "forced")], fake.library))
    with pytest.raises(RuntimeError, match=f"compiling {kernel} .* failed: .*told to be refused"):
        getattr(fake.ops, op)(*arguments)
    assert capfd.readouterr().err == ""
    rows = [(key, tile, "tuned on this machine")]
    fake.library.metal_attn_use_tiles(tiles.make(rows, fake.library))
    for _ in range(2):
        getattr(fake.ops, op)(*arguments)
    assert fake.log()[-1] == "end"
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith(
        f"torch_metal_attn: a table of tiles has {tile} for {key}, which does not compile: the "
        f"row is ignored (compiling {kernel} "
    )
    assert "told to be refused" in line
    assert "`python -m torch_metal_attn tune`" in line

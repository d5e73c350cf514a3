"""Tiles that the GPU refuses, on the fake of torch's shims (tests/runtime/fake_mps/)."""

import re
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from tests.runtime.conftest import any_fake, fakes, libraries  # noqa: F401
from tests.runtime.fake_mac import kernels
from torch_metal_attn.runtime import extension, shaders
from torch_metal_attn.tuned import tiles


@pytest.fixture
def fake(any_fake):  # noqa: F811
    shaders.serve(any_fake.library)
    yield any_fake
    any_fake.library.metal_attn_use_tiles(None)


# A refusal lasts for the process, so each test has other head dims.
def call(ops, op, head_dim):
    q = torch.zeros(1, 2, 40, head_dim)
    new, lse = q[:, :, :1].contiguous(), torch.zeros(1, 2, 40)
    arguments = {
        "flash_fwd": (q, q, q),
        "flash_decode": (q[:, :, :1], q, q),
        "decode_step": (new, new, new, q.clone(), q.clone(), torch.tensor([3], dtype=torch.int32)),
        "flash_bwd": (q, None, q, q, q, q, lse),
        "flash_bwd_bias": (q, q, q, q, lse, lse),
    }
    options = {"attn_bias": torch.zeros(40, 40)} if op == "flash_bwd_bias" else {}
    return getattr(ops, op)(*arguments[op], **options)


def launches_of(op, head_dim):
    launches = extension.launches(call(torch.ops.metal_attn_explain, op, head_dim))
    return {launch["kernel"]: launch for launch in launches}


def text_of(defines):
    return "".join(f"#define {name} {value}\n" for name, value in defines.items())


@pytest.mark.parametrize(
    "op, head_dim, kernel, word, define",
    [
        ("flash_fwd", 40, "flash_fwd", "BLOCK_K=8", "BLOCK_K 8"),
        ("flash_decode", 40, "flash_decode", "KEY_FRAGMENTS=2", "KEY_FRAGMENTS 2"),
        ("decode_step", 56, "flash_decode", "KEY_FRAGMENTS=2", "KEY_FRAGMENTS 2"),
        ("flash_bwd", 40, "flash_bwd_dkv", "BLOCK=8", "BLOCK_Q 8"),
    ],
)
def test_a_tables_bad_tile_is_replaced(op, head_dim, kernel, word, define, fake, capfd):
    tuning = launches_of(op, head_dim)[kernel]["tuning"]
    key = tuning["key"]
    tile = next(tile for tile in tuning["candidates"] if f"{word} " in f"{tile} ")
    fake.refuse(f"#define {define}\n")
    fake.library.metal_attn_use_tiles(tiles.make([(kernel, tile, "forced")], fake.library))
    with pytest.raises(RuntimeError, match=f"compiling {kernel} .* failed: .*told to be refused"):
        call(fake.ops, op, head_dim)
    assert capfd.readouterr().err == ""
    rows = [(key, tile, "tuned on this machine")]
    fake.library.metal_attn_use_tiles(tiles.make(rows, fake.library))
    for _ in range(2):
        call(fake.ops, op, head_dim)
    assert fake.log()[-1] == "end"
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith(
        f"torch_metal_attn: this GPU refuses the tile {tile}, which a tuned table has for {key}: "
        f"the tile {tuning['candidates'][0]} is used instead (compiling {kernel} "
    )
    assert "told to be refused" in line
    assert "`python -m torch_metal_attn tune`" in line


REASONS = {
    "text": "the text was told to be refused",
    "pipeline": "Compute function exceeds available temporary registers",
    "dispatch": "Threadgroup size exceeds 24 limit",
}


@pytest.mark.parametrize(
    "op, head_dim, kernel, stage",
    [
        ("flash_fwd", 104, "flash_fwd", "text"),
        ("flash_fwd", 112, "flash_fwd", "pipeline"),
        ("flash_fwd", 120, "flash_fwd", "dispatch"),
        ("flash_decode", 104, "flash_decode", "pipeline"),
        ("decode_step", 112, "flash_decode", "dispatch"),
        ("flash_bwd", 104, "flash_bwd_dq", "dispatch"),
        ("flash_bwd", 112, "flash_bwd_dkv", "pipeline"),
        ("flash_bwd_bias", 104, "flash_bwd_bias", "dispatch"),
    ],
)
def test_a_default_tile_that_the_gpu_refuses_is_replaced(op, head_dim, kernel, stage, fake, capfd):
    before = launches_of(op, head_dim)
    compiled = []
    fake.set_compiler(compiled.append)
    fake.refuse(text_of(before[kernel]["defines"]), stage)
    call(fake.ops, op, head_dim)
    fake.refuse("")
    call(fake.ops, op, head_dim)
    texts = [text for text in compiled if f" void {kernel}(" in text]
    assert len(texts) == 2, "the tile that was refused, and the next one"
    assert text_of(before.pop(kernel)["defines"]) not in texts[1]
    for launch in before.values():
        assert sum(text_of(launch["defines"]) in text for text in compiled) == 1
    (line,) = capfd.readouterr().err.splitlines()
    words = rf"the tile .*, which the default table has for {kernel} float {head_dim} .*: the tile "
    assert re.match(f"torch_metal_attn: this GPU refuses {words}.* is used instead ", line)
    assert REASONS[stage] in line
    assert "verify --full" in line


@pytest.mark.parametrize("stage", REASONS)
def test_a_problem_whose_tiles_are_all_refused_raises(stage, fake, capfd):
    head_dim = {"text": 136, "pipeline": 144, "dispatch": 152}[stage]
    compiled = []
    fake.set_compiler(compiled.append)
    fake.refuse("#define HEAD_DIM_QK ", stage)
    errors = []
    for _ in range(2):
        with pytest.raises(RuntimeError) as raised:
            call(fake.ops, "flash_fwd", head_dim)
        errors.append(str(raised.value))
    assert errors[0] == errors[1]
    words = rf"all (\d+) tiles of flash_fwd float {head_dim} {head_dim}"
    count = int(re.search(words, errors[0])[1])
    assert count == len(set(compiled)) == len(compiled) > 2
    assert errors[0].count(REASONS[stage]) == count
    assert "python -m torch_metal_attn verify --full" in errors[0].splitlines()[-1]
    assert capfd.readouterr().err == ""
    fake.refuse("")
    call(fake.ops, "flash_decode", head_dim)  # flash_decode has other tiles


def test_several_threads_launch_a_refused_tile_at_once(fake, capfd):
    fake.refuse(text_of(launches_of("flash_fwd", 168)["flash_fwd"]["defines"]), "dispatch")
    start = threading.Barrier(8)

    def work(_):
        start.wait()
        call(fake.ops, "flash_fwd", 168)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(8)))
    assert sum(line.startswith("dispatch") for line in fake.log()) == 8
    assert len(capfd.readouterr().err.splitlines()) == 1


def test_a_refusal_without_an_error_text_is_handled(fakes):  # noqa: F811
    """Before torch 2.13 a dispatch is refused only for its threads, so the next tile runs."""
    oldest = fakes["tensor"]
    oldest.clear()
    shaders.serve(oldest.library)
    oldest.refuse(text_of(launches_of("flash_fwd", 120)["flash_fwd"]["defines"]), "dispatch")
    call(oldest.ops, "flash_fwd", 120)
    assert kernels(oldest) == ["flash_fwd"] * 2
    assert oldest.log()[-1] == "end"

"""Launches that run in pieces (csrc/runtime/pieces.h); on mps a piece is a command buffer."""

import ctypes
import math
import struct
from itertools import groupby

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask
from torch.utils._pytree import tree_leaves

from tests.attention.held_cases import LENGTHS, PACKED, SIZES, case
from tests.common.ops import EXAMPLES, call, on
from tests.helpers.home import UNKNOWN_CORES
from torch_metal_attn import explain, flex_attention
from torch_metal_attn.runtime import extension, session, shaders
from torch_metal_attn.simulator import engine
from torch_metal_attn.testing.attention_run import prepare

PLACE = struct.Struct("6I")  # GridPiece


def limit_of(library):
    library.metal_attn_limit_pieces.argtypes = [ctypes.c_int64]
    return library.metal_attn_limit_pieces


@pytest.fixture
def limit():
    yield limit_of(extension.load())
    limit_of(extension.load())(0)


@pytest.fixture
def launches(monkeypatch):
    """Launches in the simulator: kernel, whether it is a piece, its params and its grid."""
    made = []
    real = session._launch

    def launch(specialisation, kernel, buffers, threadgroups, threads):
        constant = engine.SPACES.index("constant")
        params = [ctypes.string_at(b.storage, b.bytes) for b in buffers if b.space == constant]
        made.append((kernel, "GRID_PIECE" in specialisation.defines, params[0], threadgroups))
        real(specialisation, kernel, buffers, threadgroups, threads)

    monkeypatch.setattr(session, "_launch", launch)
    return made


def boxes(pieces):
    """How often each threadgroup of the grid ran."""
    places = [PLACE.unpack(params[-PLACE.size :]) for params, _ in pieces]
    assert len({place[3:] for place in places}) == 1
    grid = torch.zeros(*places[0][3:], dtype=torch.int32)
    for (x, y, z, *_), (_, (width, height, depth)) in zip(places, pieces, strict=True):
        box = grid[x : x + width, y : y + height, z : z + depth]
        assert box.shape == (width, height, depth), "the piece reaches beyond the grid"
        box += 1
    return grid


def of_case(**fields):
    def run(device):
        prepared = prepare(case(**fields), device)
        return lambda: prepared.function(**prepared.arguments)

    return run


def of_example(name):
    def run(device):
        example = EXAMPLES[name]
        return lambda: call(on(device, example.make()), example)

    return run


def flex(device):
    made = [torch.randn(1, 2, 150, 16, device=device, dtype=torch.float16) for _ in range(3)]
    bias = torch.randn(150, device=device)
    sizes = {"Q_LEN": 150, "KV_LEN": 150, "BLOCK_SIZE": 32}
    mask = create_block_mask(lambda b, h, q, k: q >= k, 1, 1, **sizes, device=device)

    def run():
        leaves = [x.detach().requires_grad_() for x in (*made, bias)]
        *qkv, captured = leaves
        out = flex_attention(*qkv, lambda s, b, h, i, j: s + captured[i - j], block_mask=mask)
        return out, torch.autograd.grad(out.float().square().sum(), leaves)

    return run


def grids(launches):
    """For each launch in pieces: its kernel, and how often each threadgroup ran."""
    launch = -1
    numbered = []
    for kernel, is_piece, params, grid in launches:
        launch += not is_piece or PLACE.unpack(params[-PLACE.size :])[:3] == (0, 0, 0)
        numbered += [(launch, kernel, params, grid)] if is_piece else []
    for (_, kernel), pieces in groupby(numbered, key=lambda piece: piece[:2]):
        yield kernel, boxes([piece[2:] for piece in pieces])


GRADIENTS = {"flash_fwd", "flash_bwd_dq", "flash_bwd_dkv"}
SCORED = SIZES | LENGTHS | {"softcap": 2.0, "causal": True, "q_offset": 20}
CALLS = {
    "gradients": (
        GRADIENTS | {"flash_bwd_bias"},
        of_case(**SCORED, attn_bias="float32 hqk", attn_mask="bool bk", dropout_p=0.3),
    ),
    "packed": (GRADIENTS, of_case(**PACKED)),
    "BlockMask": (GRADIENTS | {"flash_bwd_captures"}, flex),
    "pages": ({"flash_fwd"}, of_case(**SIZES, cache="paged", causal=True)),
    "decode": ({"flash_decode"}, of_case(call="flash_decode", **SIZES, num_splits=3)),
    "decode_step packed": ({"flash_decode"}, of_example("decode_step packed")),
    "index_scores": ({"index_scores"}, of_example("index_scores")),
}


def check_pieces(make, kernels, device, limit, launches):
    run = make(device)
    expected = tree_leaves(run())
    assert not [kernel for kernel, is_piece, *_ in launches if is_piece]
    for threadgroups in (1, 2, 3, 7):
        launches.clear()
        limit(threadgroups)
        torch.testing.assert_close(tree_leaves(run()), expected, rtol=0, atol=0, equal_nan=True)
        limit(0)
        if device.type == "mps":
            continue
        made = dict(grids(launches))
        assert made.keys() <= kernels
        assert made.keys() == kernels or threadgroups > 1
        assert all((ran == 1).all() for ran in made.values()), "a threadgroup ran twice or never"
        sizes = [math.prod(grid) for _, is_piece, _, grid in launches if is_piece]
        assert all(size <= threadgroups for size in sizes)


@pytest.mark.parametrize(("kernels", "make"), CALLS.values(), ids=CALLS)
def test_pieces_give_the_same_bits(kernels, make, device, limit, launches):
    check_pieces(make, kernels, device, limit, launches)


@pytest.mark.usefixtures("m5")
def test_pieces_of_tensor_tiles_give_the_same_bits(device, limit, launches):
    tensor = {f"{kernel}_tensor" for kernel in GRADIENTS}
    check_pieces(of_case(**SCORED), tensor, device, limit, launches)


M1 = 8  # cores


@pytest.fixture
def m1(fakes):
    changed = []

    def fake_of(variant):
        fake = fakes[variant]
        fake.clear()
        shaders.serve(fake.library)
        fake.library.metal_attn_set_gpu_cores(M1)
        changed.append(fake)
        return fake

    yield fake_of
    for fake in changed:
        fake.library.metal_attn_set_gpu_cores(UNKNOWN_CORES)
        limit_of(fake.library)(0)


def long_rows(length, heads=1):
    q = torch.zeros(64, dtype=torch.float16).expand(1, heads, length, 64)
    return q, q, q.clone()[:, :, :1].expand_as(q)


def order(fake):
    return [line for line in fake.log() if line.startswith(("commit", "dispatch"))]


COMMITS = {"bytes": "commit of 0", "member": "commit", "tensor": None}


@pytest.mark.parametrize(("variant", "commit"), COMMITS.items())
def test_each_piece_is_a_command_buffer(m1, variant, commit, capfd):
    """torch's stream (2.10 to 2.15) or C++ API commits it. If it has neither, a message says so."""
    fake = m1(variant)
    q, k, v = long_rows(100_000, heads=2)
    for _ in range(2):
        fake.clear()
        fake.ops.flash_fwd(q, k, v)
        pieces = sum(line.startswith("dispatch") for line in fake.log())
        assert 12 <= pieces <= 30, "2 * 100000^2 * 192 products, 40e9 a second of 8 cores: 12 s"
        kinds = ["commit" if line == commit else line.split()[0] for line in order(fake)]
        between = ["commit"] if commit else []
        assert kinds == [*between, "dispatch"] * pieces + between
    said = capfd.readouterr().err
    assert said.count("cannot commit its MPS stream") == (commit is None)


def test_pieces_on_mps_cover_the_grid_once(m1):
    fake = m1("bytes")
    fake.ops.flash_fwd(*long_rows(100_000, heads=2))
    params = [bytes.fromhex(line.split()[2]) for line in fake.log() if line.startswith("bytes 3 ")]
    lines = [line.split() for line in fake.log() if line.startswith("dispatch")]
    sizes = [[int(n) // int(of) for n, of in zip(x[1:4], x[5:], strict=True)] for x in lines]
    assert (boxes(list(zip(params, sizes, strict=True))) == 1).all()


def test_short_launches_are_committed_within_a_second(m1):
    """Each stream's command buffer is committed before our launches exceed one second."""
    fake = m1("bytes")
    for stream in (5, 6, 5, 6, 5, 6, 6, 5):
        fake.set_stream(stream)
        fake.ops.flash_fwd(*long_rows(27_000))  # 0.44 s
    kinds = [line if line.startswith("commit") else line.split()[0] for line in order(fake)]
    assert kinds == [*["dispatch"] * 4, "commit of 5", "dispatch", "commit of 6", *["dispatch"] * 3]


def test_an_error_of_a_piece_reaches_the_caller(m1):
    fake = m1("bytes")
    fake.fail("dispatch", after=2)
    with pytest.raises(RuntimeError, match="dispatch was told to fail"):
        fake.ops.flash_fwd(*long_rows(100_000, heads=2))
    assert len(order(fake)) == 5, "two pieces ran, and a commit came before each of three"


WAN = (1, 40, 32_760, 128)


def test_explain_shows_pieces(cores):
    cores(M1)
    rows = torch.zeros(128, dtype=torch.float16)
    q, k, v = (rows.clone().expand(WAN) for _ in range(3))
    actual = explain(q, k, v, backward=True)
    pieces = actual.kernels["flash_fwd"].pieces
    assert 43 <= pieces <= 100, "40 * 32760^2 * 320 products: 43 s"
    assert f"threadgroups, in {pieces} command buffers" in str(actual)
    for kernel in ("flash_bwd_dq", "flash_bwd_dkv"):
        more = actual.training.kernels[kernel].pieces
        assert more >= pieces
        assert f"in {more} command buffers" in str(actual)
    window = explain(q, k, v, window_size_left=512, causal=True)
    assert window.kernels["flash_fwd"].pieces < pieces / 10
    cores(80)
    assert explain(q, k, v).kernels["flash_fwd"].pieces < 10
    short = explain(*(rows.clone().expand(1, 8, 2048, 128) for _ in range(3)))
    assert short.kernels["flash_fwd"].pieces == 1
    assert "command buffers" not in str(short)

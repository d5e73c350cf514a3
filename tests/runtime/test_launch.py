"""The launch layer on MPS, run against a recording fake of torch's shims (fake_mps/)."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from tests.helpers import shader_params
from tests.helpers.cases import each_case
from tests.rope.rope_check import make_problem
from torch_metal_attn import reference, simulate
from torch_metal_attn.runtime import shaders
from torch_metal_attn.simulator import compile_shader

TEXT = "kernel void scale(device float* x [[buffer(0)]]) {}\nkernel void other(device int* x) {}\n"
MANY = bytes(range(256)) * 16


def launch(fake, *, family, kernel="scale", defines="", **settings):
    buffers = settings.get("buffers", [torch.zeros(4)])
    slots = settings.get("slots", range(len(buffers)))
    params = torch.tensor(list(settings.get("params", b"\1\2\3\4")), dtype=torch.uint8)
    slot = settings.get("params_slot", 7)
    grid = settings.get("threadgroups", (1, 1, 1)), settings.get("threads", (32, 1, 1))
    fake.ops.launch(family, kernel, defines, buffers, list(slots), params, slot, *grid)


def words(fake, first):
    return [line.split() for line in fake.log() if line.split()[0] == first]


def test_encodes_in_order_inside_one_block(fake):
    fake.add_family("order", TEXT)
    a, b = torch.zeros(4), torch.zeros(8)
    launch(fake, family="order", buffers=[a, b], slots=[3, 1], params=b"\xab\xcd", params_slot=5)
    how = {"bytes": "bytes", "member": "member", "tensor": "byte_tensor"}[fake.variant]
    assert fake.log() == [
        "library",
        "kernel scale",
        "block",
        "start scale",
        f"tensor 3 {a.data_ptr()}",
        f"tensor 1 {b.data_ptr()}",
        f"{how} 5 abcd",
        "dispatch 32 1 1 / 32 1 1",
        "end",
    ]


@each_case(
    "settings, words",
    [
        ({"threadgroups": (3, 5, 7), "threads": (64, 2, 1)}, ["dispatch 192 10 7 / 64 2 1"]),
        ({"threadgroups": (2**25, 1, 1), "threads": (128, 1, 1)}, [f"dispatch {2**32} 1 1 / 128"]),
        ({"params": MANY}, [f"7 {MANY.hex()}", "dispatch"]),
        ({"params": b""}, ["start", "tensor", "dispatch"]),
    ],
)
def test_arguments_reach_the_dispatch(fake, settings, words):
    fake.clear()
    fake.add_family("given", TEXT)
    launch(fake, family="given", **settings)
    *log, end = fake.log()
    assert end == "end"
    for line, part in zip(log[-len(words) :], words, strict=True):
        assert part in line


@each_case(
    "settings, words",
    [
        ({"params": bytes(4097)}, r"4097 bytes .* allows at most 4096"),
        ({"defines": "NAME=\u00e9"}, "not ASCII"),
        ({"slots": [31]}, "setting buffer 31 of 'scale' failed: "),
        ({"family": "nowhere"}, "no shader text for the family 'nowhere'"),
    ],
)
def test_invalid_launches_are_refused(fake, settings, words):
    fake.add_family("refused", TEXT)
    # In torch 2.15 C++ ops raise a RuntimeError instead of a ValueError.
    with pytest.raises((ValueError, RuntimeError), match=words):
        launch(fake, **{"family": "refused"} | settings)
    assert not [line for line in fake.log() if line.startswith("dispatch")]


def test_non_ascii_text_is_refused_before_torch_sees_it(any_fake):
    any_fake.add_family("accent", TEXT + "// caf\u00e9\n")
    with pytest.raises(RuntimeError, match=f"'accent' is not ASCII at byte {len(TEXT) + 6}"):
        launch(any_fake, family="accent")
    assert any_fake.log() == []
    assert "accent" not in any_fake.last_text()


def test_defines_come_between_metals_headers_and_the_text(any_fake):
    headers, text = "#include <metal_stdlib>\n", f'#line 1 "defines"\n{TEXT}'
    any_fake.add_family("defines", headers + text)
    launch(any_fake, family="defines", defines="ELEMENT=half\nBLOCK_K=32")
    expected = headers + "#define ELEMENT half\n#define BLOCK_K 32\n" + text
    assert any_fake.last_text() == expected
    defines = {"ELEMENT": "half", "BLOCK_K": "32"}
    assert shaders.with_defines(headers + text, defines) == expected


def test_a_specialisation_makes_its_library_and_kernel_once(any_fake):
    any_fake.add_family("cached", TEXT)
    for _ in range(2):
        for defines in ("N=1", "N=2"):
            for kernel in ("scale", "other"):
                launch(any_fake, family="cached", kernel=kernel, defines=defines)
    made = [line for line in any_fake.log() if line.split()[0] in ("library", "kernel")]
    assert made == ["library", "kernel scale", "kernel other"] * 2
    assert any_fake.log().count("end") == 8


def test_a_missing_kernel_is_named(any_fake):
    any_fake.add_family("missing", TEXT)
    for _ in range(2):
        words = "compiling 'absent' of missing for this GPU failed: no such kernel"
        with pytest.raises(RuntimeError, match=words):
            launch(any_fake, family="missing", kernel="absent")
        any_fake.fail("get_kernel_function", "it was looked for again")
    any_fake.fail("")
    launch(any_fake, family="missing")
    assert any_fake.log()[:2] == ["library", "kernel scale"], "the library was kept"


@pytest.mark.parametrize(
    ("variant", "shim"),
    [
        ("bytes", "start_encoding"),
        ("bytes", "set_arg_tensor"),
        ("bytes", "set_arg_bytes"),
        ("bytes", "dispatch"),
        ("member", "setArg"),  # throws; the other shims return an error
    ],
)
def test_errors_inside_the_block_reach_the_caller(fakes, variant, shim):
    fake = fakes[variant]
    fake.clear()
    fake.add_family("errors", TEXT)
    fake.fail(shim)
    with pytest.raises(RuntimeError, match=f"{shim} was told to fail"):
        launch(fake, family="errors")
    assert fake.log()[-1] == "end", "the block was left by an exception"
    assert "an exception crossed the block" not in fake.log()
    fake.clear()
    launch(fake, family="errors")
    assert fake.log()[-1] == "end"


def test_an_error_of_the_block_itself_is_reported(any_fake):
    any_fake.add_family("block_error", TEXT)
    any_fake.fail("run_command_block")
    with pytest.raises(RuntimeError, match="running 'scale' failed: run_command_block was told"):
        launch(any_fake, family="block_error")


def test_threads_share_a_library_but_not_a_block(fake):
    fake.add_family("threads", TEXT)
    start = threading.Barrier(8)

    def work(value):
        start.wait()
        for _ in range(5):
            launch(fake, family="threads", params=bytes([value]) * 4)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(8)))
    assert not fake.overlapped()
    log = fake.log()
    assert log.count("library") == log.count("kernel scale") == 1
    text = "\n".join(line for line in log if line not in ("library", "kernel scale"))
    blocks = [block.split("\n") for block in text.removesuffix("\nend").split("\nend\n")]
    assert len(blocks) == 40
    assert {(block[0], len(block)) for block in blocks} == {("block", 5)}


PARAMS = shader_params.struct("FlashFwdParams")
SLOTS = shader_params.slots("FlashBuffer", "FLASH_")
SLOTS |= shader_params.slots("FlashFwdBuffer", "FLASH_FWD_")


def bound(fake):
    """{slot: address} of the buffers, then the slot and the bytes of the params."""
    buffers = {int(slot): int(address) for _, slot, address in words(fake, "tensor")}
    (params,) = (line for line in fake.log() if line.startswith(("bytes", "member", "byte_")))
    _, slot, text = params.split()
    return buffers, int(slot), bytearray.fromhex(text)


def launched(fake):
    buffers, slot, params = bound(fake)
    assert slot == SLOTS["params"]
    fields = PARAMS.from_buffer_copy(params)
    own = shader_params.values(fields)
    own.pop("problem")
    return buffers, shader_params.values(fields.problem) | own


def run_launched_text(fake, kernel, tensors):
    by_address = {tensor.data_ptr(): tensor for tensor in tensors}
    buffers, slot, params = bound(fake)
    arguments = {n: by_address[address] for n, address in buffers.items()}
    arguments[slot] = torch.frombuffer(params, dtype=torch.uint8)
    (dispatch,) = (line for line in fake.log() if line.startswith("dispatch"))
    grid, group = dispatch.removeprefix("dispatch").split("/")
    getattr(compile_shader(fake.last_text()), kernel)(
        *(arguments.get(n) for n in range(max(arguments) + 1)),
        threads=[int(n) for n in grid.split()],
        group_size=[int(n) for n in group.split()],
    )


def at(**tensors):
    return {SLOTS[name]: tensor.data_ptr() for name, tensor in tensors.items()}


def every_feature(batch, heads, q_length, kv_length):
    """Every optional buffer; no two have the same strides."""

    def cut(*shape):
        return torch.randn(*(2 * size + 1 for size in shape))[tuple(slice(1, s + 1) for s in shape)]

    tables = {
        f"{side}_rotary_{function}": cut(batch, length + i, 9)[..., :8]
        for side, length in (("q", q_length), ("k", kv_length))
        for i, function in enumerate(("cos", "sin"))
    }
    return tables | {
        "seqused_k": torch.full((batch,), kv_length).int(),
        "leftpad_k": torch.zeros(batch).int(),
        "attn_mask": cut(batch, 1, q_length, kv_length) > -1,
        "attn_bias": cut(1, heads, q_length, kv_length),
        "alibi_slopes": cut(batch, heads),
        "learnable_sink": torch.randn(heads),
    }


@pytest.mark.parametrize(
    ("dropout_p", "last_dropped", "keep_scale"),
    [
        *((2.0**-32, 0, 1), (1e-300, 0, 1), (1.5 * 2**-32, 1, 1), (0.1, 429496729, 1 / 0.9)),
        *((1 - 2.0**-53, 2**32 - 1, 2**53), (1, 2**32 - 1, 0)),
    ],
)
def test_dropout_params_follow_dropout_p(fake, dropout_p, last_dropped, keep_scale):
    fake.add_family("flash_fwd", "kernel void flash_fwd() {}")
    q = torch.randn(1, 1, 8, 16)
    fake.ops.flash_fwd(q, q, q, dropout_p=dropout_p, rng_state=torch.tensor([5, 6]))
    _, params = launched(fake)
    assert params["last_dropped"] == last_dropped
    assert params["keep_scale"] == pytest.approx(keep_scale)


def test_empty_tensors_of_rope_bind_another_tensor(any_fake):
    any_fake.add_family("rope", "kernel void rope() {}")
    q, k, cos, sin = make_problem(heads=0)
    q_out, k_out = any_fake.ops.rope(q, k, cos, sin)
    addresses = [int(address) for _, _, address in words(any_fake, "tensor")]
    assert addresses == [tensor.data_ptr() for tensor in (k, k, cos, sin, k_out, k_out)]
    assert q_out.shape == q.shape


@each_case("empty", [{"batch": 0}, {"length": 0}, {"heads": 0, "kv_heads": 0}])
def test_without_rows_nothing_is_launched(any_fake, empty):
    q, k, cos, sin = make_problem(**empty)
    any_fake.ops.rope(q, k, cos, sin)
    any_fake.ops.rope_(q, k, cos, sin)
    any_fake.ops.rope_tables(torch.zeros(4), torch.arange(0))
    out, lse = any_fake.ops.flash_fwd(q, q, q)
    assert (out.shape, lse.shape) == (q.shape, q.shape[:3])
    assert any_fake.log() == []


def test_flash_fwd_without_keys_reads_no_keys(any_fake):
    """The kernel writes the results. Slots of empty tensors bind another tensor."""
    any_fake.add_family("flash_fwd", "kernel void flash_fwd() {}")
    q = torch.randn(1, 2, 40, 16)
    empty = torch.empty(1, 2, 0, 16)
    out, lse = any_fake.ops.flash_fwd(q, empty, empty, attn_mask=torch.empty(40, 0) > 0)
    buffers, params = launched(any_fake)
    assert buffers == at(q=q, k=q, v=q, mask=q, out=out, lse=lse)
    assert params["kv_length"] == 0


# The specialisations differ from those above, because libraries stay cached.
@pytest.mark.parametrize(
    ("dtype", "head_dim_v", "q_offset", "features"),
    [(torch.float32, 56, None, False), (torch.bfloat16, 40, 20, True)],
    ids=["plain", "every feature"],
)
def test_the_launched_text_computes_attention(fake, dtype, head_dim_v, q_offset, features):
    shaders.serve(fake.library)
    q = torch.randn(2, 70, 6, 64).to(dtype).transpose(1, 2)
    k = torch.randn(2, 2, 90, 64).to(dtype)
    v = torch.randn(2, 2, 90, head_dim_v).to(dtype)
    options = every_feature(2, 6, 70, 90) if features else {}
    if features:
        options |= {"dropout_p": 0.3, "rng_state": torch.tensor([5, 6])}
    options |= {"causal": q_offset is not None, "q_offset": q_offset}
    out, lse = fake.ops.flash_fwd(q, k, v, **options)
    settings = [value for value in options.values() if torch.is_tensor(value)]
    run_launched_text(fake, "flash_fwd", [q, k, v, out, lse, *settings])
    with simulate():
        expected, expected_lse = torch.ops.metal_attn.flash_fwd(q, k, v, **options)
    assert torch.equal(out, expected)
    assert torch.equal(lse, expected_lse)
    expected, expected_lse = reference.attention(q, k, v, **options)
    tolerance = 1e-4 if dtype == torch.float32 else 5e-2
    torch.testing.assert_close(out, expected, atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(lse, expected_lse, atol=tolerance, rtol=tolerance)

"""`warm_up` and slow compilations, on the fake of torch's shims (fake_mps/)."""

import json
import threading

import pytest
import torch

from tests.helpers.forks import run_alone
from tests.helpers.patience import HANG_SECONDS
from tests.runtime.test_launch import TEXT, launch
from tests.runtime.test_pieces import limit_of
from torch_metal_attn import mps, warm_up
from torch_metal_attn.kv_cache import PagedKVCache
from torch_metal_attn.runtime import extension, shaders
from torch_metal_attn.tools.explain import ops


@pytest.fixture
def fake(any_fake, monkeypatch):
    """The fake replaces the extension, so that its ops explain and compile."""
    shaders.serve(any_fake.library)
    monkeypatch.setattr(mps, "available", lambda: True)
    monkeypatch.setattr(extension, "load", lambda: any_fake.library)
    monkeypatch.setattr(ops, "recording_op", lambda n: getattr(any_fake.ops, f"{n}_explain", None))
    return any_fake


def meta(head_dim, lengths=(40, 40)):
    q, k = (torch.empty(1, 2, length, head_dim, device="meta") for length in lengths)
    return q, k, k


def compiled_in(fake):
    texts = []
    fake.set_compiler(texts.append)
    return texts


class TestCompiling:
    @pytest.mark.parametrize("head_dim, limit", [(72, 0), (160, 1)], ids=["whole", "in pieces"])
    def test_tensors_without_memory_suffice(self, fake, head_dim, limit):
        arguments = meta(head_dim)
        texts = compiled_in(fake)
        limit_pieces = limit_of(fake.library)
        limit_pieces(limit)
        try:
            done = warm_up(*arguments, causal=True, backward=True)
            assert done.kernels == dict.fromkeys(
                ("flash_fwd", "flash_bwd_delta", "flash_bwd_dq", "flash_bwd_dkv"), 1
            )
            assert (done.compiled, done.already, done.failed) == (4, 0, ())
            assert {line.split()[0] for line in fake.log()} == {"library", "kernel"}
            assert sum("#define GRID_PIECE" in text for text in texts) == (3 if limit else 0)
            q, lse = torch.zeros(1, 2, 40, head_dim), torch.zeros(1, 2, 40)
            fake.ops.flash_fwd(q, q, q, causal=True)
            fake.ops.flash_bwd(q, None, q, q, q, q, lse, exact_delta=True, causal=True)
            assert fake.log()[-1] == "end"
            assert len(texts) == 4, "the ops compiled another text"
            again = warm_up(*arguments, causal=True, backward=True)
        finally:
            limit_pieces(0)
        assert (again.compiled, again.already) == (0, 4)
        assert str(again).startswith(
            "4 programs (flash_bwd_delta 1, flash_bwd_dkv 1, flash_bwd_dq 1, flash_fwd 1): "
            "0 compiled, 4 compiled before, 0 calls failed; "
        )

    def test_programs_are_compiled_side_by_side(self, fake):
        meet = threading.Barrier(3)
        fake.set_compiler(lambda text: meet.wait(HANG_SECONDS))
        calls = [meta(head_dim) for head_dim in (80, 88, 96)]
        done = warm_up(lambda: [torch.ops.metal_attn.flash_fwd(*qkv) for qkv in calls], threads=3)
        assert (done.compiled, done.failed) == (3, ())
        assert not meet.broken

    def test_a_program_is_compiled_once(self, fake, monkeypatch):
        """Three calls differ only in lengths, so one program is compiled."""
        texts, asked = compiled_in(fake), []
        explain = fake.ops.flash_fwd_explain
        monkeypatch.setattr(
            ops,
            "recording_op",
            lambda name: lambda *arguments: asked.append(name) or explain(*arguments),
        )
        arguments = [meta(184, (length, 50)) for length in (40, 41, 42)]
        done = warm_up(lambda: [torch.ops.metal_attn.flash_fwd(*qkv) for qkv in arguments])
        assert (done.kernels, len(texts)) == ({"flash_fwd": 1}, 1)
        assert asked == ["flash_fwd"] * 4

    def test_a_tile_that_the_gpu_refuses_is_replaced(self, fake, capfd):
        (first,) = extension.launches(fake.ops.flash_fwd_explain(*meta(200)))
        defines = "".join(f"#define {name} {value}\n" for name, value in first["defines"].items())
        fake.refuse(defines, "pipeline")
        texts = compiled_in(fake)
        done = warm_up(*meta(200))
        assert (done.kernels, done.compiled, done.failed) == ({"flash_fwd": 1}, 1, ())
        assert len(texts) == 2
        assert "this GPU refuses the tile" in capfd.readouterr().err
        (then,) = extension.launches(fake.ops.flash_fwd_explain(*meta(200)))
        tiles = [launch["tuning"]["candidates"][0] for launch in (first, then)]
        assert then["choice"].startswith(f"default; refused: {tiles[0]} in threadgroups of ")
        assert tiles[1] != tiles[0]

    def test_compile_errors_are_reported(self, fake):
        fake.refuse("#define HEAD_DIM_QK 208")
        calls = [meta(208), meta(216)]
        done = warm_up(lambda: [torch.ops.metal_attn.flash_fwd(*qkv) for qkv in calls])
        (error,) = done.failed
        assert "told to be refused" in error
        assert (done.kernels, done.compiled) == ({"flash_fwd": 1}, 1)
        assert "1 call failed" in str(done)
        assert str(done).splitlines()[1].startswith("failed: metal_attn: compiling flash_fwd ")


class TestRefusals:
    def test_without_mps_it_raises(self):
        with pytest.raises(RuntimeError, match=r"mps is not available\. Call it on a Mac"):
            warm_up(*meta(64))

    def test_invalid_arguments_raise(self, fake):
        with pytest.raises(TypeError, match="warm_up's first argument is an int; it must be"):
            warm_up(3)
        with pytest.raises(TypeError, match=r"a Linear, which has no generate\(\), and no arg"):
            warm_up(torch.nn.Linear(2, 2))
        with pytest.raises(ValueError, match="softcap"):
            warm_up(*meta(64), softcap=-1.0)

    def test_a_call_without_our_ops_compiles_nothing(self, fake):
        assert "nothing to compile" in str(warm_up(torch.nn.Linear(2, 2), torch.zeros(2)))


MODEL = """
import json, sys, warnings, torch
from tests.runtime import fake_mac
fake = fake_mac.fake_mac("Apple M2", 10, sys.argv[1])
warnings.simplefilter("ignore")  # kernels of the CPU are replaced
from torch_metal_attn import warm_up
from torch_metal_attn.tools.explain import ops
from tests.transformers.tiny_models import build
model = build("Llama")
model.set_attn_implementation("metal_attn")
fake.library.fake_mps_take_over()
ops.recording_op = lambda name: getattr(fake.ops, name + "_explain", None)
texts = []
fake.set_compiler(texts.append)
done = warm_up(model, prompt_lengths=(8, 40))
first = len(texts), sorted({line.split()[0] for line in fake.log()})
for length in (8, 40):
    prompt = torch.ones(1, length, dtype=torch.long)
    model.generate(prompt, attention_mask=torch.ones_like(prompt), do_sample=False,
                   min_new_tokens=3, max_new_tokens=3)
print(json.dumps([done.kernels, done.compiled, *first, len(texts), fake_mac.kernels(fake)]))
"""


def test_a_warm_model_of_transformers_compiles_nothing(libraries):
    pytest.importorskip("transformers")
    output = run_alone(MODEL, libraries["bytes"], TORCH_METAL_ATTN_BACKEND="mps")
    kernels, compiled, texts, lines, at_last, ran = json.loads(output)
    assert set(kernels) == {"flash_fwd", "flash_decode"}
    assert sum(kernels.values()) == compiled == texts == at_last
    assert lines == ["kernel", "library"]
    assert set(ran) == set(kernels)


def test_slow_compilations_are_reported(any_fake, capfd):
    """Compilations of more than 2 s are reported, in at most five lines per process."""

    def compiler(text):
        any_fake.library.fake_mps_pass_time(int(text.split()[-1]))

    any_fake.set_compiler(compiler)
    for milliseconds in (2000, 2001, 63000):
        name = f"takes_{milliseconds}"
        any_fake.add_family(name, f"{TEXT}// {milliseconds}\n")
        for _ in range(2):
            launch(any_fake, family=name)
    assert capfd.readouterr().err.splitlines() == [
        f"torch_metal_attn: compiling scale took {seconds} s, once in this process; "
        "torch_metal_attn.warm_up compiles kernels before they are needed"
        for seconds in ("2.0", "63.0")
    ]
    for number in range(9):
        launch(any_fake, family="takes_2001", defines=f"N={number}")
    lines = capfd.readouterr().err.splitlines()
    assert len(lines) == 3
    assert lines[-1].endswith("(later slow compilations are not reported)")


def test_prefixes_of_warm_up_are_not_matched(fake):
    """Ops write nothing in warm_up, so the cache must not match these tokens."""
    cache = PagedKVCache(4, 8, 2, 8, dtype=torch.float32)
    id, rows, tokens = cache.allocate(), torch.zeros(1, 2, 8, 8), list(range(8))

    def fill():
        cache.append([id], rows, rows, 0, token_ids=[tokens])

    warm_up(fill)
    cache.free(id)
    assert cache.match_prefix(tokens)[1] == 0


def test_a_gpu_of_unknown_cores_does_not_divide_short_calls():
    """torch reports 0 cores if it does not know the number."""
    extension.load().metal_attn_set_gpu_cores(0)
    q = torch.zeros(1, 2, 40, 64)
    (launch,) = extension.launches(torch.ops.metal_attn_explain.flash_fwd(q, q, q))
    assert launch["pieces"] == 1

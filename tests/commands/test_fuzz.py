"""`fuzz`: a sample of its cases holds, it finds planted faults, and nothing of a run is lost."""

import dataclasses
import json
import random
from functools import cache

import pytest
import torch

from tests.commands import fuzz_deadly
from tests.helpers import forks
from tests.helpers.cases import each_case
from tests.helpers.mutants import plant, repeated
from torch_metal_attn import sdpa, simulate, testing
from torch_metal_attn.__main__ import main
from torch_metal_attn.ops import differentiation
from torch_metal_attn.quantisation import FORMATS
from torch_metal_attn.testing import running, shrinking, storage
from torch_metal_attn.testing.attention import CALLS
from torch_metal_attn.testing.case import drawn as drawn_fields
from torch_metal_attn.testing.families import FAMILIES, Family, draw, draw_of
from torch_metal_attn.testing.running import Outcome
from torch_metal_attn.testing.tensors import Memory
from torch_metal_attn.tools.fuzz import command, report, workers
from torch_metal_attn.tools.fuzz.workers import Ran

CPU = torch.device("cpu")
SEED = 0


@cache
def drawn():
    """Cases far apart, so that they are of many models."""
    return [draw(SEED, 40 * index) for index in range(1000)]


@cache
def sample():
    """Cases that find faults, and the first of each call of families that are cheap to compile."""
    calls = {}
    for case in drawn():
        if not isinstance(case, testing.Attention) and not case.refused():
            calls.setdefault((type(case), case.call), case)
    found = dict.fromkeys(first(wanted) for *_, wanted, _ in FAULTS.values())
    return [*found, *calls.values()]


PARTS = 4


# Right results that bounds once were too tight for, or that were asked for a wrong error: rows of a
# cache without a gradient, dropout of equal values, scores whose terms cancel, a float16 gradient
# below its normal numbers, the log-sum-exp of large rotated scores, dropout of dequantised values,
# a cache that cannot be quantised, and a page of one element.
RIGHT = [
    testing.Step(call="append_kv", backward=True),
    testing.Attention(
        call="flash_varlen_bwd",
        dtype="float16",
        packed=((16, 11),),
        dropout_p=0.6,
        backward=True,
        exact_delta=True,
        values="constant",
    ),
    testing.Attention(
        call="flash_fwd",
        dtype="bfloat16",
        q_length=63,
        kv_length=32,
        head_dim=15,
        causal=True,
        window_size_left=0,
        format="fp8_e4m3",
        values="sharp",
    ),
    testing.Attention(
        call="flash_attn_func",
        softmax_scale=1.0,
        learnable_sink="float16",
        backward=True,
        values="sharp",
    ),
    testing.Attention(
        call="flash_varlen_fwd",
        seed=111443381,
        dtype="bfloat16",
        packed=((6, 4),),
        causal=True,
        rotary="qk",
        rotary_columns=8,
        rotary_interleaved=True,
        values="sharp",
    ),
    testing.Attention(
        call="flash_varlen_fwd",
        seed=970964191,
        dtype="float16",
        head_dim=32,
        v_head_dim=32,
        packed=((1, 21),),
        attention_chunk=12,
        dropout_p=0.6,
        cache="paged",
        format="q4_0",
        values="sharp",
    ),
    testing.Attention(
        call="flash_varlen_fwd",
        packed=((0, 0),),
        spare_rows=1,
        learnable_sink="float32",
        backward=True,
    ),
    testing.Attention(
        call="scaled_dot_product_attention",
        seed=1881718781,
        dtype="bfloat16",
        batch=2,
        q_length=7,
        kv_length=20,
        v_head_dim=40,
        softmax_scale=1.0,
        backward=True,
    ),
    testing.Attention(dtype="float64", head_dim=32, v_head_dim=32, kv_length=3, format="q8_0"),
    testing.Copy(shape=(1, 1, 1), copies=(), layout=("order 021", "padded 8")),
]


@pytest.mark.parametrize("part", range(PARTS))
def test_a_sample(part, device):
    for case in sample()[part::PARTS]:
        outcome = running.run(case, device)
        assert outcome.ok, f"{case}\n{outcome}"


class TestDrawing:
    def test_a_case_is_its_seed_and_index(self):
        assert [draw(SEED, 40 * i) for i in (999, 0, 77)] == [drawn()[i] for i in (999, 0, 77)]
        assert draw(1, 0) != drawn()[0]

    def test_every_function_and_option_is_drawn(self):
        r = random.Random(SEED)
        attention = [draw_of(testing.Attention, r) for _ in range(5000)]
        legal = [case for case in attention if not case.refused()]
        assert {type(case) for case in drawn()} == {n for n, f in FAMILIES.items() if f.weight}
        assert {case.call for case in legal} == set(CALLS)
        given = {(case.call, name) for case in legal for name in case.fields()}
        for name, how in drawn_fields(testing.Attention).items():
            for call in how.calls or CALLS:
                assert (call, name) in given, (call, name)
        formats = {"", *FORMATS}
        assert {(case.cache, case.format) for case in legal} == {
            (cache, format) for cache in ("", "paged", "indexed") for format in formats
        }
        assert any(0 in pair for case in legal for pair in case.sequences)

    def test_one_in_ten_is_wrong(self):
        wrong = [case for case in drawn() if case.refused()]
        assert 0.05 < len(wrong) / len(drawn()) < 0.15
        assert len({case.refused() for case in wrong}) > 20

    def test_cases_share_kernels(self):
        """Compiling takes longer than running: a run has far fewer kinds of calls than cases."""
        cases = [draw(SEED, index) for index in range(1000)]
        kinds = {(type(case), case.call, case.fields().get("dtype")) for case in cases}
        assert len(kinds) < len(cases) / 15

    def test_all_have_a_meaning(self):
        assert not [case for case in drawn() if case.meaningless()]

    @pytest.mark.parametrize("case", RIGHT, ids=lambda case: case.call)
    def test_what_is_right_is_not_reported(self, case, device):
        outcome = running.run(case, device)
        assert outcome.ok, outcome

    def test_only_what_has_an_argument_is_drawn(self):
        case = testing.Attention(call="flash_attn_varlen_func", packed=((1, 1),), cache="indexed")
        assert case.meaningless() == "flash_attn_varlen_func has no cache_batch_idx"
        mask = testing.Attention(call="scaled_dot_product_attention", attn_mask="bfloat16 qk")
        assert mask.meaningless() == "torch's masks are of bool, float32 or the queries' dtype"

    @pytest.mark.parametrize("sizes", [(72, 64), (64, 72)])
    def test_groups_of_columns_divide_both_head_dims(self, sizes):
        size, v_size = sizes
        case = testing.Attention(
            call="flash_decode",
            head_dim=size,
            v_head_dim=v_size,
            format="q2_g64",
            v_format="q2_g64",
        )
        assert case.meaningless().endswith("q2_g64 has blocks of 64 columns")

    @pytest.mark.parametrize("q_length, kv_length", [(0, 9), (9, 0)])
    def test_strides_of_no_elements_are_not_wrong(self, q_length, kv_length):
        """Every function takes them, so they are not drawn."""
        for name in ("q", "k", "v"):
            case = testing.Attention(
                call="flash_fwd",
                q_length=q_length,
                kv_length=kv_length,
                head_dim=8,
                v_head_dim=8,
                spoilt=f"strides of {name}",
            )
            is_empty = (q_length if name == "q" else kv_length) == 0
            assert bool(case.meaningless()) == is_empty

    @pytest.mark.parametrize("illegal", testing.Attention().wrong(), ids=str)
    def test_what_is_illegal_is_refused(self, illegal, device):
        """Each illegal option in a call of the first function that has it."""
        cases = [testing.Attention(call=call, **{"kv_length": 8, **illegal}) for call in CALLS]
        case = next(case for case in cases if not case.meaningless() and case.refused())
        outcome = running.run(case, device)
        assert outcome.ok, outcome
        assert not outcome.measures


class TestJson:
    def test_every_case_comes_back(self):
        for case in drawn()[:500]:
            text = json.dumps(storage.to_json(case))
            assert storage.from_json(json.loads(text)) == case

    def test_a_case_is_python(self):
        for case in drawn()[:100]:
            assert eval(f"testing.{case}") == case

    @pytest.mark.parametrize(
        "data, words",
        [
            ({"family": "Nothing"}, "family is 'Nothing'; it must be one of Attention, "),
            ({"family": "Copy", "pages": 3}, "Copy has no pages"),
            ({"family": "Attention", "call": "flash_fwd", "num_splits": 2}, "has no num_splits"),
        ],
    )
    def test_what_is_no_case(self, data, words):
        with pytest.raises(ValueError, match=words):
            storage.from_json(data)


class TestMemory:
    LAYOUTS = ((), ("padded 3",), ("order 120", "padded 8"), ("repeated 0",), ("order 3210",))

    @pytest.mark.parametrize("layout", LAYOUTS, ids=str)
    @pytest.mark.parametrize("dtype", [torch.float16, torch.int32, torch.bool, torch.float8_e4m3fn])
    def test_numbers_stay_what_they_are(self, layout, dtype):
        x = torch.randn(3, 2, 5, 4).to(dtype)
        if "repeated 0" in layout:
            x = x[:1].expand(3, -1, -1, -1)
        memory = Memory(CPU)
        placed = memory.place("x", x, layout)
        assert placed.dtype == dtype
        assert torch.equal(placed.float(), x.float())
        assert (placed.stride(0) == 0) == ("repeated 0" in layout)
        if layout == ("order 120", "padded 8"):
            assert placed.stride() == (20, 700, 100, 1)
        assert memory.undisturbed().ok

    def test_a_write_beside_is_seen(self):
        memory = Memory(CPU)
        x = memory.place("x", torch.zeros(2, 3), ("padded 2",))
        x.fill_(1.0)
        assert memory.undisturbed(("x",)).ok
        assert memory.undisturbed().error == 12  # two bytes of each of six ones
        torch.as_strided(x, (1,), (1,), x.storage_offset() - 1).fill_(0.0)
        assert memory.undisturbed(("x",)).error > 0


READ = "// Every SIMD group has read the tiles of the block before.\n    "
BARRIER = READ + "threadgroup_barrier(mem_flags::mem_threadgroup);"
COUNTER = "uint4(key_index / 4, query, head, batch)"
SCALE = (repeated("scores.scale(params.scale_log2)"), "scores.scale(0.98f * params.scale_log2)")
READ_Q = "source.template pair<FRAGMENTS * FRAGMENT>(positions[i], d * FRAGMENT, lane_column);"
ROUNDED_Q = f"{READ_Q} return Fragment<T>(T(KV_ELEMENT(pair.x)), pair.y);"
FORWARDS = ("flash_fwd", "flash_varlen_fwd")


def is_forward(case, **longest):
    """Whether a forward has scores by the values of q and k, and is of so many queries and keys."""
    enough = zip(("queries", "keys"), getattr(case, "longest", ()), strict=False)
    return (
        case.call in FORWARDS
        and case.softmax_scale != 0
        and all(n >= longest.get(name, 1) for name, n in enough)
    )


def shows_most(case):
    """Whether queries see more than a few keys."""
    names = ("attention_chunk", "q_offset", "attn_mask", "attn_bias", "seqused_k", "leftpad_k")
    return min(case.longest) > 4 and not any(getattr(case, name) for name in names)


OUT = ("out", "softmax_lse")
GRADIENTS = ("dq", "dk", "dalibi_slopes")
# The kernel, what is planted in its text, which drawn cases fail, and how they do.
FAULTS = {
    "diagonal hidden": (
        *("flash_decode", "position + window_right + 1", "position + window_right"),
        lambda c: c.call == "flash_decode" and c.causal and c.kv_length > c.q_length > 1,
        OUT,
    ),
    "softcap dropped": (
        "flash_fwd",
        "    tanh(scores, params);\n",
        "    scores.scale(params.scale_over_cap);\n",
        lambda c: is_forward(c) and c.softcap == 1.5,
        OUT,
    ),
    "wrong stride of pages": (
        *("flash_decode", "Offset(page) * page_stride", "Offset(page) * PAGE_SIZE * row_stride"),
        lambda c: c.call == "flash_decode" and c.cache == "paged" and "padded 8" in c.k_layout,
        (*OUT, "out_of_bounds"),
    ),
    "other random numbers in backward": (
        *("flash_bwd_dq", COUNTER, COUNTER.replace("query", "query + 1")),
        lambda c: getattr(c, "dropout_p", 0) in (0.1, 0.6) and c.backward and shows_most(c),
        GRADIENTS,
    ),
    "no barrier before staging": (
        *("flash_fwd", BARRIER, READ),
        lambda c: is_forward(c, queries=9, keys=66) and c.dtype == "float16",
        ("race",),
    ),
    "last new row not written": (
        *("flash_decode", "min(end, params.capacity", "min(end - 1, params.capacity"),
        lambda c: c.call == "decode_step",
        ("k_cache, bytes that differ",),
    ),
    "sum of one lane": (
        *("softmax", "row_sum = simd_sum(row_sum)", "row_sum = row_sum"),
        lambda c: isinstance(c, testing.Softmax) and c.shape[c.dim] > 32 and c.hidden < 1,
        ("weights",),
    ),
    "gradient of the log-sum-exp not in an exact delta": (
        *("flash_bwd_dq", "sum - dlse;", "sum - 0.0f * dlse;"),
        lambda c: c.call == "flash_varlen_bwd" and c.through_lse and c.exact_delta,
        GRADIENTS,
    ),
    "q rounded to the dtype of its cache": (
        *("flash_fwd", f"return {READ_Q}", f"const Fragment<T> pair = {ROUNDED_Q}"),
        lambda c: is_forward(c, queries=9, keys=9) and c.cache_dtype,
        OUT,
    ),
}


@cache
def first(wanted):
    """Of the drawn cases that are judged by normal values."""
    return next(
        case
        for case in drawn()
        if not case.refused()
        and not getattr(case, "poison", "")
        and getattr(case, "values", "normal") == "normal"
        and wanted(case)
    )


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_found(name, monkeypatch):
    kernels, old, new, wanted, what = FAULTS[name]
    plant(monkeypatch, kernels, old, new)
    with simulate(check=True):
        outcome = running.run(first(wanted), CPU)
    assert not outcome.ok
    assert outcome.what in what


def test_a_diagonal_of_the_other_corner_is_found(monkeypatch):
    plan = sdpa.plan

    def other(arguments):
        problem = plan(arguments)
        return dataclasses.replace(problem, q_offset=0 if problem.q_offset is None else None)

    monkeypatch.setattr(sdpa, "plan", other)
    with simulate(check=True):
        assert running.run(first(of_a_corner), CPU).what == "out"


def of_a_corner(case):
    return getattr(case, "causal_bias", "") and case.q_length != case.kv_length


def test_a_gradient_that_gets_lost_is_found(monkeypatch):
    """Of a call that has none, and whose result does not say so."""
    monkeypatch.setattr(differentiation, "without_gradient", lambda message, tensors, run: run())
    with simulate(check=True):
        assert running.run(first(without_gradient), CPU).status == running.RAISED


def without_gradient(case):
    asked = case.call == "flash_decode" and case.backward and not case.differentiable
    return asked and not case.refused()


class TestShrinking:
    # Most fields need no other kernel than the simplest case, as a planted fault is compiled anew.
    CASE = testing.Attention(
        batch=2, heads=4, kv_heads=2, q_length=9, kv_length=40, seqused_k=(38, 5), seed=5
    )

    def test_of_a_planted_fault(self, monkeypatch, tmp_path, capsys):
        """Simpler, the same fault, and still failing when its JSON and its Python are run."""
        plant(monkeypatch, "flash_fwd", *SCALE)
        with simulate(check=True):
            ran = workers.run_and_shrink(3, self.CASE, CPU)
        simple, outcome = ran.shrunk
        assert outcome.shows(ran.outcome)
        assert len(simple.fields()) <= 4
        assert simple.batch == simple.heads == 1
        found = report.Report({}, SEED)
        found.add(ran)
        path = tmp_path / "report.json"
        found.write(path)
        assert report.read(path) == [simple]
        assert main(["fuzz", "--replay", str(path)]) == 1
        exec(storage.snippet(simple))
        out = capsys.readouterr().out
        assert "1 of 1 fail" in out
        assert f"Outcome(status='FAILED', what='{outcome.what}'" in out

    def test_keeps_the_way_in_which_it_fails(self):
        """A simpler case that fails in another way is another fault."""

        def run(case):
            return Outcome(running.FAILED, "out" if case.heads > 1 else "softmax_lse")

        simple, _ = shrinking.shrink(self.CASE, run(self.CASE), run)
        assert simple.fields() == {"call": "flash_fwd", "heads": 2}

    def test_of_every_family(self):
        """Whatever the case: what has no meaning, or must be refused, is not run."""

        def run(case):
            assert not case.meaningless()
            return Outcome(running.FAILED, "out")

        for case in drawn()[:60]:
            simple, _ = shrinking.shrink(case, run(case), run)
            assert len(simple.fields()) <= len(case.fields())
            assert bool(simple.refused()) == bool(case.refused())


class TestOutcomes:
    CASE = testing.Attention(kv_length=3)

    def outcome(self, monkeypatch, call, case=CASE, device=CPU):
        family = FAMILIES[testing.Attention]

        def prepare(case, device):
            prepared = family.prepare(case, CPU)
            return dataclasses.replace(prepared, function=lambda **given: call(prepared, given))

        monkeypatch.setitem(FAMILIES, testing.Attention, family._replace(prepare=prepare))
        with simulate(check=True):
            return running.run(case, device)

    def test_a_legal_case_that_is_refused(self, monkeypatch):
        def call(prepared, given):
            raise ValueError("not today")

        outcome = self.outcome(monkeypatch, call)
        assert (outcome.status, outcome.what) == (running.REFUSED, "ValueError")
        assert "not today" in outcome.message

    def test_an_illegal_case_that_is_not(self, monkeypatch):
        case = dataclasses.replace(self.CASE, softcap=-2.0)
        outcome = self.outcome(monkeypatch, lambda prepared, given: None, case)
        assert outcome.status == running.ACCEPTED
        assert "softcap below 0" in outcome.message

    def test_a_length_that_mps_does_not_read(self, monkeypatch):
        """There it may run, and must write nothing else."""

        def call(prepared, given):
            return None

        case = dataclasses.replace(self.CASE, seqused_k=(4,))
        assert self.outcome(monkeypatch, call, case).status == running.ACCEPTED
        monkeypatch.undo()
        assert self.outcome(monkeypatch, call, case, torch.device("mps")).ok
        monkeypatch.undo()

        def write(prepared, given):
            given["k"].zero_()

        outcome = self.outcome(monkeypatch, write, case, torch.device("mps"))
        assert outcome.what.startswith("memory")

    def test_an_illegal_case_that_writes_before_it_is_refused(self, monkeypatch):
        def call(prepared, given):
            given["q"].zero_()
            raise ValueError("too late")

        case = dataclasses.replace(self.CASE, softcap=-2.0)
        outcome = self.outcome(monkeypatch, call, case)
        assert outcome.status == running.FAILED
        assert outcome.what.startswith("memory")

    def test_a_refusal_of_another_type(self, monkeypatch):
        def call(prepared, given):
            raise RuntimeError("broken")

        for case in (self.CASE, dataclasses.replace(self.CASE, softcap=-2.0)):
            assert self.outcome(monkeypatch, call, case).status == running.RAISED
            monkeypatch.undo()

    def test_an_argument_that_is_written(self, monkeypatch):
        def call(prepared, given):
            results = prepared.function(**given)
            given["k"].zero_()
            return results

        assert self.outcome(monkeypatch, call).what.startswith("memory")


def test_workers_that_die_and_hang(monkeypatch, tmp_path, capsys):
    """Each case has its outcome, and those behind it are run."""
    monkeypatch.setattr(command, "draw", fuzz_deadly.draw)
    # Fresh processes all the same.
    monkeypatch.setattr(workers.multiprocessing, "get_context", {"spawn": forks.context}.get)
    monkeypatch.setitem(FAMILIES, fuzz_deadly.Deadly, Family(0, fuzz_deadly.prepare))
    monkeypatch.setitem(storage._BY_NAME, "Deadly", fuzz_deadly.Deadly)
    path = tmp_path / "report.json"
    arguments = ["--cases", "3", "--minutes", "10", "--case-seconds", "2", "--out", str(path)]
    assert main(["fuzz", *arguments]) == 1
    data = json.loads(path.read_text())
    assert data["cases"] == 3
    assert [(f["case"]["call"], f["status"], f["message"]) for f in data["failures"]] == [
        ("dies", running.DIED, "the process ended with exit status 7"),
        ("hangs", running.HUNG, "no end after 2 s"),
    ]
    assert "print(testing.check(testing.Deadly(call='dies')))" in capsys.readouterr().out


class TestCommand:
    @pytest.fixture
    def fuzzing(self, monkeypatch, tmp_path):
        """Runs `fuzz` with what the workers would have sent."""

        def run(sent, *arguments):
            def instead(draw, seed, indices, count, **_):
                for ran in sent:
                    if isinstance(ran, BaseException):
                        raise ran
                    yield ran

            monkeypatch.setattr(workers, "run", instead)
            path = tmp_path / "report.json"
            code = main(["fuzz", "--seed", "5", "--out", str(path), *arguments])
            return code, json.loads(path.read_text())

        return run

    SOUND = Ran(0, testing.Copy(), Outcome(running.PASSED))
    BAD = Ran(1, testing.Softmax(seed=3), Outcome(running.FAILED, "weights", "text"))

    def test_all_is_well(self, fuzzing, capsys):
        code, data = fuzzing([self.SOUND, None])
        assert code == 0
        assert (data["seed"], data["cases"], data["failures"]) == (5, 1, [])
        assert data["cases_by_call"] == {"Copy copy_pages": 1}
        assert "1 cases ran" in capsys.readouterr().out

    def test_a_failure(self, fuzzing, capsys):
        shrunk = (testing.Softmax(), Outcome(running.FAILED, "weights"))
        code, data = fuzzing([self.SOUND, dataclasses.replace(self.BAD, shrunk=shrunk)])
        assert code == 1
        (failure,) = data["failures"]
        assert failure["case"] == {"family": "Softmax", "call": "softmax"}
        assert failure["drawn_as"]["seed"] == 3
        assert "testing.Softmax(call='softmax')" in capsys.readouterr().out

    def test_the_same_failure_again(self, fuzzing, capsys):
        bad = dataclasses.replace(self.BAD, shrunk=(testing.Softmax(), self.BAD.outcome))
        code, data = fuzzing([bad, dataclasses.replace(bad, index=9)])
        assert code == 1
        assert len(data["failures"]) == 2
        out = capsys.readouterr().out
        assert out.count("testing.Softmax(") == 1
        assert "case 9: as case 1\n" in out

    def test_an_interrupt_keeps_what_was_found(self, fuzzing, capsys):
        code, data = fuzzing([self.SOUND, self.BAD, KeyboardInterrupt(), self.BAD])
        assert code == 130
        assert len(data["failures"]) == 1
        assert "2 cases ran" in capsys.readouterr().out

    def test_where_it_cannot_be_written(self, tmp_path, capsys):
        assert main(["fuzz", "--out", str(tmp_path / "no folder" / "x.json")]) == 2
        assert "no folder" in capsys.readouterr().err

    @pytest.mark.parametrize(
        "text", ["", "{}", '{"failures": [{"case": {"family": "x"}}]}', "[" * 10**5], ids=len
    )
    def test_what_is_no_report(self, text, tmp_path, capsys):
        path = tmp_path / "x.json"
        path.write_text(text)
        with pytest.raises(SystemExit) as ended:
            main(["fuzz", "--replay", str(path)])
        assert ended.value.code == 2
        assert str(path) in capsys.readouterr().err

    @each_case(
        "option, text, message",
        [
            *((name, "0", "not a positive") for name in ("--minutes", "--workers", "--cases")),
            ("--minutes", "inf", "inf is not a positive, finite number"),
            ("--case-seconds", "nan", "nan is not a positive, finite number"),
            ("--cases", "1" + "0" * 20, "is above 1000000000"),
            ("--workers", "1025", "1025 is above 1024"),
        ],
    )
    def test_numbers(self, option, text, message, capsys):
        with pytest.raises(SystemExit):
            main(["fuzz", option, text])
        assert message in capsys.readouterr().err

    def test_a_case_has_a_number_from_0(self, capsys):
        with pytest.raises(SystemExit):
            main(["fuzz", "--case", "-1"])
        assert "-1 is not the number of a case, from 0" in capsys.readouterr().err


@each_case(
    "fields, message",
    [
        ({"heads": None}, "heads is None; it must be of type int"),
        ({"seed": "a"}, "seed is 'a'; it must be of type int"),
        ({"softmax_scale": "a"}, "softmax_scale is 'a'; it must be of type float or None"),
        ({"seqused_k": 3}, "seqused_k is 3; it must be of type tuple or None"),
        ({"dtype": "a"}, "dtype is 'a'; it must be the name of a dtype of torch"),
        ({"call": "a"}, "call is 'a'; it must be one of flash_fwd, "),
        ({"cache": "paged", "call": "flash_bwd"}, "flash_bwd has no cache"),
    ],
)
def test_fields_that_make_no_case(fields, message):
    with pytest.raises((TypeError, ValueError), match=message):
        testing.check(testing.Attention(**fields))


def test_public_names():
    assert set(testing.__all__) == {family.__name__ for family in FAMILIES} | {"check"}

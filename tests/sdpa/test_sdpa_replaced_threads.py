"""sdpa_replaced() and threads: blocks of one thread, and blocks of the whole process."""

import sys
import threading
import types
import warnings
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.nn.functional as F
from torch.nn.functional import scaled_dot_product_attention as imported_before
from torch.overrides import BaseTorchFunctionMode

from tests.helpers.patience import HANG_SECONDS
from tests.sdpa.sdpa_check import (
    BUILTIN,
    LEFT_TO_TORCH,
    NO_CALL,
    OUTSIDE,
    Graphs,
    close,
    normal,
    nothing_said,  # noqa: F401
    qkv,
    simulate,
)
from torch_metal_attn import sdpa_replaced


def run(*functions):
    """Runs each function in a new thread, all at once."""
    pools = [ThreadPoolExecutor(1) for _ in functions]
    for future in [pool.submit(f) for pool, f in zip(pools, functions, strict=True)]:
        future.result()


@pytest.mark.parametrize("process_wide", [False, True])
@pytest.mark.parametrize("module", ["attention", "layer", "encoder"])
@pytest.mark.filterwarnings("ignore:.*nested tensors", f"ignore:.*{NO_CALL}")
def test_the_fused_path_is_off_in_a_block(module, process_wide):
    """Only torch's fused path supports nested tensors. It is off in threads of a block."""
    layer = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
    attend = {
        "attention": lambda x: layer.self_attn(x, x, x, need_weights=False)[0],
        "layer": layer,
        "encoder": torch.nn.TransformerEncoder(layer, 2).eval(),
    }[module]
    rows, dense = [normal(3, 8), normal(5, 8)], normal(2, 5, 8)
    nested = torch.nested.nested_tensor(rows)

    def launches():
        with simulate() as run, torch.no_grad():
            for out, row in zip(attend(nested).unbind(), expected, strict=True):
                close(out, row)
            close(attend(dense), expected_dense)
        return len(run.launches)

    with torch.no_grad():
        expected, expected_dense = attend(nested).unbind(), attend(dense)
        with pytest.warns(UserWarning, match=f"{LEFT_TO_TORCH}: an argument is a nested tensor"):
            with sdpa_replaced(process_wide) as calls:
                count = launches()
        assert calls.left_alone == {"an argument is a nested tensor": count}
        assert calls.replaced == count
        assert count == (2 if module == "encoder" else 1)
        elsewhere = []
        with sdpa_replaced(process_wide), sdpa_replaced(), BaseTorchFunctionMode():
            run(lambda: elsewhere.append(launches()))
            with pytest.raises(AssertionError, match="some Tensor argument has_torch_function"):
                attend(nested)  # the error that another mode causes outside of a block too
        assert elsewhere == [count if process_wide else 0]


def test_other_threads_call_torchs_function():
    q, k, v = qkv()

    def elsewhere():
        with simulate() as simulated:
            F.scaled_dot_product_attention(q, k, v)
            imported_before(q, k, v)
        assert not simulated.launches

    with simulate(), sdpa_replaced() as calls:
        run(elsewhere)
        F.scaled_dot_product_attention(q, k, v)
    assert calls.replaced == 1


class TestProcessWide:
    @pytest.mark.parametrize("call", ["attribute", "imported before", "layer"])
    def test_calls_in_any_thread_are_replaced(self, call):
        """The threads are one that runs already, one that starts in the block, and the block's."""
        q, k, v = qkv()
        x = normal(2, 5, 8)
        layer = torch.nn.MultiheadAttention(8, 2, batch_first=True).eval()
        function = {
            "attribute": lambda: F.scaled_dot_product_attention(q, k, v),
            "imported before": lambda: imported_before(q, k, v),
            "layer": lambda: layer(x, x, x, need_weights=False)[0],
        }[call]
        expected, kernels, early = function(), [], ThreadPoolExecutor(1)
        early.submit(function).result()

        def attend():
            with simulate() as run:
                close(function(), expected)
            kernels.append(len(run.launches))

        with sdpa_replaced(process_wide=True) as calls:
            early.submit(attend).result()
            run(attend)
            attend()
        early.submit(attend).result()
        assert (calls.replaced, calls.left_alone) == (3, {})
        assert kernels == [1, 1, 1, 0]

    def test_names_are_restored(self):
        """A name that a module binds inside the block keeps a function that calls torch's."""
        here = globals()
        with sdpa_replaced(process_wide=True):
            assert here["imported_before"] is not BUILTIN[0]
            with sdpa_replaced(process_wide=True):
                late = types.ModuleType("late")
                exec("from torch.nn.functional import scaled_dot_product_attention", vars(late))
            assert here["imported_before"] is not BUILTIN[0]
            assert torch._C._nn.scaled_dot_product_attention is BUILTIN[0]
        assert imported_before is BUILTIN[0]
        q, k, v = qkv()
        with simulate() as simulated:
            close(late.scaled_dot_product_attention(q, k, v), imported_before(q, k, v))
        assert not simulated.launches

    def test_a_rebound_name_stays(self):
        module = types.ModuleType("sdpa_stub")
        module.attend = imported_before
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(sys.modules, "sdpa_stub", module)
            with sdpa_replaced(process_wide=True):
                assert module.attend is not BUILTIN[0]
                module.attend = len
        assert module.attend is len

    def test_every_open_block_counts(self):
        q, k, v = qkv()
        with simulate(), sdpa_replaced(process_wide=True) as outer:
            with sdpa_replaced(process_wide=True) as inner, sdpa_replaced() as of_thread, outer:
                F.scaled_dot_product_attention(q, k, v)
                run(lambda: F.scaled_dot_product_attention(q, k, v))
            run(lambda: F.scaled_dot_product_attention(q, k, v))
        assert [c.replaced for c in (outer, inner, of_thread)] == [1, 1, 1]
        assert outer.left_alone == {OUTSIDE: 2}  # the simulator belongs to this thread
        assert inner.left_alone == {OUTSIDE: 1}
        assert of_thread.left_alone == {}

    def test_a_block_may_end_during_a_call_in_another_thread(self):
        """Our kernel finishes the call, which is counted. The next call calls torch's function."""
        q, k, v = qkv()
        calling, ended = threading.Event(), threading.Event()

        class Slow(torch.utils._python_dispatch.TorchDispatchMode):
            def __torch_dispatch__(self, function, types, args=(), kwargs=None):
                if "flash_fwd" in str(function):
                    calling.set()
                    assert ended.wait(HANG_SECONDS)
                return function(*args, **(kwargs or {}))

        def elsewhere():
            with simulate() as simulated:
                with Slow():
                    close(F.scaled_dot_product_attention(q, k, v), BUILTIN[0](q, k, v))
                close(F.scaled_dot_product_attention(q, k, v), BUILTIN[0](q, k, v))
            assert len(simulated.launches) == 1

        try:
            with sdpa_replaced(process_wide=True) as calls:
                result = ThreadPoolExecutor(1).submit(elsewhere)
                assert calling.wait(HANG_SECONDS)
            assert F.scaled_dot_product_attention is BUILTIN[0]
            assert calls.replaced == 0
        finally:
            ended.set()
        result.result()
        assert (calls.replaced, calls.left_alone) == (1, {})

    def test_a_block_may_end_in_another_thread(self):
        q, k, v = qkv()
        calls = sdpa_replaced(process_wide=True)
        run(calls.__enter__)
        with simulate():
            F.scaled_dot_product_attention(q, k, v)
        run(lambda: calls.__exit__(None, None, None))
        assert calls.replaced == 1

    def test_many_threads_count_every_call_once(self):
        """Blocks of both kinds open and close in all threads. A call counts once in each block."""
        q, k, v = (t[:1, :1, :2] for t in qkv())
        start = threading.Barrier(8)

        def worker():
            start.wait()
            for _ in range(10):
                with sdpa_replaced(process_wide=True), sdpa_replaced() as calls_here:
                    for _ in range(3):
                        imported_before(q, k, v)
                assert calls_here.left_alone == {OUTSIDE: 3}

        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            with sdpa_replaced(process_wide=True) as calls:
                run(*[worker] * 8)
        assert calls.left_alone == {OUTSIDE: 8 * 10 * 3}
        assert [LEFT_TO_TORCH in str(warning.message) for warning in said].count(True) == 1

    def test_invalid_arguments_are_refused(self):
        with pytest.raises(TypeError, match="process_wide is 2; it must be a bool"):
            sdpa_replaced(2)

    def test_threads_share_compiled_graphs(self):
        """All threads share a graph for calls inside and one for calls outside of blocks."""
        torch._dynamo.reset()
        graphs = Graphs()

        def call(q, k, v):
            return imported_before(q, k, v) + F.scaled_dot_product_attention(q, k, v)

        compiled = torch.compile(call, fullgraph=True, backend=graphs)
        q, k, v = qkv()
        expected = call(q, k, v)

        def check(launches):
            with simulate() as simulated:
                close(compiled(q, k, v), expected)
            assert len(simulated.launches) == launches

        check(0)
        for _ in range(12):
            with sdpa_replaced(process_wide=True):
                check(2)
                run(lambda: check(2))
            run(lambda: check(0))
        assert graphs.calls == [0, 2]


class TestNoCall:
    @pytest.mark.parametrize(
        "process_wide, why",
        [(False, r"use sdpa_replaced\(process_wide=True\)"), (True, "an attention of its own")],
    )
    def test_warns_once(self, process_wide, why):
        def block():
            with sdpa_replaced(process_wide):
                pass

        with pytest.warns(UserWarning, match=f"{NO_CALL}: .*{why}") as said:
            run(block, block)
        assert [warning.filename for warning in said] == [__file__]

    def test_blocks_that_may_have_replaced_a_call_do_not_warn(self):
        """There was a call or an error, or a compiled function may have run."""
        q, k, v = qkv()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            with simulate(), sdpa_replaced():
                F.scaled_dot_product_attention(q, k, v)
            for process_wide in (False, True):
                with pytest.raises(KeyError), sdpa_replaced(process_wide):
                    raise KeyError
            torch._dynamo.reset()
            compiled = torch.compile(
                lambda q: F.scaled_dot_product_attention(q, q, q) + 0, backend="eager"
            )
            for _ in range(2):
                with simulate() as simulated, sdpa_replaced():
                    compiled(q)
                assert simulated.launches

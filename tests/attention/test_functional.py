"""flash-attn's functions: layouts, bottom-right alignment, every option, and errors."""

import inspect
import re
from itertools import product

import numpy as np
import pytest
import torch

import torch_metal_attn
from tests.attention.flash_fwd_check import make_packed
from tests.attention.held_cases import case, hold
from tests.attention.test_values import EVERY_OPTION, ODD
from tests.attention.test_values import packed as packed_case
from tests.helpers.cases import each_case
from torch_metal_attn import (
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
    flash_attn_with_kvcache,
    flex_attention,
    scaled_dot_product_attention,
)
from torch_metal_attn.call.options import ScoreOptions
from torch_metal_attn.testing.judge import normal

FUNCTIONS = {
    name: function
    for name, function in vars(torch_metal_attn).items()
    if name.startswith("flash_attn_")
}
WINDOWS = [
    {},
    {"window_size_left": 5, "window_size_right": 2},
    {"window_size_left": 7, "causal": True},
    {"window_size_right": 9, "causal": True},  # causal takes precedence over the right window
]


def cases(call):
    """Windows and every option at different lengths; for flash_attn_func also all odd lengths."""
    qkvpacked = "qkvpacked" in call
    sizes = {"heads": 4, "kv_heads": 4 if qkvpacked else 2}
    pairs = [(q, q) if qkvpacked else (q, k) for q, k in ((33, 40), (31, 65), (40, 7), (7, 9))]
    if call == "flash_attn_with_kvcache":
        without_dropout = EVERY_OPTION | {"dropout_p": 0.0}
        for (q, k), feature in zip(pairs, (*WINDOWS[1:], without_dropout), strict=True):
            yield case(call=call, **sizes, batch=2, q_length=q, kv_length=k, **feature)
        for cache in ("", "paged"):
            options = {"dtype": "float32", "cache_dtype": "float16", "causal": True}
            yield case(call=call, **sizes, cache=cache, **options)
        return
    for i, feature in enumerate((*WINDOWS, EVERY_OPTION)):
        if "varlen" in call:
            lengths = (*pairs[: i % 3 + 1], (0, 0), *pairs[i % 3 + 1 :])
            if feature is EVERY_OPTION:
                feature = feature | {"seqused_k": (30, 31, 0, 3, 7)}
            yield packed_case(lengths, call=call, **sizes, **feature)
        else:
            q, k = pairs[i % 4]
            yield case(call=call, **sizes, batch=2, q_length=q, kv_length=k, **feature)
    if call == "flash_attn_varlen_func":
        paged = {"seqused_k": (9, 2, 33), "cache": "paged", "causal": True}
        yield packed_case(((7, 9), (0, 5), (33, 40)), call=call, **paged)
    if call == "flash_attn_func":
        for q, k in ODD:
            yield case(call=call, **sizes, q_length=q, kv_length=k, causal=True)


@pytest.mark.parametrize("call", FUNCTIONS)
def test_values(call, device):
    hold(list(cases(call)), device)


def close(actual, expected):
    torch.testing.assert_close(actual.cpu(), expected.to(actual.dtype), rtol=1e-5, atol=1e-5)


SINK = "learnable_sink"
WRONG_VALUES = [
    ({"softcap": -1.0}, "softcap is -1; it must be 0"),
    ({"softmax_scale": -(10**400)}, r"scale is -inf; its product with log2\(e\) must be finite"),
    ({"dropout_p": 1.1}, r"dropout_p is 1\.1; it must be in 0\.\.1"),
    ({"attention_chunk": 2**63}, "attention_chunk is 9223372036854775808; it must fit int64"),
]
WRONG_TYPES = [
    ({"q": [1.0]}, "q is a list"),
    ({"v": None}, "v is None"),
    ({"causal": 2}, "causal is 2; it must be a bool"),
    ({"causal": torch.ones(2)}, "causal is a float32 tensor of shape .*; it must be a bool"),
    *(
        ({name: torch.ones(3, 3).bool()}, f"^{name} is a bool tensor .*: for a mask call sc")
        for name in ("causal", "dropout_p")
    ),
    ({"attention_chunk": 2.5}, r"attention_chunk is 2\.5; it must be an int"),
    *(
        ({name: value}, f"{name} is {value!r}; it must be {kind}")
        for kind, names, values in (
            ("a bool", ("return_attn_probs", "deterministic"), ("a", None)),
            ("a number", ("softmax_scale", "softcap", "dropout_p"), ("a", True)),
        )
        for name, value in product(names, values)
    ),
    *(({name: 1.0}, f"{name} is a float; it must be a ") for name in ("alibi_slopes", SINK)),
    ({"window_size": torch.ones(2)}, r"window_size is a float32 tensor.*; it must be two ints"),
    *(
        ({"window_size": size}, f"window_size is {re.escape(str(size))}; it must be two ints")
        for size in (3, (True, 1), (-1,), (-1, 2.5))
    ),
]


class TestFlashAttnFunc:
    @each_case("position, shape", product(range(3), [(), (8,), (5, 2, 8), (1, 1, 5, 2, 8)]))
    def test_wrong_ranks_are_refused(self, position, shape):
        tensors = [normal(1, 5, 2, 8)] * 3
        tensors[position] = normal(*shape)
        message = f"{'qkv'[position]} has shape {shape}; it must be (B, L, H, D)"
        with pytest.raises(ValueError, match=re.escape(message)):
            flash_attn_func(*tensors)

    @each_case(
        "arguments, error, message",
        [
            *((arguments, ValueError, message) for arguments, message in WRONG_VALUES),
            *((arguments, TypeError, message) for arguments, message in WRONG_TYPES),
        ],
    )
    def test_invalid_arguments_are_refused(self, arguments, error, message):
        q = normal(1, 5, 2, 8)
        with pytest.raises(error, match=message):
            flash_attn_func(**{"q": q, "k": q, "v": q} | arguments)

    @pytest.mark.parametrize("name", ["softmax_scale", "softcap"])
    def test_numbers_that_require_grad_are_refused(self, name):
        q, number = normal(1, 5, 2, 8), torch.tensor(0.5, requires_grad=True)
        with pytest.raises(NotImplementedError, match=f"{name} requires grad, .*: detach it"):
            flash_attn_func(q, q, q, **{name: number})
        expected = flash_attn_func(q, q, q, **{name: 0.5})
        with torch.no_grad():
            assert torch.equal(flash_attn_func(q, q, q, **{name: number}), expected)

    @pytest.mark.parametrize(
        "options",
        [
            {"window_size": torch.tensor([2, 1])},
            {"window_size": [np.int64(2), torch.tensor(1)]},
            {"causal": 1, "window_size": np.array([2, -1])},
            {"causal": np.True_, "window_size": (np.int32(2), None)},
            {"causal": torch.tensor(True), "window_size": (2, 7), "softcap": 0},
            {"softcap": np.float32(2.0), "softmax_scale": torch.tensor(0.5)},
            {"softcap": 2, "softmax_scale": np.float64(0.5), "attention_chunk": np.int64(0)},
            {"dropout_p": np.float64(0.5)},
            {"dropout_p": torch.tensor(0.5)},
        ],
        ids=str,
    )
    def test_numbers_may_be_of_any_type(self, options):
        plain = {"causal": bool(options.get("causal", False))}
        plain["dropout_p"] = float(options.get("dropout_p", 0))
        if "window_size" in options:
            plain["window_size"] = (2, -1 if plain["causal"] else 1)
        if options.get("softcap"):
            plain |= {"softcap": 2.0, "softmax_scale": 0.5}
        q, k = normal(1, 5, 2, 8), normal(1, 9, 2, 8)
        results = []
        for arguments in (options, plain):
            torch.manual_seed(0)
            results.append(flash_attn_func(q, k, k, **arguments))
        assert torch.equal(*results)

    @pytest.mark.parametrize("shape", [(0, 3), (1, 0), (0, 33), (0, 0)])
    @pytest.mark.parametrize("function", [flash_attn_func, flash_attn_with_kvcache])
    def test_empty_tensors_may_have_any_strides(self, function, shape):
        """Strides of an empty tensor are ignored, because `contiguous()` does not change them."""
        batch, length = shape
        q, k = normal(batch, length, 2, 16)[..., ::2], normal(batch, 9, 1, 8)
        assert q.stride(-1) == 2
        assert function(q, k, k).shape == (batch, length, 2, 8)
        with pytest.raises(ValueError, match=r"k.* has strides .*; the last must be 1"):
            function(normal(1, length, 2, 8), normal(1, 9, 1, 16)[..., ::2], normal(1, 9, 1, 8))

    @pytest.mark.parametrize("far", [2**31, 2**63 - 1, 2**70, -(2**70)])
    def test_windows_beyond_int64(self, far):
        q, k = normal(1, 5, 2, 8), normal(1, 9, 2, 8)
        close(flash_attn_func(q, k, k, window_size=(-1, far)), flash_attn_func(q, k, k))
        close(flash_attn_func(q, k, k, window_size=(far, -1)), flash_attn_func(q, k, k))
        close(flash_attn_func(q, k, k, window_size=(far, 0)), flash_attn_func(q, k, k, causal=True))


def packed(q_lengths=(7, 0, 33, 1, 12)):
    return make_packed(q_lengths, [9, 5, 40, 31, 0], heads=4, kv_heads=2, head_dim=16)


@each_case(
    "index, value, error, message",
    [
        (0, [1.0], TypeError, "q is a list"),
        (3, [0, 5], TypeError, "cu_seqlens_q is a list"),
        (5, None, TypeError, "max_seqlen_q is None; it must be an int"),
        (6, -(2**63) - 1, ValueError, "max_seqlen_k is -9223372036854775809; it must fit"),
        (6, 40.0, TypeError, r"max_seqlen_k is 40\.0; it must be an int"),
        (1, torch.ones(1, 85, 2, 16), ValueError, r"k has shape .* be \(T, H, D\)"),
        (5, 32, ValueError, "cu_seqlens_q has a sequence of 33 rows and max_seqlen_q is 32"),
    ],
)
def test_flash_attn_varlen_func_refuses_invalid_arguments(index, value, error, message):
    arguments = list(packed())
    arguments[index] = value
    with pytest.raises(error, match=message):
        flash_attn_varlen_func(*arguments)


class TestPacked:
    def test_no_operand_is_copied(self):
        qkv = normal(2, 9, 3, 4, 16)
        seen = []

        class Watch(torch.utils._python_dispatch.TorchDispatchMode):
            def __torch_dispatch__(self, function, types, args=(), kwargs=None):
                if function.namespace == "metal_attn":
                    seen.extend(args[:3])
                return function(*args, **(kwargs or {}))

        with Watch():
            flash_attn_qkvpacked_func(qkv)
            flash_attn_varlen_qkvpacked_func(qkv[0], torch.tensor([0, 9], dtype=torch.int32), 9)
        assert [t.data_ptr() for t in seen] == [qkv[:, :, i].data_ptr() for i in range(3)] * 2

    @pytest.mark.parametrize("shape", [(2, 9, 2, 4, 16), (2, 9, 3, 4), (9, 3, 4, 16)])
    def test_wrong_shapes_are_refused(self, shape):
        with pytest.raises(ValueError, match=r"qkv has shape .* must be \(B, L, 3, H, D\)"):
            flash_attn_qkvpacked_func(normal(*shape))
        with pytest.raises(ValueError, match=r"kv has shape .* must be \(T, 2, Hkv, D\)"):
            flash_attn_varlen_kvpacked_func(None, normal(9, 3, 4, 16), None, None, 1, 1)

    def test_errors_name_the_part_of_the_packed_tensor(self):
        qkv, ends = normal(9, 3, 4, 16), torch.tensor([0, 10], dtype=torch.int32)
        with pytest.raises(TypeError, match="flash_attn_varlen_func takes it"):
            flash_attn_varlen_qkvpacked_func(qkv, ends, 9, block_table=ends)
        with pytest.raises(ValueError, match=r"^the last element of cu_seqlens is 10 .* 9 rows"):
            flash_attn_varlen_qkvpacked_func(qkv, ends, 10)
        with pytest.raises(ValueError, match=r"^qkv\[:, :, 0\] has dtype float64"):
            flash_attn_qkvpacked_func(qkv[None].double())
        q, kv = normal(1, 9, 3, 16), normal(1, 9, 2, 2, 16)
        with pytest.raises(ValueError, match=r"q has 3 heads and kv\[:, :, 0\] 2;"):
            flash_attn_kvpacked_func(q, kv)
        with pytest.raises(ValueError, match=r"q has 3 heads and kv\[:, 0\] 2;"):
            flash_attn_varlen_kvpacked_func(q[0], kv[0], ends - 1, ends - 1, 9, 9)


SCORES = {"causal": True, "window_size": (11, -1), "softcap": 3.0, "attention_chunk": 16}
SCORES |= {"alibi_slopes": normal(4).abs(), SINK: normal(4)}


@pytest.mark.parametrize(
    "function, lengths, options, dynamic",
    [
        (
            flash_attn_func,
            [(normal(2, n, 4, 16), *normal(2, 2, 15, 2, 16, seed=1)) for n in (9, 12)],
            *(SCORES, True),
        ),
        (flash_attn_varlen_func, [packed(), packed([3, 4, 5, 6, 0])], {"causal": True}, True),
        (flash_attn_qkvpacked_func, [(normal(2, n, 3, 4, 16),) for n in (9, 12)], {}, False),
    ],
)
def test_compiled(function, lengths, options, dynamic):
    torch._dynamo.reset()
    compiled = torch.compile(function, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for arguments in lengths:
        out, expected = compiled(*arguments, **options), function(*arguments, **options)
        close(out, expected)
        assert out.stride() == expected.stride()


class TestOptions:
    def test_defaults_are_those_of_the_op(self):
        arguments = torch.ops.metal_attn.flash_fwd.default._schema.arguments
        defaults = {argument.name: argument.default_value for argument in arguments}
        for function, name in product(FUNCTIONS.values(), ScoreOptions.__annotations__):
            assert inspect.signature(function).parameters[name].default == defaults[name]

    def test_arguments_of_flash_attn_3_must_have_their_defaults(self):
        q = normal(1, 3, 2, 8)
        names = "pack_gqa qv q_descale k_descale v_descale page_table seqused_q scheduler_metadata"
        defaults = dict.fromkeys(names.split()) | {"sm_margin": 0}
        for function, more in ((flash_attn_func, {"num_splits": 1}), (flash_attn_with_kvcache, {})):
            assert torch.equal(function(q, q, q, **defaults, **more), function(q, q, q))
        for name, value, advice in (
            ("num_splits", 3, "must be 0 or 1: only flash_attn_with_kvcache splits keys"),
            ("pack_gqa", True, "pack_gqa is True; it must be None: "),
            ("q_descale", torch.ones(1, 2), "must be None: multiply q by it"),
            ("q_descale", np.ones(2), r"is a float64 ndarray of shape \(2,\); it must be None"),
            ("page_table", torch.ones(1, 2), "flash_attn_varlen_func takes it as block_table"),
        ):
            with pytest.raises(ValueError, match=advice):
                flash_attn_func(q, q, q, **{name: value})

    @each_case(
        "function, name, advice",
        [
            (flash_attn_func, "is_causal", "use causal"),
            (flash_attn_func, "mask", "scaled_dot_product_attention takes it as attn_mask"),
            (flash_attn_func, "enable_gqa", "leave it out"),
            (flash_attn_func, "sotfcap", "did you mean softcap?"),
            (flash_attn_func, "logit_bias", "it has q, k, v, dropout_p, softmax_scale,"),
            (flash_attn_qkvpacked_func, "p", "use dropout_p"),
            (flash_attn_qkvpacked_func, "block_table", "flash_attn_varlen_func takes it"),
            (flash_attn_with_kvcache, "attn_mask", "torch.ops.metal_attn.decode_step takes it"),
            (scaled_dot_product_attention, "attn_bias", "use attn_mask"),
            (scaled_dot_product_attention, "sinks", "flash_attn_func takes it as learnable_sink"),
            (flex_attention, "attn_mask", "make a block_mask of a bool mask"),
            (flex_attention, "bias", "add it in a score_mod"),
        ],
    )
    def test_unknown_options_are_refused(self, function, name, advice):
        """For an option of torch, flash-attn, MLX or xformers, the error says what to use."""
        packed = function is flash_attn_qkvpacked_func
        operands = [normal(1, 3, 3, 2, 8)] if packed else [normal(1, 3, 2, 8)] * 3
        message = f"{function.__name__} has no argument {name}; {advice}"
        with pytest.raises(TypeError, match=f"^{re.escape(message)}"):
            function(*operands, **{name: True})

    def test_torch_compile_shows_the_error(self):
        call = torch.compile(lambda q: flash_attn_func(q, q, q, logit_bias=q), fullgraph=True)
        with pytest.raises(torch._dynamo.exc.Unsupported, match="no argument logit_bias; it has"):
            call(normal(1, 3, 2, 8))

"""The frequencies and tables of `torch_metal_attn.rope`, against transformers."""

import itertools
import math

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb
from transformers.models.qwen2_vl.configuration_qwen2_vl import Qwen2VLTextConfig
from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VLRotaryEmbedding
from transformers.models.qwen3_vl.configuration_qwen3_vl import Qwen3VLTextConfig
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLTextRotaryEmbedding

from tests.helpers.cases import each_case
from tests.rope.rope_check import check_close, normal
from torch_metal_attn import rope

rope_op = torch.ops.metal_attn.rope


def config_of(parameters, head_dim=64):
    return LlamaConfig(
        hidden_size=4 * head_dim,
        num_attention_heads=4,
        head_dim=head_dim,
        max_position_embeddings=8192,
        rope_parameters=parameters,
    )


def ours(config, seq_len=None):
    """Our frequencies for a config. Its parameters have the names of our arguments."""
    options = dict(config.rope_parameters)
    kind, base = options.pop("rope_type"), options.pop("rope_theta")
    length = config.max_position_embeddings
    if kind == "dynamic":
        kind = "dynamic_ntk"
        options |= {"max_position_embeddings": length, "seq_len": seq_len}
    if kind in ("yarn", "llama3"):
        options.setdefault("original_max_position_embeddings", length)
    if kind == "yarn" and options.get("factor") is None:
        options["factor"] = length / options["original_max_position_embeddings"]
    return getattr(rope, kind)(config.head_dim, base, **options)


def check_transformers(config, seq_len=None):
    """Checks that our frequencies for `config` equal those of transformers bit for bit."""
    inv_freq, factor = ours(config, seq_len)
    kind = config.rope_parameters["rope_type"]
    if kind == "default":
        theirs, their_factor = LlamaRotaryEmbedding.compute_default_rope_parameters(config)
    else:
        theirs, their_factor = ROPE_INIT_FUNCTIONS[kind](config, seq_len=seq_len)
    assert inv_freq.dtype == torch.float32
    assert torch.equal(inv_freq, theirs)
    assert (factor, type(factor)) == (their_factor, float)


SWEEPS = {
    "default": {"rope_theta": [10000.0, 500000]},
    "linear": {"rope_theta": [10000.0], "factor": [1.0, 2.0, 8, 3.7]},
    "dynamic": {"rope_theta": [10000.0, 1e6], "factor": [1.0, 2.0, 8]},
    "yarn": {
        "rope_theta": [10000.0, 150000],
        "factor": [1.0, 4.0, 40, None],
        "original_max_position_embeddings": [2048, 4096],
        "beta_fast": [None, 48.0],
        "beta_slow": [None, 2],
        "attention_factor": [None, 0.7],
        "truncate": [None, True, False],
    },
    "llama3": {
        "rope_theta": [500000.0],
        "factor": [8.0, 32],
        "low_freq_factor": [1.0, 2],
        "high_freq_factor": [4.0, 5],
        "original_max_position_embeddings": [2048, 8192],
    },
}


def combinations(kind):
    names = list(SWEEPS[kind])
    for values in itertools.product(*SWEEPS[kind].values()):
        parameters = dict(zip(names, values, strict=True))
        kept = {n: v for n, v in parameters.items() if v is not None or n == "factor"}
        yield {"rope_type": kind, **kept}


class TestAgainstTransformers:
    @pytest.mark.parametrize("head_dim", [16, 80])
    @pytest.mark.parametrize("kind", SWEEPS)
    def test_frequencies_of_every_option(self, kind, head_dim):
        for parameters in combinations(kind):
            for seq_len in (None, 100, 20000) if kind == "dynamic" else (None,):
                check_transformers(config_of(parameters, head_dim), seq_len)

    @pytest.mark.parametrize("mscale, mscale_all_dim", [(1.0, 1.0), (0.707, 1.0), (1.0, None)])
    @pytest.mark.parametrize("factor", [1.0, 40.0])
    def test_yarn_mscale(self, mscale, mscale_all_dim, factor):
        parameters = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": factor}
        parameters |= {"original_max_position_embeddings": 4096, "mscale": mscale}
        if mscale_all_dim is not None:
            parameters["mscale_all_dim"] = mscale_all_dim
        check_transformers(config_of(parameters))

    def test_original_length_by_default(self):
        for kind in ("yarn", "llama3"):
            parameters = next(combinations(kind))
            del parameters["original_max_position_embeddings"]
            check_transformers(config_of(parameters))

    @pytest.mark.parametrize("kind", ["default", "yarn", "llama3"])
    def test_whole_embedding(self, kind, device):
        """Tables and rotation together, as a Llama layer computes them."""
        config = config_of(next(combinations(kind)), head_dim=64)
        q, k = normal(2, 4, 33, 64), normal(2, 2, 33, 64, seed=1)
        position_ids = torch.arange(100, 133)[None].expand(2, -1)
        theirs = apply_rotary_pos_emb(q, k, *LlamaRotaryEmbedding(config)(q, position_ids))
        inv_freq, factor = ours(config)
        cos, sin = rope.tables(inv_freq.to(device), 200, attention_factor=factor)
        actual = rope_op(q.to(device), k.to(device), cos, sin, positions=position_ids.to(device))
        for our, their in zip(actual, theirs, strict=True):
            torch.testing.assert_close(our.cpu(), their, rtol=2e-6, atol=2e-6)


def test_ntk_aware_changes_the_base():
    """By eq. 16 of YaRN, b' = b s^(|D| / (|D| - 2)), so the lowest frequency is divided by s."""
    inv_freq, factor = rope.ntk_aware(128, 10000.0, factor=8.0)
    base = 10000.0 * 8 ** (128 / 126)
    expected = torch.tensor([base ** (-2 * i / 128) for i in range(64)], dtype=torch.float64)
    torch.testing.assert_close(inv_freq.double(), expected, rtol=1e-6, atol=0)
    assert inv_freq[0] == 1.0
    assert inv_freq[-1].item() == pytest.approx(10000.0 ** (-126 / 128) / 8, rel=1e-5)
    assert factor == 1.0  # cos and sin are not scaled


def test_yarn_is_finite_if_its_ramp_is_a_step():
    step, _ = rope.yarn(8, 1e9, factor=2.0, original_max_position_embeddings=4, truncate=True)
    assert step.isfinite().all()


@pytest.mark.parametrize(
    "model, config, section",
    [
        (Qwen2VLRotaryEmbedding, Qwen2VLTextConfig, [16, 8, 8]),
        (Qwen3VLTextRotaryEmbedding, Qwen3VLTextConfig, [12, 10, 10]),
    ],
)
def test_tables_of_a_model_with_three_positions_per_token(model, config, section, device):
    """transformers repeats the columns for both halves. docs/porting.md keeps the first half."""
    parameters = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": section}
    sizes = {"hidden_size": 256, "num_attention_heads": 4, "head_dim": 64}
    settings = config(**sizes, rope_parameters=parameters)
    settings.head_dim = 64
    positions = torch.randint(0, 500, (3, 2, 37), generator=torch.Generator().manual_seed(0))
    cos, sin = model(settings)(torch.zeros(1), positions)
    assert torch.equal(cos[..., :32], cos[..., 32:])
    q = normal(2, 4, 37, 64)
    halves = cos[..., :32].contiguous(), sin[..., :32].contiguous()
    out, _ = rope_op(q.to(device), None, *(table.to(device) for table in halves))
    check_close(out.cpu(), q, *halves)


FOUR, ORIGINAL = torch.ones(4), {"original_max_position_embeddings": 4096}
CALLS = {
    rope.default: {"dim": 8},
    rope.linear: {"dim": 8, "factor": 2.0},
    rope.ntk_aware: {"dim": 8, "factor": 2.0},
    rope.dynamic_ntk: {"dim": 8, "factor": 2.0, "max_position_embeddings": 9},
    rope.yarn: {"dim": 8, "factor": 2.0} | ORIGINAL,
    rope.llama3: {"dim": 8, "factor": 2.0, "low_freq_factor": 4, "high_freq_factor": 8} | ORIGINAL,
    rope.tables: {"inv_freq": FOUR, "positions": 5},
}
BAD_VALUES = [
    (rope.default, {"dim": 2**63}, "dim is 9223372036854775808; it must be an even int"),
    (rope.default, {"dim": 7}, "dim is 7; it must be an even int"),
    (rope.default, {"base": 2**200}, "base is .*; it must be a positive, finite"),
    (rope.default, {"device": "gpu"}, "device is 'gpu'; it must be a torch device"),
    (rope.linear, {"factor": True}, "factor is True; it must be a positive"),
    (rope.ntk_aware, {"dim": 2}, "dim is 2; to scale the base it must"),
    (rope.yarn, {"base": 1.0}, r"base is 1\.0; for yarn"),
    (rope.yarn, {"beta_slow": 1e-320}, "beta_slow is 1e-320; it must be a positive"),
    (rope.yarn, {"beta_fast": 1, "beta_slow": 2}, "beta_fast is 1; it must be at least beta_slow"),
    (rope.yarn, {"attention_factor": math.nan}, "attention_factor is nan; it must be None, or fin"),
    (rope.llama3, {"high_freq_factor": None}, "high_freq_factor is None; it must be a positive"),
    (rope.llama3, {"high_freq_factor": 4}, "high_freq_factor is 4; it must be greater than low"),
    (rope.tables, {"positions": -1}, "positions is -1; it must be at least 0"),
    (rope.tables, {"positions": 2**62}, r"positions is .*; it must be in 0\.\.2147483647"),
]
BAD_TYPES = [
    (rope.dynamic_ntk, {"seq_len": math.nan}, "seq_len is nan; it must be an int"),
    (rope.yarn, {"mscale": "1"}, "mscale is '1'; it must be a"),
    (rope.yarn, {"truncate": FOUR}, "truncate is a float32 tensor .* a bool"),
    (rope.tables, {"inv_freq": [1.0]}, "inv_freq is a list; it must be a tensor"),
    (rope.tables, {"positions": "5"}, "positions is '5'; it must be an int or a tensor"),
    (rope.tables, {"attention_factor": None}, "attention_factor is None; it must"),
    (rope.tables, {"dtype": "half"}, "dtype is 'half'; it must be a torch.dtype"),
]


@each_case(
    "error, function, changes, message",
    [*((ValueError, *row) for row in BAD_VALUES), *((TypeError, *row) for row in BAD_TYPES)],
)
def test_invalid_arguments_are_refused(error, function, changes, message):
    with pytest.raises(error, match=message):
        function(**CALLS[function] | changes)

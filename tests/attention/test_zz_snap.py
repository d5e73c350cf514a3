import pytest
from tests.attention import flash_fwd_problems as p
NAMES = "plain windows chunks lengths masks biases softcap alibi sinks large_sinks rotary slices_of_v shared_rows odd_head_dims packed pages pages_of_packed indices formats codes_of_fp8".split()
@pytest.mark.parametrize("name", NAMES)
def test_problem(name, device):
    getattr(p, name)(device)
@pytest.mark.parametrize("first", ["alibi_slopes", "attn_bias", "learnable_sink", "softcap", "dropout"])
def test_pair(first, device):
    import torch
    from tests.attention.dropout_check import dropout
    if first == "dropout":
        p.dense(device, torch.float32, causal=True, **dropout())
        p.dense(device, torch.bfloat16, attention_chunk=21, **dropout())
        return
    o = {"alibi_slopes": torch.tensor([.05,.1,.2,.25]), "attn_bias": torch.randn(77, 101, generator=torch.Generator().manual_seed(1)), "learnable_sink": torch.tensor([3.0,1,-1,5]), "softcap": 2.0}
    for dtype in (torch.float32, torch.bfloat16):
        p.dense(device, dtype, causal=True, window_size_left=40, **{first: o[first]})
    for other in o:
        if other != first:
            p.dense(device, **{first: o[first], other: o[other]})

"""Calls that ring_attention and its helpers refuse. If one process refuses, all do."""

import inspect

import torch

from torch_metal_attn.distributed import ring_attention, shard_sequence, unshard_sequence


def qkv(dtype=torch.float32, q_heads=2, heads=2, length=2, kv_length=None, grad=False):
    sizes = ((length, q_heads), (kv_length or length, heads), (kv_length or length, heads))
    return [torch.ones(1, *size, 16, dtype=dtype, requires_grad=grad) for size in sizes]


def ring(elsewhere=None, packed=False, **arguments):
    """ring_attention with `arguments`. elsewhere: other arguments for ranks other than 1."""

    def call(rank):
        options = dict(arguments if elsewhere is None or rank == 1 else elsewhere)
        of_qkv = {n: options.pop(n) for n in inspect.signature(qkv).parameters if n in options}
        tensors = qkv(**of_qkv)
        return ring_attention(*(x[0] for x in tensors) if packed else tensors, **options)

    return call


def unshard(grad=False, dtype=torch.float32, length=2, **options):
    """unshard_sequence. Ranks other than 1 pass a float32 tensor with 2 rows."""

    def call(rank):
        x = torch.ones(1, 2)
        if rank == 1:
            x = torch.ones(1, length, dtype=dtype, requires_grad=grad)
        return unshard_sequence(x, **options)

    return call


def shard(cu_seqlens):
    return lambda rank: shard_sequence(torch.ones(7), cu_seqlens=torch.tensor(cu_seqlens))


ONES = {"alibi_slopes": torch.ones(2)}
WHOLE, SPLIT = ({"cu_seqlens": torch.tensor(bounds)} for bounds in ([0, 8], [0, 5, 8]))

# {pattern of the error on rank 1: call}.
REFUSED = {
    "q's dtype is torch.float16 on rank 1": ring({}, dtype=torch.float16),
    "causal is True on rank 1 and False on rank 0": ring({}, causal=True),
    "q's number of heads is 4 on rank 1 and 2 on rank 0": ring({}, q_heads=4),
    "k's number of heads is 1 on rank 1 and 2 on rank 0": ring({}, heads=1),
    "whether q, k, v or learnable_sink requires grad is True on rank 1": ring({}, grad=True),
    "softcap is 3.0 on rank 1 and 0.0 on rank 0": ring({}, softcap=3.0),
    "softmax_scale is 0.5 on rank 1 and None": ring({}, softmax_scale=0.5),
    "layout is zigzag on rank 1": ring({}, layout="zigzag"),
    r"q has shape \(1, 2, 2, 16\); it must be \(T, H, D\)": ring({}, **WHOLE),
    "cu_seqlens .* on rank 1 and .* on rank 0": ring(WHOLE, packed=True, **SPLIT),
    "layout is 'stripes'; it must be": ring({}, layout="stripes"),
    "causal is 'yes'; it must be a bool": ring({}, causal="yes"),
    "the function called is unshard_sequence on rank 1 and ring_attention on rank 0": (
        lambda rank: (unshard() if rank == 1 else ring())(rank)
    ),
    "learnable_sink .* on rank 1 and None on rank 0": ring({}, learnable_sink=torch.zeros(2)),
    "alibi_slopes .* on rank 1 and .* on rank 0": ring(ONES, alibi_slopes=torch.arange(2.0)),
    "learnable_sink has shape": ring(learnable_sink=torch.ones(3)),
    "alibi_slopes has shape": ring(alibi_slopes=torch.ones(3)),
    "alibi_slopes has 3 rows; cu_seqlens has 1 sequence": ring(
        packed=True, alibi_slopes=torch.ones(3, 2), **WHOLE
    ),
    "alibi_slopes requires grad; ring_attention has no gradient for it: detach": ring(
        alibi_slopes=torch.ones(2, requires_grad=True)
    ),
    "ring_attention does not work in torch.func's transforms": lambda rank: torch.func.grad(
        lambda q: ring_attention(q, *qkv()[1:]).sum()
    )(qkv()[0]),
    "q is on meta, where tensors have no values": lambda rank: ring_attention(
        *(x.to("meta") for x in qkv())
    ),
    "x is on meta, where tensors have no values": lambda rank: unshard_sequence(
        torch.ones(1, 2, device="meta")
    ),
    "dropout_p is 0.5; ring_attention has no dropout": ring(dropout_p=0.5),
    "q has dtype float64": ring(dtype=torch.float64),
    "softcap is -1; it must be 0": ring(softcap=-1.0),
    "k has 3 rows and q 2": ring(kv_length=3),
    "q has 2 rows on rank 0; its zigzag share of the sequence has 3": ring(
        {"layout": "zigzag"}, length=4, layout="zigzag"
    ),
    "group is a str; it must be a ProcessGroup": ring(group="gloo"),
    "x requires grad; unshard_sequence has no gradient": unshard(grad=True),
    "x's dtype is torch.int32 on rank 1": unshard(dtype=torch.int32),
    "x has 2 rows on rank 0; its zigzag share of the sequence has 3|x has 3 rows on rank 1": (
        unshard(length=3, dim=1, layout="zigzag")
    ),
    r"dim is 2; x has shape \(1, 2\)": unshard(dim=2),
    "x has 7 rows in dim 0 and the last element of cu_seqlens is 8": shard([0, 8]),
    r"cu_seqlens starts with 1;": shard([1, 7]),
    "cu_seqlens decreases": shard([0, 9, 7]),
    "cu_seqlens has dtype torch.float32": shard([0.0, 7.0]),
}
# {pattern: function}. For these errors, the other ranks name rank 1 and the function.
ON_RANK_1 = {
    r"q has shape \(1, 2, 2, 16\); it must be \(T, H, D\)": "ring_attention",
    "layout is 'stripes'; it must be": "ring_attention",
    "causal is 'yes'; it must be a bool": "ring_attention",
    "x requires grad; unshard_sequence has no gradient": "unshard_sequence",
}


def errors(rank, calls=REFUSED):
    texts = {}
    for name, call in calls.items():
        try:
            call(rank)
        except (NotImplementedError, TypeError, ValueError) as error:
            texts[name] = f"{type(error).__name__}: {error}"
    return texts


def of_groups(rank, pair):
    """Errors of a mesh, and of a group without this process. pair: the group of ranks 0 and 1."""
    mesh = torch.distributed.init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "sequence"))
    groups = {"mesh": mesh, "pair": pair}
    calls = {name: ring(group=group) for name, group in groups.items()}
    return errors(rank, calls), ring_attention(*qkv(), mesh["sequence"])

"""Calls that ring_attention and its helpers refuse: on all processes, if on one."""

import inspect

import torch

from torch_metal_attn.distributed import ring_attention, shard_sequence, unshard_sequence


def qkv(dtype=torch.float32, heads=2, length=2, kv_length=None, grad=False):
    sizes = ((length, 2), (kv_length or length, heads), (kv_length or length, heads))
    made = [torch.ones(1, *size, 16, dtype=dtype) for size in sizes]
    return [x.requires_grad_() if grad else x for x in made]


def ring(others=None, **given):
    """ring_attention with `given` on rank 1, and on the others with `others`, or `given` too."""

    def call(rank):
        options = dict(given if others is None or rank == 1 else others)
        of_qkv = {n: options.pop(n) for n in inspect.signature(qkv).parameters if n in options}
        return ring_attention(*qkv(**of_qkv), **options)

    return call


def unshard(grad=False, dtype=torch.float32, length=2, **options):
    """unshard_sequence, of what is given to rank 1 and of plain arguments on the others."""

    def call(rank):
        mine = rank == 1
        x = torch.ones(1, length if mine else 2, dtype=dtype if mine else torch.float32)
        return unshard_sequence(x.requires_grad_() if grad and mine else x, **options)

    return call


# By name: the call, the error on rank 1, and that on the others; None for the same.
REFUSED = {
    "dtypes differ": (ring({}, dtype=torch.float16), "q's dtype is torch.float16 on rank 1", None),
    "causal differs": (ring({}, causal=True), "causal is True on rank 1 and False on rank 0", None),
    "heads differ": (ring({}, heads=1), "k's number of heads is 1 on rank 1 and 2 on rank 0", None),
    "grad differs": (
        ring({}, grad=True),
        "whether q, k, v or learnable_sink requires grad is True on rank 1",
        None,
    ),
    "scale differs": (ring({}, softmax_scale=0.5), "softmax_scale is 0.5 on rank 1 and None", None),
    "layout differs": (ring({}, layout="zigzag"), "layout is zigzag on rank 1", None),
    "one is packed": (
        ring({}, cu_seqlens=torch.tensor([0, 8])),
        r"q has shape \(1, 2, 2, 16\); it must be \(T, H, D\)",
        r"ring_attention was refused on rank 1: q has shape",
    ),
    "layout of one": (
        ring({}, layout="stripes"),
        "layout is 'stripes'; it must be",
        "was refused on rank 1: layout is 'stripes'",
    ),
    "type of one": (
        ring({}, causal="yes"),
        "causal is 'yes'; it must be a bool",
        "was refused on rank 1: causal is 'yes'",
    ),
    "functions differ": (
        lambda rank: (unshard() if rank == 1 else ring())(rank),
        "the function called is unshard_sequence on rank 1 and ring_attention on rank 0",
        None,
    ),
    "sink differs": (
        ring({}, learnable_sink=torch.zeros(2)),
        "learnable_sink .* on rank 1 and None on rank 0",
        None,
    ),
    "slopes differ": (
        ring({"alibi_slopes": torch.ones(2)}, alibi_slopes=torch.tensor([1.0, 2.0])),
        "alibi_slopes .* on rank 1 and .* on rank 0",
        None,
    ),
    "sinks of heads": (ring(learnable_sink=torch.ones(3)), "learnable_sink has shape", None),
    "slopes of heads": (ring(alibi_slopes=torch.ones(3)), "alibi_slopes has shape", None),
    "slopes of sequences": (
        lambda rank: ring_attention(
            *(x[0] for x in qkv()),
            alibi_slopes=torch.ones(3, 2),
            cu_seqlens=torch.tensor([0, 8]),
        ),
        "alibi_slopes has 3 rows; cu_seqlens has 1 sequences",
        None,
    ),
    "slopes' gradient": (
        ring(alibi_slopes=torch.ones(2, requires_grad=True)),
        "alibi_slopes requires grad; ring_attention has no gradient for it: detach",
        None,
    ),
    "torch.func": (
        lambda rank: torch.func.grad(lambda q: ring_attention(q, *qkv()[1:]).sum())(qkv()[0]),
        "ring_attention does not work in torch.func's transforms",
        None,
    ),
    "meta": (
        lambda rank: ring_attention(*(x.to("meta") for x in qkv())),
        "q is on meta, where tensors have no values",
        None,
    ),
    "unshard meta": (
        lambda rank: unshard_sequence(torch.ones(1, 2, device="meta")),
        "x is on meta, where tensors have no values",
        None,
    ),
    "dropout": (ring(dropout_p=0.5), "dropout_p is 0.5; ring_attention has no dropout", None),
    "float64": (ring(dtype=torch.float64), "q has dtype float64", None),
    "softcap": (ring(softcap=-1.0), "softcap is -1; it must be 0", None),
    "keys of another length": (ring(kv_length=3), "k has 3 rows and q 2", None),
    "zigzag of other lengths": (
        ring({"layout": "zigzag"}, length=4, layout="zigzag"),
        "q has 2 rows on rank 0; its zigzag share of the sequence has 3",
        None,
    ),
    "group": (ring(group="gloo"), "group is a str; it must be a ProcessGroup", None),
    "unshard grad": (
        unshard(grad=True),
        "x requires grad; unshard_sequence has no gradient",
        "unshard_sequence was refused on rank 1: x requires grad",
    ),
    "unshard dtypes": (unshard(dtype=torch.int32), "x's dtype is torch.int32 on rank 1", None),
    "unshard lengths": (
        unshard(length=3, dim=1, layout="zigzag"),
        "x has 2 rows on rank 0; its zigzag share of the sequence has 3|x has 3 rows on rank 1",
        None,
    ),
    "unshard dim": (unshard(dim=2), r"dim is 2; x has shape \(1, 2\)", None),
    "shard bounds": (
        lambda rank: shard_sequence(torch.ones(7), cu_seqlens=torch.tensor([0, 8])),
        "x has 7 rows in dim 0 and cu_seqlens ends at 8",
        None,
    ),
    "shard first bound": (
        lambda rank: shard_sequence(torch.ones(7), cu_seqlens=torch.tensor([1, 7])),
        r"cu_seqlens starts with \[1\]",
        None,
    ),
    "shard order": (
        lambda rank: shard_sequence(torch.ones(7), cu_seqlens=torch.tensor([0, 9, 7])),
        "cu_seqlens decreases",
        None,
    ),
    "shard dtype": (
        lambda rank: shard_sequence(torch.ones(7), cu_seqlens=torch.tensor([0.0, 7.0])),
        "cu_seqlens has dtype torch.float32",
        None,
    ),
}


def told(rank):
    """By name the error of each call on this process."""
    found = {}
    for name, (call, _, _) in REFUSED.items():
        try:
            call(rank)
        except (NotImplementedError, TypeError, ValueError) as error:
            found[name] = f"{type(error).__name__}: {error}"
    return found


def of_groups(pair):
    """Errors of groups: without this process, and of a mesh. pair: of ranks 0 and 1."""
    found = {}
    mesh = torch.distributed.init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "sequence"))
    for name, group in {"mesh": mesh, "pair": pair}.items():
        try:
            ring_attention(*qkv(), group)
        except ValueError as error:
            found[name] = str(error)
    x = ring_attention(*qkv(), mesh["sequence"])
    return found, x

"""A small transformer, trained in one process and in several."""

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import torch_metal_attn
from tests.libraries.modules import HEADS, WIDTH, WORDS, Language
from torch_metal_attn.distributed import ring_attention, shard_sequence

BATCH, LENGTH = 4, 16
WAYS = ["DDP of four", "DDP of two with rings", "FSDP2 of four", "FSDP2 of two with rings"]


class Attention(nn.Module):
    """Causal attention. sequence: the group that shares each sequence."""

    def __init__(self, sequence):
        super().__init__()
        self.sequence = sequence
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, -1)).unbind(2)
        if self.sequence is None:
            out = torch_metal_attn.flash_attn_func(q, k, v, causal=True)
        else:
            out = ring_attention(q, k, v, self.sequence, causal=True, layout="zigzag")
        return out.flatten(-2).clone()  # FSDP2 warns of views


class Model(Language):
    def __init__(self, sequence=None):
        torch.manual_seed(5)
        super().__init__(Attention(sequence), Attention(sequence))

    def forward(self, tokens):
        return super().forward(tokens).clone()


def batch():
    tokens = torch.randint(WORDS, (BATCH, LENGTH + 1), generator=torch.Generator().manual_seed(6))
    return tokens[:, :-1], tokens[:, 1:]


def train(model, data, parameters):
    """The parameters after 2 steps. parameters: a function that returns them unsharded."""
    optimiser = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    tokens, labels = data
    for _ in range(2):
        logits = model(tokens)
        nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()).backward()
        optimiser.step()
        optimiser.zero_grad()
    return [x.detach().clone() for x in parameters()]


def in_parallel(wrapper, mesh, sequence=None):
    """Trains on the processes of `mesh`. sequence: those that share a sequence."""
    ranks = 1 if sequence is None else sequence.size()
    data_rank, data_ranks = mesh.get_local_rank() // ranks, mesh.size() // ranks
    data = [x.chunk(data_ranks)[data_rank] for x in batch()]
    if sequence is not None:
        data = [shard_sequence(x, sequence, layout="zigzag") for x in data]
    model = Model(sequence)
    if wrapper == "DDP":
        model = DistributedDataParallel(model, process_group=mesh.get_group())
        return train(model, data, model.parameters)
    for attention in model.attentions:
        fully_shard(attention, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return train(model, data, lambda: [x.full_tensor() for x in model.parameters()])


def every_way():
    everyone = init_device_mesh("cpu", (4,))
    pairs = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "sequence"))["sequence"]
    meshes = {"of four": (everyone,), "of two with rings": (everyone, pairs)}
    return {way: in_parallel(way.split()[0], *meshes[way.partition(" ")[2]]) for way in WAYS}

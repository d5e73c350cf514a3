"""A small transformer, trained in one process and in several."""

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import torch_metal_attn
from torch_metal_attn.distributed import ring_attention, shard_sequence

BATCH, LENGTH, WORDS, WIDTH = 4, 16, 11, 16
WAYS = ["DDP of four", "DDP of two with rings", "FSDP2 of four", "FSDP2 of two with rings"]


class Layer(nn.Module):
    """Pre-norm causal attention and an MLP. sequence: the group that shares each sequence."""

    def __init__(self, sequence):
        super().__init__()
        self.sequence = sequence
        self.norms = nn.ModuleList([nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)])
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH)
        )

    def forward(self, x):
        q, k, v = self.qkv(self.norms[0](x)).unflatten(-1, (3, 2, 8)).unbind(2)
        if self.sequence is None:
            out = torch_metal_attn.flash_attn_func(q, k, v, causal=True)
        else:
            out = ring_attention(q, k, v, self.sequence, causal=True, layout="zigzag")
        x = x + out.flatten(-2)
        return x + self.mlp(self.norms[1](x))


class Model(nn.Module):
    def __init__(self, sequence=None):
        super().__init__()
        torch.manual_seed(5)
        self.words = nn.Embedding(WORDS, WIDTH)
        self.places = nn.Embedding(LENGTH, WIDTH)
        self.layers = nn.ModuleList([Layer(sequence) for _ in range(2)])
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, tokens, places):
        x = self.words(tokens) + self.places(places)
        for layer in self.layers:
            x = layer(x)
        return self.head(x).clone()  # FSDP2 warns of views


def batch():
    """Tokens, positions and labels: (B, L) each."""
    tokens = torch.randint(WORDS, (BATCH, LENGTH + 1), generator=torch.Generator().manual_seed(6))
    return tokens[:, :-1], torch.arange(LENGTH).expand(BATCH, LENGTH), tokens[:, 1:]


def train(model, data, parameters):
    """The parameters after 2 steps; `parameters` gives them whole."""
    optimiser = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    tokens, places, labels = data
    for _ in range(2):
        logits = model(tokens, places)
        nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()).backward()
        optimiser.step()
        optimiser.zero_grad()
    return [x.detach().clone() for x in parameters()]


def alone():
    model = Model()
    return train(model, batch(), model.parameters)


def in_parallel(wrapper, mesh, sequence=None):
    """This process' part of the training. mesh: all processes that the model is wrapped for.

    sequence: the mesh of the processes that share each sequence; they hold the same examples.
    """
    ranks = 1 if sequence is None else sequence.size()
    data_rank, data_ranks = mesh.get_local_rank() // ranks, mesh.size() // ranks
    data = [x.chunk(data_ranks)[data_rank] for x in batch()]
    if sequence is not None:
        data = [shard_sequence(x, sequence, layout="zigzag") for x in data]
    model = Model(sequence)
    if wrapper == "DDP":
        model = DistributedDataParallel(model, process_group=mesh.get_group())
        return train(model, data, model.parameters)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return train(model, data, lambda: [x.full_tensor() for x in model.parameters()])


def every_way():
    """By name the parameters after each of the WAYS."""
    everyone = init_device_mesh("cpu", (4,))
    pairs = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "sequence"))["sequence"]
    meshes = {"of four": (everyone,), "of two with rings": (everyone, pairs)}
    return {way: in_parallel(way.split()[0], *meshes[way.partition(" ")[2]]) for way in WAYS}

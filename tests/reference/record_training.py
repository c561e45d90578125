#!/usr/bin/env python3
"""Records how PyTorch trains four networks, for tests/test_training_reference.c.

    tests/reference/record_training.py > tests/reference/training_curves.txt

Weights, data, the order of the data and dropout all come from the generator that is seeded first, so
that none of them need be stored. Each network has these lines, as many of a kind as there are
parameters or steps:

    network NAME
    weight  ELEMENTS CHECKSUM BITS…     before the first step
    grad    NORM DOT VALUES…            of the first step
    loss    VALUE                       of each step, before it
    final   NORM DOT VALUES…            the parameters after the last step, or «unsure»
    next    NUMBER                      that the generator gives after all that
    end

DOT is the sum of the elements, each times how_much(its index); VALUES are those of sample(elements).
«unsure» is a parameter that ends up elsewhere when PyTorch itself adds up in another order: a bias of
the keys changes nothing, so that its gradient is mere rounding, which Adam then blows up.

Recorded with PyTorch 1.13.1. On standard error it says how far gradients and losses move with the
other order: what is compared with them cannot be closer than that.
"""

import statistics
import sys
import zlib

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

STEPS = 100
SAMPLE = 8


def sample(elements):
    count = min(SAMPLE, elements)
    return [i * elements // count for i in range(count)]


def how_much(elements):
    return (torch.arange(elements, dtype=torch.int64) * 7919 % 1000).double() / 1000


def mlp():
    network = nn.Sequential(
        nn.Flatten(), nn.Linear(784, 64), nn.ReLU(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 10)
    )
    data = TensorDataset(torch.randn(403, 1, 28, 28), torch.randint(0, 10, (403,)))
    sampler = DistributedSampler(data, num_replicas=2, rank=1, shuffle=True, seed=5)
    loader = DataLoader(data, batch_size=32, sampler=sampler)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.005, momentum=0.9, weight_decay=1e-4)
    return network, loader, optimizer


def lenet():
    network = nn.Sequential(
        nn.Conv2d(1, 6, 5, padding=2),
        nn.BatchNorm2d(6),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(6, 16, 5),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.AvgPool2d(2),
        nn.Flatten(),
        nn.Linear(400, 120),
        nn.BatchNorm1d(120),
        nn.ReLU(),
        nn.Linear(120, 84),
        nn.ReLU(),
        nn.Linear(84, 10),
    )
    data = TensorDataset(torch.randn(300, 1, 28, 28), torch.randint(0, 10, (300,)))
    loader = DataLoader(data, batch_size=16, shuffle=True, drop_last=True)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.01, momentum=0.9, nesterov=True)
    return network, loader, optimizer


class Transformer(nn.Module):
    def __init__(self, vocabulary, width, heads, layers, sequence, dropout):
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.places = nn.Embedding(sequence, width)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, heads, 4 * width, dropout, F.gelu, batch_first=True)
            for _ in range(layers)
        )
        self.head = nn.Linear(width, vocabulary)
        self.mask = nn.Transformer.generate_square_subsequent_mask(sequence)
        self.range = torch.arange(sequence)

    def forward(self, x):
        x = self.tokens(x) + self.places(self.range)
        for layer in self.layers:
            x = layer(x, self.mask)
        return self.head(x).transpose(1, 2)


def transformer(dropout=0.0):
    network = Transformer(256, 32, 4, 2, 24, dropout)
    text = torch.randint(0, 256, (40, 25))
    data = TensorDataset(text[:, :-1], text[:, 1:])
    loader = DataLoader(data, batch_size=8)
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-3, weight_decay=0.05)
    return network, loader, optimizer


def seeds():
    network = nn.Sequential(
        nn.Conv2d(1, 10, 5),
        nn.MaxPool2d(2),
        nn.ReLU(),
        nn.Conv2d(10, 20, 5),
        nn.Dropout2d(),
        nn.MaxPool2d(2),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(320, 50),
        nn.ReLU(),
        nn.Dropout(),
        nn.Linear(50, 10),
        nn.LogSoftmax(1),
    )
    data = TensorDataset(torch.randn(128, 1, 28, 28), torch.randint(0, 10, (128,)))
    loader = DataLoader(data, batch_size=16)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.01, momentum=0.5)
    return network, loader, optimizer


def transformer_dropout():
    return transformer(0.1)


NETWORKS = {
    "mlp": (mlp, F.cross_entropy),
    "lenet": (lenet, F.cross_entropy),
    "transformer": (transformer, F.cross_entropy),
    "transformer_dropout": (transformer_dropout, F.cross_entropy),
    "seeds": (seeds, F.nll_loss),
}


def batches(loader):
    for epoch in range(STEPS):
        if isinstance(loader.sampler, DistributedSampler):
            loader.sampler.set_epoch(epoch)
        yield from loader


def train(name):
    """The network, its parameters at first, the gradients of the first step, and the losses."""
    make, criterion = NETWORKS[name]
    torch.manual_seed(1234)
    network, loader, optimizer = make()
    first = [p.detach().clone() for p in network.parameters()]
    grads, losses = None, []
    for x, target in batches(loader):
        optimizer.zero_grad()
        loss = criterion(network(x), target)
        loss.backward()
        grads = grads or [p.grad.clone() for p in network.parameters()]
        optimizer.step()
        losses.append(loss.item())
        if len(losses) == STEPS:
            break
    return network, first, grads, losses


def numbers(kind, tensor):
    flat = tensor.detach().flatten().double()
    figures = [flat.norm().item(), flat.dot(how_much(flat.numel())).item()]
    figures += flat[sample(flat.numel())].tolist()
    print(kind, *(f"{figure:.9g}" for figure in figures))


def differences(ones, others):
    """How far apart tensors are, relative to their norms."""
    return [((a - b).norm() / a.norm()).item() for a, b in zip(ones, others)]


def record(name):
    with torch.backends.mkldnn.flags(enabled=False):
        other, _, other_grads, other_losses = train(name)
    network, first, grads, losses = train(name)
    print("network", name)
    for tensor in first:
        flat = tensor.flatten().view(torch.int32)
        bits = [f"{v & 0xFFFFFFFF:08x}" for v in flat[sample(flat.numel())].tolist()]
        print("weight", flat.numel(), f"{zlib.crc32(flat.numpy().tobytes()):08x}", *bits)
    for tensor in grads:
        numbers("grad", tensor)
    for loss in losses:
        print(f"loss {loss:.9g}")
    moved = differences(network.parameters(), other.parameters())
    for tensor, difference in zip(network.parameters(), moved):
        if difference > 1e-5:
            print("final unsure")
        else:
            numbers("final", tensor)
    print("next", torch.empty((), dtype=torch.int64).random_().item())
    print("end")
    loss = max(abs(a - b) / a for a, b in zip(losses, other_losses))
    print(
        f"{name:20} losses {losses[0]:.4f} to {losses[-1]:.4f}, moved by {loss:.1e};"
        f" gradients moved by {statistics.median(differences(grads, other_grads)):.1e}",
        file=sys.stderr,
    )


def main():
    torch.set_num_threads(1)
    for name in NETWORKS:
        record(name)


main()

"""A torch net on digits with two modules that 16 bits break, and the same net without them."""

import torch
from torch import nn


class Energy(nn.Module):
    """Adds the energy of its inputs; on the way to it are numbers beyond float16."""

    def forward(self, x):
        energy = (x * 400).square().sum(-1, keepdim=True)
        return torch.cat([x, energy * 1e-4], -1)


class Offset(nn.Module):
    """Adds a number and takes it away again: 16 bits lose most of what was there."""

    def forward(self, x):
        return (x + 256.0) - 256.0


def digits_net(dangerous: bool) -> nn.Sequential:
    """Two convolutions and two linear modules; weights are the same on every call."""
    torch.manual_seed(0)
    modules = {
        "conv1": nn.Conv2d(1, 16, 3),
        "relu1": nn.ReLU(),
        "conv2": nn.Conv2d(16, 32, 3),
        "relu2": nn.ReLU(),
        "flat": nn.Flatten(),
        "energy": Energy() if dangerous else nn.Identity(),
        "fc1": nn.Linear(513 if dangerous else 512, 64),
        "relu3": nn.ReLU(),
        "offset": Offset() if dangerous else nn.Identity(),
        "norm": nn.LayerNorm(64),
        "logits": nn.Linear(64, 10),
    }
    net = nn.Sequential()
    for name, module in modules.items():
        net.add_module(name, module)
    return net


def batches(split, size=64):
    """`(images, labels)` of a split, as tensors, in order."""
    images, labels = torch.from_numpy(split.images), torch.from_numpy(split.labels)
    return [(images[i : i + size], labels[i : i + size]) for i in range(0, len(images), size)]

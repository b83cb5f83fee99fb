"""Nets that keep state in attributes, containers, objects, buffers and closures."""

from __future__ import annotations

import types
from collections import deque

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F


class Normalizer(nn.Module):
    """Keeps a running mean in a dict."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 4)
        self.state = {}

    def forward(self, x):
        mean = x.mean()
        self.state["mean"] = 0.9 * self.state["mean"] + 0.1 * mean if self.state else mean
        return self.layer(x - self.state["mean"])


class MovingMean(nn.Module):
    """Assigns a tensor attribute."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 4)
        self.mean = torch.zeros(8)

    def forward(self, x):
        self.mean = 0.5 * self.mean + 0.5 * x.mean(0)
        return self.layer(x - self.mean)


class Accumulator(nn.Module):
    """Writes to a tensor attribute in place."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 4)
        self.sum = torch.zeros(8)

    def forward(self, x):
        self.sum += x.sum(0)
        return self.layer(x + self.sum)


class NestedAccumulator(nn.Module):
    """Writes in place to a tensor in a dict in a list."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 4)
        self.caches = [{"sum": torch.zeros(8)}]

    def forward(self, x):
        self.caches[0]["sum"].add_(x.sum(0))
        return self.layer(x + self.caches[0]["sum"])


class Streaming(nn.Module):
    """Keeps the last frames in an attribute that is None at first."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Conv1d(8, 4, 3)
        self.frames = None

    def forward(self, x):
        x = x.unsqueeze(2)
        if self.frames is None:
            self.frames = x.new_zeros(x.shape[0], 8, 2)
        x = torch.cat([self.frames, x], 2)
        self.frames = x[:, :, -2:]
        return self.layer(x)


class Recurrent(nn.Module):
    """Keeps the states of an LSTM in a tuple."""

    def __init__(self):
        super().__init__()
        self.layer = nn.LSTM(8, 4, batch_first=True)
        self.states = None

    def forward(self, x):
        outputs, states = self.layer(x.unsqueeze(1), self.states)
        self.states = tuple(state.detach() for state in states)
        return outputs


class Counter(nn.Module):
    """Counts its calls in a number."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 4)
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return self.layer(x) * (1 if self.calls > 3 else 2)


class Log(nn.Module):
    """Appends its outputs to containers of several types."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 4)
        self.log, self.recent, self.kinds = [], deque(maxlen=3), set()

    def forward(self, x):
        outputs = self.layer(x)
        self.log.append(outputs)
        self.recent.append(outputs)
        self.kinds.add(str(type(outputs)))
        return outputs


class ClassLog(nn.Module):
    """Appends its outputs to a list of its class."""

    log: list = []  # noqa: RUF012 (shared by all instances, which is the point)

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 4)

    def forward(self, x):
        self.log.append(self.layer(x))
        return self.log[-1]


class Statistics:
    """Plain object that holds state."""

    def __init__(self):
        self.mean, self.inner = None, types.SimpleNamespace(count=0)


class WithObject(nn.Module):
    """Keeps state in an object of the user's own class."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 4)
        self.statistics = Statistics()

    def forward(self, x):
        self.statistics.mean = x.mean()
        self.statistics.inner.count += 1
        return self.layer(x)


class WithArray(nn.Module):
    """Writes to an array, as long as it is not traced."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 4)
        self.sizes = np.zeros(3, dtype=np.int64)

    def forward(self, x):
        self.sizes[0] += 1
        return self.layer(x)


class Inner(nn.Module):
    """A module whose inner module keeps state."""

    def __init__(self):
        super().__init__()
        self.inner, self.head = MovingMean(), nn.Linear(4, 2)

    def forward(self, x):
        self.features = self.inner(x).relu()
        return self.head(self.features)


class Buffers(nn.Module):
    """Writes to one buffer and assigns another."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 4)
        self.register_buffer("written", torch.zeros(8))
        self.register_buffer("assigned", torch.zeros(8))

    def forward(self, x):
        self.written += x.sum(0)
        self.assigned = self.assigned + x.sum(0)
        return self.layer(x + self.written + self.assigned)


class Table(nn.Module):
    """Computes a table of positions for the longest batch so far."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 4)
        self.table = None

    def forward(self, x):
        count = x.shape[0]
        if self.table is None or self.table.shape[0] < count:
            self.table = torch.arange(count)[:, None] / torch.arange(1, 9)
        return self.layer(x + self.table[:count])


class Tagged(nn.Module):
    """Two layers and a bank of features that a hook fills."""

    def __init__(self, bank):
        super().__init__()
        self.first, self.second, self.bank = nn.Linear(8, 8), nn.Linear(8, 4), bank

    def forward(self, x):
        outputs = F.relu(self.first(x))
        return self.second(outputs + self.bank["first"])


def hooked() -> nn.Module:
    """Return a net whose hook fills a dict that a later layer reads."""
    bank: dict = {}
    net = Tagged(bank)
    net.first.register_forward_hook(lambda _, inputs, output: bank.__setitem__("first", output))
    return net


def hooked_closure() -> nn.Module:
    """Return a net whose hook assigns a variable and fills a list, which only the hook knows."""
    net, last, features = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4)), None, []

    def keep(_, inputs, output):
        nonlocal last
        last = output
        features.append(output)

    net[0].register_forward_hook(keep)
    return net


FEATURES: dict = {}


def hooked_global() -> nn.Module:
    """Return a net whose hook fills a dict of its Python module."""
    net = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4))
    net[0].register_forward_hook(lambda _, inputs, output: FEATURES.__setitem__("x", output))
    return net


#: Nets whose outputs depend on earlier calls → what a warning names.
DEPENDENT = {
    Normalizer: "state",
    MovingMean: "mean",
    Accumulator: "sum",
    NestedAccumulator: "caches",
    Streaming: "frames",
    Recurrent: "states",
    Counter: "calls",
    Inner: "inner.mean",
    Buffers: "written",
}
#: Nets whose state does not matter for their outputs.
INDEPENDENT = (
    Log,
    ClassLog,
    WithObject,
    WithArray,
    Table,
    hooked,
    hooked_closure,
    hooked_global,
)

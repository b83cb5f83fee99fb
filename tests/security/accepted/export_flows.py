"""Modules for export with control flow, open sizes, odd arguments and types."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import torch
import torch.nn.functional as F
from accepted.export_calls import Build, Call, Run
from accepted.export_ops import linear
from torch import nn
from torch.export import Dim

FLOWS: dict[str, Build] = {}
#: Exports whose outputs differ from run to run.
RANDOM = {"random"}
#: Exports that PyTorch decomposes into ops that a file cannot hold, or that are decomposed already.
UNDECOMPOSED = {"decomposed", "quantized"}


def _flow(build: Build) -> Build:
    FLOWS[build.__name__] = build
    return build


@_flow
def branches() -> Call:
    """A condition on data."""

    def run(m: Any, x: Any) -> Any:
        return torch.cond(x.sum() > 0, lambda y: m.l(y), lambda y: y * 2, (x,))

    return Call(linear(run), (torch.randn(2, 4),), dynamic=({0: Dim("b", min=2)},))


@_flow
def loops() -> Call:
    """Loops over data."""
    from torch._higher_order_ops.associative_scan import associative_scan
    from torch._higher_order_ops.scan import scan
    from torch._higher_order_ops.while_loop import while_loop

    def run(m: Any, x: Any) -> Any:
        first = (torch.tensor(0), m.l(x))
        many = while_loop(lambda i, _: i < 3, lambda i, y: (i + 1, y + 1), first)[1]
        return many, scan(lambda c, y: (c + y, c * y), torch.zeros(4), m.l(x))[1]

    assert associative_scan is not None
    return Call(linear(run), (torch.randn(3, 4),))


@_flow
def layered() -> Call:
    """Layers in branches within a branch, and in a loop."""
    from torch._higher_order_ops.while_loop import while_loop

    def normalized(m: Any, x: Any) -> Any:
        return torch.cond(x.sum() > 1, lambda y: m.n(y), lambda y: torch.fft.rfft(y, 6).abs(), (x,))

    def run(m: Any, x: Any) -> Any:
        y = torch.cond(x.sum() > 0, lambda y: normalized(m, y), lambda y: m.l(y), (x,))
        first = (torch.tensor(0), y)
        return while_loop(lambda i, _: i < 3, lambda i, z: (i + 1, m.n(z)), first)[1]

    return Call(linear(run, n=nn.BatchNorm1d(4).eval()), (torch.randn(2, 4),))


@_flow
def mapped() -> Call:
    """A function over a batch."""

    def run(m: Any, x: Any) -> Any:
        return torch.vmap(lambda row: m.l(row).softmax(-1))(x)

    return Call(linear(run), (torch.randn(2, 4),))


@_flow
def checked() -> Call:
    """Numbers from data, with bounds."""

    def run(m: Any, x: Any, n: Any) -> Any:
        count = n.item()
        torch._check(count >= 0)
        torch._check(count <= 10)
        return m.l(x) + torch.zeros(count, 4).sum(), torch.arange(count), x[:, : count // 4 + 1]

    return Call(linear(run), (torch.randn(2, 4), torch.tensor(3)))


@_flow
def chosen() -> Call:
    """Rows whose number depends on data."""

    def run(m: Any, x: Any) -> Any:
        y = m.l(x)
        return y[y > 0], y[y.sum(1) > -100], y.nonzero()

    return Call(linear(run), (torch.randn(2, 4),))


@_flow
def divided() -> Call:
    """Sizes that are computed from sizes."""

    def run(m: Any, x: Any) -> Any:
        y = m.c(x)
        flat = y.reshape(y.shape[0], -1)
        rest = F.pad(x, (0, (-x.shape[2]) % 8))
        root = torch.arange(x.shape[2] ** 2 // 7)
        return flat, x[:, :, : x.shape[2] - 2], rest, root, x.shape[2] * 2

    net = Run(run, c=nn.Conv1d(4, 8, 3, 2, 1))
    dynamic = ({0: Dim("b"), 2: Dim("t", min=4, max=1000)},)
    return Call(net, (torch.randn(2, 4, 20),), dynamic=dynamic)


@_flow
def automatic() -> Call:
    """Sizes that PyTorch leaves open where it can."""
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(1))
    dynamic = ({0: Dim.AUTO, 2: Dim.AUTO, 3: Dim.AUTO},)
    return Call(net, (torch.randn(2, 3, 8, 8),), dynamic=dynamic)


@_flow
def nested() -> Call:
    """Nested inputs and outputs, and a keyword argument."""

    def run(m: Any, d: Any, *, scale: Any = None) -> Any:
        return OrderedDict(out=[m.l(d["a"]), (d["b"][0] * scale,)], z=d["a"].sum())

    inputs = {"a": torch.randn(2, 4), "b": [torch.randn(2, 4)]}
    return Call(linear(run), (inputs,), {"scale": torch.tensor(2.0)})


@_flow
def named() -> Call:
    """Outputs in a class of `transformers`, and of PyTorch."""
    from transformers.modeling_outputs import BaseModelOutput

    def run(m: Any, x: Any) -> Any:
        return BaseModelOutput(last_hidden_state=m.l(x)), torch.topk(x, 2), torch.max(x, 1)

    return Call(linear(run), (torch.randn(2, 4),))


@_flow
def constants() -> Call:
    """Arguments that are no tensors, and an argument that is absent."""

    def run(m: Any, x: Any, past: Any = None, k: int = 3, f: float = 0.5, flag: bool = True) -> Any:
        return (m.l(x) * k + f if flag else x), past

    return Call(linear(run), (torch.randn(2, 4), None, 2, 0.25, True))


@_flow
def lists() -> Call:
    """A list of inputs for a list of layers with odd names."""

    def run(m: Any, xs: Any) -> Any:
        return [layer(x) for layer, x in zip(m.layers.values(), xs, strict=True)]

    layers = nn.ModuleDict({"layer-1": nn.Linear(4, 4), "größe": nn.Linear(4, 4)})
    return Call(Run(run, layers=layers), ([torch.randn(2, 4)] * 2,))


@_flow
def state() -> Call:
    """A buffer that each call changes."""

    def run(m: Any, x: Any) -> Any:
        m.n.add_(1)
        return m.l(x) * 2

    return Call(linear(run, n=torch.zeros(())), (torch.randn(2, 4),))


@_flow
def half() -> Call:
    """Weights and inputs in 16 bits."""
    net = nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.LayerNorm(4)).bfloat16()
    return Call(net, (torch.randn(2, 4).bfloat16(),))


@_flow
def contexts() -> Call:
    """Autocast and no gradients inside."""

    def run(m: Any, x: Any) -> Any:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = m.l(x)
        with torch.no_grad():
            z = m.l(x) * 2
        return y.float(), z + m.l(x), y.detach()

    return Call(linear(run), (torch.randn(2, 4),))


@_flow
def trained() -> Call:
    """Quantization simulated as in training."""

    def run(m: Any, x: Any) -> Any:
        y = torch.fake_quantize_per_tensor_affine(x, 0.1, 0, -128, 127)
        scale, zero = torch.full((4,), 0.1), torch.zeros(4, dtype=torch.int32)
        weight = torch.fake_quantize_per_channel_affine(m.l.weight, scale, zero, 0, -128, 127)
        return F.linear(y, weight)

    return Call(linear(run), (torch.randn(2, 4),))


@_flow
def random() -> Call:
    """Random numbers of every kind."""

    def run(m: Any, x: Any) -> Any:
        y = m.l(x)
        return [
            torch.rand_like(y),
            torch.randn_like(y),
            torch.rand(2),
            torch.randn(2),
            torch.bernoulli(y.sigmoid()),
            torch.multinomial(y.softmax(-1), 2),
            torch.randperm(4),
            F.dropout(y, 0.5, training=True),
            torch.randint(0, 4, (2,)),
            torch.normal(y, 1.0),
            torch.poisson(y.exp()),
            torch.randint_like(y, 4),
            F.alpha_dropout(y, 0.5, training=True),
            F.gumbel_softmax(y),
            torch.empty_like(y).normal_(),
            torch.normal(0.0, 1.0, (2,)),
        ]

    return Call(linear(run), (torch.randn(2, 4),))


@_flow
def decomposed() -> Call:
    """A program in core ATen from layers with decompositions."""
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.GELU(), nn.LayerNorm(6)).eval()
    return Call(torch.export.export(net, (torch.randn(2, 3, 8, 8),)).run_decompositions())


@_flow
def quantized() -> Call:
    """Integers of a quantized model, as exported."""
    import torch.ao.quantization.fx._decomposed

    pair = torch.ops.quantized_decomposed
    assert torch.ao.quantization is not None

    def run(m: Any, x: Any) -> Any:
        y = pair.quantize_per_tensor(x, 0.1, 0, -128, 127, torch.int8)
        y = pair.dequantize_per_tensor(y, 0.1, 0, -128, 127, torch.int8)
        limits = (0, -128, 127, torch.int8)
        weight = pair.dequantize_per_channel(m.weight, m.scale, m.zero, *limits)
        return F.linear(y, weight)

    parts = {"weight": torch.ones(3, 4, dtype=torch.int8), "scale": torch.full((3,), 0.1)}
    zero = torch.zeros(3, dtype=torch.int64)
    return Call(Run(run, **parts, zero=zero), (torch.randn(2, 4),))

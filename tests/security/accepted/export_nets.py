"""Modules of `torch.nn` for export: convolutional, recurrent and attention nets."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from accepted.export_calls import Build, Call, Run
from torch import nn
from torch.export import Dim

NETS: dict[str, Build] = {}


def _net(build: Build) -> Build:
    NETS[build.__name__] = build
    return build


def _batch(**sizes: int) -> tuple[dict[int, Any]]:
    return ({0: Dim("batch", **sizes)},)


def _block(entering: int, leaving: int, stride: int) -> nn.Module:
    def run(m: Any, x: Any) -> Any:
        return F.relu(m.b2(m.c2(F.relu(m.b1(m.c1(x))))) + m.skip(x))

    skip = nn.Sequential(
        nn.Conv2d(entering, leaving, 1, stride, bias=False), nn.BatchNorm2d(leaving)
    )
    return Run(
        run,
        c1=nn.Conv2d(entering, leaving, 3, stride, 1, bias=False),
        b1=nn.BatchNorm2d(leaving),
        c2=nn.Conv2d(leaving, leaving, 3, 1, 1, bias=False),
        b2=nn.BatchNorm2d(leaving),
        skip=skip,
    )


@_net
def resnet() -> Call:
    """Residual blocks with an open batch size."""
    stem = (nn.Conv2d(3, 8, 7, 2, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(3, 2, 1))
    head = (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10))
    net = nn.Sequential(*stem, _block(8, 8, 1), _block(8, 16, 2), *head)
    return Call(net, (torch.randn(2, 3, 32, 32),), dynamic=_batch(min=1, max=64))


@_net
def mobilenet() -> Call:
    """Depthwise convolutions."""

    def depthwise(entering: int, leaving: int) -> nn.Module:
        first = (nn.Conv2d(entering, entering, 3, 1, 1, groups=entering), nn.BatchNorm2d(entering))
        last = (nn.Conv2d(entering, leaving, 1), nn.BatchNorm2d(leaving), nn.Hardswish())
        return nn.Sequential(*first, nn.ReLU6(), *last, nn.Hardsigmoid())

    head = (nn.AdaptiveAvgPool2d((1, 1)), nn.Flatten(), nn.Dropout(0.2), nn.Linear(8, 5))
    return Call(nn.Sequential(depthwise(3, 6), depthwise(6, 8), *head), (torch.randn(2, 3, 9, 9),))


@_net
def vgg() -> Call:
    """Fixed sizes, and activations in place."""
    net = (nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(True), nn.MaxPool2d(2), nn.Flatten())
    return Call(nn.Sequential(*net, nn.Linear(128, 10)), (torch.randn(1, 3, 8, 8),), strict=True)


@_net
def unet() -> Call:
    """Skip connections and enlargement, with open heights and widths."""

    def run(m: Any, x: Any) -> Any:
        a = F.relu(m.a(x))
        b = F.relu(m.b(F.max_pool2d(a, 2)))
        larger = F.interpolate(b, scale_factor=2, mode="bilinear", align_corners=False)
        return m.o(torch.cat([a, m.u(b)], 1)), larger

    net = Run(
        run,
        a=nn.Conv2d(3, 8, 3, padding=1),
        b=nn.Conv2d(8, 16, 3, padding=1),
        u=nn.ConvTranspose2d(16, 8, 2, 2),
        o=nn.Conv2d(16, 2, 1),
    )
    height, width = Dim("h", min=2, max=64), Dim("w", min=2, max=64)
    return Call(net, (torch.randn(2, 3, 16, 16),), dynamic=({2: 2 * height, 3: 2 * width},))


@_net
def segnet() -> Call:
    """Pooling with indices, undone."""

    def run(m: Any, x: Any) -> Any:
        y, indices = F.max_pool2d(m.c(x), 2, return_indices=True)
        return F.max_unpool2d(y, indices, 2)

    return Call(Run(run, c=nn.Conv2d(1, 2, 3)), (torch.randn(2, 1, 10, 10),))


@_net
def volumes() -> Call:
    """Convolutions over volumes."""
    net = (nn.Conv3d(1, 4, 3), nn.BatchNorm3d(4), nn.InstanceNorm3d(4), nn.MaxPool3d(2))
    deeper = (nn.ConvTranspose3d(4, 2, 2), nn.AvgPool3d(2, padding=1), nn.AdaptiveAvgPool3d(1))
    return Call(nn.Sequential(*net, *deeper, nn.Flatten()), (torch.randn(2, 1, 8, 8, 8),))


@_net
def sequences() -> Call:
    """Convolutions over sequences."""
    net = (
        nn.Conv1d(4, 8, 3, 2, 1),
        nn.BatchNorm1d(8),
        nn.PReLU(),
        nn.MaxPool1d(2),
        nn.AvgPool1d(2),
    )
    deeper = (nn.ConvTranspose1d(8, 4, 3), nn.AdaptiveMaxPool1d(3), nn.Flatten(), nn.Linear(12, 2))
    return Call(nn.Sequential(*net, *deeper), (torch.randn(2, 4, 20),), dynamic=_batch())


@_net
def pools() -> Call:
    """Pooling of every kind."""

    def run(m: Any, x: Any, v: Any, s: Any) -> Any:
        plane = [
            F.avg_pool2d(x, 2, ceil_mode=True),
            F.lp_pool2d(x, 2, 2),
            F.adaptive_avg_pool2d(x, (3, 5)),
            F.adaptive_max_pool2d(x, (3, None)),
            F.adaptive_max_pool2d(x, 2, return_indices=True)[1],
            F.fractional_max_pool2d(x, 2, output_size=3, _random_samples=m.samples),
        ]
        volume = [F.adaptive_avg_pool3d(v, 2), F.adaptive_max_pool3d(v, 2), F.max_pool3d(v, 2)]
        line = [F.adaptive_avg_pool1d(s, 3), F.adaptive_max_pool1d(s, 3), F.lp_pool1d(s, 2, 2)]
        return plane, volume, line, F.max_pool1d(s, 3, return_indices=True)

    net = Run(run, samples=torch.rand(2, 3, 2))
    inputs = (torch.randn(2, 3, 9, 9), torch.randn(1, 2, 6, 6, 6), torch.randn(2, 3, 12))
    return Call(net, inputs)


@_net
def sizes() -> Call:
    """Interpolation of every kind."""

    def run(_: Any, x: Any, s: Any, v: Any) -> Any:
        plane = [
            F.interpolate(x, size=(7, 5), mode=m) for m in ("nearest", "nearest-exact", "area")
        ]
        smooth = [
            F.interpolate(x, scale_factor=1.5, mode=m, align_corners=a, antialias=n)
            for m in ("bilinear", "bicubic")
            for a, n in ((True, False), (False, False), (False, True))
        ]
        line = [F.interpolate(s, size=9, mode=m) for m in ("nearest", "linear", "nearest-exact")]
        volume = [
            F.interpolate(v, size=5, mode=m) for m in ("nearest", "trilinear", "nearest-exact")
        ]
        return plane, smooth, line, volume

    return Call(
        Run(run), (torch.randn(1, 2, 4, 4), torch.randn(1, 2, 5), torch.randn(1, 2, 3, 3, 3))
    )


@_net
def paddings() -> Call:
    """Padding of every kind."""

    def run(_: Any, x: Any, s: Any, v: Any) -> Any:
        modes = ("reflect", "replicate", "circular", "constant")
        return [
            [F.pad(x, (1, 2, 1, 0), mode=m) for m in modes],
            [F.pad(s, (1, 2), mode=m) for m in modes],
            [F.pad(v, (1, 1, 1, 0, 0, 1), mode=m) for m in modes],
        ]

    return Call(
        Run(run), (torch.randn(1, 2, 4, 4), torch.randn(1, 2, 5), torch.randn(1, 2, 3, 3, 3))
    )


@_net
def activations() -> Call:
    """Activations of every kind."""
    kinds = (
        "ELU",
        "SELU",
        "CELU",
        "GELU",
        "SiLU",
        "Mish",
        "Softplus",
        "Softsign",
        "Tanhshrink",
        "Hardtanh",
        "Hardswish",
        "Hardsigmoid",
        "LeakyReLU",
        "LogSigmoid",
        "Sigmoid",
        "Tanh",
        "Hardshrink",
        "Softshrink",
        "PReLU",
        "ReLU6",
        "RReLU",
        "Softmax",
        "LogSoftmax",
        "Softmin",
    )
    layers = [getattr(nn, kind)() for kind in kinds]
    layers += [nn.Threshold(0.1, 0.2), nn.GELU("tanh"), nn.GLU(), nn.Softmax2d()]
    net = Run(lambda m, x: [layer(x) for layer in m.layers], layers=nn.ModuleList(layers))
    return Call(net, (torch.randn(2, 4, 4, 4),))


@_net
def norms() -> Call:
    """Normalization of every kind."""
    layers = (
        nn.GroupNorm(2, 4),
        nn.InstanceNorm2d(4, affine=True),
        nn.BatchNorm2d(4, affine=False),
    )
    layer_norms = (nn.LocalResponseNorm(2), nn.LayerNorm([4, 6, 6]), nn.RMSNorm(6), nn.LayerNorm(6))
    tracked = nn.InstanceNorm2d(4, track_running_stats=True)
    parts = nn.ModuleList(
        [*layers, *layer_norms, tracked, nn.BatchNorm2d(4, track_running_stats=False)]
    )

    def run(m: Any, x: Any) -> Any:
        return [layer(x) for layer in m.layers], F.normalize(x), F.layer_norm(x, (6,))

    return Call(Run(run, layers=parts), (torch.randn(2, 4, 6, 6),))


@_net
def shuffled() -> Call:
    """Pixels that move."""
    net = (nn.Conv2d(3, 8, 3), nn.PixelShuffle(2), nn.PixelUnshuffle(2), nn.ChannelShuffle(2))
    deeper = (nn.Upsample(scale_factor=2), nn.ZeroPad2d(1), nn.ReflectionPad2d(1))
    return Call(nn.Sequential(*net, *deeper), (torch.randn(1, 3, 8, 8),))


@_net
def patches() -> Call:
    """Patches taken apart and put together."""

    def run(_: Any, x: Any) -> Any:
        return F.fold(F.unfold(x, 2, stride=2) * 2, (8, 8), 2, stride=2), x.unfold(2, 3, 2)

    return Call(Run(run), (torch.randn(2, 3, 8, 8),))


@_net
def sampled() -> Call:
    """Sampling at positions that are computed."""

    def run(m: Any, x: Any, v: Any) -> Any:
        matrix = m.head(x.flatten(1)).reshape(-1, 2, 3)
        grid = F.affine_grid(matrix, list(x.shape), align_corners=False)
        modes = [F.grid_sample(x, grid, m_, p, align_corners=False) for m_, p in _SAMPLINGS]
        return modes, F.grid_sample(v, torch.zeros(1, 2, 2, 2, 3), align_corners=True)

    net = Run(run, head=nn.Linear(48, 6))
    return Call(net, (torch.randn(2, 3, 4, 4), torch.randn(1, 2, 3, 3, 3)))


_SAMPLINGS = (("bilinear", "zeros"), ("nearest", "border"), ("bicubic", "reflection"))


@_net
def weight_norm() -> Call:
    """Weights that are normalized in every call."""
    from torch.nn.utils.parametrizations import spectral_norm, weight_norm

    net = (weight_norm(nn.Conv1d(2, 4, 3)), nn.ELU(), spectral_norm(nn.Conv1d(4, 4, 1)))
    return Call(nn.Sequential(*net), (torch.randn(2, 2, 9),))

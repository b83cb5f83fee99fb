"""Layers of `torch.nn` without recurrence or attention: one small model of each."""

from __future__ import annotations

import torch
from torch import nn
from zoo.harness import Case
from zoo.torch_cases import BY_MODULES, case, floats, integers, layer, several

_STEPS = "a value at the edge falls to either side of it"


def _activations() -> list[Case]:
    smooth = (
        nn.CELU,
        nn.ELU,
        nn.GELU,
        nn.Hardsigmoid,
        nn.Hardswish,
        nn.Hardtanh,
        nn.LeakyReLU,
        nn.LogSigmoid,
        nn.Mish,
        nn.PReLU,
        nn.RReLU,
        nn.ReLU,
        nn.ReLU6,
        nn.SELU,
        nn.SiLU,
        nn.Sigmoid,
        nn.Softplus,
        nn.Softshrink,
        nn.Softsign,
        nn.Tanh,
        nn.Tanhshrink,
    )
    return [
        *(layer(kind.__name__, kind, 16) for kind in smooth),
        layer("GELU tanh", lambda: nn.GELU("tanh"), 16),
        layer("GLU", nn.GLU, 16),
        layer("Hardshrink", nn.Hardshrink, 16, discontinuous=_STEPS),
        layer("Threshold", lambda: nn.Threshold(0.1, 20.0), 16, discontinuous=_STEPS),
        layer("Softmax", lambda: nn.Softmax(1), 16),
        layer("Softmin", lambda: nn.Softmin(1), 16),
        layer("LogSoftmax", lambda: nn.LogSoftmax(1), 16),
        layer("Softmax2d", nn.Softmax2d, 4, 5, 5),
    ]


def _convolutions() -> list[Case]:
    return [
        layer("Conv1d", lambda: nn.Conv1d(4, 6, 3, stride=2), 4, 12),
        layer("Conv2d", lambda: nn.Conv2d(4, 6, 3, padding=1), 4, 8, 8),
        layer("Conv2d grouped", lambda: nn.Conv2d(4, 8, 3, groups=2, dilation=2), 4, 8, 8),
        layer("Conv2d depthwise", lambda: nn.Conv2d(4, 4, 3, groups=4, padding="same"), 4, 8, 8),
        layer("Conv2d reflect", lambda: nn.Conv2d(4, 6, 3, 1, 1, padding_mode="reflect"), 4, 8, 8),
        layer("Conv3d", lambda: nn.Conv3d(2, 3, 2), 2, 4, 5, 6),
        layer("ConvTranspose1d", lambda: nn.ConvTranspose1d(4, 6, 3, stride=2), 4, 7),
        layer("ConvTranspose2d", lambda: nn.ConvTranspose2d(4, 6, 3, 2, 1, 1), 4, 5, 5),
        layer("ConvTranspose3d", lambda: nn.ConvTranspose3d(2, 3, 2), 2, 3, 4, 4),
        layer("Linear", lambda: nn.Linear(16, 8), 16),
        layer("Linear no bias", lambda: nn.Linear(16, 8, bias=False), 16),
        case("Bilinear", lambda: nn.Bilinear(6, 5, 4), several(floats(6), floats(5))),
        case("Identity", nn.Identity, floats(4, 5)),
        layer("Fold", lambda: nn.Fold((4, 4), (2, 2)), 8, 9),
        layer("Unfold", lambda: nn.Unfold((2, 3), stride=2), 3, 6, 7),
    ]


def _lazy(kind: type[nn.Module], *shape: int, **options: object) -> nn.Module:
    module = kind(**options)
    module(torch.randn(2, *shape))
    return module


def _lazies() -> list[Case]:
    shapes = {1: (4, 9), 2: (4, 6, 6), 3: (2, 4, 4, 4)}
    cases = [layer("LazyLinear", lambda: _lazy(nn.LazyLinear, 16, out_features=8), 16)]
    for axes, shape in shapes.items():
        for name in ("Conv", "ConvTranspose"):
            kind = getattr(nn, f"Lazy{name}{axes}d")
            options = {"out_channels": 5, "kernel_size": 2}
            cases.append(
                layer(
                    kind.__name__,
                    lambda kind=kind, shape=shape, options=options: _lazy(kind, *shape, **options),
                    *shape,
                )
            )
        for name in ("BatchNorm", "InstanceNorm"):
            kind = getattr(nn, f"Lazy{name}{axes}d")
            make = lambda kind=kind, shape=shape: _lazy(kind, *shape)  # noqa: E731
            cases.append(layer(kind.__name__, make, *shape))
    return cases


def _normalizations() -> list[Case]:
    shapes = {1: (4, 9), 2: (4, 6, 6), 3: (2, 4, 4, 4)}
    cases = []
    for axes, shape in shapes.items():
        for name in ("BatchNorm", "InstanceNorm"):
            kind = getattr(nn, f"{name}{axes}d")
            make = lambda kind=kind, shape=shape: kind(shape[0])  # noqa: E731
            cases.append(layer(kind.__name__, make, *shape))
    return [
        *cases,
        layer("InstanceNorm2d tracked", lambda: nn.InstanceNorm2d(4, True, 0.1, True), 4, 6, 6),
        layer("BatchNorm2d current", lambda: nn.BatchNorm2d(4, track_running_stats=False), 4, 6, 6),
        layer("SyncBatchNorm", lambda: nn.SyncBatchNorm(4), 4, 6, 6),
        layer("CrossMapLRN2d", lambda: nn.CrossMapLRN2d(3), 4, 6, 6, **BY_MODULES),
        layer("LocalResponseNorm", lambda: nn.LocalResponseNorm(3), 4, 6, 6),
        layer("GroupNorm", lambda: nn.GroupNorm(2, 4), 4, 6, 6),
        layer("LayerNorm", lambda: nn.LayerNorm(16), 16),
        layer("RMSNorm", lambda: nn.RMSNorm(16), 16),
    ]


def _poolings() -> list[Case]:
    shapes = {1: (4, 12), 2: (4, 8, 8), 3: (2, 4, 6, 6)}
    cases = []
    for axes, shape in shapes.items():
        arguments = {
            "AdaptiveAvgPool": (3,),
            "AdaptiveMaxPool": (2,),
            "AvgPool": (2,),
            "LPPool": (2, 2),
            "MaxPool": (3, 2, 1),
        }
        for name, values in arguments.items():
            kind = getattr(nn, f"{name}{axes}d")
            make = lambda kind=kind, values=values: kind(*values)  # noqa: E731
            cases.append(layer(kind.__name__, make, *shape))
    return [
        *cases,
        layer("AdaptiveMaxPool2d global", lambda: nn.AdaptiveMaxPool2d((1, None)), 4, 8, 8),
        layer(
            "MaxPool2d indices",
            lambda: nn.MaxPool2d(2, return_indices=True),
            4,
            8,
            8,
            discontinuous="rounding decides which of two near values is the largest",
        ),
        case("FractionalMaxPool2d", lambda: _Fractional(2), floats(4, 8, 8)),
        # torch fixes all sizes of this op as it exports, so its batches are of one size.
        case("FractionalMaxPool3d", lambda: _Fractional(3), lambda _: torch.randn(3, 4, 6, 6, 6)),
        *(_unpooling(axes, shape) for axes, shape in shapes.items()),
    ]


class _Fractional(nn.Module):
    """Fractional pooling with its samples given, as it draws them at random otherwise."""

    def __init__(self, axes: int) -> None:
        super().__init__()
        kind = getattr(nn, f"FractionalMaxPool{axes}d")
        self.pool = kind(2, output_ratio=0.6)
        self.stem = (nn.Conv2d if axes == 2 else nn.Conv3d)(4, 4, 1)
        self.axes = axes

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.pool._random_samples = x.new_full((x.shape[0], 4, self.axes), 0.5)
        return self.pool(self.stem(x))


class _Unpooled(nn.Module):
    def __init__(self, axes: int, width: int) -> None:
        super().__init__()
        self.stem = getattr(nn, f"Conv{axes}d")(width, width, 1)
        self.pool = getattr(nn, f"MaxPool{axes}d")(2, return_indices=True)
        self.unpool = getattr(nn, f"MaxUnpool{axes}d")(2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        values, indices = self.pool(self.stem(x))
        return self.unpool(values, indices)


def _unpooling(axes: int, shape: tuple[int, ...]) -> Case:
    return case(
        f"MaxUnpool{axes}d",
        lambda: _Unpooled(axes, shape[0]),
        floats(*shape),
        discontinuous="rounding decides where the largest of two near values goes",
    )


def _paddings() -> list[Case]:
    shapes = {1: (4, 9), 2: (4, 6, 6), 3: (2, 4, 4, 4)}
    cases = []
    for axes, shape in shapes.items():
        for name in ("CircularPad", "ReflectionPad", "ReplicationPad", "ZeroPad"):
            kind = getattr(nn, f"{name}{axes}d")
            cases.append(layer(kind.__name__, lambda kind=kind: kind(1), *shape))
        kind = getattr(nn, f"ConstantPad{axes}d")
        cases.append(layer(kind.__name__, lambda kind=kind: kind(1, 0.5), *shape))
    return cases


def _rearrangements() -> list[Case]:
    return [
        layer("ChannelShuffle", lambda: nn.ChannelShuffle(2), 4, 6, 6),
        layer("PixelShuffle", lambda: nn.PixelShuffle(2), 4, 6, 6),
        layer("PixelUnshuffle", lambda: nn.PixelUnshuffle(2), 4, 6, 6),
        layer("Flatten", nn.Flatten, 4, 6, 6),
        layer("Unflatten", lambda: nn.Unflatten(1, (2, 8)), 16),
        layer("Upsample nearest", lambda: nn.Upsample(scale_factor=2), 4, 5),
        layer("Upsample linear", lambda: nn.Upsample(12, mode="linear"), 4, 5),
        layer("Upsample bicubic", lambda: nn.Upsample(scale_factor=2, mode="bicubic"), 4, 5, 5),
        layer("Upsample trilinear", lambda: nn.Upsample((4, 6, 6), mode="trilinear"), 2, 3, 4, 4),
        layer("UpsamplingBilinear2d", lambda: nn.UpsamplingBilinear2d(scale_factor=2), 4, 5, 5),
        layer("UpsamplingNearest2d", lambda: nn.UpsamplingNearest2d(scale_factor=2), 4, 5, 5),
    ]


def _regularizations() -> list[Case]:
    kinds = (nn.AlphaDropout, nn.Dropout, nn.FeatureAlphaDropout)
    return [
        *(layer(kind.__name__, kind, 16) for kind in kinds),
        layer("Dropout1d", nn.Dropout1d, 4, 9),
        layer("Dropout2d", nn.Dropout2d, 4, 6, 6),
        layer("Dropout3d", nn.Dropout3d, 2, 4, 4, 4),
    ]


class _Bags(nn.Module):
    """An embedding bag of ragged rows, and a layer behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.bags, self.head = nn.EmbeddingBag(30, 8, mode="mean"), nn.Linear(8, 4)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        starts = torch.arange(tokens.shape[0]) * tokens.shape[1]
        return self.head(self.bags(tokens.flatten(), starts))


def _embeddings() -> list[Case]:
    def then_linear(table: nn.Module) -> nn.Module:
        return nn.Sequential(table, nn.Linear(8, 4))

    return [
        case("Embedding", lambda: then_linear(nn.Embedding(30, 8)), integers(30, 5)),
        case(
            "Embedding max norm",
            lambda: then_linear(nn.Embedding(30, 8, padding_idx=0, max_norm=1.0)),
            integers(30, 5),
        ),
        *(
            case(
                f"EmbeddingBag {mode}",
                lambda mode=mode: then_linear(nn.EmbeddingBag(30, 8, mode=mode)),
                integers(30, 5),
            )
            for mode in ("sum", "mean", "max")
        ),
        case("EmbeddingBag offsets", _Bags, integers(30, 5)),
    ]


CASES = (
    *_activations(),
    *_convolutions(),
    *_lazies(),
    *_normalizations(),
    *_poolings(),
    *_paddings(),
    *_rearrangements(),
    *_regularizations(),
    *_embeddings(),
)

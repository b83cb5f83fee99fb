"""Random nets layer–op–layer in INT8 in PyTorch: integer kernels against simulation and FP32.

    OMP_NUM_THREADS=1 python tests/adaptors/fuzz_torch.py [--seed 0] [--count 500] [--only pad,cat]

Each net has a layer with an integer kernel before and after an op that joins, moves or activates
values, with random arguments. The net is converted without measurement, and the lowered graph is
compared with its own quantize–dequantize form and with FP32: on the calibration batch, on one of
another number of samples and, if the net accepts it, on larger inputs. The exit code is 1 if a net
raises, or computes what rounding does not explain.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

import torch
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.nn import functional as F
from torch.utils import _pytree as pytree

from neural_mp.adaptors.loaded_model import LoadedModel
from neural_mp.adaptors.registry import get_adaptor_named
from neural_mp.core.hardware import detect
from neural_mp.core.precision import Precision
from neural_mp.errors import DataError

Tensor = torch.Tensor
Middle = Callable[[Tensor, Tensor], object]
Draw = Callable[[random.Random, int], Middle]

#: SQNR in dB of the lowered graph relative to its simulation. A step more or less at a tie is
#: rounding: it may be passed on by the layer that follows, as errors of the simulation are.
_LEAST_AGREEMENT = 30.0
#: Loss in dB against the simulation, both relative to FP32, that ties explain.
_MOST_LOSS = 1.5
#: SQNR in dB relative to FP32 below which the net is reported, whatever the simulation computes.
_LEAST_SQNR = 15.0
_SAMPLES, _OTHER_SAMPLES = 4, 3
_ATTEMPTS = 20

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
POOLS = {
    "max": (F.max_pool1d, F.max_pool2d, F.max_pool3d),
    "avg": (F.avg_pool1d, F.avg_pool2d, F.avg_pool3d),
    "adaptive max": (F.adaptive_max_pool1d, F.adaptive_max_pool2d, F.adaptive_max_pool3d),
    "adaptive avg": (F.adaptive_avg_pool1d, F.adaptive_avg_pool2d, F.adaptive_avg_pool3d),
    "lp": (F.lp_pool1d, F.lp_pool2d, F.lp_pool3d),
}


def max_pool(draw: random.Random, axes: int) -> Middle:
    """Max pooling with all of its arguments."""
    kernel = draw.choice((2, 3))
    options = {
        "stride": draw.choice((1, 2, 3)),
        "padding": draw.randint(0, kernel // 2),
        "dilation": draw.choice((1, 1, 2)),
        "ceil_mode": draw.random() < 0.5,
    }
    return lambda x, y: POOLS["max"][axes - 1](x, kernel, **options)


def avg_pool(draw: random.Random, axes: int) -> Middle:
    """Average pooling with all of its arguments."""
    kernel = draw.choice((2, 3))
    options: dict[str, object] = {
        "stride": draw.choice((1, 2, 3)),
        "padding": draw.randint(0, kernel // 2),
        "ceil_mode": draw.random() < 0.5,
        "count_include_pad": draw.random() < 0.5,
    }
    if axes > 1 and draw.random() < 0.3:
        options["divisor_override"] = draw.choice((1, 5))
    return lambda x, y: POOLS["avg"][axes - 1](x, kernel, **options)


def adaptive_pool(draw: random.Random, axes: int) -> Middle:
    """Pooling to a size."""
    pool = POOLS[draw.choice(("adaptive max", "adaptive avg"))][axes - 1]
    size = draw.choice((1, 2, 3, 5))
    return lambda x, y: pool(x, size)


def lp_pool(draw: random.Random, axes: int) -> Middle:
    """Power-average pooling."""
    kernel, ceil = draw.choice((2, 3)), draw.random() < 0.5
    return lambda x, y: POOLS["lp"][axes - 1](x.abs() + 0.1, 2, kernel, ceil_mode=ceil)


def pad(draw: random.Random, axes: int) -> Middle:
    """Padding in each mode, also negative, and with values outside of the range."""
    mode = draw.choice(("constant", "constant", "reflect", "replicate", "circular"))
    least = -1 if mode == "constant" else 0
    widths = [draw.randint(least, 2) for _ in range(2 * axes)]
    if mode != "constant":
        return lambda x, y: F.pad(x, widths, mode)
    value = draw.choice((0.0, 0.0, 1.0, -0.5, 7.0))
    return lambda x, y: F.pad(x, widths, value=value)


def infinite_pad(draw: random.Random, axes: int) -> Middle:
    """Padding with -Inf that max pooling removes."""
    widths = [draw.randint(0, 1) for _ in range(2 * axes)]
    stride = draw.choice((1, 2))
    return lambda x, y: POOLS["max"][axes - 1](F.pad(x, widths, value=-torch.inf), 2, stride)


def concatenation(draw: random.Random, axes: int) -> Middle:
    """Concatenation along any axis, of two or three tensors, also of one with itself."""
    axis = draw.randint(1, axes + 1)
    parts = draw.choice(("xy", "yx", "xx", "xyx"))
    scale = draw.choice((1.0, 1.0, 9.0))
    return lambda x, y: torch.cat([x if part == "x" else y * scale for part in parts], axis)


def sum_of_two(draw: random.Random, axes: int) -> Middle:
    """Sums with `alpha`, of a tensor with itself, a constant or a broadcast tensor."""
    alpha = draw.choice((1, 1, 1, 2, -0.5))
    operand = draw.choice(
        ("other", "other", "itself", "number", "broadcast", "channels", "swapped")
    )
    channels = torch.linspace(-1, 1, 8).reshape(1, 8, *[1] * axes)

    def run(x: Tensor, y: Tensor) -> Tensor:
        second = {
            "other": y,
            "swapped": y,
            "itself": x,
            "number": 0.75,
            "broadcast": y.mean(-1, keepdim=True),
            "channels": channels,
        }[operand]
        if operand == "swapped":
            return torch.add(y, x, alpha=alpha)
        return torch.add(x, second, alpha=alpha)

    return run


def arithmetic(draw: random.Random, axes: int) -> Middle:
    """Products, differences, quotients and extremes of two tensors."""
    kind = draw.choice(("mul", "gate", "sub", "div", "maximum", "minimum", "number", "square"))
    return {
        "mul": lambda x, y: x * y,
        "gate": lambda x, y: x * y.mean(tuple(range(2, axes + 2)), keepdim=True).sigmoid(),
        "sub": lambda x, y: x - y,
        "div": lambda x, y: x / (y.abs() + 0.5),
        "maximum": torch.maximum,
        "minimum": torch.minimum,
        "number": lambda x, y: x * -1.7,
        "square": lambda x, y: x * x,
    }[kind]


def interpolation(draw: random.Random, axes: int) -> Middle:
    """Resizing in each mode, by factor or size."""
    smooth = {1: ("linear",), 2: ("bilinear", "bicubic"), 3: ("trilinear",)}[axes]
    mode = draw.choice(("nearest", "nearest-exact", "area", *smooth))
    by = draw.choice(({"scale_factor": draw.choice((2, 0.5, 1.5))}, {"size": draw.choice((3, 9))}))
    corners = {"align_corners": draw.random() < 0.5} if mode in smooth else {}
    return lambda x, y: F.interpolate(x, mode=mode, **by, **corners)


def movement(draw: random.Random, axes: int) -> Middle:
    """Ops that move or select values; at fixed places, as rounding may flip a comparison."""
    last = list(range(2, axes + 2))
    draw.shuffle(last)
    axis = draw.randint(1, axes + 1)
    start, step = draw.randint(-3, 2), draw.choice((1, 2))
    moves: dict[str, Middle] = {
        "flatten": lambda x, y: x.flatten(1),
        "reshape": lambda x, y: x.reshape(x.shape[0], 4, -1),
        "permute": lambda x, y: x.permute(0, 1, *last),
        "channels last": lambda x, y: x.movedim(1, -1),
        "transpose": lambda x, y: x.transpose(1, axis),
        "chunk": lambda x, y: torch.cat(x.chunk(2, 1)[::-1], 1),
        "split": lambda x, y: torch.cat([x.split([3, 5], 1)[1], y], 1),
        "slice": lambda x, y: x[:, :, start::step] + 0.0,
        "select": lambda x, y: x.select(axis, -1),
        "roll": lambda x, y: x.roll((1, 2), (1, axis)),
        "flip": lambda x, y: x.flip(axis),
        "stack": lambda x, y: torch.stack((x, y), axis).flatten(1, 2),
        "expand": lambda x, y: x.mean(-1, keepdim=True).expand(x.shape),
        "unsqueeze": lambda x, y: x.unsqueeze(axis).squeeze(axis),
        "repeat": lambda x, y: x.repeat(1, *[2 if n == axis else 1 for n in range(1, axes + 2)]),
        "repeat_interleave": lambda x, y: x.repeat_interleave(2, axis),
        "index": lambda x, y: x[:, [2, 0, 7, 1]],
        "gather": lambda x, y: x.gather(1, x.new_zeros(x.shape, dtype=torch.int64) + 3),
        "where": lambda x, y: torch.where(torch.arange(x.shape[-1]) % 3 > 0, x, y),
        "masked_fill": lambda x, y: x.masked_fill(torch.arange(x.shape[-1]) % 3 > 0, 0.0),
        "unfold": lambda x, y: x.unfold(-1, 3, 2).flatten(-2),
    }
    if axes == 2:
        moves |= {
            "pixel_shuffle": lambda x, y: F.pixel_shuffle(x, 2),
            "pixel_unshuffle": lambda x, y: F.pixel_unshuffle(x[..., :6, :6], 2),
            "channel_shuffle": lambda x, y: F.channel_shuffle(x, 2),
            "im2col": lambda x, y: F.unfold(x, 3, padding=1, stride=2),
        }
    return moves[draw.choice(list(moves))]


ACTIVATIONS: tuple[Callable[[Tensor], Tensor], ...] = (
    F.relu,
    F.relu6,
    F.hardtanh,
    lambda x: F.hardtanh(x, -0.3, 0.7),
    lambda x: F.hardtanh(x, 0.2, 0.9),
    lambda x: x.clamp(-0.5, 0.25),
    lambda x: x.clamp(min=0.1),
    F.leaky_relu,
    lambda x: F.leaky_relu(x, -0.2),
    F.elu,
    F.celu,
    F.selu,
    F.gelu,
    lambda x: F.gelu(x, approximate="tanh"),
    F.silu,
    F.mish,
    F.hardswish,
    F.hardsigmoid,
    torch.sigmoid,
    torch.tanh,
    F.softplus,
    F.softsign,
    lambda x: F.softmax(x, 1),
    lambda x: F.softmax(x, -1),
    lambda x: F.log_softmax(x, 1),
    torch.abs,
    torch.exp,
    lambda x: F.threshold(x, 0.1, -0.4),
)


def activation(draw: random.Random, axes: int) -> Middle:
    """One or two activations, also after a sum, as kernels fuse them."""
    first, second = draw.choice(ACTIVATIONS), draw.choice(ACTIVATIONS)
    kind = draw.choice(("one", "one", "two", "after a sum", "both"))
    return {
        "one": lambda x, y: first(x),
        "two": lambda x, y: second(first(x)),
        "after a sum": lambda x, y: first(x + y),
        "both": lambda x, y: first(x) + second(y),
    }[kind]


def reduction(draw: random.Random, axes: int) -> Middle:
    """Reductions over any axes."""
    count = draw.randint(1, axes)
    over = tuple(draw.sample(range(2, axes + 2), count))
    keep = draw.random() < 0.5
    kinds: dict[str, Middle] = {
        "mean": lambda x, y: x.mean(over, keepdim=keep),
        "sum": lambda x, y: x.sum(over, keepdim=keep),
        "amax": lambda x, y: x.amax(over, keepdim=keep),
        "amin": lambda x, y: x.amin(over, keepdim=keep),
        "var": lambda x, y: x.var(over, keepdim=keep),
        "logsumexp": lambda x, y: x.logsumexp(over, keepdim=keep),
        "norm": lambda x, y: torch.linalg.vector_norm(x, dim=over, keepdim=keep),
        "cumsum": lambda x, y: x.cumsum(over[0]),
        "topk": lambda x, y: x.topk(2, over[0])[0],
        "sort": lambda x, y: x.sort(over[0])[0],
    }
    return kinds[draw.choice(list(kinds))]


def normalization(draw: random.Random, axes: int) -> Middle:
    """Layer, group, instance and batch norms, with and without affine parameters."""
    affine = draw.random() < 0.5
    batch = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)[axes - 1](8, affine=affine)
    with torch.no_grad():
        assert batch.running_mean is not None
        assert batch.running_var is not None
        batch.running_mean.uniform_(-0.5, 0.5)
        batch.running_var.uniform_(0.5, 2)
    layer = draw.choice(
        (
            batch,
            nn.GroupNorm(draw.choice((1, 2, 4, 8)), 8, affine=affine),
            (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)[axes - 1](8, affine=affine),
            nn.LocalResponseNorm(3),
            nn.LayerNorm(8, elementwise_affine=affine),
        )
    ).eval()
    if isinstance(layer, nn.LayerNorm):
        return _Norm(lambda x: layer(x.movedim(1, -1)).movedim(-1, 1), layer)
    return _Norm(layer, layer)


@dataclass
class _Norm:
    run: Callable[[Tensor], Tensor]
    layer: nn.Module

    def __call__(self, x: Tensor, y: Tensor) -> Tensor:
        return self.run(x)


def branches(draw: random.Random, axes: int) -> Middle:
    """A tensor with several readers, and views of a sum that is computed in place."""
    kinds: dict[str, Middle] = {
        "residual": lambda x, y: (x + y).relu() + y,
        "chain": lambda x, y: ((x + y) + y).relu(),
        "pool of sum": lambda x, y: POOLS["max"][axes - 1]((x + y).relu(), 2) + 1.0,
        "view of summand": lambda x, y: torch.cat((x + y, y.flip(1)[:, :4]), 1),
        "two outputs": lambda x, y: (x + y, x[:, ::2]),
        "outputs read": lambda x, y: (x, torch.cat((x, y), 1)),
        "pad of cat": lambda x, y: F.pad(torch.cat((x, y), 1), [1] * (2 * axes)),
        "sum of pools": lambda x, y: POOLS["max"][axes - 1](x, 2) + POOLS["avg"][axes - 1](y, 2),
    }
    return kinds[draw.choice(list(kinds))]


FAMILIES: dict[str, Draw] = {
    "max_pool": max_pool,
    "avg_pool": avg_pool,
    "adaptive_pool": adaptive_pool,
    "lp_pool": lp_pool,
    "pad": pad,
    "infinite_pad": infinite_pad,
    "cat": concatenation,
    "add": sum_of_two,
    "arithmetic": arithmetic,
    "interpolate": interpolation,
    "move": movement,
    "activation": activation,
    "reduce": reduction,
    "norm": normalization,
    "branches": branches,
}


class Net(nn.Module):
    """Two layers `x` and `y` → an op → a layer for each of its results."""

    def __init__(self, draw: random.Random, axes: int, middle: Middle) -> None:
        super().__init__()
        self.axes, self.middle, self.channels = axes, middle, draw.choice((3, 6, 8))
        kind = draw.choice((CONVOLUTIONS, CONVOLUTIONS, CONVOLUTIONS, TRANSPOSED))[axes - 1]
        self.is_dense = draw.random() < 0.2
        if self.is_dense:
            self.x, self.y = nn.Linear(self.channels, 8), nn.Linear(self.channels, 8)
        else:
            size = draw.choice((1, 3, 3))
            groups = draw.choice({3: (1,), 6: (1, 1, 2), 8: (1, 2, 8)}[self.channels])
            options = {"bias": draw.random() < 0.8, "padding": size // 2, "groups": groups}
            self.x = kind(self.channels, 8, size, **options)
            self.y = kind(self.channels, 8, size, **options)
        self.norm = middle.layer if isinstance(middle, _Norm) else None
        self.is_last_dense = draw.random() < 0.3
        self.last_kind = draw.choice((*[CONVOLUTIONS] * 9, TRANSPOSED))[axes - 1]
        self.outputs, self.stride = draw.choice((5, 16)), draw.choice((1, 1, 2))
        self.last = nn.ModuleList()

    def first(self, image: Tensor) -> tuple[Tensor, Tensor]:
        """Return the results of the layers before the op, with channels on axis 1."""
        if not self.is_dense:
            return self.x(image), self.y(image)
        channels_last = image.movedim(1, -1)
        return self.x(channels_last).movedim(-1, 1), self.y(channels_last).movedim(-1, 1)

    def build(self, image: Tensor) -> None:
        """Add the layers that read the results of the op."""
        for result in pytree.tree_leaves(self.middle(*self.first(image))):
            is_spatial = result.ndim == self.axes + 2 and not self.is_last_dense
            if is_spatial and min(result.shape[2:]) >= 1:
                size = min(2, *result.shape[2:])
                layer = self.last_kind(result.shape[1], self.outputs, size, stride=self.stride)
                self.last.append(layer)
            else:
                self.last.append(nn.Linear(result.shape[-1], self.outputs))

    def forward(self, image: Tensor) -> tuple[Tensor, ...]:
        results = pytree.tree_leaves(self.middle(*self.first(image)))
        return tuple(layer(result) for layer, result in zip(self.last, results, strict=True))


@dataclass(frozen=True)
class Verdict:
    """The end of the conversion of a net to INT8.

    Attributes:
        family: the op between the layers.
        seed: seed of the net.
        failure: the failure; empty without one.
        int8: number of ops in INT8.
        agreement: SQNR of the lowered graph relative to its simulation, in dB.
        lowered: SQNR of the lowered graph relative to FP32, in dB.
        simulated: the same of the simulation.
    """

    family: str
    seed: int
    failure: str = ""
    int8: int = 0
    agreement: float = 0.0
    lowered: float = 0.0
    simulated: float = 0.0


def drawn_net(family: str, seed: int) -> tuple[Net, list[Tensor]]:
    """Return the net of a seed with batches of different sizes."""
    draw = random.Random(f"{family} {seed}")
    torch.manual_seed(seed)
    for _ in range(_ATTEMPTS):
        axes = draw.choice((1, 2, 2, 2, 3))
        size = {1: (14,), 2: (9, 8), 3: (5, 6, 4)}[axes]
        net = Net(draw, axes, FAMILIES[family](draw, axes)).eval()
        batch = torch.randn(_SAMPLES, net.channels, *size)
        second = torch.randn(_OTHER_SAMPLES, net.channels, *size)
        larger = torch.randn(_OTHER_SAMPLES, net.channels, *(length + 3 for length in size))
        with suppress(RuntimeError, IndexError, ValueError), torch.no_grad():
            net.build(batch)
            if all(output.numel() and output.isfinite().all() for output in net(batch)):
                return net, [batch, second, *_accepted(net, larger)]
    raise RuntimeError(f"no net of {family} with seed {seed} runs in PyTorch")


def _accepted(net: Net, batch: Tensor) -> list[Tensor]:
    """Return the batch if the net runs on it."""
    try:
        net(batch)
    except (RuntimeError, IndexError, ValueError):
        return []
    return [batch]


def checked(family: str, seed: int) -> Verdict:
    """Convert the net of a seed and compare what it computes."""
    net, batches = drawn_net(family, seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return compared(family, seed, net, batches)
        except Exception as error:  # noqa: BLE001 (counted as a failure)
            where = traceback.extract_tb(error.__traceback__)[-1]
            message = f"{type(error).__name__}: {str(error)[:160]} ({where.name}:{where.lineno})"
            return Verdict(family, seed, message)


def compared(family: str, seed: int, net: Net, batches: list[Tensor]) -> Verdict:
    """Return the verdict on a net."""
    adaptor = get_adaptor_named("pytorch")
    model = adaptor.load(net, example=batches[0])
    space = adaptor.space(model, detect({})).restricted_to([Precision.INT8])
    loaded = LoadedModel(adaptor, model)
    batches = [*batches[:2], *(batch for batch in batches[2:] if _runs(loaded, batch))]
    tunable = loaded.in_space(space).with_calibration(batches)
    plan = tunable.space.resolve(tunable.space.fastest_plan())
    int8 = sum(precision is Precision.INT8 for precision in plan.effective.values())
    converted = tunable.convert_by_plan(plan)
    rows = []
    with torch.no_grad():
        for batch in batches:
            expected = net(batch)
            captured = pytree.tree_leaves(tunable(batch))
            if sqnr(expected, captured) < 80:
                return Verdict(
                    family, seed, f"FP32 differs: {sqnr(expected, captured):.0f} dB", int8
                )
            lowered = pytree.tree_leaves(converted(batch))
            simulated = (
                pytree.tree_leaves(converted.held.portable_graph(batch)) if int8 else lowered
            )
            pairs = (simulated, lowered), (expected, lowered), (expected, simulated)
            rows.append([sqnr(*pair) for pair in pairs])
    agreement, against_fp32, simulation = (min(column) for column in zip(*rows, strict=True))
    failure = ""
    if agreement < _LEAST_AGREEMENT and against_fp32 < simulation - _MOST_LOSS:
        failure = "the kernels differ from their simulation"
    elif against_fp32 < _LEAST_SQNR:
        failure = "far from FP32"
    return Verdict(family, seed, failure, int8, agreement, against_fp32, simulation)


def _runs(model: LoadedModel, batch: Tensor) -> bool:
    """Whether a captured model accepts a batch; sizes may decide on branches of the code."""
    try:
        model(batch)
    except DataError:
        return False
    return True


def sqnr(expected: object, outputs: object) -> float:
    """Return the lowest SQNR in dB over pairs of outputs; -999 if shapes or NaN differ."""
    lowest = 200.0
    for reference, output in zip(expected, outputs, strict=True):  # type: ignore[call-overload]
        if reference.shape != output.shape or not output.isfinite().all():
            return -999.0
        noise = (output.double() - reference.double()).square().sum()
        power = reference.double().square().sum()
        if noise > 0:
            lowest = min(lowest, float(10 * torch.log10(power / noise)))
    return lowest


def main() -> None:
    """Check nets, print a table of failures, and exit with 1 if there are any."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=0, help="seed of the first net")
    parser.add_argument("--count", type=int, default=500, help="number of nets")
    parser.add_argument("--only", default="", help="families of ops, separated by commas")
    options = parser.parse_args()
    torch.set_num_threads(1)
    families = options.only.split(",") if options.only else list(FAMILIES)
    started = time.process_time()
    verdicts = []
    for seed in range(options.seed, options.seed + options.count):
        verdicts.append(checked(families[seed % len(families)], seed))
        if verdicts[-1].failure:
            print(verdicts[-1], file=sys.stderr, flush=True)
    failures = [verdict for verdict in verdicts if verdict.failure]
    table = Table("family", "nets", "ops in INT8", "failures", "lowest agreement", "lowest SQNR")
    totals = Counter(verdict.family for verdict in verdicts)
    for family, count in totals.items():
        own = [verdict for verdict in verdicts if verdict.family == family]
        right = [verdict for verdict in own if not verdict.failure]
        table.add_row(
            family,
            str(count),
            str(sum(verdict.int8 for verdict in own)),
            str(len(own) - len(right)),
            f"{min((verdict.agreement for verdict in right), default=0):.0f} dB",
            f"{min((verdict.lowered for verdict in right), default=0):.0f} dB",
        )
    console = Console()
    console.print(table)
    if failures:
        wrong = Table("family", "seed", "failure", "agreement", "lowered", "simulated")
        for verdict in failures:
            numbers = (verdict.agreement, verdict.lowered, verdict.simulated)
            wrong.add_row(
                verdict.family, str(verdict.seed), verdict.failure, *map("{:.1f}".format, numbers)
            )
        console.print(wrong)
    seconds = time.process_time() - started
    console.print(f"{len(verdicts)} nets, {len(failures)} failures, {seconds:.0f} CPU seconds")
    sys.exit(bool(failures))


if __name__ == "__main__":
    main()

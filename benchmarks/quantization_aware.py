"""Accuracy that training recovers, its steps, and seconds per step over FP32, beside torchao.

    python benchmarks/quantization_aware.py [--epochs 10]

Three nets on scikit-learn's digits that lose accuracy in INT8, or with weights in 4 bits: hostile
scalings that keep the function, and a narrow net with batch norms. torchao trains the INT8 nets by
its PT2E flow (X86InductorQuantizer) for as many steps, if installed. Seconds are CPU seconds of
interleaved steps.
"""

from __future__ import annotations

import sys
from pathlib import Path

# Files beside this one bear the names of packages: its folder must not be searched for those.
# ruff: noqa: E402
sys.path[0] = str(Path(__file__).resolve().parent / "models")

import argparse
import copy
import importlib.util
import math
import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from resnet50 import resnet50
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.nn import functional as F

from neural_mp import training
from neural_mp.core.plan import PrecisionPlan
from neural_mp.testing import digits

TRAIN, TEST = digits()
IMAGES, LABELS = torch.from_numpy(TRAIN.images), torch.from_numpy(TRAIN.labels)
RATE, BATCH = 5e-3, 50
INT4 = {"precision": "int4", "weight": "uint4 asymmetric per_group 64 minmax"}


def scaled(first: nn.Module, second: nn.Module, outputs: bool) -> None:
    """Scale the channels between two layers 1 to 1000 times; the function stays the same."""
    with torch.no_grad():
        factors = torch.logspace(0, 3, len(first.weight))
        first.weight.mul_(factors.reshape(-1, *[1] * (first.weight.ndim - 1)))
        first.bias.mul_(factors)
        second.weight.div_(factors.reshape(-1, 1, 1, 1) if outputs else factors)


def narrow() -> tuple[nn.Module, Callable[[nn.Module], None], dict[str, Any]]:
    """A net of depthwise convolutions."""
    layers = nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 16, 3, 1, 1, groups=16)
    rest = nn.ReLU(), nn.Conv2d(16, 32, 1, 2), nn.ReLU(), nn.Flatten(), nn.Linear(512, 10)
    names = dict.fromkeys(("0", "2", "4", "7"), "int8")
    return nn.Sequential(*layers, *rest), lambda net: scaled(net[0], net[2], True), names


def normed() -> tuple[nn.Module, Callable[[nn.Module], None], dict[str, Any]]:
    """A narrow net with batch norms, some of whose channels are scaled after training."""

    def block(inputs: int, outputs: int, stride: int) -> list[nn.Module]:
        depthwise = nn.Conv2d(inputs, inputs, 3, stride, 1, groups=inputs)
        pointwise = nn.Conv2d(inputs, outputs, 1)
        norms = nn.BatchNorm2d(inputs), nn.BatchNorm2d(outputs)
        return [depthwise, norms[0], nn.ReLU(), pointwise, norms[1], nn.ReLU()]

    def hostile(net: Any) -> None:
        with torch.no_grad():
            factors = torch.logspace(0, 3, 8)
            net[1].weight.mul_(factors)
            net[1].bias.mul_(factors)
            net[3].weight.div_(factors.reshape(-1, 1, 1, 1))

    stem = [nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU()]
    body = [*block(8, 16, 1), *block(16, 32, 2)]
    net = nn.Sequential(*stem, *body, nn.Flatten(), nn.Linear(512, 10))
    layers = [str(i) for i, each in enumerate(net) if isinstance(each, nn.Conv2d | nn.Linear)]
    return net, hostile, dict.fromkeys(layers, "int8")


def dense() -> tuple[nn.Module, Callable[[nn.Module], None], dict[str, Any]]:
    """A dense net with weights in 4 bits."""
    layers = nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)
    net = nn.Sequential(nn.Flatten(), *layers)
    return net, lambda net: scaled(net[1], net[3], False), {"1": INT4, "3": INT4}


NETS = {"narrow depthwise": narrow, "with batch norms": normed, "dense, 4 bits": dense}


def rates(epochs: int) -> Iterator[float]:
    for epoch in range(epochs):
        yield RATE * 0.5 * (1 + math.cos(math.pi * epoch / epochs))


def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Any, y: Any) -> None:
    optimizer.zero_grad()
    F.cross_entropy(model(x), y).backward()
    optimizer.step()


def train(model: nn.Module, epochs: int) -> None:
    """Train with Adam; the learning rate decays along half a cosine."""
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad])
    for rate in rates(epochs):
        optimizer.param_groups[0]["lr"] = rate
        for x, y in zip(IMAGES.split(BATCH), LABELS.split(BATCH), strict=True):
            step(model, optimizer, x, y)


@torch.no_grad()
def accuracy(run: Callable[[torch.Tensor], torch.Tensor]) -> float:
    found = run(torch.from_numpy(TEST.images))
    return float((found.argmax(1) == torch.from_numpy(TEST.labels)).float().mean())


def step_ratio(
    net: nn.Module,
    simulation: nn.Module,
    images: torch.Tensor = IMAGES[:BATCH],
    labels: torch.Tensor = LABELS[:BATCH],
    count: int = 30,
) -> float:
    """CPU seconds of a step with the simulation over those of a step in FP32: the median."""
    models = copy.deepcopy(net).train(), copy.deepcopy(simulation).train()
    optimizers = [torch.optim.Adam(model.parameters(), 1e-5) for model in models]
    ratios = []
    for _ in range(count):
        seconds = []
        for model, optimizer in zip(models, optimizers, strict=True):
            started = time.process_time()
            step(model, optimizer, images, labels)
            seconds.append(time.process_time() - started)
        ratios.append(seconds[1] / seconds[0])
    return statistics.median(ratios)


def by_torchao(net: nn.Module, epochs: int) -> tuple[float, float]:
    """Accuracy of torchao's simulation and of its converted model after as many steps."""
    from torchao.quantization.pt2e import move_exported_model_to_eval as to_eval
    from torchao.quantization.pt2e import move_exported_model_to_train as to_train
    from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_qat_pt2e
    from torchao.quantization.pt2e.quantizer import x86_inductor_quantizer as x86

    batch = {0: torch.export.Dim("batch", min=2)}
    exported = torch.export.export(net, (IMAGES[:BATCH],), dynamic_shapes=(batch,)).module()
    quantizer = x86.X86InductorQuantizer()
    quantizer.set_global(x86.get_default_x86_inductor_quantization_config(is_qat=True))
    prepared = prepare_qat_pt2e(exported, quantizer)
    to_train(prepared)
    train(prepared, epochs)
    to_eval(prepared)
    simulated = accuracy(prepared)
    converted = convert_pt2e(prepared)
    to_eval(converted)
    return simulated, accuracy(converted)


def resnet50_ratio() -> float:
    """CPU seconds of a training step of ResNet-50 in INT8 over those in FP32."""
    net = resnet50().eval()
    images, labels = torch.randn(8, 3, 96, 96), torch.randint(0, 1000, (8,))
    convolutions = (n for n, m in net.named_modules() if isinstance(m, nn.Conv2d | nn.Linear))
    plan = PrecisionPlan.from_dict(dict.fromkeys(convolutions, "int8"))
    simulation = training.quantization_aware(net, plan, calibration=[images])
    return step_ratio(net, simulation, images, labels, 5)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=10)
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    table = Table(title=f"Accuracy in percent; {options.epochs * len(IMAGES) // BATCH} steps")
    words = ("FP32", "plan", "simulation", "converted", "step / FP32", "torchao", "converted")
    for word in ("net", *words):
        table.add_column(word, justify="left" if word == "net" else "right")
    for name, make in NETS.items():
        torch.manual_seed(0)
        net, hostile, layers = make()
        train(net.train(), 12)
        hostile(net.eval())
        plan = PrecisionPlan.from_dict(layers)
        fp32, steps = accuracy(net), options.epochs * len(IMAGES) // BATCH
        simulation = training.quantization_aware(
            net, plan, calibration=[IMAGES[:200]], norm_steps=steps // 2
        )
        before = accuracy(training.finish(simulation).model)
        ratio = step_ratio(net, simulation)
        train(simulation.train(), options.epochs)
        found = accuracy(simulation.eval()), accuracy(training.finish(simulation).model)
        peer = ("–", "–")
        if importlib.util.find_spec("torchao") and "int8" in layers.values():
            peer = tuple(
                f"{100 * each:.1f}" for each in by_torchao(copy.deepcopy(net), options.epochs)
            )
        ours = (f"{100 * each:.1f}" for each in (fp32, before, *found))
        table.add_row(name, *ours, f"{ratio:.2f}", *peer)
    Console().print(table)
    print(f"ResNet-50, batch 8, 96×96: step / FP32 {resnet50_ratio():.2f}")


if __name__ == "__main__":
    main()

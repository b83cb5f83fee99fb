"""Accuracy of nets that lose more than 5 points in INT8 or 4-bit weights, and what is recovered.

    OMP_NUM_THREADS=1 python -m benchmarks.qat [--peer PYTHON] [--only narrow] [--epochs 10]

Every method converts a net with the same plan: all layers in INT8 with INT8 activations, or all
dense layers in 4-bit weights with float activations, for which every runtime has a kernel.
`to nearest` is calibration alone; `reconstruction` learns the weights from the FP32 results of each
layer on calibration images, without labels (`adaround learned_scale bias_correction`, and
`autoround` for weights in groups). `training` goes on from the reconstructed plan, on labels;
`training alone` from the plan without it. INT8 layers run in PyTorch, ONNX Runtime and OpenVINO,
4-bit weights in PyTorch; ONNX files are exported from PyTorch. `--peer` is a Python with torchao,
NNCF, OpenVINO and scikit-learn, whose training takes as many steps at the same rate.

Accuracy is that of the simulation and of the converted model, on test images. Seconds are CPU
seconds of conversion or training; a step is compared with one of FP32 training, taken in turn.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from benchmarks.measurement.children import run_child
from benchmarks.measurement.qat_training import Outcome, Tool, outcome, runs_of, step_seconds
from benchmarks.measurement.search_data import Digits
from benchmarks.measurement.tables import markdown_table
from benchmarks.nets.deployed_nets import resnet50
from benchmarks.nets.qat_nets import CASES, Case, accuracy
from neural_mp import training
from neural_mp.adaptors.common.weights.corrected_weights import CorrectedWeights
from neural_mp.adaptors.common.weights.reconstruction import reconstructable_layers
from neural_mp.adaptors.contract import Adaptor
from neural_mp.adaptors.registry import get_adaptor_named
from neural_mp.core.enums import WeightCorrection
from neural_mp.core.hardware import detect
from neural_mp.core.observations import Observations
from neural_mp.core.plan import PrecisionPlan
from neural_mp.core.precision import RECONSTRUCTIONS, OpConfig, Precision
from neural_mp.space import TuningSpace

Run = Callable[[np.ndarray], object]
HEADINGS = ("net", "runtime", "method", "simulation", "converted")
HEADINGS = (*HEADINGS, "recovered", "CPU seconds", "step / FP32")
RUNTIMES = ("pytorch", "onnxrt", "openvino")
PEERS = {"torchao": "torchao", "nncf": "NNCF"}
FOLDED = 0.5


@dataclass(frozen=True)
class Loaded:
    """A net in one runtime, calibrated."""

    adaptor: Adaptor[Any]
    model: Any
    space: TuningSpace
    observations: Observations
    images: np.ndarray
    bits: int

    def plan(self, **corrections: tuple[str, ...]) -> PrecisionPlan:
        """Return the plan of all layers, with `weight` and `layer` corrections."""
        precision = Precision(f"int{self.bits}")
        layers = reconstructable_layers(self.adaptor, self.model)
        requested = tuple(map(WeightCorrection, corrections.get("weight", ())))
        configs: dict[str, OpConfig] = {}
        for op in self.space.tunable_ops:
            config = next((c for c in self._configs(op, precision, requested)), None)
            if config is not None:
                names = corrections.get("layer", ()) if op in layers else ()
                configs[op] = replace(config, corrections=names)
        return PrecisionPlan(configs)

    def _configs(
        self, op: str, precision: Precision, requested: tuple[WeightCorrection, ...]
    ) -> Iterator[OpConfig]:
        for config in self.space.capabilities[op].configs:
            supported = () if config.weight is None else config.weight.corrections
            if config.precision is precision and supported == requested:
                yield config

    def converted(self, plan: PrecisionPlan) -> Run:
        """Return a function that runs the net in a plan."""
        corrected = CorrectedWeights(self.adaptor, self.model, lambda: [self.images])
        resolved = self.space.resolve(plan)
        model = self.adaptor.convert(self.model, resolved, self.observations, self.space, corrected)
        return lambda images: self.adaptor.predict(model, images)


def nearest(loaded: Loaded) -> PrecisionPlan:
    """Return the plan with weights rounded to nearest."""
    return loaded.plan()


def reconstruction(loaded: Loaded) -> PrecisionPlan:
    """Return the plan with weights learned from FP32 results."""
    if loaded.bits < Precision.INT8.bits:
        return loaded.plan(weight=("autoround",))
    return loaded.plan(layer=("bias_correction", *RECONSTRUCTIONS))


def load(case: Case, runtime: str, images: np.ndarray, folder: Path) -> Loaded:
    """Load and calibrate the net of a case in a runtime."""
    net, adaptor = case.net(), get_adaptor_named(runtime)
    source: Any = net
    if runtime != "pytorch":
        source = str(folder / f"{case.build.__name__}.onnx")
        batch = (torch.tensor(images[:8]),)
        free = ({0: torch.export.Dim.AUTO},)
        torch.onnx.export(net, batch, source, dynamo=True, dynamic_shapes=free, verbose=False)
    model = adaptor.load(source, example=images[:8])
    space = adaptor.space(model, detect())
    int8 = space.restricted_to([Precision.INT8])
    return Loaded(adaptor, model, space, adaptor.observe(model, [images], int8), images, case.bits)


@dataclass(frozen=True)
class Line:
    """A line of the table; accuracies of FP32 and of rounding to nearest stand in all of a net."""

    method: str
    converted: float
    simulated: float | None = None
    seconds: float | None = None
    ratio: float | None = None

    def cells(self, exact: float, rounded: float) -> list[str]:
        gained = (self.converted - rounded) / (exact - rounded) if exact > rounded else 0.0
        is_start = self.seconds is None or self.converted == rounded
        figures = (
            (self.simulated, ".1%"),
            (self.converted, ".1%"),
            (None if is_start else gained, ".0%"),
            (self.seconds, ".1f"),
            (self.ratio, ".2f"),
        )
        return [self.method, *("" if v is None else format(v, form) for v, form in figures)]


def by_rounding(loaded: Loaded) -> Iterator[Line]:
    """Yield FP32, rounding to nearest, and reconstruction."""
    yield Line("FP32", accuracy(lambda images: loaded.adaptor.predict(loaded.model, images)))
    for name, plan in (("to nearest", nearest), ("reconstruction", reconstruction)):
        started = time.process_time()
        run = loaded.converted(plan(loaded))
        seconds = time.process_time() - started
        yield Line(name, accuracy(run), seconds=seconds)


def by_training(loaded: Loaded, case: Case, epochs: int) -> Iterator[Line]:
    """Yield training from the reconstructed plan, and from the plan alone."""
    images = torch.from_numpy(loaded.images)
    for name, plan in (("training", reconstruction), ("training alone", nearest)):
        trained = outcome(tool(plan(loaded)), case, images, epochs)
        yield line(f"{name}, {epochs} epochs", trained)


def tool(plan: PrecisionPlan) -> Tool:
    """Return training with a plan; batch norms are frozen half way."""

    def simulate(net: nn.Module, images: torch.Tensor, steps: int) -> nn.Module:
        norms = int(FOLDED * steps)
        prepared: nn.Module = training.quantization_aware(
            net, plan, calibration=[images], norm_steps=norms
        )
        return prepared

    return Tool(simulate, lambda simulation: runs_of(training.finish(simulation).model))


def line(method: str, result: Outcome) -> Line:
    return Line(method, result.converted, result.simulated, result.seconds, result.ratio)


def by_peer(python: str, name: str, case: Case, epochs: int, samples: int) -> Iterator[Line]:
    """Yield a peer's model before and after its training, in its own Python."""
    numbers = (CASES.index(case), epochs, samples)
    with tempfile.TemporaryDirectory() as folder:  # the peers write files where they stand
        figures = run_child("peers.qat_peers", name, *numbers, python=python, folder=folder)
    yield Line(f"{PEERS[name]}, calibrated", figures.pop("before"))
    yield line(f"{PEERS[name]}, {epochs} epochs", Outcome(**figures))


def rows(case: Case, options: argparse.Namespace, folder: Path) -> Iterator[list[str]]:
    """Yield the rows of a net: in PyTorch, by the peers, then in the other runtimes."""
    images = Digits("train").images[: options.samples]
    runtimes = RUNTIMES if case.bits == Precision.INT8.bits else RUNTIMES[:1]
    for runtime in runtimes:
        loaded = load(case, runtime, images, folder)
        lines = list(by_rounding(loaded))
        if runtime == "pytorch":
            lines += by_training(loaded, case, options.epochs)
            for name in PEERS if options.peer else ():
                lines += by_peer(options.peer, name, case, options.epochs, options.samples)
        for entry in lines:
            yield [case.name, runtime, *entry.cells(lines[0].converted, lines[1].converted)]


def resnet50_ratio(count: int = 5) -> float:
    """Return CPU seconds of a step of ResNet-50 in INT8 over those in FP32."""
    net = resnet50().eval()
    images, labels = torch.randn(8, 3, 96, 96), torch.randint(0, 1000, (8,))
    convolutions = (n for n, m in net.named_modules() if isinstance(m, nn.Conv2d | nn.Linear))
    plan = PrecisionPlan.from_dict(dict.fromkeys(convolutions, "int8"))
    simulation = training.quantization_aware(net, plan, calibration=[images])
    modules = net.train(), simulation.train()
    runs = [(run, torch.optim.Adam(run.parameters(), 1e-5)) for run in modules]
    ratios = []
    for _ in range(count):
        fp32, ours = (step_seconds(*run, images, labels) for run in runs)
        ratios.append(ours / fp32)
    return statistics.median(ratios)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="a part of the names of the nets")
    parser.add_argument("--samples", type=int, default=500, help="calibration images")
    parser.add_argument("--epochs", type=int, default=10, help="of 24 steps each")
    parser.add_argument("--peer", help="a Python with torchao, nncf, openvino and scikit-learn")
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    entries = []
    with tempfile.TemporaryDirectory() as folder:
        for case in CASES:
            if options.only in case.name:
                entries += rows(case, options, Path(folder))
    print(markdown_table(HEADINGS, entries))
    print(f"ResNet-50 in INT8, batch 8, 96×96: a step takes {resnet50_ratio():.2f} of FP32")


if __name__ == "__main__":
    main()

"""Accuracy of nets that lose more than 5 points in INT8 or 4-bit weights, and what is recovered.

    OMP_NUM_THREADS=1 python benchmarks/qat.py [--only narrow] [--samples 500]

Every method converts a net with the same plan: all layers in INT8, or all dense layers in 4-bit
weights. `rounded to nearest` is calibration alone; `reconstruction` learns the weights from the
FP32 results of each layer on calibration images, without labels (`adaround learned_scale
bias_correction`, and `autoround` for weights in groups). INT8 layers run in PyTorch, ONNX Runtime
and OpenVINO, 4-bit weights in PyTorch; ONNX files are exported from PyTorch.
Accuracy is that of the converted model on test images. Seconds are CPU seconds of the conversion.
"""

from __future__ import annotations

import sys
from pathlib import Path

# Files beside this one bear the names of packages: its folder must not be searched for those.
# ruff: noqa: E402
sys.path[0] = str(Path(__file__).resolve().parent / "models")

import argparse
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from qat_nets import CASES, Case, accuracy
from search_data import Digits
from tables import markdown_table

from neural_mp.adaptors.common.corrected_weights import CorrectedWeights
from neural_mp.adaptors.common.reconstruction import reconstructable
from neural_mp.adaptors.contract import Adaptor
from neural_mp.adaptors.registry import adaptor_named
from neural_mp.core.enums import WeightCorrection
from neural_mp.core.hardware import detect
from neural_mp.core.observations import Observations
from neural_mp.core.plan import PrecisionPlan
from neural_mp.core.precision import RECONSTRUCTIONS, OpConfig, Precision
from neural_mp.space import TuningSpace

HEADINGS = ("net", "runtime", "method", "FP32", "accuracy", "recovered", "CPU seconds")
RUNTIMES = ("pytorch", "onnxrt", "openvino")


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
        layers = reconstructable(self.adaptor, self.model)
        wanted = tuple(map(WeightCorrection, corrections.get("weight", ())))
        found: dict[str, OpConfig] = {}
        for op in self.space.tunable_ops:
            config = next((c for c in self._configs(op, precision, wanted)), None)
            if config is not None:
                names = corrections.get("layer", ()) if op in layers else ()
                found[op] = replace(config, corrections=names)
        return PrecisionPlan(found)

    def _configs(
        self, op: str, precision: Precision, wanted: tuple[WeightCorrection, ...]
    ) -> Iterator[OpConfig]:
        for config in self.space.capabilities[op].configs:
            given = () if config.weight is None else config.weight.corrections
            if config.precision is precision and given == wanted:
                yield config

    def converted(self, plan: PrecisionPlan) -> Callable[[np.ndarray], object]:
        """Return a function that runs the net in a plan."""
        corrected = CorrectedWeights(self.adaptor, self.model, lambda: [self.images])
        resolved = self.space.resolve(plan)
        model = self.adaptor.convert(self.model, resolved, self.observations, self.space, corrected)
        return lambda images: self.adaptor.predict(model, images)


def nearest(loaded: Loaded) -> Callable[[np.ndarray], object]:
    """Convert with weights rounded to nearest."""
    return loaded.converted(loaded.plan())


def reconstruction(loaded: Loaded) -> Callable[[np.ndarray], object]:
    """Convert with weights learned from FP32 results."""
    if loaded.bits < Precision.INT8.bits:
        return loaded.converted(loaded.plan(weight=("autoround",)))
    return loaded.converted(loaded.plan(layer=("bias_correction", *RECONSTRUCTIONS)))


#: Method → a function from a calibrated net to its runs; the first is what others recover from.
METHODS: Mapping[str, Callable[[Loaded], Callable[[np.ndarray], object]]] = {
    "rounded to nearest": nearest,
    "reconstruction": reconstruction,
}


def load(case: Case, runtime: str, images: np.ndarray, folder: Path) -> Loaded:
    """Load and calibrate the net of a case in a runtime."""
    net, adaptor = case.net(), adaptor_named(runtime)
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


def rows(case: Case, runtime: str, samples: int, folder: Path) -> Iterator[list[str]]:
    """Yield the rows of a net in a runtime."""
    loaded = load(case, runtime, Digits("train").images[:samples], folder)
    exact = accuracy(lambda images: loaded.adaptor.predict(loaded.model, images))
    lost = 0.0
    for name, method in METHODS.items():
        started = time.process_time()
        run = method(loaded)
        seconds = time.process_time() - started
        found = accuracy(run)
        lost = lost or exact - found
        gained = 1 - (exact - found) / lost if lost else 0.0
        figures = f"{exact:.1%}", f"{found:.1%}", f"{gained:.0%}", f"{seconds:.1f}"
        yield [case.name, runtime, name, *figures]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="a part of the names of the nets")
    parser.add_argument("--samples", type=int, default=500, help="calibration images")
    given = parser.parse_args()
    found = []
    with tempfile.TemporaryDirectory() as folder:
        for case in CASES:
            if given.only in case.name:
                runtimes = RUNTIMES if case.bits == Precision.INT8.bits else RUNTIMES[:1]
                for runtime in runtimes:
                    found += rows(case, runtime, given.samples, Path(folder))
    print(markdown_table(HEADINGS, found))


if __name__ == "__main__":
    main()

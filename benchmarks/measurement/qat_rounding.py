"""Nets of the benchmark of training, converted in one runtime with and without reconstruction."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.nets.qat_nets import Case
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

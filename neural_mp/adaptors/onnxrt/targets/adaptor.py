"""The adaptor of targets: plans for an accelerator, written as ONNX files, simulated on the CPU."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from neural_mp.adaptors.common import conversion, optional
from neural_mp.adaptors.common.signatures.input_spec import InputSpec
from neural_mp.adaptors.common.signatures.signature import Array
from neural_mp.adaptors.common.weights.corrected_weights import CorrectedWeights
from neural_mp.adaptors.onnxrt.adaptor import OnnxRuntimeAdaptor
from neural_mp.adaptors.onnxrt.files import storage
from neural_mp.adaptors.onnxrt.graph.edit import is_float32
from neural_mp.adaptors.onnxrt.graph.sessions import CPU
from neural_mp.adaptors.onnxrt.model import OnnxModel
from neural_mp.adaptors.onnxrt.targets.model import (
    TargetModel,
    build_graph,
    capabilities_of,
    work_of,
)
from neural_mp.adaptors.onnxrt.targets.qdq_writer import write_qdq
from neural_mp.adaptors.onnxrt.targets.rewrites import rewrite_for, with_static_shapes
from neural_mp.adaptors.onnxrt.targets.switch_model import build_switch_model, measure_noise
from neural_mp.amp import FourLists
from neural_mp.core.hardware import Hardware
from neural_mp.core.observations import KeptOutputs, Observations, Range
from neural_mp.core.precision import Precision
from neural_mp.core.width_figures import WidthFigures
from neural_mp.errors import ConversionError
from neural_mp.space import ResolvedPlan, TuningSpace
from neural_mp.targets import TargetProfile

#: SQNR in dB that a rewritten graph must reach, and one with clipped masks.
_LEAST_EXACT_DB, _LEAST_CLIPPED_DB = 80.0, 30.0
#: Range of the calibration of activations.
_ALGORITHM = "minmax"


class TargetAdaptor(OnnxRuntimeAdaptor):
    """The adaptor of a target.

    Args:
        profile: the rules of the target.
    """

    corrections = None
    layer_inputs = None
    grouped_weights = None
    portability = None
    transfer = None
    unoptimized_run = None
    single_file = optional.SingleFile((".onnx",), lambda *args: save_static(*args))

    graph = staticmethod(build_graph)

    def __init__(self, profile: TargetProfile) -> None:
        super().__init__(CPU)
        self.profile = profile

    def read(self, source: object, spec: InputSpec) -> TargetModel:
        """Read, canonicalize and rewrite a model."""
        model = super().read(source, spec)
        if model.obstacle is not None:
            raise ConversionError(f"the model cannot be written for a target: {model.obstacle}")
        rewritten = rewrite_for(model.program, self.profile)
        state = {item.name: getattr(model, item.name) for item in fields(OnnxModel)}
        state |= {
            "program": rewritten.program,
            "opset": self.profile.opset[0],
            "warnings": (*model.warnings, *rewritten.notes),
            "quantized": None,
            "kernel_check": None,
            "_runners": {},
        }
        target = TargetModel(**state, profile=self.profile)
        self._check_rewriting(target, exact=not rewritten.notes)
        return target

    def _check_rewriting(self, target: TargetModel, exact: bool) -> None:
        """Compare the rewritten graph with the given one, on the example.

        Raises:
            ConversionError: the outputs differ by more than rounding, or, with clipped masks, by
                more than masks may.
        """
        expected = target.run(target.example)
        outputs = target.signature.output_tensors
        actual = target.session(target.program).fetching(outputs)(target.example)
        least = _LEAST_EXACT_DB if exact else _LEAST_CLIPPED_DB
        for name, before, after in zip(outputs, expected, actual, strict=True):
            if before.dtype.kind == "f" and not _is_near(before, after, least):
                raise ConversionError(
                    f"the graph rewritten for {self.profile.title} must compute the output "
                    f"{name!r} with at least {least:g} dB, and does not; give the model without "
                    f"the ops that the profile rewrites: {', '.join(self.profile.rewrites)}"
                )

    def space(
        self,
        model: OnnxModel,
        hardware: Hardware,
        lists: Mapping[Precision, FourLists] | None = None,
    ) -> TuningSpace:
        """Return the graph with the widths that the target computes every op in."""
        return TuningSpace(self.graph(_target(model)), capabilities_of(_target(model)))

    def observe(
        self,
        model: OnnxModel,
        batches: Iterable[Any],
        space: TuningSpace,
        collected: KeptOutputs | None = None,
    ) -> Observations:
        """Observe every float tensor, since a plan may store each in integers."""
        values = model.structure.values.items()
        tensors = frozenset(name for name, value in values if is_float32(value))
        return conversion.observe(self, model, batches, space, collected, tensors)

    def convert(
        self,
        model: OnnxModel,
        plan: ResolvedPlan,
        observations: Observations,
        space: TuningSpace,
        corrected: CorrectedWeights[OnnxModel] | None = None,
    ) -> OnnxModel:
        """Return the model with pairs of Q/DQ ops; `model` itself for an all-float plan."""
        target = _target(model)
        configs = {op: c for op, c in plan.plan.items() if c.activation is not None}
        if not configs:
            return model
        ranges = _value_ranges(target, observations)
        program, counts = write_qdq(target.program, configs, ranges, self.profile)
        return replace(
            target,
            program=program,
            given=None,
            counts=counts,
            plan_configs=configs,
            _runners={},
        )

    def width_figures(
        self, model: OnnxModel, inputs: object, observations: Observations
    ) -> WidthFigures:
        """Return the noise of every tensor and weight on one batch, and the work of every op."""
        target = _target(model)
        ranges = _value_ranges(target, observations)
        switched = build_switch_model(
            target.program, target.configs, ranges, target.tensor_names, self.profile
        )
        outputs = [str(value.name) for value in switched.program.graph.outputs]
        run = target.session(switched.program).fetching(outputs)
        feeds = target.signature.bind(inputs)
        tensors, weights = measure_noise(switched, run, [feeds])
        return WidthFigures(tensors, weights, *self.op_work(model, inputs))

    def op_work(
        self, model: OnnxModel, inputs: object
    ) -> tuple[dict[str, float], dict[str, float]]:
        """Return the work of every op, from the sizes of one batch."""
        feeds = model.signature.bind(inputs)
        static = with_static_shapes(model.program, feeds)
        return work_of(static, max(1, model.signature.samples(feeds)))

    def time_ops(self, model: OnnxModel, inputs: object, runs: int) -> Any:
        """Times of the simulation say nothing about the target."""
        raise optional.not_offered(self.profile.title, "times of single ops")

    def trace_kernels(self, model: OnnxModel, inputs: object) -> Any:
        """Kernels of the simulation say nothing about the target."""
        raise optional.not_offered(self.profile.title, "trace of kernels; use the audit")

    def save(self, model: OnnxModel, folder: Path) -> None:
        """Write the model with the sizes of the example, and its metadata."""
        storage.save(static_form(model), folder)


def _is_near(expected: Array, actual: Array, least_db: float) -> bool:
    """Whether an output has an SQNR; values that are not finite in either are left out."""
    finite = np.isfinite(expected) & np.isfinite(actual)
    before, after = expected[finite].astype(np.float64), actual[finite].astype(np.float64)
    noise, signal = np.square(after - before).sum(), np.square(before).sum()
    return bool(noise <= signal * 10 ** (-least_db / 10))


def _target(model: OnnxModel) -> TargetModel:
    assert isinstance(model, TargetModel)
    return model


def _value_ranges(model: TargetModel, observations: Observations) -> dict[str, Range]:
    """Return value of the graph → the observed range of its tensor."""
    ranges = observations.ranges
    return {
        value: ranges[name][_ALGORITHM]
        for value, name in model.tensor_names.items()
        if name in ranges
    }


def static_form(model: OnnxModel) -> OnnxModel:
    """Return a model with the sizes of one example sample, if the target needs static sizes."""
    target = _target(model)
    if target.rules.shapes != "static":
        return model
    example = target.signature.bind(target.signature.in_order(target.example, 1))
    return replace(target, program=with_static_shapes(target.runs, example), given=None)


def save_static(model: OnnxModel, path: Path, metadata: Mapping[str, str]) -> None:
    """Write the model with static sizes to one file."""
    storage.save_file(static_form(model), path, metadata)

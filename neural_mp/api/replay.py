"""Conversion and comparison without a search: what the command line does beside tuning."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from neural_mp.adaptors.contract import Adaptor, Model
from neural_mp.api.deployment import hardware_for
from neural_mp.api.loading import load_source
from neural_mp.api.optimized_model import OptimizedModel, is_saved_model, load
from neural_mp.core import hardware as machine
from neural_mp.core.hardware import Hardware
from neural_mp.core.observations import Observations
from neural_mp.core.plan import PrecisionPlan, load_plan_file
from neural_mp.errors import ConfigurationError, PlanError
from neural_mp.profiling import interleaved_rounds, ratio, undisturbed
from neural_mp.reporting.tables import BenchmarkRow
from neural_mp.core.nested import count_samples
from neural_mp.tuning.finish import compared
from neural_mp.tuning.objectives import Measurement
from neural_mp.tuning.report import Report, count_ops


def convert_with_plan(
    source: Any,
    plan: PrecisionPlan | str | Path,
    *,
    observations: Observations | None = None,
    framework: str | None = None,
    inputs: Any = None,
    hardware: Hardware | None = None,
    target: str = machine.THIS,
    capture: str = "whole",
) -> OptimizedModel:
    """Replay a plan on a model.

    Args:
        source: the model: object, path or `module:attribute`.
        plan: a plan, or the file of one. A file holds what calibration saw, too.
        observations: what calibration saw, where `plan` is no file.
        framework: where it is not found by itself.
        inputs: example inputs, where the model cannot do without.
        hardware: the machine at hand; found by itself.
        target: what to convert for, a name in `neural_mp.core.hardware.TARGETS`.
        capture: `modules` for a model whose graph cannot be captured as a whole.

    Raises:
        PlanError: the plan is malformed or does not fit the model or the machine.
        ConversionError: it quantizes tensors whose ranges are not known.
    """
    started = time.perf_counter()
    if not isinstance(plan, PrecisionPlan):
        plan, observations = load_plan_file(plan)
    adaptor, held = load_source(source, framework, inputs, capture=capture)
    warnings = list(getattr(held, "warnings", ()))
    there = hardware_for(target, hardware or machine.detect(), adaptor, warnings)
    space = adaptor.space(held, there)
    right = space.with_right_weights(plan)
    changed = sum(right[op] != config for op, config in plan.items())
    if changed:
        warnings.append(
            f"the weights of {changed} ops are stored in another range than the plan says: "
            f"{there.byte_products.in_words}"
        )
    resolved = space.resolve(right)
    if observations is None:
        if any(config.approach == "static" for config in resolved.values()):
            raise PlanError(
                "the plan has INT8 ops with calibrated ranges but holds no observations to "
                "quantize with; use a plan file written by save_plan or `neural-mp tune --output`"
            )
        observations = Observations()
    converted = adaptor.convert(held, resolved, observations, space)
    measurement = Measurement(adaptor, adaptor.example_inputs(held))
    speed = compared(*measurement.rounds([held, converted]))
    report = Report(
        **speed.figures,
        batch_size=measurement.batch_size,
        baseline_size=adaptor.size(held),
        size=adaptor.size(converted),
        seconds={"convert": time.perf_counter() - started},
        op_counts=count_ops(space.graph, space.flow(resolved).precisions),
        conversions=adaptor.conversion_counts(converted),
        warnings=tuple(warnings),
    )
    return OptimizedModel(adaptor, converted, resolved, report, observations=observations)


def benchmark_models(
    sources: Sequence[str],
    batch_size: int | None = None,
    warmup: int = 5,
    iterations: int = 50,
    inputs: Any = None,
) -> list[BenchmarkRow]:
    """Latency and size of models and saved results, by interleaved runs.

    Args:
        sources: models, saved results or `module:attribute`, in any mix.
        batch_size: samples a batch; as many as the example inputs hold by default.
        warmup: rounds not counted.
        iterations: rounds counted.
        inputs: what all are run on; by default the example inputs of the first that is a file.

    Raises:
        ModelLoadError: one of them cannot be read.
    """
    held = [_load_any(source, inputs) for source in sources]
    # All run the same batch; what a file holds is more to be trusted than a guess.
    known = [pair for pair, source in zip(held, sources, strict=True) if Path(source).exists()]
    adaptor, model = held[0] if inputs is not None or not known else known[0]
    batch = adaptor.example_inputs(model, batch_size)
    runs = [
        (lambda adaptor=adaptor, model=model: adaptor.predict(model, batch))
        for adaptor, model in held
    ]
    rounds = interleaved_rounds(runs, warmup=warmup, iterations=iterations)
    return [
        BenchmarkRow(
            str(source),
            undisturbed(seconds),
            count_samples(batch),
            adaptor.size(model),
            ratio(seconds, rounds[0]).inverse,
        )
        for source, seconds, (adaptor, model) in zip(sources, rounds, held, strict=True)
    ]


def _load_any(source: str, inputs: Any) -> tuple[Adaptor, Model]:
    if is_saved_model(source):
        saved = load(source)
        return saved.adaptor, saved.held
    return load_source(source, None, inputs)


def random_inputs(descriptions: Sequence[str]) -> tuple[np.ndarray, ...] | None:
    """Example inputs from words such as `2,3,224,224` or `int64:2,128`; None for no words.

    Floats are drawn from 0…1, integers are zeros (an index that is always valid).

    Raises:
        ConfigurationError: a description is malformed.
    """
    arrays = []
    for text in descriptions:
        kind, _, shape_text = text.rpartition(":")
        try:
            dtype = np.dtype(kind or "float32")
            shape = tuple(int(size) for size in shape_text.split(","))
            drawn = np.random.default_rng(0).random(shape)
        except (TypeError, ValueError):
            raise ConfigurationError(
                f"input shape {text!r} is malformed; write sizes with commas, such as 2,3,224,224, "
                f"or with a dtype before them, such as int64:2,128"
            ) from None
        arrays.append((drawn if dtype.kind == "f" else np.zeros(shape)).astype(dtype))
    return tuple(arrays) or None

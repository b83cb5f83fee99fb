"""Times of models and ops that follow from what they are: no test is about how fast something is.

A measured time differs from run to run, and more on a busy machine; what it decides would, too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

#: Seconds per byte of weights, and bytes that a model without weights counts.
_SECONDS_PER_BYTE, _LEAST_BYTES = 1e-8, 1000
#: Seconds of a model with conversions, as a fraction of one of the same size without.
_CONVERTED_RATIO = 0.8
#: Rounds of a measurement: so many leave no doubt about a difference.
_ROUNDS = 4
#: Seconds of the conversions of a model together, as a fraction of those of one op.
_CONVERSION_RATIO = 0.05
#: Seconds of a conversion per element of a tensor.
_SECONDS_PER_ELEMENT = 1e-13
#: Factor on limits.
_LIFTED_RATIO = 10.0

Runs = Sequence[Callable[[], Any]]
Rounds = list[list[float]]


def nominal_seconds(model: Any) -> float:
    """Return the seconds of a model: fewer for fewer bytes of weights, and for lower precisions."""
    counts = model.conversions
    converts = counts.casts + counts.quantize + counts.dequantize > 0
    ratio = _CONVERTED_RATIO if converts else 1.0
    return (model.size + _LEAST_BYTES) * _SECONDS_PER_BYTE * ratio


def time_by_size(time_rounds: Callable[..., Rounds]) -> Callable[..., Rounds]:
    """Return `time_interleaved_rounds` of models by their sizes; other runs are timed.

    Every model runs once, so that one which fails does so where it is measured.
    """

    def rounds(runs: Runs, **options: Any) -> Rounds:
        models = [_find_model(run) for run in runs]
        if None in models:
            return time_rounds(runs, **options)
        for run in runs:
            run()
        return [[nominal_seconds(model)] * _ROUNDS for model in models]

    return rounds


def _find_model(run: Any) -> Any | None:
    """Return the model that a run calls, alone or in several threads."""
    while isinstance(run, partial):
        run = run.func if hasattr(run.func, "conversions") else next(iter(run.args), None)
    return run if hasattr(run, "conversions") else None


def fix_seconds_per_element(measure: Callable[[], float]) -> Callable[[], float]:
    """Return `op_timing.seconds_per_element` without a measurement."""
    return lambda: _SECONDS_PER_ELEMENT


def time_ops_alike(time_ops: Callable[..., Any]) -> Callable[..., Any]:
    """Return `op_timing.time_ops` with the same time for every op of a model: none is profiled."""

    def timed(
        models: Mapping[Any, Any], profiled: Any, wholes: Callable[..., Any], *rest: Any
    ) -> Any:
        plans = {id(model): plan for plan, model in models.items()}

        def profile(model: Any) -> dict[str, tuple[float, ...]]:
            counts = model.conversions
            count = counts.casts + counts.quantize + counts.dequantize
            runs = dict.fromkeys(plans[id(model)].effective, (1.0,))
            return {**runs, "conversions": (_CONVERSION_RATIO * count,)} if count else runs

        return time_ops(models, profile, wholes, 1)

    return timed


def lift(seconds: float) -> float:
    """Return a limit that a slow machine does not reach."""
    return _LIFTED_RATIO * seconds


#: Module → its function that times, or its limit in seconds → what makes the replacement of that.
REPLACED: Mapping[str, Mapping[str, Callable[[Any], Any]]] = {
    "neural_mp.tuning.measurement.objectives": {"time_interleaved_rounds": time_by_size},
    "neural_mp.tuning.measurement.probe": {
        "time_ops": time_ops_alike,
        "seconds_per_element": fix_seconds_per_element,
    },
    "neural_mp.tuning.size_budget": {"LEAST_ALLOWANCE": lift},
    "neural_mp.tuning.tuner": {"LEAST_ALLOWANCE": lift},
    "neural_mp.tuning.unchecked": {"_LEAST_SECONDS": lift},
    "neural_mp.adaptors.pytorch.graph.dynamic_shapes": {"MAX_SCAN_SECONDS": lift},
    "neural_mp.adaptors.pytorch.graph.tracing": {
        "MAX_EXPORT_SECONDS": lift,
        "MAX_LARGE_EXPORT_SECONDS": lift,
    },
}

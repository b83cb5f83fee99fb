"""Choice of the runtime of a model: verified against the source, then by latency."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import numpy as np

from neural_mp.adaptors.detect import FRAMEWORKS
from neural_mp.adaptors.loaded_model import AnyModel
from neural_mp.adaptors.transfer import TransferredLoader, runtimes_of, transferred
from neural_mp.core.enums import AUTO_RUNTIME, SOURCE_RUNTIME
from neural_mp.core.hardware import Hardware
from neural_mp.core.precision import Precision
from neural_mp.errors import (
    ConfigurationError,
    MissingFrameworkError,
    NeuralMPError,
    did_you_mean,
    one_line,
)
from neural_mp.profiling import ratio, uncontended
from neural_mp.runs.report import RuntimeFigures
from neural_mp.tuning.calibration_batches import Calibration
from neural_mp.tuning.objectives import Measurement
from neural_mp.tuning.sqnr import mean_nsr
from neural_mp.util.pytree import as_numpy, structure_of, tree_leaves

logger = logging.getLogger(__name__)

#: SQNR in dB that FP32 in another runtime must reach, with the source as reference.
MIN_RUNTIME_SQNR_DB = 90.0
#: Speedup over the source, at its lower bound, below which the source is kept.
MIN_RUNTIME_SPEEDUP = 1.05
#: Largest fraction of integers or booleans that may differ, where rounding decides a near tie.
_MAX_DIFFERENT = 1e-3
#: Batches of data that outputs are compared on, and that INT8 is calibrated on for its latency.
_COMPARED, _CALIBRATED = 4, 2
#: Runtimes that are also timed in INT8.
_TIMED_IN_INT8 = 2

Load = Callable[[], AnyModel]


def check_runtime(name: object) -> str:
    """Return a valid name of a runtime.

    Raises:
        ConfigurationError: the name is unknown.
    """
    known = (SOURCE_RUNTIME, AUTO_RUNTIME, *FRAMEWORKS)
    if not isinstance(name, str) or name not in known:
        hint = did_you_mean(name, known) if isinstance(name, str) else ""
        raise ConfigurationError(f"runtime must be one of {', '.join(known)}, got {name!r}{hint}")
    return name


@dataclass(frozen=True)
class RuntimeCandidate:
    """A model in one runtime.

    Attributes:
        framework: the runtime.
        model: the verified model; None if ruled out.
        sqnr_db: SQNR of the outputs relative to the source, in dB; None if not measured.
        reason: why the runtime is ruled out; empty if verified.
        rounds: seconds of FP32 in each round.
        int8_rounds: seconds in INT8 in each round.
    """

    framework: str
    model: AnyModel | None = None
    sqnr_db: float | None = None
    reason: str = ""
    rounds: Sequence[float] = ()
    int8_rounds: Sequence[float] = ()

    @property
    def best(self) -> Sequence[float]:
        """The rounds of the faster precision."""
        timed = [rounds for rounds in (self.rounds, self.int8_rounds) if rounds]
        return min(timed, key=uncontended)

    def figures(self, chosen: bool, reason: str) -> RuntimeFigures:
        """Return the figures for the report."""
        return RuntimeFigures(
            self.framework,
            uncontended(self.rounds) if self.rounds else None,
            uncontended(self.int8_rounds) if self.int8_rounds else None,
            self.sqnr_db,
            chosen,
            self.reason or reason,
        )


@dataclass(frozen=True)
class RuntimeChoice:
    """The choice of a runtime for a loaded model.

    Attributes:
        source: the model in its own framework.
        calibration: calibration data; None without data.
        measurement: latency measurement.
        hardware: the hardware to convert for.
        int8: whether INT8 is requested.
    """

    source: AnyModel
    calibration: Calibration | None
    measurement: Measurement
    hardware: Hardware
    int8: bool

    def named(self, runtime: str) -> AnyModel:
        """Return the verified model in a runtime.

        Raises:
            ConfigurationError: the runtime cannot run the model, or computes other outputs.
            MissingFrameworkError: the runtime is not installed.
        """
        own = self.source.adaptor.framework
        if runtime == own:
            return self.source
        try:
            model = transferred(self.source, runtime)
        except MissingFrameworkError:
            raise
        except Exception as error:
            # Runtimes raise errors of any type for models that they do not support.
            raise _unusable(runtime, one_line(error)) from error
        sqnr_db, reason = compared(self.source, model, self._batches())
        if reason:
            raise _unusable(runtime, reason)
        logger.info("%s runs the model of %s with an SQNR of %s dB", runtime, own, sqnr_db)
        return model

    def fastest(self) -> tuple[AnyModel, tuple[RuntimeFigures, ...]]:
        """Return the model in the fastest runtime, and the figures of all candidates."""
        own = RuntimeCandidate(self.source.adaptor.framework, self.source)
        others = [self._verified(name) for name in runtimes_of(self.source)]
        found = [own, *others]
        able = [candidate for candidate in found if candidate.model is not None]
        if len(able) == 1:
            return self.source, _report(found, own, {})
        timed = self._timed(able)
        own = timed[0]
        winner = min(timed, key=lambda candidate: uncontended(candidate.best))
        gain = ratio(own.best, winner.best)
        reasons = {}
        for candidate in timed:
            speed = ratio(own.best, candidate.best)
            if candidate.framework != own.framework:
                reasons[candidate.framework] = f"{speed} the speed of {own.framework}"
        if gain.low < MIN_RUNTIME_SPEEDUP:
            winner = own
        by_name = {candidate.framework: candidate for candidate in timed}
        found = [by_name.get(candidate.framework, candidate) for candidate in found]
        model = winner.model
        assert model is not None
        return model, _report(found, winner, reasons)

    def _batches(self) -> Iterator[Any]:
        """Yield the inputs of batches of at least two sizes."""
        data = [] if self.calibration is None else self.calibration.batches.inputs()
        yield from islice(data, _COMPARED)
        yield self.source.example_inputs()
        for size in (1, 3):
            inputs = self.source.example_inputs(size)
            if _runs(self.source, inputs):
                yield inputs

    def _verified(self, runtime: str) -> RuntimeCandidate:
        try:
            model = transferred(self.source, runtime)
            sqnr_db, reason = compared(self.source, model, self._batches())
        except Exception as error:
            # Exporters and runtimes raise errors of any type, and none may end the run.
            logger.debug("no model in %s", runtime, exc_info=True)
            return RuntimeCandidate(runtime, reason=one_line(error))
        return RuntimeCandidate(runtime, None if reason else model, sqnr_db, reason)

    def _timed(self, candidates: Sequence[RuntimeCandidate]) -> list[RuntimeCandidate]:
        """Return candidates with their latencies, the source first."""
        models = [candidate.model for candidate in candidates if candidate.model is not None]
        first = self.measurement.interleaved(models)
        order = sorted(range(len(models)), key=lambda index: uncontended(first[index]))
        low = {}
        for index in order[:_TIMED_IN_INT8]:
            converted = self._in_int8(models[index])
            if converted is not None:
                low[index] = converted
        if not low:
            pairs = zip(candidates, first, strict=True)
            return [replace(candidate, rounds=rounds) for candidate, rounds in pairs]
        rounds = self.measurement.interleaved([*models, *low.values()])
        int8 = dict(zip(low, rounds[len(models) :], strict=True))
        return [
            replace(candidate, rounds=rounds[index], int8_rounds=int8.get(index, ()))
            for index, candidate in enumerate(candidates)
        ]

    def _in_int8(self, model: AnyModel) -> AnyModel | None:
        """Return a model with all eligible ops in INT8; None if there are none."""
        if not self.int8 or self.calibration is None:
            return None
        try:
            space = model.adaptor.space(model.held, self.hardware).restricted_to([Precision.INT8])
            tunable = model.in_space(space)
            plan = space.resolve(space.fastest_plan())
            if not plan.has_low_precision:
                return None
            batches = islice(self.calibration.inputs(), _CALIBRATED)
            return tunable.calibrated(batches).converted(plan)
        except Exception:
            # A plan of the search may work where this one does not.
            logger.debug("no INT8 in %s", model.adaptor.framework, exc_info=True)
            return None


def in_runtime(
    runtime: str, load: Load, choice: RuntimeChoice
) -> tuple[Load, AnyModel, tuple[RuntimeFigures, ...]]:
    """Return a picklable loader, the model in the chosen runtime and figures of all candidates.

    Args:
        runtime: `auto`, or the name of a runtime.
        load: loads the model in its source framework.
        choice: the choice.

    Raises:
        ConfigurationError: a named runtime cannot run the model.
        MissingFrameworkError: a named runtime is not installed.
    """
    figures: tuple[RuntimeFigures, ...] = ()
    if runtime == AUTO_RUNTIME:
        model, figures = choice.fastest()
    else:
        model = choice.named(runtime)
    if model is choice.source:
        return load, model, figures
    return TransferredLoader(load, model.adaptor.framework), model, figures


def only_source(source: AnyModel, reason: str) -> tuple[RuntimeFigures, ...]:
    """Return the figures of a choice that has to keep the source, for one reason."""
    own = RuntimeCandidate(source.adaptor.framework, source)
    others = [RuntimeCandidate(name, reason=reason) for name in runtimes_of(source)]
    return _report([own, *others], own, {})


def _report(
    found: Sequence[RuntimeCandidate], winner: RuntimeCandidate, reasons: dict[str, str]
) -> tuple[RuntimeFigures, ...]:
    def reason_of(candidate: RuntimeCandidate) -> str:
        name = candidate.framework
        if candidate is winner:
            package = FRAMEWORKS[name].package if name in FRAMEWORKS else name
            return ", ".join(filter(None, (reasons.get(name), f"requires the package {package}")))
        return reasons.get(name, "") or "not faster than the chosen runtime"

    return tuple(c.figures(c is winner, reason_of(c)) for c in found)


def compared(
    source: AnyModel, candidate: AnyModel, batches: Iterator[Any]
) -> tuple[float | None, str]:
    """Compare outputs with those of the source.

    Returns:
        The lowest SQNR over all batches in dB, None without float outputs; and the reason why the
        candidate is ruled out, or an empty text.
    """
    lowest: float | None = None
    for inputs in batches:
        expected = source(inputs)
        try:
            found = candidate(inputs)
        except (NeuralMPError, RuntimeError, ValueError) as error:
            return lowest, f"fails on a batch that the source accepts: {one_line(error)}"
        reason = _difference(expected, found)
        if reason:
            return lowest, reason
        pairs = zip(_arrays(expected), _arrays(found), strict=True)
        for one, other in ((a, b) for a, b in pairs if a.dtype.kind == "f"):
            nsr = mean_nsr([one], [other])
            sqnr_db = -10 * math.log10(nsr) if nsr > 0 else math.inf
            lowest = sqnr_db if lowest is None else min(lowest, sqnr_db)
    if lowest is not None and lowest < MIN_RUNTIME_SQNR_DB:
        return lowest, (
            f"the outputs must have an SQNR of at least {MIN_RUNTIME_SQNR_DB:g} dB relative to the "
            f"source, got {lowest:.1f} dB"
        )
    return lowest, ""


def _arrays(outputs: Any) -> list[np.ndarray]:
    leaves = (leaf for leaf in tree_leaves(outputs, sort_keys=True) if leaf is not None)
    return [as_numpy(leaf) for leaf in leaves]


def _difference(expected: Any, found: Any) -> str:
    """Return a difference of structure, names, dtypes, shapes or integers; empty without one."""
    if structure_of(expected) != structure_of(found):
        return "the structure or the names of the outputs differ"
    for one, other in zip(_arrays(expected), _arrays(found), strict=True):
        if one.dtype != other.dtype or one.shape != other.shape:
            return (
                f"an output must be {one.dtype}{list(one.shape)}, got "
                f"{other.dtype}{list(other.shape)}"
            )
        if one.dtype.kind != "f" and one.size:
            different = float(np.mean(one != other))
            if different > _MAX_DIFFERENT:
                return f"{different:.2%} of the values of an integer output differ"
    return ""


def _runs(model: AnyModel, inputs: Any) -> bool:
    try:
        model(inputs)
    except Exception:
        # A model of a fixed batch size may fail in any way.
        logger.debug("another batch size does not run", exc_info=True)
        return False
    return True


def _unusable(runtime: str, reason: str) -> ConfigurationError:
    return ConfigurationError(
        f"runtime must be able to run the model, got {runtime!r}: {reason}; set runtime to "
        f"{AUTO_RUNTIME!r} or {SOURCE_RUNTIME!r}"
    )

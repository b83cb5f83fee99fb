"""Choice of the runtime of a model: verified against the source, then by latency."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice
from typing import Any

from neural_mp.adaptors.detect import FRAMEWORKS
from neural_mp.adaptors.loaded_model import AnyModel, AnyTunableModel
from neural_mp.adaptors.registry import COMPOSITE
from neural_mp.adaptors.transfer import (
    CompilingLoader,
    TransferFile,
    TransferredLoader,
    compile_calls,
    list_reading_runtimes,
    transfer_file,
    transfer_model,
)
from neural_mp.amp import AmpSettings
from neural_mp.api.constraints import Limits, SourceConstraints, apply_constraints, names_ops
from neural_mp.api.runtime_comparison import ReferenceOutputs, compare_outputs
from neural_mp.config import Settings
from neural_mp.core.enums import AUTO_RUNTIME, COMPILED_RUNTIME, SOURCE_RUNTIME
from neural_mp.core.hardware import Hardware
from neural_mp.core.precision import Precision
from neural_mp.errors import (
    ConfigurationError,
    ConversionError,
    MissingFrameworkError,
    NeuralMPError,
    UnknownOperatorError,
    one_line,
)
from neural_mp.profiling import estimate_latency_ratio, estimate_uncontended_latency
from neural_mp.runs.report import RuntimeFigures
from neural_mp.space import ResolvedPlan, TuningSpace
from neural_mp.strategies.base import Strategy
from neural_mp.tuning.evaluation.calibration_batches import Calibration
from neural_mp.tuning.measurement.objectives import Measurement
from neural_mp.tuning.measurement.other_runtimes import is_certain, select_runtime
from neural_mp.util.pytree import batch_size_of, tree_leaves

logger = logging.getLogger(__name__)

#: Batches of data that outputs are compared on, and samples after which no further batch is.
_MAX_COMPARED, _COMPARED_SAMPLES = 4, 8
#: Sizes of further batches that are compared if the source runs on them.
_OTHER_SIZES = (1, 3)
#: CPU seconds of the source beyond which a batch of the data adds nothing to such two.
_MAX_COMPARED_SECONDS = 0.2
#: Rounds that select the runtimes that are also timed in lower precisions, and plans in each.
_FIRST_ROUNDS = 5
#: Plans slower than the fastest of a runtime by this factor in the first rounds are dropped, and
#: runtimes slower than those timed in INT8 are timed without.
_SLOWER_RATIO = 1.25

Load = Callable[[], AnyModel]


@dataclass(frozen=True)
class RuntimeCandidate:
    """A model in one runtime.

    Attributes:
        framework: the runtime.
        model: the verified model; None if ruled out.
        sqnr_db: SQNR of the outputs relative to the source, in dB; None if not measured.
        reason: why the runtime is ruled out; empty if verified.
        rounds: seconds of FP32 in each round.
        int8_rounds, low_float_rounds: seconds with all eligible ops in INT8, and in 16-bit floats,
            in each round.
    """

    framework: str
    model: AnyModel | None = None
    sqnr_db: float | None = None
    reason: str = ""
    rounds: Sequence[float] = ()
    int8_rounds: Sequence[float] = ()
    low_float_rounds: Sequence[float] = ()

    @property
    def is_in_fp32_only(self) -> bool:
        """Whether the model was timed in no lower precision."""
        return not self.int8_rounds and not self.low_float_rounds

    @property
    def fastest_rounds(self) -> Sequence[float]:
        """The rounds of the fastest precision."""
        timed = filter(None, (self.rounds, self.int8_rounds, self.low_float_rounds))
        return min(timed, key=estimate_uncontended_latency)

    def runtime_figures(self, chosen: bool, reason: str) -> RuntimeFigures:
        """Return the figures for the report."""
        return RuntimeFigures(
            self.framework,
            estimate_uncontended_latency(self.rounds) if self.rounds else None,
            estimate_uncontended_latency(self.int8_rounds) if self.int8_rounds else None,
            self.sqnr_db,
            chosen,
            self.reason or reason,
            low_float_latency=(
                estimate_uncontended_latency(self.low_float_rounds)
                if self.low_float_rounds
                else None
            ),
        )


@dataclass(frozen=True)
class ChosenRuntime:
    """A model in the runtime of the options.

    Attributes:
        load: a picklable loader of the model.
        model: the model.
        figures: figures of all candidates; empty without a comparison.
        alternatives: FP32 models in other runtimes that the result must be faster than.
    """

    load: Load
    model: AnyModel
    figures: tuple[RuntimeFigures, ...] = ()
    alternatives: tuple[AnyModel, ...] = ()

    @property
    def warnings(self) -> tuple[str, ...]:
        """A warning for each reason that rules out installed runtimes."""
        names: dict[str, list[str]] = {}
        for entry in self.figures:
            is_compared = entry.chosen or entry.latency is not None
            built_in = FRAMEWORKS.get(entry.framework)  # none for compiled forms
            if not is_compared and built_in is not None and built_in.is_installed:
                names.setdefault(entry.reason, []).append(entry.framework)
        return tuple(
            f"the result was not compared with FP32 in {' and '.join(excluded)}, and may be slower "
            f"than FP32 there: {reason}"
            for reason, excluded in names.items()
        )


@dataclass(frozen=True)
class RuntimeChoice:
    """The choice of a runtime for a loaded model.

    Attributes:
        load, source: the model in its own framework.
        calibration: None without data.
        hardware: the hardware to convert for.
        precisions: the requested precisions.
        needs_gradients: whether the strategy needs gradients.
        constrained: model, its space → the space after the user's constraints;
            `ConfigurationError` if that is impossible.
    """

    load: Load
    source: AnyModel
    calibration: Calibration | None
    measurement: Measurement
    hardware: Hardware
    precisions: tuple[Precision, ...]
    needs_gradients: bool = False
    constrained: Callable[[AnyModel, TuningSpace], TuningSpace] = lambda model, space: space

    def choose_named(self, runtime: str) -> ChosenRuntime:
        """Return the verified model in a runtime.

        Raises:
            ConfigurationError: the runtime cannot run the model, or computes other outputs.
            MissingFrameworkError: the runtime is not installed.
        """
        own = self.source.adaptor.framework
        if runtime == own:
            return ChosenRuntime(self.load, self.source)
        try:
            model = self._transfer_model(runtime)
        except MissingFrameworkError:
            raise
        except Exception as error:
            # Runtimes raise errors of any type for models that they do not support.
            raise _unusable_runtime_error(runtime, one_line(error)) from error
        sqnr_db, reason = compare_outputs(self._reference_outputs, model)
        if reason:
            raise _unusable_runtime_error(runtime, reason)
        logger.info("%s runs the model of %s with an SQNR of %s dB", runtime, own, sqnr_db)
        return ChosenRuntime(self._select_loader(model), model)

    def choose_fastest(self) -> ChosenRuntime:
        """Return the model in the fastest runtime, with the figures of all candidates."""
        own = RuntimeCandidate(self.source.adaptor.framework, self.source)
        alternatives = [
            self._verify_runtime_candidate(name) for name in list_reading_runtimes(self.source)
        ]
        candidates = [own, *alternatives, *_iterate_compiled_candidate(self.source)]
        able = [candidate for candidate in candidates if candidate.model is not None]
        if len(able) == 1:
            return ChosenRuntime(
                self.load, self.source, _collect_runtime_figures(candidates, own, {})
            )
        timed = self._time_candidates(able)
        own = timed[0]
        winner = timed[select_runtime([candidate.fastest_rounds for candidate in timed])]
        reasons = {
            entry.framework: _describe_speed(entry, own) for entry in timed if entry is not own
        }
        by_name = {candidate.framework: candidate for candidate in timed}
        candidates = [by_name.get(candidate.framework, candidate) for candidate in candidates]
        model = winner.model
        assert model is not None
        figures = _collect_runtime_figures(candidates, winner, reasons)
        rivals = _select_fp32_rivals(timed, winner)
        return ChosenRuntime(self._select_loader(model), model, figures, rivals)

    def repeat_choice(self, figures: Sequence[RuntimeFigures]) -> ChosenRuntime:
        """Return the choice of an earlier run, by its figures, without a new comparison.

        Raises:
            ConfigurationError: the runtime of that run can no longer run the model.
            MissingFrameworkError: the runtime is no longer installed.
        """
        chosen = next(entry for entry in figures if entry.chosen)
        choice = self.choose_named(chosen.framework)
        own = self.source.adaptor.framework
        names = [
            entry.framework
            for entry in figures
            if entry.framework not in (own, chosen.framework)
            and entry.latency
            and chosen.latency
            and entry.latency <= chosen.latency
        ]
        models = [self._verify_runtime_candidate(name).model for name in names]
        if choice.model is not self.source:
            models.append(self.source)
        alternatives = tuple(model for model in models if model is not None)
        return replace(choice, figures=tuple(figures), alternatives=alternatives)

    def _select_loader(self, model: AnyModel) -> Load:
        if model is self.source:
            return self.load
        if model.boundary is None:
            return CompilingLoader(self.load)
        return TransferredLoader(self.load, model.adaptor.framework, self._batch_size)

    @cached_property
    def _transfer_file(self) -> TransferFile:
        return transfer_file(self.source)

    @cached_property
    def _batch_size(self) -> int | None:
        """The size of the measured batch if examples of that size have its shapes, else None.

        Runtimes compile a form of their own for the shapes of the example.
        """
        size = self.measurement.batch_size
        try:
            shapes = [
                _sorted_array_shapes(self.source.example_inputs(size)),
                _sorted_array_shapes(self.measurement.inputs),
            ]
        except NeuralMPError:
            return None
        return size if shapes[0] == shapes[1] else None

    def _transfer_model(self, runtime: str) -> AnyModel:
        """Return a model in another runtime that the strategy and the constraints allow.

        Raises:
            NeuralMPError: the model must stay in its framework.
        """
        if runtime == COMPILED_RUNTIME:
            return compile_calls(self.source)
        if runtime not in list_reading_runtimes(self.source):
            return transfer_model(self.source, runtime)
        model = transfer_model(self.source, runtime, self._transfer_file, self._batch_size)
        model = model.prepare_for_streams(self.measurement.streams)
        if self.needs_gradients and not model.adaptor.offers("hessian_traces"):
            raise ConversionError("it has no gradients, which the strategy needs")
        self._make_constrained_space(model)
        return model

    def _make_constrained_space(self, model: AnyModel) -> TuningSpace:
        return self.constrained(model, model.whole_space(self.hardware))

    @cached_property
    def _reference_outputs(self) -> ReferenceOutputs:
        """The outputs of the source on batches of at least two sizes."""
        return ReferenceOutputs(
            self.source,
            self._iterate_required_batches,
            lambda: (self.source.example_inputs(size) for size in _OTHER_SIZES),
            max_seconds=_MAX_COMPARED_SECONDS,
        )

    def _iterate_required_batches(self) -> Iterator[Any]:
        """Yield a batch of the data, more of few samples, and the example if of another size."""
        data = [] if self.calibration is None else self.calibration.batches.iterate_inputs()
        sizes: list[int] = []
        for inputs in islice(data, _MAX_COMPARED):
            yield inputs
            sizes.append(batch_size_of(inputs))
            if sum(sizes) >= _COMPARED_SAMPLES:
                break
        example = self.source.example_inputs()
        if batch_size_of(example) not in sizes:
            yield example

    def _verify_runtime_candidate(self, runtime: str) -> RuntimeCandidate:
        try:
            model = self._transfer_model(runtime)
            sqnr_db, reason = compare_outputs(self._reference_outputs, model)
        except Exception as error:
            # Exporters and runtimes raise errors of any type, and none may end the run.
            logger.debug("no model in %s", runtime, exc_info=True)
            return RuntimeCandidate(runtime, reason=one_line(error))
        return RuntimeCandidate(runtime, None if reason else model, sqnr_db, reason)

    def _time_candidates(self, candidates: Sequence[RuntimeCandidate]) -> list[RuntimeCandidate]:
        """Return candidates with their latencies, the source first."""
        models = [candidate.model for candidate in candidates if candidate.model is not None]
        low: list[tuple[int, _LowModel]] = []
        count = self.measurement.limits.low_precision_runtimes
        if self.calibration is not None and count:
            first = self.measurement.time_fastest_of(models, _FIRST_ROUNDS)
            order = sorted(range(len(models)), key=first.__getitem__)
            # Runtimes that are nearly as fast as the last one are compared in the same precision.
            longest = _SLOWER_RATIO * first[order[min(count, len(order)) - 1]]
            for index in order:
                forms = self._select_low_models(models[index], has_int8=first[index] <= longest)
                low += [(index, form) for form in forms]

        def with_rounds(rounds: Sequence[Sequence[float]]) -> list[RuntimeCandidate]:
            timed = [
                replace(candidate, rounds=seconds)
                for candidate, seconds in zip(candidates, rounds, strict=False)
            ]
            for (index, form), seconds in zip(low, rounds[len(models) :], strict=True):
                if form.has_int8:
                    timed[index] = replace(timed[index], int8_rounds=seconds)
                else:
                    timed[index] = replace(timed[index], low_float_rounds=seconds)
            return timed

        return with_rounds(
            self.measurement.measure_interleaved(
                [*models, *(form.model for _, form in low)],
                lambda rounds: is_certain(
                    [candidate.fastest_rounds for candidate in with_rounds(rounds)]
                ),
                is_warm=True,  # FP32 ran when verified, the others when converted
            )
        )

    def _select_low_models(self, model: AnyModel, has_int8: bool) -> list[_LowModel]:
        """Return a model with all eligible ops in INT8, and in 16-bit floats, if these are as fast.

        Ops without INT8 run in FP32 or in 16-bit floats, whichever is faster.
        """
        forms = self._convert_to_low(model, has_int8)
        if len(forms) < 2:
            return forms
        seconds = self.measurement.time_fastest_of([form.model for form in forms], _FIRST_ROUNDS)
        order = sorted(range(len(forms)), key=seconds.__getitem__)
        fastest: dict[bool, _LowModel] = {}
        for index in order:
            if seconds[index] <= _SLOWER_RATIO * seconds[order[0]]:
                fastest.setdefault(forms[index].has_int8, forms[index])
        return list(fastest.values())

    def _convert_to_low(self, model: AnyModel, has_int8: bool) -> list[_LowModel]:
        """Return a model with as many ops as possible in INT8, in both, and in 16-bit floats."""
        assert self.calibration is not None
        try:
            space = self._make_constrained_space(model).restricted_to(self.precisions)
            space = space.without_emulated(self.hardware.forced)
            floats = [p for p in space.usable_precisions if p.is_16_bit]
            int8 = [Precision.INT8] if has_int8 else []
            low = [p for p in space.usable_precisions if p in (*int8, *floats)]
            if not low:
                return []
            tunable = model.in_space(space.restricted_to(low))
            if Precision.INT8 in low:
                # Ranges hardly change the latency, whatever their samples.
                batches = [*islice(self.calibration.iterate_inputs(), 1), self.measurement.inputs]
                tunable = tunable.with_calibration([min(batches, key=batch_size_of)])
        except Exception:
            # A plan of the search may work where these do not.
            logger.debug("no lower precision in %s", model.adaptor.framework, exc_info=True)
            return []
        space = tunable.space
        plans = [space.restricted_to(precisions).fastest_plan() for precisions in (int8, floats)]
        if floats:
            plans = [plans[0], *(space.with_floats_in(plan, floats[0]) for plan in plans)]
        resolved = dict.fromkeys(map(space.resolve, plans))
        forms = [self._convert_by(tunable, plan) for plan in resolved]
        return [form for form in forms if form is not None]

    def _convert_by(self, model: AnyTunableModel, plan: ResolvedPlan) -> _LowModel | None:
        """Return a converted model that ran once; None for an all-FP32 plan, or if it fails."""
        if not plan.has_low_precision:
            return None
        try:
            converted = model.convert_by_plan(plan)
            converted(self.measurement.inputs)
        except Exception:
            # Runtimes raise errors of any type for plans that they do not run.
            logger.debug("no %s in %s", plan.plan, model.adaptor.framework, exc_info=True)
            return None
        return _LowModel(converted, Precision.INT8 in plan.effective.values())


@dataclass(frozen=True)
class _LowModel:
    """A converted model, and whether any of its ops is in INT8."""

    model: AnyModel
    has_int8: bool


def _select_fp32_rivals(
    timed: Sequence[RuntimeCandidate], winner: RuntimeCandidate
) -> tuple[AnyModel, ...]:
    """Return the source, and FP32 models that may be faster than FP32 in the winner."""
    return tuple(
        entry.model
        for index, entry in enumerate(timed)
        if entry is not winner
        and entry.model is not None
        and (index == 0 or estimate_latency_ratio(entry.rounds, winner.rounds).low < 1)
    )


def _describe_speed(candidate: RuntimeCandidate, source: RuntimeCandidate) -> str:
    """Return the speed of a candidate over the source as text, with the precisions if unequal."""
    ratio = estimate_latency_ratio(source.fastest_rounds, candidate.fastest_rounds)
    text = f"{ratio} the speed of {source.framework}"
    if candidate.is_in_fp32_only == source.is_in_fp32_only:
        return text
    return f"{text}, {'' if candidate.is_in_fp32_only else 'which was '}timed in FP32 only"


def _iterate_compiled_candidate(source: AnyModel) -> Iterator[RuntimeCandidate]:
    """Yield the compiled form of a model with the reason why `auto` does not choose it."""
    offered = source.adaptor.compiler
    if offered is not None:
        reason = offered.missing() or (
            f"not compared, as compiling costs more CPU time than a choice of the runtime may; set "
            f"runtime={offered.runtime!r}"
        )
        yield RuntimeCandidate(offered.runtime, reason=reason)


def _collect_runtime_figures(
    candidates: Sequence[RuntimeCandidate], winner: RuntimeCandidate, reasons: dict[str, str]
) -> tuple[RuntimeFigures, ...]:
    def explain_candidate_choice(candidate: RuntimeCandidate) -> str:
        name = candidate.framework
        if candidate is winner:
            package = FRAMEWORKS[name].package if name in FRAMEWORKS else name
            needed = f"the result requires the package {package} where it is loaded"
            needed = "each part runs in its own framework" if name == COMPOSITE else needed
            return ", ".join(filter(None, (reasons.get(name), needed)))
        return reasons.get(name, "") or "not faster than the chosen runtime"

    return tuple(c.runtime_figures(c is winner, explain_candidate_choice(c)) for c in candidates)


def _unusable_runtime_error(runtime: str, reason: str) -> ConfigurationError:
    return ConfigurationError(
        f"runtime must be able to run the model, got {runtime!r}: {reason}; set runtime to "
        f"{AUTO_RUNTIME!r} or {SOURCE_RUNTIME!r}"
    )


def _sorted_array_shapes(inputs: object) -> list[tuple[int, ...]]:
    leaves = tree_leaves(inputs)
    return sorted(tuple(leaf.shape) for leaf in leaves if hasattr(leaf, "shape"))


@dataclass(frozen=True)
class RuntimeOptions:
    """The options of a run that the runtime of the result depends on.

    Attributes:
        runtime: `source`, `auto` or the name of a runtime.
        load, source: the model in its own framework.
        limits: constraints set in Python.
        precisions: the requested precisions.
        hardware: the hardware to convert for.
    """

    runtime: str
    load: Load
    source: AnyModel
    settings: Settings
    limits: Limits
    precisions: tuple[Precision, ...]
    hardware: Hardware
    amp: AmpSettings
    strategy: Strategy

    def choose_runtime(
        self,
        calibration: Calibration | None,
        measurement: Callable[[], Measurement],
        recorded: Callable[[], Sequence[RuntimeFigures]],
    ) -> ChosenRuntime:
        """Return the model in its runtime.

        `recorded` returns the figures of the choice to repeat; empty for a new choice.

        Raises:
            ConfigurationError: a named runtime cannot run the model.
            MissingFrameworkError: a named runtime is not installed.
        """
        own = ChosenRuntime(self.load, self.source)
        if self.runtime == SOURCE_RUNTIME:
            return own
        is_auto = self.runtime == AUTO_RUNTIME
        if is_auto and self.amp.edits:
            framework = self.source.adaptor.framework
            reason = f"edits of the four lists name op types of {framework}"
            source = RuntimeCandidate(framework, self.source)
            rest = [
                RuntimeCandidate(name, reason=reason) for name in list_reading_runtimes(self.source)
            ]
            return replace(own, figures=_collect_runtime_figures([source, *rest], source, {}))
        choice = RuntimeChoice(
            self.load,
            self.source,
            calibration,
            measurement(),
            self.hardware,
            self.precisions,
            self.strategy.needs_gradients,
            lambda model, space: self.apply_constraints(model, space)[0],
        )
        if not is_auto:
            return choice.choose_named(self.runtime)
        figures = recorded()
        return choice.repeat_choice(figures) if figures else choice.choose_fastest()

    def apply_constraints(
        self, model: AnyModel, space: TuningSpace
    ) -> tuple[TuningSpace, tuple[str, ...]]:
        """Return the space of a model in any runtime after the user's constraints, and warnings.

        Constraints name ops of the source; if one names none, all name ops of a named runtime.

        Raises:
            UnknownOperatorError: a constraint matches no op.
            ConfigurationError: a constraint is invalid, or has no counterpart in the runtime.
        """
        if model is self.source or not names_ops(self.settings, self.limits):
            return apply_constraints(space, self.settings, self.limits)
        try:
            return self._by_source.apply_to_space(space)
        except UnknownOperatorError:
            if self.runtime == AUTO_RUNTIME:
                raise
            return apply_constraints(space, self.settings, self.limits)

    @cached_property
    def _by_source(self) -> SourceConstraints:
        space = self.source.whole_space(self.hardware)
        return SourceConstraints(space.restricted_to(self.precisions), self.settings, self.limits)

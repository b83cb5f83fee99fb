"""The runtime of a model by the options of a run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from neural_mp.adaptors.loaded_model import AnyModel
from neural_mp.amp import AmpSettings
from neural_mp.api.constraints import Limits, SourceConstraints, constrained, names_ops
from neural_mp.api.runtimes import ChosenRuntime, Load, RuntimeChoice, in_runtime, only_source
from neural_mp.config import Settings
from neural_mp.core.enums import AUTO_RUNTIME, SOURCE_RUNTIME
from neural_mp.core.hardware import Hardware
from neural_mp.core.precision import Precision
from neural_mp.errors import UnknownOperatorError
from neural_mp.runs.report import RuntimeFigures
from neural_mp.space import TuningSpace
from neural_mp.strategies.base import Strategy
from neural_mp.tuning.evaluation.calibration_batches import Calibration
from neural_mp.tuning.measurement.objectives import Measurement


@dataclass(frozen=True)
class RuntimeOptions:
    """The options of a run that the runtime of the result depends on.

    Attributes:
        runtime: `source`, `auto` or the name of a runtime.
        load: loads the model in its own framework.
        source: the model in its own framework.
        settings: the tuning file.
        limits: constraints set in Python.
        precisions: the requested precisions.
        hardware: the hardware to convert for.
        amp: the options of auto mixed precision.
        strategy: the search strategy.
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

    def chosen(
        self,
        calibration: Calibration | None,
        measurement: Callable[[], Measurement],
        recorded: Callable[[], Sequence[RuntimeFigures]],
    ) -> ChosenRuntime:
        """Return the model in its runtime.

        Args:
            calibration: calibration data; None without data.
            measurement: returns the latency measurement.
            recorded: returns the figures of the choice to repeat; empty for a new choice.

        Raises:
            ConfigurationError: a named runtime cannot run the model.
            MissingFrameworkError: a named runtime is not installed.
        """
        own = ChosenRuntime(self.load, self.source)
        if self.runtime == SOURCE_RUNTIME:
            return own
        is_auto = self.runtime == AUTO_RUNTIME
        if is_auto and self.amp.edits:
            reason = f"edits of the four lists name op types of {self.source.adaptor.framework}"
            return replace(own, figures=only_source(self.source, reason))
        choice = RuntimeChoice(
            self.load,
            self.source,
            calibration,
            measurement(),
            self.hardware,
            Precision.INT8 in self.precisions,
            self.strategy.needs_gradients,
            lambda model, space: self.constrained(model, space)[0],
        )
        figures = recorded() if is_auto else ()
        return choice.repeated(figures) if figures else in_runtime(self.runtime, choice)

    def constrained(
        self, model: AnyModel, space: TuningSpace
    ) -> tuple[TuningSpace, tuple[str, ...]]:
        """Return the space of a model in any runtime after the user's constraints, and warnings.

        Constraints name ops of the source; if one names none, all name ops of a named runtime.

        Raises:
            UnknownOperatorError: a constraint matches no op.
            ConfigurationError: a constraint is invalid, or has no counterpart in the runtime.
        """
        if model is self.source or not names_ops(self.settings, self.limits):
            return constrained(space, self.settings, self.limits)
        try:
            return self._by_source.on(space)
        except UnknownOperatorError:
            if self.runtime == AUTO_RUNTIME:
                raise
            return constrained(space, self.settings, self.limits)

    @cached_property
    def _by_source(self) -> SourceConstraints:
        space = self.source.adaptor.space(self.source.held, self.hardware)
        return SourceConstraints(space.restricted_to(self.precisions), self.settings, self.limits)

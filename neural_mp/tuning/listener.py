"""Receives the events of a run; the default does nothing with them."""

from __future__ import annotations

from collections.abc import Mapping

from neural_mp.core.trial import Trial
from neural_mp.runs.report import Report


class Listener:
    """Receives the events of a run; every method may be overridden, none must."""

    def phase(self, name: str, total: int | None = None) -> None:
        """A phase begins, of `total` steps if that is known."""

    def step(self) -> None:
        """One batch of the phase is done."""

    def baseline(self, accuracy: float, target: float) -> None:
        """The FP32 accuracy was measured, and with it the worst accuracy accepted."""

    def metrics(self, baseline: Mapping[str, float], targets: Mapping[str, float]) -> None:
        """Of several metrics that each have to meet a target: FP32's values, and the targets.

        It comes before `baseline`, which is told the score that stands for all of them.
        """

    def trial(self, trial: Trial, speedup: float | None) -> None:
        """A trial ended."""

    def close(self) -> None:
        """The run is over, well or badly."""

    def result(self, report: Report, met: bool | None) -> None:
        """The run ended with a result; after `close`."""

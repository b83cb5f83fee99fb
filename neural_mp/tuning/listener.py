"""Receives the events of a run; the default does nothing with them."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

from neural_mp.core.trial import Trial
from neural_mp.runs.report import Report
from neural_mp.util.user_calls import call_user


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


class RunLog:
    """The warnings of a run, the seconds of its phases, and who listens to it.

    Args:
        listener: receives the events of the run.
        warnings: what the user was already warned of.
        seconds: phases already done → how long they took.

    Attributes:
        reused: what was not measured, since an earlier run had.
    """

    def __init__(
        self,
        listener: Listener | None = None,
        warnings: Iterable[str] = (),
        seconds: Mapping[str, float] | None = None,
    ) -> None:
        self.listener = listener or Listener()
        self.warnings = list(warnings)
        self.seconds = dict(seconds or {})
        self.reused: list[str] = []

    def reuse(self, what: str) -> None:
        """Note that something was not measured: an earlier run did."""
        if what not in self.reused:
            self.reused.append(what)

    def step(self) -> None:
        """Tell the listener that a batch is done.

        Raises:
            UserCodeError: the listener raised; no plan or batch is to blame for it.
        """
        call_user(self.listener.step)

    def warn(self, words: str) -> None:
        """Keep a warning for the report."""
        self.warnings.append(words)

    @contextmanager
    def loading(self) -> Iterator[None]:
        """The first phase of a run; where it fails there is no run, and the listener is closed."""
        try:
            with self.phase("load", "Loading the model"):
                yield
        except BaseException:
            self.listener.close()
            raise

    @contextmanager
    def phase(self, name: str, words: str = "", total: int | None = None) -> Iterator[None]:
        """Take the time of a phase, and announce it.

        Args:
            name: what its seconds stand under in the report.
            words: what the listener is told; nothing is announced without.
            total: steps of the phase, where that is known.
        """
        if words:
            self.listener.phase(words, total)
        started = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - started

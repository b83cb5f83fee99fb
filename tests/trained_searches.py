"""Searches that train a plan, of all frameworks: their batches, and what holds of their results."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Sequence
from typing import Any


class CountingEpochs:
    """Batches that count their epochs; with `killed`, the process ends in that epoch."""

    def __init__(self, batches: Sequence[Any], killed: int | None = None) -> None:
        self.batches, self.killed, self.epochs = batches, killed, 0

    def __iter__(self) -> Iterator[Any]:
        self.epochs += 1
        if self.epochs == self.killed:
            os.kill(os.getpid(), signal.SIGKILL)
        return iter(self.batches)


def check_trained(result: Any) -> None:
    """Assert that training saved the plan of the only other trial."""
    missed, trained = result.trials
    assert missed.outcome.value == "missed"
    assert trained.trained
    assert trained.plan == missed.plan
    assert result.met
    assert result.report.accuracy == trained.accuracy
    noise = result.report.stage_noise
    assert noise.ops.keys() == set(trained.plan)
    assert [stage.value for stage in noise.measured_stages] == ["nearest", "trained"]
    assert noise.outputs["trained"] != noise.outputs["nearest"]
    assert any("was trained" in warning for warning in result.report.warnings)

"""Outcome of one tuning job among many."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from neural_mp.errors import TuningError
from neural_mp.io.files import write_atomic
from neural_mp.io.readers import read_json
from neural_mp.runs.report import Report
from neural_mp.util.json_fields import Count, JsonFields, NonNegative
from neural_mp.util.string_enum import StringEnum

#: File with the outcome in the folder of a job.
OUTCOME_FILE = "job.json"


class JobStatus(StringEnum):
    """Status of a job."""

    BEGUN = "begun"  #: running, or killed
    MET = "met"
    MISSED = "missed"
    UNCHECKED = "unchecked"  #: converted without accuracy check
    FAILED = "failed"

    @property
    def ended(self) -> bool:
        """Whether the job ended, with or without success."""
        return self is not JobStatus.BEGUN

    @property
    def has_result(self) -> bool:
        """Whether there is a result, so that the job is not repeated."""
        return self not in (JobStatus.BEGUN, JobStatus.FAILED)


@dataclass(frozen=True)
class JobOutcome(JsonFields):
    """Outcome of a job.

    Attributes:
        name: name of the job and of its folder.
        file: the tuning file.
        digest: digest of settings, model and data.
        status: final status.
        reason: reason of a failure, in one line; otherwise empty.
        exit_code: exit code of its process; negative for a signal.
        seconds: duration, from the start of its process.
        known: whether the job was already finished, so that nothing was done.
        run: name of its run in the history.
        framework: the model's framework.
        metric: name of the metric, or names of several.
        accuracy, baseline_accuracy, target: as in `Report`, like the remaining fields.
    """

    name: str
    file: str
    digest: str
    status: JobStatus
    reason: str = ""
    exit_code: int | None = None
    seconds: NonNegative = 0.0
    known: bool = False
    run: str = ""
    framework: str = ""
    metric: str = ""
    accuracy: float | None = None
    baseline_accuracy: float | None = None
    target: float | None = None
    latency: NonNegative | None = None
    baseline_latency: NonNegative | None = None
    size: Count = 0
    baseline_size: Count = 0
    evaluations: Count = 0

    @property
    def speedup(self) -> float | None:
        """Speed-up over FP32."""
        if not self.latency or not self.baseline_latency:
            return None
        return self.baseline_latency / self.latency

    def ended(self, report: Report, met: bool | None) -> JobOutcome:
        """Return the outcome completed with the result."""
        status = {True: JobStatus.MET, False: JobStatus.MISSED, None: JobStatus.UNCHECKED}[met]
        record = report.record
        return replace(
            self,
            status=status,
            reason="",
            run=record.name if record else "",
            framework=record.setup.framework if record else "",
            metric=report.metric,
            **{name: getattr(report, name) for name in _FIGURES},
        )

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON-compatible dict."""
        return {**super().to_dict(), "speedup": self.speedup}

    def write(self, folder: Path) -> None:
        """Write the outcome to the folder of the job, atomically."""
        write_atomic(folder / OUTCOME_FILE, json.dumps(self.to_dict(), indent=1).encode())


def read_outcome(folder: Path) -> JobOutcome | None:
    """Read the outcome from the folder of a job; None if there is none.

    Raises:
        TuningError: the file is damaged.
    """
    file = folder / OUTCOME_FILE
    if not file.exists():
        return None
    return read_json(file, JobOutcome.from_dict, TuningError, "delete the file to repeat the job")


#: Figures with the same names in `Report`.
_FIGURES = (
    "accuracy",
    "baseline_accuracy",
    "target",
    "latency",
    "baseline_latency",
    "size",
    "baseline_size",
    "evaluations",
)
#: Saved result; default workspace; captured output.
RESULT, WORKSPACE, LOG_FILE = "result", "workspace", "log.txt"
#: HTML page of all jobs.
SUMMARY_FILE = "index.html"

"""What came of one tuning job among many."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from neural_mp.errors import TuningError
from neural_mp.io.files import write_atomic
from neural_mp.io.readers import read_json
from neural_mp.runs.report import Report
from neural_mp.util.string_enum import StringEnum
from neural_mp.util.validators import (
    boolean,
    enum_of,
    integer,
    non_negative_float,
    non_negative_integer,
    number,
    optional,
    record,
    string,
)

#: The file in the folder of a job that keeps what came of it.
OUTCOME_FILE = "job.json"


class JobStatus(StringEnum):
    """How a job stands."""

    BEGUN = "begun"  #: it goes on, or was killed
    MET = "met"
    MISSED = "missed"
    UNCHECKED = "unchecked"  #: converted without a check of its accuracy
    FAILED = "failed"

    @property
    def ended(self) -> bool:
        """Whether it was done, well or badly."""
        return self is not JobStatus.BEGUN

    @property
    def finished(self) -> bool:
        """Whether there is a result, so that the job is not done again."""
        return self not in (JobStatus.BEGUN, JobStatus.FAILED)


@dataclass(frozen=True)
class JobOutcome:
    """What came of a job.

    Attributes:
        name: of the job, and of its folder.
        file: the tuning file.
        digest: what the job is about; the same for the same settings, model and data.
        status: how it ended.
        reason: why it failed, in one line; empty if it did not.
        exit_code: that of its process; negative for a signal.
        seconds: how long it took, from the start of its process.
        known: whether it was finished before, so that nothing was done now.
        run: what the history calls its run.
        framework: the model's framework.
        accuracy, baseline_accuracy, target: as in `Report`, and so are the rest.
    """

    name: str
    file: str
    digest: str
    status: JobStatus
    reason: str = ""
    exit_code: int | None = None
    seconds: float = 0.0
    known: bool = False
    run: str = ""
    framework: str = ""
    accuracy: float | None = None
    baseline_accuracy: float | None = None
    target: float | None = None
    latency: float | None = None
    baseline_latency: float | None = None
    size: int = 0
    baseline_size: int = 0
    evaluations: int = 0

    @property
    def speedup(self) -> float | None:
        """How many times faster than FP32."""
        if not self.latency or not self.baseline_latency:
            return None
        return self.baseline_latency / self.latency

    def ended(self, report: Report, met: bool | None) -> JobOutcome:
        """The same job with its result."""
        status = {True: JobStatus.MET, False: JobStatus.MISSED, None: JobStatus.UNCHECKED}[met]
        record = report.record
        return replace(
            self,
            status=status,
            reason="",
            run=record.name if record else "",
            framework=record.setup.framework if record else "",
            accuracy=report.accuracy,
            baseline_accuracy=report.baseline_accuracy,
            target=report.target,
            latency=report.latency,
            baseline_latency=report.baseline_latency,
            size=report.size,
            baseline_size=report.baseline_size,
            evaluations=report.evaluations,
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers and words."""
        return {**asdict(self), "status": self.status.value, "speedup": self.speedup}

    def write(self, folder: Path) -> None:
        """Keep it in the folder of the job; a reader sees all of it or what was there before."""
        write_atomic(folder / OUTCOME_FILE, json.dumps(self.to_dict(), indent=1).encode())


def read_outcome(folder: Path) -> JobOutcome | None:
    """What is kept in the folder of a job; None where nothing is.

    Raises:
        TuningError: the file is damaged.
    """
    file = folder / OUTCOME_FILE
    if not file.exists():
        return None
    return read_json(file, _outcome, TuningError, "delete it to have the job done again")


def _outcome(value: object) -> JobOutcome:
    return JobOutcome(**_OUTCOME(value))


_OUTCOME = record(
    {"name": string, "file": string, "digest": string, "status": enum_of(JobStatus)},
    {
        **dict.fromkeys(("reason", "run", "framework"), string),
        "exit_code": optional(integer),
        "seconds": non_negative_float,
        "known": boolean,
        **dict.fromkeys(("accuracy", "baseline_accuracy", "target"), optional(number)),
        **dict.fromkeys(("latency", "baseline_latency"), optional(non_negative_float)),
        **dict.fromkeys(("size", "baseline_size", "evaluations"), non_negative_integer),
    },
)


#: The saved result, the workspace unless the tuning file names one, and what was printed.
RESULT, WORKSPACE, LOG_FILE = "result", "workspace", "log.txt"
#: The page of all jobs.
SUMMARY_FILE = "index.html"

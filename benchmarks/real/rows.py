"""The rows of the table of pretrained models, and how they are shown."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from rich.table import Table

from benchmarks.measurement.tables import markdown_table, sectioned_table, shown

FP32, OURS = "FP32", "neural-mp"
#: Start of the names of a result with a chosen runtime, and of FP32 in another runtime.
CHOSEN, ELSEWHERE = "neural-mp, runtime=", "FP32 in "
HEADINGS = (
    "case",
    "",
    "accuracy",
    "trials",
    "INT8 ops",
    "× of FP32",
    "× of best FP32",
    "seconds",
    "peak memory, MB",
    "file, MB",
)


@dataclass
class Row:
    """What is said of one model in one form; None where it is not known.

    Attributes:
        case: the model.
        way: `FP32`, ours, or the peer that made it.
        accuracy: on the test data.
        met: whether it meets the target.
        trials: plans tried.
        int8: integer kernels that run.
        speed, slowest, fastest: over FP32: of the medians, and of the quartiles.
        over_best: speed over the fastest FP32, in any runtime.
        seconds: of the whole conversion, evaluations included.
        megabytes: the most memory the process held.
        file: megabytes on disk.
        warnings: what the user was warned of.
        error: why there is no result.
    """

    case: str
    way: str
    accuracy: float | None = None
    met: bool | None = None
    trials: int | None = None
    int8: int | None = None
    speed: float | None = None
    slowest: float | None = None
    fastest: float | None = None
    over_best: float | None = None
    seconds: float | None = None
    megabytes: float | None = None
    file: float | None = None
    warnings: tuple[str, ...] = ()
    error: str | None = None

    def cells(self) -> list[str]:
        """As they are shown; of what failed, the reason in place of the accuracy."""
        accuracy = shown(self.accuracy, ".4f")
        if self.met is False:
            accuracy += ", below the target"
        speed = shown(self.speed, ".2f")
        if self.slowest is not None and self.fastest is not None:
            speed += f" ({self.slowest:.2f}…{self.fastest:.2f})"
        return [
            self.case,
            self.way,
            accuracy if self.error is None else self.error[:90],
            shown(self.trials, "d"),
            shown(self.int8, "d"),
            speed,
            shown(self.over_best, ".2f"),
            shown(self.seconds, ".0f"),
            shown(self.megabytes, ".0f"),
            shown(self.file, ".2f"),
        ]


def table_of(rows: Iterable[Row]) -> Table:
    """For a terminal."""
    lines = ((row.case, row.cells()) for row in rows)
    return sectioned_table("Pretrained models", HEADINGS, lines)


def markdown(rows: Iterable[Row]) -> str:
    """For a page."""
    return markdown_table(HEADINGS, (row.cells() for row in rows))

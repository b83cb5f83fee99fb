"""Outcome of the conversion of a drawn graph to INT8, whatever framework the graph is of."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol

import numpy as np

from neural_mp.core.hardware import Hardware, detect
from neural_mp.errors import NeuralMPError, one_line
from neural_mp.util.pytree import Array

#: NSR relative to FP32 up to which noise is that of INT8.
MAX_INT8_NSR = 10**-1.5


class DrawnGraph(Protocol):
    """A graph of an op between two kernels, drawn by a seed."""

    @property
    def kind(self) -> str:
        """Type of the op between the kernels."""


class Verdict(Enum):
    """End of the conversion of a graph."""

    RIGHT = "right"
    UNCHANGED = "no op in INT8"
    NOT_LOADED = "does not load"
    WRONG_FUSION = "fused wrongly"
    WRONG_KERNEL = "other than simulated"
    WRONG_NUMBERS = "wrong numbers"
    REFUSED = "refused"
    TRACEBACK = "traceback"


@dataclass(frozen=True)
class Outcome:
    """The end of a conversion.

    Attributes:
        details: noise, or the error.
    """

    verdict: Verdict
    details: str = ""

    @property
    def is_failure(self) -> bool:
        """Whether the conversion should have ended otherwise."""
        return self.verdict not in (Verdict.RIGHT, Verdict.UNCHANGED)


def outcome_of(
    graph: Any, convert: Callable[[Any, Hardware], Outcome], machine: Hardware | None = None
) -> Outcome:
    """Convert a graph and compare the outputs; errors are outcomes, too."""
    try:
        return convert(graph, machine or detect())
    except NeuralMPError as error:
        return Outcome(Verdict.REFUSED, one_line(error))
    except Exception as error:  # noqa: BLE001 (any other error is what the check looks for)
        return Outcome(Verdict.TRACEBACK, f"{type(error).__name__}: {one_line(error)}")


def nsr(expected: Array, output: Array) -> float:
    """Return the NSR of an output; infinite for another shape."""
    if expected.shape != output.shape:
        return float("inf")
    noise, power = np.square(expected - output).sum(), np.square(expected).sum()
    return float(noise / power) if power else float(noise)

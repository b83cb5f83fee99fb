"""The contract of a strategy: plans out, trials in; no framework, no files, no clock."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Generator
from dataclasses import dataclass
from typing import ClassVar

from neural_mp.observations import Observations
from neural_mp.plan import PrecisionPlan
from neural_mp.precision import Precision
from neural_mp.space import TuningSpace
from neural_mp.trial import Trial

#: What `Strategy.search` is: it yields rounds of independent plans and is sent their trials.
Search = Generator[list[PrecisionPlan], list[Trial], None]


@dataclass(frozen=True)
class TuningProblem:
    """What a strategy is given.

    Attributes:
        space: what every op may run in.
        observations: what calibration saw.
        precisions: what the user asked for, FP32 aside.
        seed: for strategies that draw at random.
    """

    space: TuningSpace
    observations: Observations
    precisions: tuple[Precision, ...]
    seed: int = 0


class Strategy(ABC):
    """One way to search for the fastest plan that meets the target."""

    name: ClassVar[str]

    @abstractmethod
    def search(self, problem: TuningProblem) -> Search:
        """Yield plans that can be tried side by side; receive their trials.

        The generator returns when it cannot hope for a better plan. It need not remember what it
        tried before: the tuner answers a repeated plan from history.
        """

"""The batches of one evaluation shared among workers: what each gets, and whether it is worth it.

A share is a run of batches, not every n-th of them. Merged in the order of the shares, what metrics
gather is then in the order of the data; and a loader that has to read what it skips reads less. The
last share has no end, so that a loader which is longer than it says is read whole.
"""

from __future__ import annotations

import logging
import platform
from collections.abc import Callable
from dataclasses import dataclass, field

from neural_mp.common import can_merge
from neural_mp.space import ResolvedPlan
from neural_mp.tuning.evaluator import Evaluator

logger = logging.getLogger(__name__)

#: Seconds that sharing has to save where workers have to start for it. They import the framework
#: and load the model: 3 s for a small one on a quiet machine, 24 s with Ray on a busy one.
STARTING = 15.0
#: Seconds that it has to save where workers run already: each of them converts the plan.
SENDING = 2.0


@dataclass(frozen=True)
class Shard:
    """A part of the evaluation of a plan.

    Attributes:
        plan: the plan.
        batches: which of the batches; without an end for the last share.
    """

    plan: ResolvedPlan
    batches: slice

    @property
    def is_first(self) -> bool:
        """Whether the data begin with it."""
        return not self.batches.start


@dataclass(frozen=True)
class ShardResult:
    """What came of a share.

    Attributes:
        states: the metrics, as `Evaluator.merged` takes them.
        origin: of the first share: where NaN or Inf begin in what the plan gives, as a clause.
        seconds: how long it took.
        node: the machine that it was evaluated on.
    """

    states: bytes
    origin: str | None = None
    seconds: float = 0.0
    node: str = field(default_factory=platform.node)


@dataclass
class ShardingPolicy:
    """Whether the evaluations of a run are shared among its workers.

    Attributes:
        evaluator: measures accuracy.
        seconds: how long FP32's evaluation took, in one process.
        cpu_seconds: the CPU time that it took, over all threads.
        warn: takes what the user should know.
    """

    evaluator: Evaluator
    seconds: float
    cpu_seconds: float
    warn: Callable[[str], None]
    _given_up: bool = False

    def may_be_worth(self, cost: float) -> bool:
        """Whether to look for workers at all.

        Args:
            cost: seconds that it has to save, `STARTING` or `SENDING`.
        """
        if self._given_up:
            return False
        if self.seconds <= cost:
            logger.info(
                "an evaluation is not shared: it takes %.1f s, and sharing costs %g s",
                self.seconds,
                cost,
            )
            return False
        why = obstacle(self.evaluator)
        if why:
            self.give_up(why)
        return not why

    def give_up(self, why: str) -> None:
        """Share none of the evaluations that come, and say so once.

        Args:
            why: a clause.
        """
        self._given_up = True
        self.warn(f"the batches of an evaluation are not shared among the workers: {why}")

    def shares(self, plan: ResolvedPlan, width: int, threads: int, cost: float) -> list[Shard]:
        """A share of a plan's evaluation for each worker; none where that would not be worth it.

        Args:
            plan: the plan.
            width: how many workers there are.
            threads: threads that each of them may use.
            cost: seconds that it has to save.
        """
        assert self.evaluator.batches is not None
        count = self.evaluator.batches.count
        width = min(width, count)
        saved = self.seconds - shared_seconds(self.seconds, self.cpu_seconds, width, threads)
        if width < 2 or saved <= cost:
            logger.info(
                "an evaluation is not shared: %d workers would save %.1f s, at a cost of %g s",
                width,
                saved,
                cost,
            )
            return []
        starts = [count * place // width for place in range(width)]
        stops = [*starts[1:], None]
        return [Shard(plan, slice(start, stop)) for start, stop in zip(starts, stops, strict=True)]


def shared_seconds(seconds: float, cpu_seconds: float, width: int, threads: int) -> float:
    """How long an evaluation will take that is shared, but for what sharing costs.

    Args:
        seconds: how long it takes in one process.
        cpu_seconds: the CPU time that it takes there; where threads wait for each other at work,
            that is more than is needed, and too much is expected rather than too little.
        width: how many workers there are.
        threads: threads that each of them may use.
    """
    return max(seconds, cpu_seconds / threads) / max(1, width)


def obstacle(evaluator: Evaluator) -> str:
    """Why an evaluation cannot be shared, as a clause; empty where it can."""
    if evaluator.eval_func is not None or evaluator.batches is None:
        return "eval_func sees all of the data itself"
    alone = [
        name
        for name, (metric, _) in zip(evaluator.names, evaluator.metrics, strict=True)
        if not can_merge(metric)
    ]
    if alone:
        return (
            f"the metric {' and '.join(alone)} has no method merge(other), which takes in all that "
            f"another of its kind has taken in, after what it has taken in itself"
        )
    if callable(getattr(evaluator.postprocess, "reset", None)):
        return "the postprocess has a method reset, so it may hold back what it sees"
    if evaluator.batches.shuffled:
        return "the evaluation data come in another order each time"
    return ""

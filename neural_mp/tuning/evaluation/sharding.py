"""Sharding of one evaluation among workers: the shards, and whether sharding is faster.

A shard is a contiguous range of batches, not every n-th batch. So metrics merged in the order of
shards see the data in order, and a loader that must read skipped batches reads fewer. The last
shard has no end, so that a loader with more batches than its length is read completely.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

from neural_mp.common import can_merge
from neural_mp.space import ResolvedPlan
from neural_mp.tuning.evaluation.evaluator import Evaluator

logger = logging.getLogger(__name__)

#: Minimum gain in seconds if workers must start: they import the framework and load the model, 3 s
#: for a small model on an idle machine, 24 s with Ray on a busy one.
STARTING = 15.0
#: Minimum gain in seconds if workers are running: each of them converts the plan.
SENDING = 2.0


@dataclass(frozen=True)
class Shard:
    """A slice of the batches for the evaluation of a plan; the last shard has no end."""

    plan: ResolvedPlan
    batches: slice

    @property
    def is_first(self) -> bool:
        """Whether the shard is the start of the data."""
        return not self.batches.start


@dataclass(frozen=True)
class ShardResult:
    """Result of a shard.

    Attributes:
        states: the metrics, as input of `Evaluator.merge_shards`.
        origin: for the first shard, the origin of NaN or Inf in the outputs, as a clause.
        seconds: duration.
        node: name of the machine of the evaluation; empty for this machine.
    """

    states: bytes
    origin: str | None = None
    seconds: float = 0.0
    node: str = ""


@dataclass
class ShardingPolicy:
    """Decides whether the evaluations of a run are sharded.

    Attributes:
        evaluator: measures accuracy.
        seconds: duration of FP32's evaluation in one process.
        cpu_seconds: its CPU time, over all threads.
        warn: receives warnings.
    """

    evaluator: Evaluator
    seconds: float
    cpu_seconds: float
    warn: Callable[[str], None]
    _given_up: bool = False

    def is_worth_trying(self, cost: float) -> bool:
        """Whether sharding may gain more than `cost` seconds, so that workers should be found."""
        if self._given_up:
            return False
        if self.seconds <= cost:
            logger.info(
                "Evaluations are not sharded: one takes %.1f s, sharding costs %g s",
                self.seconds,
                cost,
            )
            return False
        why = find_sharding_obstacle(self.evaluator)
        if why:
            self.give_up(why)
        return not why

    def give_up(self, why: str) -> None:
        """Disable sharding for all further evaluations, and warn once; the reason is a clause."""
        self._given_up = True
        self.warn(f"evaluations are not sharded among the workers: {why}")

    def split_evaluation(
        self, plan: ResolvedPlan, width: int, threads: int, cost: float
    ) -> list[Shard]:
        """Return one shard of a plan's evaluation per worker; empty if not worth `cost` seconds."""
        assert self.evaluator.batches is not None
        count = self.evaluator.batches.batch_count
        width = min(width, count)
        saved = self.seconds - estimate_sharded_seconds(
            self.seconds, self.cpu_seconds, width, threads
        )
        if width < 2 or saved <= cost:
            logger.info(
                "Evaluations are not sharded: %d workers would save %.1f s, at a cost of %g s",
                width,
                saved,
                cost,
            )
            return []
        starts = [count * index // width for index in range(width)]
        stops = [*starts[1:], None]
        return [Shard(plan, slice(start, stop)) for start, stop in zip(starts, stops, strict=True)]


def estimate_sharded_seconds(seconds: float, cpu_seconds: float, width: int, threads: int) -> float:
    """Estimate the duration of a sharded evaluation, without overhead.

    The CPU time in one process is an upper bound if threads wait for each other actively.
    """
    return max(seconds, cpu_seconds / threads) / max(1, width)


def find_sharding_obstacle(evaluator: Evaluator) -> str:
    """Return the reason that rules out sharding, as a clause, or an empty string."""
    if evaluator.eval_func is not None or evaluator.batches is None:
        return "eval_func reads the data itself"
    unmergeable = [
        name
        for name, (metric, _) in zip(evaluator.metric_names, evaluator.metrics, strict=True)
        if not can_merge(metric)
    ]
    if unmergeable:
        return (
            f"the metric {' and '.join(unmergeable)} has no method merge(other) to add the data of "
            f"another instance after its own"
        )
    if callable(getattr(evaluator.postprocess, "reset", None)):
        return "the postprocess has a method reset, so it may keep state between batches"
    if evaluator.batches.is_shuffled:
        return "the order of the evaluation data differs between passes"
    return ""

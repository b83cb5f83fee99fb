"""Early stopping of lost evaluations: how often it errs and how much data it saves.

    python -m benchmarks.early_stopping [--count 1000] [--metrics top1,mse,f1] [--processes 1]

Every evaluation is simulated sample by sample: a baseline, and a candidate that is better on some
samples and worse on others, so that the metric on the full data is what the row says, in
tolerances lost: just met at 1.0, missed above. The tolerance is 1% relative; the rate is 0.001.

Orders: `shuffled`; `sorted`: by class, classes differ in the baseline's score and in harm, and
gains are where harm is not; `alike`: the same, but the baseline scores alike on all classes, so
that its values do not tell the order; `drifting`: harm comes early and gains late. `best` says
that the metric's best value was told. Only `shuffled` is what the rule's odds are stated for.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import product

import numpy as np
from rich.console import Console

from benchmarks.measurement.tables import make_table
from neural_mp.core.criterion import AccuracyCriterion
from neural_mp.tuning.evaluation.early_stopping import RunningValues, will_miss_target

TOLERANCE = 0.01
CLASSES = 10
CHURN = 0.02  # share of the samples on which the candidate is right and the baseline is not
ORDERS = ("shuffled", "sorted", "alike", "drifting")
SIZES = ((10, 20), (10, 200), (32, 50), (100, 100))  # samples a batch, batches
LOSSES = (1.0, 0.3, 1.5, 5.0, None)  # in tolerances; None is a broken model, 10% right
Draw = np.random.Generator


@dataclass
class Data:
    """Samples in the order of evaluation: class, and how prone each is to harm (logarithm)."""

    classes: np.ndarray
    skill: np.ndarray
    prone: np.ndarray


def data(order: str, count: int, draw: Draw) -> Data:
    classes = draw.integers(0, CLASSES, count)
    if order in ("sorted", "alike"):
        classes = np.sort(classes)
    spread = 0.0 if order == "alike" else 0.6
    skill = (spread * draw.standard_normal(CLASSES))[classes]
    prone = (1.0 * draw.standard_normal(CLASSES))[classes]
    if order == "drifting":
        prone = 3.0 * (0.5 - np.arange(count) / count)
    return Data(classes, skill, prone)


def first(pool: np.ndarray, prone: np.ndarray, draw: Draw) -> np.ndarray:
    """The samples of a pool in random order, prone ones sooner (Efraimidis and Spirakis)."""
    return pool[np.argsort(draw.exponential(size=len(pool)) * np.exp(-prone[pool]))]


def top1(samples: Data, loss: float | None, draw: Draw) -> tuple[np.ndarray, np.ndarray]:
    """Sums of right answers, sample by sample."""
    chance = 1 / (1 + np.exp(-1.15 - samples.skill))
    base = draw.random(len(chance)) < chance
    ours = base.copy()
    if loss is None:
        ours = draw.random(len(base)) < 0.1
    else:
        gained = first(np.flatnonzero(~base), -samples.prone, draw)[: int(CHURN * len(base))]
        net = int(np.floor(loss * TOLERANCE * base.sum() + (loss > 1)))
        harmed = first(np.flatnonzero(base), samples.prone, draw)[: len(gained) + net]
        ours[gained], ours[harmed] = True, False
    return np.cumsum(base), np.cumsum(ours)


def mse(samples: Data, loss: float | None, draw: Draw) -> tuple[np.ndarray, np.ndarray]:
    """Sums of squared errors, whose sizes have a heavy tail."""
    base = np.exp(draw.standard_normal(len(samples.skill)) + 0.5 * samples.skill)
    noise = np.exp(0.2 * draw.standard_normal(len(base)) + 0.1 * samples.prone)
    ours = base * noise if loss is not None else base * noise * 10
    if loss is not None:
        exact = loss - 1e-6 if loss <= 1 else loss
        ours *= base.sum() * (1 + exact * TOLERANCE) / ours.sum()
    return np.cumsum(base), np.cumsum(ours)


def f1(samples: Data, loss: float | None, draw: Draw) -> tuple[np.ndarray, np.ndarray]:
    """F1 of every prefix, times its length, classes 0 to 2 being positive."""
    truth = samples.classes < 3
    right = draw.random(len(truth)) < 1 / (1 + np.exp(-1.9 - samples.skill))
    ours = right.copy()
    if loss is None:
        ours = np.where(truth, draw.random(len(truth)) < 0.1, draw.random(len(truth)) < 0.9)
    else:
        ours[first(np.flatnonzero(~right), -samples.prone, draw)[: int(CHURN * len(right))]] = True
        harmed = first(np.flatnonzero(right & ours), samples.prone, draw)
        target = f1_sums(truth, right)[-1] * (1 - loss * TOLERANCE)
        low, high = 0, len(harmed)  # each further harm lowers F1: the most that meets the target
        while low < high:
            middle = (low + high + 1) // 2
            tried = ours.copy()
            tried[harmed[:middle]] = False
            low, high = (middle, high) if f1_sums(truth, tried)[-1] >= target else (low, middle - 1)
        ours[harmed[: low + (loss > 1)]] = False
    return f1_sums(truth, right), f1_sums(truth, ours)


def f1_sums(truth: np.ndarray, right: np.ndarray) -> np.ndarray:
    hits, wrong = np.cumsum(truth & right), np.cumsum(~right)
    return 2 * hits / np.maximum(2 * hits + wrong, 1) * np.arange(1, len(truth) + 1)


#: The sums, whether higher is better, and the best value of a sample where that is known.
METRICS: dict[str, tuple[Callable, bool, float | None]] = {
    "top1": (top1, True, 1.0),
    "mse": (mse, False, 0.0),
    "f1": (f1, True, None),
}


def running(sums: np.ndarray, size: int) -> RunningValues:
    ends = np.arange(size, len(sums) + 1, size)
    return RunningValues(tuple((sums[ends - 1] / ends).tolist()), tuple(ends.tolist()))


def stops(base: RunningValues, ours: RunningValues, rule: Callable[..., bool]) -> int | None:
    """After how many batches the evaluation is stopped."""
    for count in range(1, len(base.values) + 1):
        if rule(base, RunningValues(ours.values[:count], ours.samples[:count])):
            return count
    return None


@dataclass
class Row:
    """One row of the table and, by loss, the shares of evaluations stopped and of data saved."""

    metric: str
    order: str
    size: int
    batches: int
    told: bool
    count: int

    def simulate(self) -> list[str]:
        best = "yes" if self.told else ""
        cells = [self.metric, self.order, f"{self.batches} × {self.size}", best]
        for loss in LOSSES:
            met = loss is not None and loss <= 1
            saved = self.savings(loss, self.count if met else max(self.count // 10, 1))
            share = np.mean(saved > 0)
            if met:
                cells.append(f"[{'red' if share > 0.001 else 'green'}]{share:.2%}[/]")
            else:
                cells.append(f"{share:.0%} · {saved.mean():.0%}")
        return cells

    def savings(self, loss: float | None, count: int) -> np.ndarray:
        """The share of the data saved in each of `count` evaluations; 0 where none is stopped."""
        sums, higher, best = METRICS[self.metric]
        criterion = AccuracyCriterion(TOLERANCE, higher_is_better=higher)
        rule = partial(will_miss_target, criterion=criterion, best=best if self.told else None)
        draw = np.random.default_rng(self.size + self.batches)
        saved = np.zeros(count)
        for index in range(count):
            samples = data(self.order, self.size * self.batches, draw)
            base, ours = (running(part, self.size) for part in sums(samples, loss, draw))
            met = criterion.met(base.values[-1], ours.values[-1])
            assert met == (loss is not None and loss <= 1), (self, loss)
            saved[index] = 1 - (stops(base, ours, rule) or self.batches) / self.batches
        return saved


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--metrics", default=",".join(METRICS))
    parser.add_argument("--orders", default=",".join(ORDERS))
    parser.add_argument("--processes", type=int, default=1)
    options = parser.parse_args()
    title = f"{options.count:,} evaluations that meet the target, a tenth that miss it"
    headings = [f"{loss} wrongly" for loss in LOSSES[:2]]
    headings += [f"{loss or 'broken'} stopped · saved" for loss in LOSSES[2:]]
    table = make_table(title, "metric", "order", "batches", "best", *headings, words=4)
    rows = [
        Row(metric, order, *size, has_best, options.count)
        for metric, order, size, has_best in product(
            options.metrics.split(","), options.orders.split(","), SIZES, (False, True)
        )
        if not has_best or METRICS[metric][2] is not None
    ]
    with ProcessPoolExecutor(options.processes) as pool:
        for cells in pool.map(Row.simulate, rows):
            table.add_row(*cells)
    Console().print(table)


if __name__ == "__main__":
    main()

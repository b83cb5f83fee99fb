"""What it costs to have plans evaluated elsewhere, and what it gains, for each engine of workers.

    python -m benchmarks.cluster [--engines local,ray] [--seconds 10]

Every engine has two places of one core on this machine: two processes, or two Ray nodes. Eight
plans are evaluated in this process, four before and four after the engine has evaluated the same
eight, so that what else the machine does hits both alike. `ray` needs the extra `ray`.
"""

from __future__ import annotations

import os

# A node is to use one core. Set before torch is imported, and for the nodes.
os.environ["OMP_NUM_THREADS"] = "1"
# By default, what Ray starts gives way to other processes; what it is compared with does not.
os.environ.update(RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER="0", RAY_worker_niceness="0")

import argparse
import itertools
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import psutil
import torch
from rich.console import Console
from rich.table import Table
from torch import nn

from benchmarks.measurement.search_data import Digits
from benchmarks.nets.search_nets import search_net
from benchmarks.real.case import Accuracy
from neural_mp import MixedPrecision, common
from neural_mp.adaptors.loaded_model import AnyModel
from neural_mp.api.job_builder import JobBuilder
from neural_mp.config import Settings
from neural_mp.core.criterion import Deadline
from neural_mp.core.plan import PrecisionPlan
from neural_mp.core.trial import Outcome
from neural_mp.space import ResolvedPlan
from neural_mp.strategies.decisions import decision_levels, iterate_combinations, plan_of
from neural_mp.tuning.baseline import calibrate_model
from neural_mp.tuning.evaluation.early_stopping import RunningValues
from neural_mp.tuning.evaluation.plan_evaluator import PlanEvaluation, PlanEvaluator
from neural_mp.tuning.executors import Executor, WorkerPayload, get_executor_named, read_workers
from neural_mp.tuning.executors.contract import Workers
from neural_mp.tuning.executors.ray_cluster import WATCHFUL
from neural_mp.tuning.job import TuningJob
from neural_mp.tuning.listener import RunLog

PLACES = 2
PLANS = 8
BATCH = 100
#: Layers of the large model; each has WIDTH × WIDTH weights: 25 million, 100 MB.
LAYERS, WIDTH = 6, 2048
#: Trials of which the overhead is the median.
TRIALS = 50
STORE = 600 << 20
MEGABYTE = 1e6


@dataclass(frozen=True)
class TimedAssessor(PlanEvaluator):
    """Evaluates plans, in CPU seconds; the one that lowers nothing has its answer at once."""

    def __call__(
        self, plan: ResolvedPlan, deadline: Deadline
    ) -> tuple[PlanEvaluation, AnyModel | None]:
        if not plan.has_low_precision:
            return PlanEvaluation(Outcome.MISSED), None
        begun = time.process_time()
        evaluation, model = super().__call__(plan, deadline)
        return replace(evaluation, seconds=time.process_time() - begun), model


class Repeated:
    """The same samples over and over."""

    def __init__(self, dataset: Any, times: int) -> None:
        self.dataset, self.times = dataset, times

    def __len__(self) -> int:
        return len(self.dataset) * self.times

    def __getitem__(self, index: int) -> Any:
        return self.dataset[index % len(self.dataset)]


class Noise:
    """A few samples for the large model."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Any:
        return torch.randn(WIDTH, generator=torch.Generator().manual_seed(index)).numpy(), 0


@dataclass(frozen=True)
class Task:
    """What is evaluated, and the plans."""

    job: TuningJob
    plan_evaluator: TimedAssessor
    plans: tuple[ResolvedPlan, ...]

    @classmethod
    def of(cls, model: nn.Module, data: Any, samples: Any) -> Task:
        converter = MixedPrecision(
            model=model,
            precisions="int8",
            metric=Accuracy(),
            eval_dataloader=common.DataLoader(data, batch_size=BATCH),
            calib_dataloader=common.DataLoader(samples, batch_size=BATCH),
        )
        log = RunLog()
        job, _ = JobBuilder(converter, Settings(), log).build_job()
        plan_evaluator = TimedAssessor(
            calibrate_model(job, log, Deadline()),
            job.evaluator,
            job.settings.criterion,
            0.0,
            RunningValues(),
            job.measurement.inputs,
        )
        space = job.space
        choices = iterate_combinations(
            [decision_levels(space, ops) for ops in space.decision_groups]
        )
        plans = (space.resolve(plan_of(space, choice)) for choice in choices)
        return cls(job, plan_evaluator, tuple(itertools.islice(plans, PLANS)))

    @property
    def nothing(self) -> ResolvedPlan:
        """The plan that is answered at once."""
        return self.job.space.resolve(PrecisionPlan())

    def alone(self, plans: Sequence[ResolvedPlan]) -> list[PlanEvaluation]:
        with self.plan_evaluator.model.adaptor.threads(1):
            return [self.plan_evaluator(plan, Deadline())[0] for plan in plans]

    def started(self, workers: Workers) -> Executor:
        """An engine all of whose places have answered."""
        work = WorkerPayload.pack_run(self.job.load, self.plan_evaluator, workers)
        executor = get_executor_named(workers.engine)(work, workers, print)
        gathered(executor, [self.nothing] * PLACES)
        return executor


def gathered(executor: Executor, plans: Sequence[ResolvedPlan]) -> list[PlanEvaluation]:
    tickets = [executor.submit(plan, 0.0) for plan in plans]
    return [executor.assessment(ticket) for ticket in tickets]


@contextmanager
def places(engine: str) -> Iterator[Workers]:
    """The setting for two places of one core."""
    if engine != "ray":
        yield read_workers({"engine": engine, "count": PLACES, "threads": 1})
        return
    import ray
    from ray.cluster_utils import Cluster

    os.environ.update(WATCHFUL)
    node = {"num_cpus": 1, "object_store_memory": STORE}
    cluster = Cluster(initialize_head=True, head_node_args={**node, "include_dashboard": False})
    for _ in range(PLACES - 1):
        cluster.add_node(**node)
    yield read_workers(f"ray:{cluster.address}")
    ray.shutdown()
    cluster.shutdown()


def sent_so_far(engine: str) -> int:
    """Bytes: what this process wrote, pipes included; of Ray, what went over the loopback."""
    if engine == "ray":
        return psutil.net_io_counters(pernic=True)["lo"].bytes_sent
    return psutil.Process().io_counters().write_chars


@dataclass(frozen=True)
class Figures:
    """What was measured of an engine; seconds, bytes.

    Attributes:
        start: until all places had answered.
        overhead: of a trial that evaluates nothing, from the hand-over to the answer.
        size: what the large model takes in memory.
        sent: of it to each place that is not this process's own node.
        alone, together: of all plans, in this process and on the engine.
        cpu_alone, cpu_together: the same in CPU seconds, which others take nothing from.
        load: how many processes wanted a core, on average, in the minute before.
    """

    start: float
    overhead: float
    size: int
    sent: float
    alone: float
    together: float
    cpu_alone: float
    cpu_together: float
    load: float

    @property
    def undisturbed(self) -> float:
        """The speed-up that CPU seconds come to on a machine that does nothing else."""
        return self.cpu_alone / ((self.cpu_together + PLANS * self.overhead) / PLACES)


def measured(engine: str, task: Task, large: Task) -> Figures:
    load = psutil.getloadavg()[0]
    with places(engine) as workers:
        previous = sent_so_far(engine)
        executor = large.started(workers)
        # Who has answered has the model; of Ray's nodes, one shares this process's memory.
        sent = (sent_so_far(engine) - previous) / (PLACES - (engine == "ray"))
        executor.close()

        begun = time.perf_counter()
        executor = task.started(workers)
        start = time.perf_counter() - begun
        overheads = [seconds(gathered, executor, [task.nothing])[0] for _ in range(TRIALS)]
        half = len(task.plans) // 2
        first, first_half = seconds(task.alone, task.plans[:half])
        together, parallel = seconds(gathered, executor, task.plans)
        second, second_half = seconds(task.alone, task.plans[half:])
        executor.close()
    sequential = [*first_half, *second_half]
    same = [result.accuracy for result in sequential] == [result.accuracy for result in parallel]
    assert same, "the engine found other accuracies"
    return Figures(
        start,
        statistics.median(overheads),
        large.plan_evaluator.model.size,
        sent,
        first + second,
        together,
        sum(result.seconds for result in sequential),
        sum(result.seconds for result in parallel),
        load,
    )


def seconds(call: Any, *arguments: Any) -> tuple[float, Any]:
    """How long a call takes, and what it returns."""
    begun = time.perf_counter()
    result = call(*arguments)
    return time.perf_counter() - begun, result


def lasting(target: float) -> Task:
    """A net for digits, with so much data that a plan takes so many CPU seconds."""
    net, test, train = search_net("residual1"), Digits("test"), Digits("train")
    short = Task.of(net, test, train)
    short.alone(short.plans[:1])
    duration = statistics.median(short.alone(short.plans[:1])[0].seconds for _ in range(5))
    return Task.of(net, Repeated(test, max(1, round(target / duration))), train)


def table_of(figures: dict[str, Figures]) -> Table:
    table = Table("", *figures)
    all_of = figures.values()
    lines = {
        "start, until both places answered": [f"{entry.start:.1f} s" for entry in all_of],
        "overhead of a trial": [f"{entry.overhead * 1e3:.1f} ms" for entry in all_of],
        f"sent to a place, of a model of {next(iter(all_of)).size / MEGABYTE:.0f} MB": [
            f"{entry.sent / MEGABYTE:.0f} MB" for entry in all_of
        ],
        f"{PLANS} evaluations in this process": [f"{entry.alone:.1f} s" for entry in all_of],
        f"the same on {PLACES} places": [f"{entry.together:.1f} s" for entry in all_of],
        "their CPU seconds, here and there": [
            f"{entry.cpu_alone:.1f} and {entry.cpu_together:.1f}" for entry in all_of
        ],
        "speed-up": [f"{entry.alone / entry.together:.2f}×" for entry in all_of],
        "speed-up by CPU seconds": [f"{entry.undisturbed:.2f}×" for entry in all_of],
        "speed-up, with the start": [
            f"{entry.alone / (entry.start + entry.together):.2f}×" for entry in all_of
        ],
        "load of the machine in the minute before": [f"{entry.load:.1f}" for entry in all_of],
    }
    for label, cells in lines.items():
        table.add_row(label, *cells)
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--engines", default="local,ray")
    parser.add_argument("--seconds", type=float, default=10.0, help="that an evaluation takes")
    chosen = parser.parse_args()
    torch.manual_seed(0)
    layers = [nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)]
    large = Task.of(nn.Sequential(*layers).eval(), Noise(), Noise())
    task = lasting(chosen.seconds)
    figures = {engine: measured(engine, task, large) for engine in chosen.engines.split(",")}
    Console().print(table_of(figures))


if __name__ == "__main__":
    main()

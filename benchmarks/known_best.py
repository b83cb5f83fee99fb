"""Distance of a run's plan from the best, on nets whose best plan is found by trying all.

    OMP_NUM_THREADS=1 python -m benchmarks.known_best [--nets wide,gated,…] [--repeats 5] [--busy]

Every assignment of INT8 and FP32 to the decisions of a net of `nets/known_nets.py` is converted
and timed as a whole model, in turn with all others. The fastest of them, FP32 and the plans that
runs came to are timed once more, and FP32, the best and the plans of the runs a third time, side by
side and for longer: the share is the time of the run's plan over that of the best. `--busy` keeps
another core busy meanwhile. A plan has to gain 3 % over FP32 to be returned, so that FP32 may be up
to 3 % behind the best.
"""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial

from benchmarks.measurement.tables import markdown_table
from benchmarks.nets.known_nets import NETS, busy_core, workspace
from neural_mp.adaptors.loaded_model import AnyModel, AnyTunableModel
from neural_mp.api.job_builder import JobBuilder
from neural_mp.config import Settings
from neural_mp.core.criterion import Deadline
from neural_mp.core.precision import Precision
from neural_mp.profiling import estimate_uncontended_latency, time_interleaved_rounds
from neural_mp.space import ResolvedPlan
from neural_mp.strategies.decisions import decision_levels, iterate_combinations, plan_of
from neural_mp.tuning.baseline import calibrate_model
from neural_mp.tuning.listener import RunLog

#: Of the plans timed first, so many are timed again.
_AGAIN = 5
#: More plans than this are not tried.
_MAX_PLANS = 512
_BLOCK_SECONDS = 0.002
HEADINGS = ("net", "plans", "best over FP32", "ours over FP32", "ours / best", "worst")


@dataclass(frozen=True)
class Found:
    """One net.

    Attributes:
        name: its name.
        plans: how many there are.
        best: the speed of the best plan, over FP32.
        ours: the speed of every run's plan, over FP32.
    """

    name: str
    plans: int
    best: float
    ours: tuple[float, ...]

    @property
    def ratios(self) -> list[float]:
        """The time of every run's plan over that of the best, smallest first."""
        return sorted(self.best / speed for speed in self.ours)

    def cells(self) -> list[str]:
        """One row."""
        ratios = self.ratios
        return [
            self.name,
            str(self.plans),
            f"{self.best:.2f}",
            " ".join(f"{speed:.2f}" for speed in self.ours),
            f"{ratios[len(ratios) // 2]:.3f}",
            f"{ratios[-1]:.3f}",
        ]


def lowered(plan: ResolvedPlan) -> frozenset[str]:
    """The ops that a plan has in a lower precision, which tell plans apart here."""
    return frozenset(op for op, p in plan.effective.items() if p is not Precision.FP32)


def all_plans(model: AnyTunableModel) -> dict[frozenset[str], ResolvedPlan]:
    """Every plan of a model by the ops that it lowers, FP32 first, each once."""
    space = model.space
    choices = [decision_levels(space, ops) for ops in space.decision_groups]
    plans = [
        space.fp32_plan(),
        *(plan_of(space, chosen) for chosen in iterate_combinations(choices)),
    ]
    distinct: dict[frozenset[str], ResolvedPlan] = {}
    for plan in plans:
        resolved = space.resolve(plan)
        distinct.setdefault(lowered(resolved), resolved)
    if len(distinct) > _MAX_PLANS:
        raise SystemExit(f"{len(distinct)} plans are too many to try them all")
    return distinct


def seconds_of(models: list[AnyModel], inputs: object, rounds: int) -> list[float]:
    """Return the seconds that each of several models takes, timed in turn."""
    runs = [partial(model, inputs) for model in models]
    timings = time_interleaved_rounds(runs, iterations=rounds, block_seconds=_BLOCK_SECONDS)
    return [estimate_uncontended_latency(seconds) for seconds in timings]


def _seconds_by_plan(
    models: Mapping[frozenset[str], AnyModel],
    plans: Iterable[frozenset[str]],
    inputs: object,
    rounds: int,
) -> dict[frozenset[str], float]:
    """Return the seconds that the models of some plans take, timed in turn."""
    chosen = list(dict.fromkeys(plans))
    seconds = seconds_of([models[low] for low in chosen], inputs, rounds)
    return dict(zip(chosen, seconds, strict=True))


def found_of(name: str, repeats: int, rounds: int) -> Found:
    """Try all plans of a net, and tune the net so many times."""
    net = NETS[name]
    with workspace() as folder:
        options = net.converter(folder)
        job, _ = JobBuilder(options, Settings(), RunLog()).build_job()
        model = calibrate_model(job, RunLog(), Deadline())
        inputs, plans = job.measurement.inputs, all_plans(model)
        models = {low: model.convert_by_plan(plan) for low, plan in plans.items()}
        first = dict(zip(models, seconds_of(list(models.values()), inputs, rounds), strict=True))
    ours = []
    for _ in range(repeats):
        with workspace() as folder:
            result = net.converter(folder)()
        plan = model.space.resolve(result.plan)
        ours.append(lowered(plan))
        models.setdefault(ours[-1], model.convert_by_plan(plan))
        print(name, sorted(ours[-1]), file=sys.stderr, flush=True)
    fastest = sorted(first, key=first.__getitem__)[:_AGAIN]
    # Each plan once: two models of one plan differ by chance.
    again = _seconds_by_plan(models, [frozenset(), *fastest, *ours], inputs, 4 * rounds)
    best = min(again, key=again.__getitem__)
    print(name, "best", sorted(best), file=sys.stderr, flush=True)
    # The fastest of several is partly so by chance: what it takes is measured once more.
    seconds = _seconds_by_plan(models, [frozenset(), best, *ours], inputs, 8 * rounds)
    fp32 = seconds[frozenset()]
    speeds = tuple(fp32 / seconds[low] for low in ours)
    return Found(name, len(plans), fp32 / seconds[best], speeds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nets", default=",".join(NETS))
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=20, help="rounds in which all are timed")
    parser.add_argument("--busy", action="store_true", help="keep another core busy")
    options = parser.parse_args()
    for package in ("neural_mp", "torch.onnx"):
        logging.getLogger(package).setLevel(logging.ERROR)
    rows = []
    with busy_core(options.busy):
        for name in options.nets.split(","):
            rows.append(found_of(name, options.repeats, options.rounds).cells())
            print(markdown_table(HEADINGS, rows[-1:]), file=sys.stderr, flush=True)
    print(markdown_table(HEADINGS, rows), end="")


if __name__ == "__main__":
    main()

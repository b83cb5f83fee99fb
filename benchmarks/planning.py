"""Planning: seconds of a whole search without a model, for graphs of growing size.

    python -m benchmarks.planning [--sizes 100,1000,10000] [--strategies mincut] [--profile]
    python -m benchmarks.planning --painting [--sizes 1000,10000,100000]

Residual nets of convolutions, additions in integers among them; every tensor has noise, one in
thirty is hostile, and what that does to accuracy is made up. Everything is counted but the
evaluations: what the space is asked, the strategy, and what the tuner does with each plan. Seconds
are the processor's, since all of it is one thread, and a shared machine lets it wait. `--painting`
measures four-list painting alone, of chains with branches and loops.
"""

from __future__ import annotations

import argparse
import cProfile
import math
import pstats
import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from rich.console import Console
from rich.table import Table

from benchmarks.measurement.tables import make_table
from neural_mp.amp import FourLists, paint
from neural_mp.amp import graph_of as graph_of_triples
from neural_mp.core.enums import RuleSet
from neural_mp.core.graph import Op, OpGraph
from neural_mp.core.observations import Observations
from neural_mp.core.plan import PrecisionPlan
from neural_mp.core.precision import FP32, OpConfig, Precision
from neural_mp.core.quant_spec import RANGE_ALGORITHMS, QuantSpec
from neural_mp.core.trial import Outcome, Trial
from neural_mp.space import Capability, TuningSpace
from neural_mp.strategies import create_strategy_named
from neural_mp.strategies.base import TuningProblem

WEIGHT = QuantSpec("int8", "symmetric", "per_channel")
INT8 = tuple(
    OpConfig(Precision.INT8, WEIGHT, QuantSpec("uint8", "asymmetric", "per_tensor", algorithm))
    for algorithm in RANGE_ALGORITHMS
)
#: Lists whose members are ops of types A, D, I and C.
LISTS = FourLists(*(frozenset({word}) for word in "ADIC"))
PARTS = ("space", "strategy", "resolving")
TOLERANCE, HOSTILE_SHARE = 0.01, 1 / 30


def graph_of(size: int) -> OpGraph:
    """About `size` ops: blocks of two convolutions and an addition, some with a projection."""
    ops = [Op("stem", "conv", ("image",))]
    stream, block = "stem", 0
    while len(ops) < size:
        of = f"block{block}_"
        first, second, shortcut = of + "conv1", of + "conv2", stream
        ops += [
            Op(first, "conv", (stream,)),
            Op(of + "relu1", "relu", (first,), fusion_group=first),
            Op(second, "conv", (of + "relu1",)),
        ]
        if block % 4 == 0:
            shortcut = of + "project"
            ops.append(Op(shortcut, "conv", (stream,)))
        ops.append(Op(of + "add", "add", (second, shortcut), joins_int8=True))
        stream, block = of + "relu2", block + 1
        ops.append(Op(stream, "relu", (of + "add",), fusion_group=of + "add"))
    return OpGraph([*ops, Op("head", "dense", (stream,))], ["image"], ["head"])


def space_of(graph: OpGraph) -> TuningSpace:
    """Everything but activations can run in INT8."""
    able, unable = Capability((*INT8, FP32)), Capability()
    return TuningSpace(graph, {op.name: unable if op.fusion_group else able for op in graph})


@dataclass
class Accuracy:
    """The made-up truth: what storing a tensor in INT8 costs, near what its noise says."""

    space: TuningSpace
    noise: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        draw = random.Random(0)
        self._losses = []
        for tensor in self.space.tensors:
            hostile = draw.random() < HOSTILE_SHARE
            noise = draw.uniform(0.02, 1.0) if hostile else 10 ** draw.uniform(-5, -3)
            self.noise[tensor.name] = noise
            harm = noise * draw.uniform(0.3, 3.0) / (1 if hostile else len(self.space.tensors))
            self._losses.append((tensor.quantizing_ops, harm))

    def trial(self, plan: PrecisionPlan, number: int) -> Trial:
        low = {op for op, config in plan.items() if config.precision is Precision.INT8}
        loss = sum(harm for ops, harm in self._losses if not low.isdisjoint(ops))
        outcome = Outcome.MET if loss <= TOLERANCE else Outcome.MISSED
        return Trial(plan, outcome, 1 - loss, loss, number=number)


@dataclass
class Planning:
    """One search, and where its seconds went."""

    size: int
    strategy: str
    ops: int = 0
    trials: list[Trial] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def clock(self, part: str) -> Iterator[None]:
        start = time.process_time()
        yield
        self.seconds[part] = self.seconds.get(part, 0.0) + time.process_time() - start

    @property
    def total(self) -> float:
        return sum(self.seconds.values())

    @property
    def met(self) -> bool:
        return any(trial.met for trial in self.trials)

    def run(self, profile: cProfile.Profile | None = None) -> None:
        graph = graph_of(self.size)
        accuracy = Accuracy(space_of(graph))
        space = space_of(graph)  # another: nothing was asked of it yet
        if profile is not None:
            profile.enable()
        self.ops = len(list(graph))
        with self.clock("space"):
            space.fp32_plan()
            _ = space.tunable_ops, space.tensors
        problem = TuningProblem(space, Observations(nsr=accuracy.noise), (Precision.INT8,))
        with self.clock("strategy"):
            search = create_strategy_named(self.strategy).search(problem)
            plans = next(search, None)
        while plans is not None:
            with self.clock("resolving"):
                resolved = [space.resolve(plan).plan for plan in plans]
                _ = [hash(plan) for plan in resolved]
            first = len(self.trials)
            tried = [accuracy.trial(plan, first + index) for index, plan in enumerate(resolved)]
            self.trials += tried
            with self.clock("strategy"):
                plans = _send(search, tried)
        if profile is not None:
            profile.disable()


def _send(search, tried: list[Trial]) -> list[PrecisionPlan] | None:
    try:
        return search.send(tried)
    except StopIteration:
        return None


def growth(previous: Planning | None, current: Planning) -> str:
    """How much longer it takes for twice the ops, and the power of size that this is."""
    if previous is None:
        return ""
    doublings = math.log2(current.ops / previous.ops)
    factor = (current.total / previous.total) ** (1 / doublings)
    return f"{factor:.2f}"


def painted_graph(size: int) -> OpGraph:
    """Ops of all lists, each behind the one before; every third has a branch, some a loop."""
    draw = random.Random(0)
    triples = []
    for index in range(size):
        reads = [f"o{index - 1}" if index else "x"]
        if index and index % 3 == 0:
            reads.append(f"o{draw.randrange(index)}")
        if index % 100 == 0 and index + 50 < size:
            reads.append(f"o{index + 50}")
        triples.append((f"o{index}", draw.choice("ADIIICCCN"), reads))
    return graph_of_triples(triples)


def painting_table(sizes: list[int]) -> Table:
    """Return seconds of four-list painting by rules, and microseconds per op."""
    table = make_table("Painting, seconds (microseconds an op)", "ops", *RuleSet)
    for size in sizes:
        ops_graph = painted_graph(size)
        cells = []
        for rules in RuleSet:
            start = time.process_time()
            paint(ops_graph, LISTS, rules)
            seconds = time.process_time() - start
            cells.append(f"{seconds:.3f} ({seconds / size * 1e6:.1f})")
        table.add_row(f"{size:,}", *cells)
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", default="100,1000,10000")
    parser.add_argument("--strategies", default="mincut")
    parser.add_argument("--profile", action="store_true", help="say where the largest spends it")
    parser.add_argument("--painting", action="store_true", help="four-list painting alone")
    options = parser.parse_args()
    sizes = [int(size) for size in options.sizes.split(",")]
    console = Console(width=110)
    if options.painting:
        console.print(painting_table(sizes))
        return
    for strategy in options.strategies.split(","):
        Planning(20, strategy).run()  # imports what it needs
        title = f"{strategy}: planning, seconds, evaluations not counted"
        counted = ("ops", "decided", "trials", "met", "seconds")
        table = make_table(title, *counted, *PARTS, "µs an op", "× a doubling")
        previous, profile = None, cProfile.Profile()
        for size in sizes:
            current = Planning(size, strategy)
            current.run()
            parts = [f"{current.seconds.get(part, 0.0):.3f}" for part in PARTS]
            counts = [
                f"{current.ops:,}",
                f"{len(current.trials[0].plan):,}",
                str(len(current.trials)),
            ]
            per_op = f"{current.total / current.ops * 1e6:.0f}"
            met = "yes" if current.met else "no"
            table.add_row(
                *counts, met, f"{current.total:.3f}", *parts, per_op, growth(previous, current)
            )
            previous = current
        console.print(table)
        if options.profile:
            Planning(sizes[-1], strategy).run(profile)
            pstats.Stats(profile).strip_dirs().sort_stats("cumulative").print_stats(35)


if __name__ == "__main__":
    main()

"""Verdicts of repeated runs of one net, counted.

    OMP_NUM_THREADS=1 python -m benchmarks.verdicts [--nets win,tie,loss] [--repeats 20] [--busy]
    OMP_NUM_THREADS=1 python -m benchmarks.verdicts --nets win,mlp --restart

Three nets of `nets/known_nets.py`: one that INT8 makes clearly faster, one at a tie, one that
loses; other nets of that file by name. Every run measures all anew, with `--restart` in a process
of its own. Of the confidence intervals, those that overlap the first are counted. `--busy` keeps
another core busy meanwhile. Speeds are those that the run reports of its result, or of the plan
that came closest where the result is FP32.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import time
from collections import Counter
from dataclasses import asdict, dataclass

from benchmarks.measurement.children import run_child
from benchmarks.measurement.tables import markdown_table
from benchmarks.nets.known_nets import NETS, VERDICTS, busy_core, workspace


@dataclass(frozen=True)
class Verdict:
    """The outcome of one run.

    Attributes:
        met: whether a plan won.
        speedup: of the result, or of the plan that came closest.
        seconds: of the run.
        low, high: the confidence interval of the speed-up.
    """

    met: bool
    speedup: float
    seconds: float
    low: float
    high: float

    def overlaps(self, other: Verdict) -> bool:
        """Whether the intervals of two runs have values in common."""
        return self.low <= other.high and other.low <= self.high


def verdict_of(name: str) -> Verdict:
    """Tune a net once."""
    with workspace() as folder:
        started = time.perf_counter()
        result = {**NETS, **VERDICTS}[name].converter(folder)()
        seconds = time.perf_counter() - started
    report = result.report
    if result.met and report.speedup:
        low, high = report.speedup_low, report.speedup_high
        return Verdict(True, report.speedup, seconds, low, high)
    figures = [t.objectives for t in result.trials if "relative_latency_low" in t.objectives]
    best = min(figures, key=lambda objectives: objectives["relative_latency"], default=None)
    if best is None:
        return Verdict(False, 1.0, seconds, 1.0, 1.0)
    ends = ("relative_latency_high", "relative_latency_low")
    low, high = (1 / best[end] for end in ends)
    return Verdict(False, 1 / best["relative_latency"], seconds, low, high)


def restarted(name: str) -> Verdict:
    """Tune a net once, in a process of its own."""
    return Verdict(**run_child("verdicts", "--once", "--nets", name))


def cells(name: str, verdicts: list[Verdict]) -> list[str]:
    """One row: the counts of verdicts, and what was measured."""
    counts = Counter(verdict.met for verdict in verdicts)
    speeds = sorted(verdict.speedup for verdict in verdicts)
    overlapping = sum(verdict.overlaps(verdicts[0]) for verdict in verdicts)
    widths = sorted(verdict.high / verdict.low - 1 for verdict in verdicts)
    return [
        name,
        f"{counts[True]} met, {counts[False]} FP32",
        f"{max(counts.values())} of {len(verdicts)} alike",
        f"{speeds[len(speeds) // 2]:.2f} ({speeds[0]:.2f} to {speeds[-1]:.2f})",
        f"{overlapping} of {len(verdicts)}",
        f"{widths[len(widths) // 2]:.1%}",
        f"{sum(verdict.seconds for verdict in verdicts) / len(verdicts):.1f}",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nets", default=",".join(VERDICTS))
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--busy", action="store_true", help="keep another core busy")
    parser.add_argument("--restart", action="store_true", help="a process for every run")
    parser.add_argument("--once", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    logging.getLogger("neural_mp").setLevel(logging.ERROR)
    if options.once:
        print(json.dumps(asdict(verdict_of(options.nets))))
        return
    rows, run_once = [], restarted if options.restart else verdict_of
    with busy_core(options.busy):
        for name in options.nets.split(","):
            verdicts: list[Verdict] = []
            for _ in range(options.repeats):
                verdicts.append(run_once(name))
                print(name, verdicts[-1], file=sys.stderr, flush=True)
            rows.append(cells(name, verdicts))
    headings = ("net", "verdicts", "alike", "speed-up", "overlap the first", "width", "seconds")
    print(markdown_table(headings, rows), end="")


if __name__ == "__main__":
    main()

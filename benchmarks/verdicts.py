"""Verdicts of repeated runs of one net, counted.

    OMP_NUM_THREADS=1 python benchmarks/verdicts.py [--nets win,tie,loss] [--repeats 20] [--busy]

Three nets of `models/known_nets.py`: one that INT8 makes clearly faster, one at a tie, one that
loses. Every run measures all anew. `--busy` keeps another core busy meanwhile. Speeds are those
that the run reports of its result, or of the plan that came closest where the result is FP32.
"""

from __future__ import annotations

import sys
from pathlib import Path

# Files beside this one bear the names of packages: its folder must not be searched for those.
# ruff: noqa: E402
sys.path[0] = str(Path(__file__).resolve().parent / "models")

import argparse
import logging
import time
from collections import Counter
from dataclasses import dataclass

from known_nets import VERDICTS, busy_core, workspace
from tables import markdown_table


@dataclass(frozen=True)
class Verdict:
    """The outcome of one run.

    Attributes:
        met: whether a plan won.
        speedup: of the result, or of the plan that came closest.
        seconds: of the run.
    """

    met: bool
    speedup: float
    seconds: float


def verdict_of(name: str) -> Verdict:
    """Tune a net once."""
    with workspace() as folder:
        started = time.perf_counter()
        result = VERDICTS[name].converter(folder)()
        seconds = time.perf_counter() - started
    speeds = [trial.speedup for trial in result.trials if trial.speedup]
    met = bool(result.met)
    speedup = result.report.speedup if met else max(speeds, default=1.0)
    return Verdict(met, speedup or 1.0, seconds)


def cells(name: str, found: list[Verdict]) -> list[str]:
    """One row: the counts of verdicts, and what was measured."""
    counts = Counter(verdict.met for verdict in found)
    speeds = sorted(verdict.speedup for verdict in found)
    return [
        name,
        f"{counts[True]} met, {counts[False]} FP32",
        f"{max(counts.values())} of {len(found)} alike",
        f"{speeds[len(speeds) // 2]:.2f} ({speeds[0]:.2f} to {speeds[-1]:.2f})",
        f"{sum(verdict.seconds for verdict in found) / len(found):.1f}",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nets", default=",".join(VERDICTS))
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--busy", action="store_true", help="keep another core busy")
    options = parser.parse_args()
    logging.getLogger("neural_mp").setLevel(logging.ERROR)
    rows = []
    with busy_core(options.busy):
        for name in options.nets.split(","):
            found: list[Verdict] = []
            for _ in range(options.repeats):
                found.append(verdict_of(name))
                print(name, found[-1], file=sys.stderr, flush=True)
            rows.append(cells(name, found))
    print(markdown_table(("net", "verdicts", "alike", "speed-up", "seconds"), rows), end="")


if __name__ == "__main__":
    main()

"""All figures of language models in one run: sizes, accuracy on unseen text, speed, memory.

    OMP_NUM_THREADS=1 python -m benchmarks.language_models [--seeds 0 1 2] [--only PART …]
        [--peer PYTHON] [--auto-round PYTHON] [--keep DIR] [--quick]

Prints each figure as it is found, and at the end, or when interrupted, a table of the numbers to
reach and then the tables of all parts:

- `weights`: a small decoder and its twin with outlier channels, trained with each seed. Uniform
  weights of 8 to 2 bits in the largest groups of each layer, the plans of runs with the tolerance
  of 1 %, and the most accurate plan of 3.4 bits per weight. Bytes are those of all weights, as a
  fraction of FP32 and of 8 bits; "unseen text" is the perplexity on as many windows that the run
  did not see. The rank is Spearman's correlation of the Fisher probe's scores with divergences from
  FP32 that are measured for every layer alone, in the largest groups of each number of bits.
- `unseen`: runs with several tuning texts each, whose plans are evaluated on text they do not see.
- `speed`: decode and prefill of layers with the widths of a decoder of 0.5 billion weights.
- `chosen`: a search by time alone on these layers, for several numbers of rows per call.
- `memory`, `killed`: calibration in child processes.
- `twins`: the hostile twin beside the plain one in 4 and 8 bits, several tuning texts each.
- `scheme`: decoders of four architectures, and AutoRound's AutoScheme (`--auto-round`).
- `cache`: an INT8 key-value cache.
- `rows`: dynamic INT8 beside torchao's, in this environment.
- `learned`: learned rounding, with the first seed.

`--peer` is a Python with nncf, torchao and transformers; its results stand beside. `--keep` trains
once and keeps decoders in a folder. `--quick` takes tiny sizes, to try the program.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from pathlib import Path

from benchmarks.decoders.calibration import killed, memory
from benchmarks.decoders.chosen import chosen
from benchmarks.decoders.first_day import auto_scheme_of, cache_of, rows_of, twins_of
from benchmarks.decoders.goals import Detail, Figure, Goal, table_of_goals, tables_of
from benchmarks.decoders.settings import Settings, Subject
from benchmarks.decoders.speed import speed
from benchmarks.decoders.weights import MISSED, REFUSED, learned_of, unseen_of, weights_of
from benchmarks.peers.decoder_peers import peer_plans

Part = Callable[[Sequence[Subject]], Iterator[Detail | Figure]]


def _weights(subjects: Sequence[Subject]) -> Iterator[Detail | Figure]:
    for subject in subjects:
        yield from weights_of(subject)
        yield from peer_plans(subject)


def _unseen(subjects: Sequence[Subject]) -> Iterator[Detail | Figure]:
    rows = []
    for subject in subjects:
        for row in unseen_of(subject):
            rows.append(row)
            yield row
    verdicts = [row.cells[-1] for row in rows]
    accepted = len(verdicts) - verdicts.count(REFUSED)
    yield Figure(Goal.UNSEEN, f"{verdicts.count(MISSED)} of {accepted}")


PARTS: dict[str, Part] = {
    "weights": _weights,
    "unseen": _unseen,
    "speed": lambda subjects: speed(subjects[0].settings),
    "chosen": lambda subjects: chosen(subjects[0].settings),
    "memory": lambda subjects: memory(subjects[0].settings),
    "twins": lambda subjects: chain.from_iterable(map(twins_of, subjects)),
    "scheme": lambda subjects: auto_scheme_of(subjects[0]),
    "cache": lambda subjects: cache_of(subjects[0]),
    "rows": lambda subjects: rows_of(subjects[0].settings),
    "killed": lambda subjects: killed(subjects[0].settings),
    "learned": lambda subjects: learned_of(subjects[0]),
}


def _settings(options: argparse.Namespace, keep: Path) -> Settings:
    sizes = {
        "steps": (800, 20),
        "windows": (256, 16),
        "tuning_texts": (5, 1),
        "layers": (4, 1),
        "rounds": (11, 3),
        "wide": (1024, 256),
        "rounding_steps": (200, 5),
    }
    chosen = {name: pair[options.quick] for name, pair in sizes.items()}
    overrides = {name: getattr(options, name) for name in ("steps", "windows", "tuning_texts")}
    chosen |= {name: value for name, value in overrides.items() if value is not None}
    return Settings(**chosen, keep=keep, peer=options.peer, auto_round=options.auto_round)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0], help="seeds of the training")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS), help="the parts")
    parser.add_argument("--peer", type=Path, help="Python with the tools to compare with")
    parser.add_argument("--auto-round", type=Path, help="Python with auto-round")
    parser.add_argument("--keep", type=Path, help="folder of the trained decoders")
    parser.add_argument("--steps", type=int, help="steps of training (800)")
    parser.add_argument("--windows", type=int, help="windows of each text (256)")
    parser.add_argument("--tuning-texts", type=int, help="tuning texts of a decoder (5)")
    parser.add_argument("--quick", action="store_true", help="tiny sizes, to try the program")
    options = parser.parse_args()
    figures: list[Figure] = []
    details: list[Detail] = []
    try:
        with tempfile.TemporaryDirectory() as folder:
            settings = _settings(options, options.keep or Path(folder))
            subjects = [Subject(seed, settings) for seed in options.seeds]
            for index, name in enumerate(options.only, 1):
                _run(name, f"{index}/{len(options.only)}", subjects, figures, details)
    finally:  # what an interrupted run has found
        print(table_of_goals(figures))
        print(tables_of(details), flush=True)


def _cpu_seconds() -> float:
    """Return the CPU seconds of this process and of its finished children."""
    return sum(os.times()[:4])


def _run(
    name: str,
    progress: str,
    subjects: Sequence[Subject],
    figures: list[Figure],
    details: list[Detail],
) -> None:
    """Run a part, and print and keep what it finds."""
    started, used = time.perf_counter(), _cpu_seconds()
    for item in PARTS[name](subjects):
        if isinstance(item, Figure):
            figures.append(item)
            text = f"{item.goal.value[0]}{', peer' * item.is_peer}: {item.value}"
        else:
            details.append(item)
            text = " | ".join(item.cells)
        spent, cpu = time.perf_counter() - started, _cpu_seconds() - used
        print(f"[{progress}] {name} {spent:5.0f} s, CPU {cpu:5.0f} s  {text}", flush=True)


if __name__ == "__main__":
    main()

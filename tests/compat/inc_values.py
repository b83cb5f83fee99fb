"""Values of Intel Neural Compressor's own code next to ours, for the names that its files hold.

    python tests/compat/inc_values.py --repository PATH [--only resize] [--single]

PATH is a folder with that project's repository (tag v1.14). Its classes are imported from there as
they are; what its package would import besides is left out. What needs a package that is not
installed (opencv-python-headless, torchvision, tensorflow, six) is said not to be compared.

A comparison is one entry in a list, such as `TRANSFORMS` of `inc_names/transforms.py`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from inc_names.comparison import Comparison, Outcome, Repository, outcome
from inc_names.transforms import TRANSFORMS
from rich.console import Console
from rich.table import Table

COMPARISONS: tuple[Comparison, ...] = (*TRANSFORMS,)


@dataclass(frozen=True)
class Row:
    """All comparisons of one name in one framework.

    Attributes:
        outcomes: with what was special in each.
    """

    name: str
    framework: str
    outcomes: Sequence[tuple[str, Outcome]]

    @property
    def verdicts(self) -> list[str]:
        """Each once, the worst first."""
        distinct = {outcome.verdict for _, outcome in self.outcomes}
        return sorted(distinct, key=lambda verdict: (not verdict.startswith("DIFFERENT"), verdict))

    @property
    def largest(self) -> str:
        """The largest difference; empty where nothing was compared."""
        differences = [o.difference for _, o in self.outcomes if not np.isnan(o.difference)]
        return f"{max(differences):.3g}" if differences else ""


def rows(
    comparisons: Sequence[Comparison], repository: Repository, only: str, single: bool
) -> Iterator[Row]:
    """What was compared, name by name, or one by one."""
    groups: dict[tuple[str, str], list[tuple[str, Outcome]]] = {}
    for comparison in comparisons:
        if only.lower() not in comparison.name.lower():
            continue
        key = f"{comparison.name} {comparison.case}" if single else comparison.name
        outcomes = groups.setdefault((key, comparison.framework), [])
        outcomes.append((comparison.case, outcome(comparison, repository)))
    for (name, framework), outcomes in sorted(groups.items()):
        yield Row(name, framework, outcomes)


def main() -> None:
    """Print the table; the exit code is 1 where something is different."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repository", type=Path, required=True)
    parser.add_argument("--only", default="", help="names that hold this text")
    parser.add_argument("--single", action="store_true", help="a row for each input and options")
    arguments = parser.parse_args()
    repository = Repository(arguments.repository)
    table = Table("name", "framework", "compared", "largest difference", "verdict")
    different = False
    for row in rows(COMPARISONS, repository, arguments.only, arguments.single):
        count = sum(not np.isnan(outcome.difference) for _, outcome in row.outcomes)
        cases = f"{count} of {len(row.outcomes)}"
        table.add_row(row.name, row.framework, cases, row.largest, "\n".join(row.verdicts))
        different |= row.verdicts[0].startswith("DIFFERENT")
    Console(width=150).print(table)
    sys.exit(1 if different else 0)


if __name__ == "__main__":
    main()

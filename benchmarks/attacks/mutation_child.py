"""A process of `children`: makes the attacks of one group, from one to another."""

from __future__ import annotations

import itertools
import sys
import warnings
from pathlib import Path

from children import begin, tell
from mutations import GROUPS
from verdicts import judged


def main() -> None:
    """Prepare, or attack."""
    warnings.simplefilter("ignore")
    group, folder = GROUPS[sys.argv[1]], Path(sys.argv[2])
    if sys.argv[3] == "prepare":
        group.prepare(folder)
        return
    seed, start, stop, count = map(int, sys.argv[3:])
    if not any(folder.iterdir()):
        group.prepare(folder)
    scratch = folder / f"{group.name} {start}"
    scratch.mkdir(exist_ok=True)
    attacks = group.attacks(folder, scratch, seed, count)
    for case, call in itertools.islice(attacks, start, stop):
        begin(case)
        tell(judged(group.name, case[:300], call, seconds=group.seconds))


if __name__ == "__main__":
    main()

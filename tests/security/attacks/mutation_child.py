"""A process of `children`: makes the attacks of some groups, from one to another."""

from __future__ import annotations

import itertools
import sys
import warnings
from pathlib import Path

from attacks.children import begin, tell
from attacks.mutations import GROUPS, Group
from attacks.verdicts import judged

#: Words of one group: its name, its folder, its first attack, the one behind the last, the count.
_WORDS = 5


def _make(group: Group, folder: Path, seed: int, start: int, stop: int, count: int) -> None:
    if not any(folder.iterdir()):
        group.prepare(folder)
    scratch = folder / f"{group.name} {start}"
    scratch.mkdir(exist_ok=True)
    attacks = group.attacks(folder, scratch, seed, count)
    for case, call in itertools.islice(attacks, start, stop):
        begin(case)
        tell(judged(group.name, case[:300], call, seconds=group.seconds))


def main() -> None:
    """Prepare, or attack."""
    warnings.simplefilter("ignore")
    first, *arguments = sys.argv[1:]
    if first == "prepare":
        GROUPS[arguments[0]].prepare(Path(arguments[1]))
        return
    for at in range(0, len(arguments), _WORDS):
        name, folder, *numbers = arguments[at : at + _WORDS]
        start, stop, count = map(int, numbers)
        _make(GROUPS[name], Path(folder), int(first), start, stop, count)


if __name__ == "__main__":
    main()

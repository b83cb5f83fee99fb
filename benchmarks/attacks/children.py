"""Attacks in processes of their own: one that ends its process is counted, and ends no run."""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from verdicts import REPOSITORY, Finding, Verdict

_CHILD = Path(__file__).resolve().parent / "mutation_child.py"
#: How many processes go at once.
_AT_ONCE = 2
#: Seconds without a word of a process after which it is taken for hanging: its own limit is lower,
#: but is not seen within a library.
_PATIENCE = 120


@dataclass(frozen=True)
class Attacked:
    """The attacks on one group of files.

    Attributes:
        group: its name in `mutations.GROUPS`.
        folder: holds what is attacked; others may be attacked there, too.
        count: how many attacks.
        a_process: how many attacks a process makes.
    """

    group: str
    folder: Path
    count: int
    a_process: int


def judged_in_children(all_attacked: Sequence[Attacked], seed: int) -> Iterator[Finding]:
    """Make attacks in processes, several at once.

    Args:
        all_attacked: the groups.
        seed: of the choice of attacks.
    """
    starts = [
        (attacked, start)
        for attacked in all_attacked
        for start in range(0, attacked.count, attacked.a_process)
    ]
    uses = Counter(attacked.folder for attacked, _ in starts)
    folders = {attacked.folder: attacked.group for attacked in all_attacked}
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        prepared = {
            folder: pool.submit(_prepare, name, folder)
            for folder, name in folders.items()
            if uses[folder] > 1  # else the process of the attacks prepares them
        }
        parts = [
            pool.submit(_part, attacked, seed, start, prepared.get(attacked.folder))
            for attacked, start in starts
        ]
        for part in parts:
            yield from part.result()


def _prepare(group: str, folder: Path) -> None:
    """Make what is attacked, in a process.

    Raises:
        RuntimeError: it cannot be made.
    """
    folder.mkdir()
    command = [sys.executable, str(_CHILD), group, str(folder), "prepare"]
    done = subprocess.run(
        command, env=_environment(), capture_output=True, text=True, check=False, timeout=600
    )
    if done.returncode:
        raise RuntimeError(f"{group} cannot be prepared: {done.stderr[-2000:]}")


def _part(
    attacked: Attacked, seed: int, start: int, prepared: Future[None] | None
) -> list[Finding]:
    """The attacks of a process; another one goes on behind an attack that ended its own."""
    if prepared is None:
        attacked.folder.mkdir()
    else:
        prepared.result()
    found: list[Finding] = []
    group, count = attacked.group, attacked.count
    stop = min(start + attacked.a_process, count)
    while start < stop:
        ended, case = False, ""
        words = [group, *map(str, (attacked.folder, seed, start, stop, count))]
        process = subprocess.Popen(
            [sys.executable, str(_CHILD), *words],
            env=_environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        for said in _said(process):
            if said is None:
                process.kill()
                ended = True
            elif "begins" in said:
                case = said["begins"]
            else:
                found.append(Finding(**{**said, "verdict": Verdict(said["verdict"])}))
                start, case = start + 1, ""
        code = process.wait()
        if start < stop:
            verdict = Verdict.HANG if ended else Verdict.TRACEBACK
            words_ = f"the process ended with {code}"
            found.append(Finding(group, case, verdict, words_))
            start += 1
    return found


def _said(process: subprocess.Popen[str]) -> Iterator[dict[str, Any] | None]:
    """What a process says, line by line; None where it has been silent for too long."""
    lines: queue.Queue[str | None] = queue.Queue()

    def read() -> None:
        assert process.stdout is not None
        for line in process.stdout:
            lines.put(line)
        lines.put(None)

    threading.Thread(target=read, daemon=True).start()
    while True:
        try:
            line = lines.get(timeout=_PATIENCE)
        except queue.Empty:
            yield None
            continue
        if line is None:
            return
        if line.startswith("{"):
            yield json.loads(line)


def tell(finding: Finding) -> None:
    """In a child: say what came of an attack."""
    cut = {**asdict(finding), "verdict": finding.verdict.value, "words": finding.words[:500]}
    print(json.dumps(cut), flush=True)


def begin(case: str) -> None:
    """In a child: say which attack comes next."""
    print(json.dumps({"begins": case[:300]}), flush=True)


def _environment() -> dict[str, str]:
    here = Path(__file__).resolve().parent
    paths = os.pathsep.join(map(str, (REPOSITORY, here)))
    quiet = {"OMP_NUM_THREADS": "1", "TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": ""}
    return {**os.environ, **quiet, "PYTHONPATH": paths}

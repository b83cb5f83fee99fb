"""Attacks in processes of their own: one that ends its process is counted, and ends no run."""

from __future__ import annotations

import itertools
import json
import os
import queue
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from attacks.own_time import OwnClock
from attacks.verdicts import REPOSITORY, Finding, Verdict, paths_with

_CHILD = Path(__file__).resolve().parent / "mutation_child.py"
#: How many processes go at once.
_AT_ONCE = 2
#: Own seconds without a word of a process after which it hangs: its own limit is lower, but is not
#: seen within a library.
_PATIENCE = 120
#: Seconds between two looks at a silent process.
_LOOK = 2.0


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


@dataclass
class _Slice:
    """Attacks of one group, from one to another, that one process makes.

    Attributes:
        attacked: the group.
        start: number of the first attack that has not been made.
        stop: number behind the last one.
    """

    attacked: Attacked
    start: int
    stop: int

    @property
    def share(self) -> float:
        """Part of what a process makes."""
        return (self.stop - self.start) / self.attacked.a_process


def judged_in_children(all_attacked: Sequence[Attacked], seed: int) -> Iterator[Finding]:
    """Make attacks in processes, several at once.

    Args:
        all_attacked: the groups.
        seed: of the choice of attacks.
    """
    slices = [
        _Slice(attacked, start, min(start + attacked.a_process, attacked.count))
        for attacked in all_attacked
        for start in range(0, attacked.count, attacked.a_process)
    ]
    uses = Counter(part.attacked.folder for part in slices)
    folders = {attacked.folder: attacked.group for attacked in all_attacked}
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        prepared = {
            folder: pool.submit(_prepare, name, folder)
            for folder, name in folders.items()
            if uses[folder] > 1  # else the process of the attacks prepares them
        }
        futures = [pool.submit(_made, group, seed, prepared) for group in _packed(slices)]
        for findings in futures:
            yield from findings.result()


def _packed(slices: Sequence[_Slice]) -> list[list[_Slice]]:
    """Return the slices of each process: few attacks of several groups share one."""
    packed: list[list[_Slice]] = []
    for part in slices:
        if packed and sum(member.share for member in packed[-1]) + part.share <= 1:
            packed[-1].append(part)
        else:
            packed.append([part])
    return packed


def _prepare(group: str, folder: Path) -> None:
    """Make what is attacked, in a process.

    Raises:
        RuntimeError: it cannot be made.
    """
    folder.mkdir()
    command = [sys.executable, str(_CHILD), "prepare", group, str(folder)]
    done = subprocess.run(command, env=_environment(), capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{group} cannot be prepared: {done.stderr[-2000:]}")


def _made(
    slices: Sequence[_Slice], seed: int, prepared: Mapping[Path, Future[None]]
) -> list[Finding]:
    """The attacks of a process; another one goes on behind an attack that ended its own."""
    for part in slices:
        if part.attacked.folder in prepared:
            prepared[part.attacked.folder].result()
        else:
            part.attacked.folder.mkdir()
    findings: list[Finding] = []
    while remaining := [part for part in slices if part.start < part.stop]:
        ended, case = False, ""
        process = subprocess.Popen(
            [sys.executable, str(_CHILD), str(seed), *itertools.chain(*map(_words, remaining))],
            env=_environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        for report in _said(process):
            if report is None:
                process.kill()
                ended = True
            elif "begins" in report:
                case = report["begins"]
            else:
                findings.append(Finding(**{**report, "verdict": Verdict(report["verdict"])}))
                _next(slices).start, case = _next(slices).start + 1, ""
        code = process.wait()
        if any(part.start < part.stop for part in slices):
            verdict = Verdict.HANG if ended else Verdict.TRACEBACK
            part = _next(slices)
            message = f"the process ended with {code}"
            findings.append(Finding(part.attacked.group, case, verdict, message))
            part.start += 1
    return findings


def _next(slices: Sequence[_Slice]) -> _Slice:
    """Return the slice whose attacks are being made."""
    return next(part for part in slices if part.start < part.stop)


def _words(part: _Slice) -> list[str]:
    """Return a slice as arguments of a child."""
    attacked = part.attacked
    numbers = (part.start, part.stop, attacked.count)
    return [attacked.group, str(attacked.folder), *map(str, numbers)]


def _said(process: subprocess.Popen[str]) -> Iterator[dict[str, Any] | None]:
    """What a process says, line by line; None where it has been silent for too long."""
    lines: queue.Queue[str | None] = queue.Queue()

    def read() -> None:
        assert process.stdout is not None
        for line in process.stdout:
            lines.put(line)
        lines.put(None)

    threading.Thread(target=read, daemon=True).start()
    clock = OwnClock(process.pid)
    while True:
        try:
            line = lines.get(timeout=_LOOK)
        except queue.Empty:
            if clock.seconds() > _PATIENCE:
                yield None
            continue
        if line is None:
            return
        clock = OwnClock(process.pid)
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
    folder = Path(__file__).resolve().parents[1]
    quiet = {"OMP_NUM_THREADS": "1", "TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": ""}
    shared = folder.parent / "adaptors" / "litert"  # changes of flatbuffers
    return {**os.environ, **quiet, "PYTHONPATH": paths_with(REPOSITORY, folder, shared)}

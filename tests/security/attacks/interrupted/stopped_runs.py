"""Runs that are stopped for a while, alone or beside another, and copies of their workspaces."""

from __future__ import annotations

import os
import random
import shutil
import signal
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from attacks.own_time import ends_within
from attacks.short_runs import Setting, as_text, kept, outcome, started, write_nets
from attacks.together import Pair, Process
from attacks.verdicts import Family, Finding, Verdict

STOPS_NAME, COPIES_NAME = "stopped runs", "copied workspaces"
_SETTINGS = (
    Setting("basic", pause=0.1),
    Setting("exhaustive", pause=0.1),
    Setting("tpe", pause=0.1),
)


def _stop_for_a_while(pair: Pair, process: Process, most: float = 0.5) -> None:
    """Stop a process if it still runs, and let it go on."""
    assert process.pid is not None
    if process.is_alive():
        os.kill(process.pid, signal.SIGSTOP)
        pair.wait(most)
        os.kill(process.pid, signal.SIGCONT)


def _begin(pair: Pair) -> Process:
    """Return a process in the midst of a new run."""
    process = pair.start(resume=False)
    pair.wait_for_a_run(process)
    pair.wait(0.5)
    return process


def _alone(pair: Pair) -> list[dict[str, Any]]:
    process = pair.start(resume=False)
    for _ in range(3):
        pair.wait(0.6)
        _stop_for_a_while(pair, process)
    return pair.ends(process)


def _beside_another(pair: Pair) -> list[dict[str, Any]]:
    """Stop a run while a second one begins and ends in its workspace."""
    first = _begin(pair)
    assert first.pid is not None
    if first.is_alive():
        os.kill(first.pid, signal.SIGSTOP)
    try:
        second = pair.start(resume=False)
        # A run that is stopped in the middle of a write holds the lock of the database.
        pair.wait(1.0)
    finally:
        if first.is_alive():
            os.kill(first.pid, signal.SIGCONT)
    return pair.ends(first, second)


def _killed_when_stopped(pair: Pair) -> list[dict[str, Any]]:
    first = _begin(pair)
    assert first.pid is not None
    if first.is_alive():
        os.kill(first.pid, signal.SIGSTOP)
        os.kill(first.pid, signal.SIGKILL)
    first.join()
    return pair.ends(pair.start(resume=True))


def _copied(pair: Pair, in_use: bool) -> list[dict[str, Any]]:
    """Go on with a copy; the first run, if in use, goes on as well."""
    first = _begin(pair)
    if not in_use:
        first.kill()
        first.join()
    copy = Pair(pair.nets, pair.home.with_name(f"{pair.home.name} copy"), pair.setting, pair.dice)
    copy.home.mkdir()
    shutil.copytree(pair.home / "workspace", copy.home / "workspace")
    trials = Counter(kept(copy.home).trials)
    second = copy.start(resume=True)
    ends = copy.ends(second) + (pair.ends(first) if in_use else [])
    stored = Counter(kept(copy.home).trials)
    assert not trials - stored, "the copy has lost trials"
    return ends


def _copied_while_idle(pair: Pair) -> list[dict[str, Any]]:
    return _copied(pair, in_use=False)


def _copied_in_use(pair: Pair) -> list[dict[str, Any]]:
    return _copied(pair, in_use=True)


Case = Callable[[Pair], list[dict[str, Any]]]


def _findings(family: str, cases: Sequence[Case]) -> Callable[[int, Path, int], Iterator[Finding]]:
    def findings(count: int, folder: Path, seed: int) -> Iterator[Finding]:
        dice, nets = random.Random(f"{family} {seed}"), folder / "nets"
        nets.mkdir()
        write_nets(nets)
        expected: dict[Setting, dict[str, Any]] = {}
        for number in range(count):
            case, setting = cases[number % len(cases)], _SETTINGS[number // 3 % len(_SETTINGS)]
            if setting not in expected:
                expected[setting] = _undisturbed(nets, folder, setting)
            home = folder / f"run {number}"
            home.mkdir()
            label = f"{case.__name__.strip('_').replace('_', ' ')}, {setting.strategy}, {number}"
            try:
                for end in case(Pair(nets, home, setting, dice)):
                    _compare(end, expected[setting])
                yield Finding(family, label, Verdict.RIGHT)
            except AssertionError as error:
                yield Finding(family, label, Verdict.WRONG, str(error)[:1000])

    return findings


def _undisturbed(nets: Path, folder: Path, setting: Setting) -> dict[str, Any]:
    home = folder / f"undisturbed {setting.strategy}"
    home.mkdir()
    process = started(nets, home, setting, resume=False)
    assert ends_within(process, 120)
    result = outcome(process, home)
    assert result is not None
    assert result["end"] == "right", result
    return result


def _compare(end: dict[str, Any], expected: dict[str, Any]) -> None:
    assert end["end"] == "right", end["words"]
    assert not any("written" in warning for warning in end["warnings"]), end["warnings"]
    for key in ("best", "accuracy", "met"):
        assert end[key] == expected[key], key
    assert Counter(map(as_text, end["trials"])) == Counter(map(as_text, expected["trials"]))


STOPPED_RUNS = Family(
    STOPS_NAME, 51, _findings(STOPS_NAME, (_alone, _beside_another, _killed_when_stopped))
)
COPIED_WORKSPACES = Family(
    COPIES_NAME, 50, _findings(COPIES_NAME, (_copied_while_idle, _copied_in_use))
)

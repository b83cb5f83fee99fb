"""Runs that are killed, again and again, and gone on with: nothing is lost, nothing done twice."""

from __future__ import annotations

import itertools
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from attacks.own_time import ends_within
from attacks.short_runs import (
    Kept,
    Setting,
    as_text,
    kept,
    left,
    outcome,
    passes,
    started,
    write_nets,
)
from attacks.verdicts import Family, Finding, Verdict

from neural_mp.strategies import list_strategy_classes

NAME = "kills"
#: Own seconds after which a run that should have ended hangs.
_HANG = 120.0
#: One run in so many is one of PyTorch.
_PYTORCH = 8


@dataclass(frozen=True)
class _Killed:
    """A run that was killed, or had ended before it could be.

    Attributes:
        kept: what its database held then.
        passes: passes over the data that had begun, in this run and those before.
        left: processes and semaphores that were still there after two minutes.
        after: seconds after its start.
    """

    kept: Kept
    passes: int
    left: list[str]
    after: float


def _settings() -> Iterator[Setting]:
    """All strategies with 0, 1 and 2 workers; now and then one of PyTorch."""
    pairs = itertools.product((0, 2, 1), list_strategy_classes())
    for index, (workers, strategy) in enumerate(itertools.cycle(pairs)):
        # Only PyTorch has gradients, which the one takes.
        torch = strategy == "hawq_v2" or index % _PYTORCH == _PYTORCH - 1
        yield Setting(strategy, workers, "pytorch" if torch else "onnx")


@cache
def _undisturbed(nets: Path, setting: Setting) -> tuple[dict[str, Any], float]:
    """What comes of a run that nobody kills, and how long it takes."""
    folder = nets / f"undisturbed {setting.strategy} {setting.workers} {setting.framework}"
    folder.mkdir()
    begun = time.monotonic()
    process = started(nets, folder, setting, resume=False)
    ends_within(process, _HANG)
    result = outcome(process, folder)
    assert result is not None, f"{setting} does not end by itself"
    assert result["end"] == "right", result["words"]
    return result, time.monotonic() - begun


def _kill(nets: Path, folder: Path, setting: Setting, resume: bool, delay: float) -> _Killed:
    process = started(nets, folder, setting, resume)
    process.join(delay)
    if process.is_alive():
        assert process.pid is not None
        os.kill(process.pid, signal.SIGKILL)
    process.join()
    assert process.pid is not None
    behind = left(process.name, process.pid)
    return _Killed(kept(folder), passes(folder), behind, delay)


def findings(count: int, folder: Path, seed: int) -> Iterator[Finding]:
    """Kill runs at random moments, once or twice each, and see what comes of them."""
    dice, completed = random.Random(seed), 0
    nets = folder / "nets"
    nets.mkdir()
    write_nets(nets)
    for index, setting in enumerate(_settings()):
        home = folder / f"run {index}"
        home.mkdir()
        expected, seconds = _undisturbed(nets, replace(setting, workers=min(setting.workers, 1)))
        if setting.workers == 2:
            seconds = _undisturbed(nets, setting)[1]
        kills: list[_Killed] = []
        for _ in range(min(count - completed, 1 + dice.randrange(2))):
            delay = dice.uniform(0, seconds)
            kills.append(_kill(nets, home, setting, bool(kills), delay))
        completed += len(kills)
        label = f"{setting.strategy}, {setting.workers} workers, {setting.framework}"
        end = _end(nets, home, setting, expected, kills)
        for number, killed in enumerate(kills, start=1):
            case = f"{label}, kill {number} of {len(kills)} after {killed.after:.2f} s"
            yield Finding(NAME, case, *(_left_behind(killed) or end))
        if completed >= count:
            return


def _left_behind(killed: _Killed) -> tuple[Verdict, str] | None:
    if killed.kept.words != "ok":
        return Verdict.LOST, f"the database is damaged: {killed.kept.words}"
    if killed.left:
        return Verdict.WRONG, f"left behind: {'; '.join(killed.left)}"
    return None


def _end(
    nets: Path, home: Path, setting: Setting, expected: dict[str, Any], kills: list[_Killed]
) -> tuple[Verdict, str]:
    """Have the run go on until it is finished, and compare it with one that nobody killed."""
    process = started(nets, home, setting, resume=True)
    if not ends_within(process, _HANG):
        process.kill()
        process.join()
        return Verdict.HANG, f"it did not end in {_HANG:g} s"
    assert process.pid is not None
    result = outcome(process, home)
    if result is None or result["end"] != "right":
        return Verdict.TRACEBACK, "it ended without words" if result is None else result["words"]
    last = _Killed(kept(home), passes(home), left(process.name, process.pid), 0)
    return (
        _left_behind(last)
        or _lost([*kills, last])
        or _repeated([*kills, last], max(1, setting.workers))
        or _different(result, expected)
        or (Verdict.RIGHT, "")
    )


def _lost(stages: list[_Killed]) -> tuple[Verdict, str] | None:
    """Whether a trial that was there once is there no more."""
    for previous, current in itertools.pairwise(stages):
        missing = Counter(previous.kept.trials) - Counter(current.kept.trials)
        if missing:
            return Verdict.LOST, f"{missing.total()} trials: {list(missing)[:2]}"
    return None


def _repeated(stages: list[_Killed], width: int) -> tuple[Verdict, str] | None:
    """Whether more was evaluated than what was missing, but for what a kill cut off."""
    twice = [trial for trial, often in Counter(stages[-1].kept.trials).items() if often > 1]
    if twice:
        return Verdict.REPEATED, f"in the database twice: {twice[:2]}"
    previous = _Killed(Kept(), 0, [], 0)
    for stage in stages:
        new = len(stage.kept.trials) - len(previous.kept.trials)
        new += stage.kept.baseline and not previous.kept.baseline
        open_ones = 0 if stage is stages[-1] else width
        begun = stage.passes - previous.passes
        if begun > new + open_ones:
            return Verdict.REPEATED, f"{begun} evaluations for {new} that were missing"
        previous = stage
    return None


def _different(result: dict[str, Any], expected: dict[str, Any]) -> tuple[Verdict, str] | None:
    """Whether a run came to something else than one that nobody killed."""
    for key in ("best", "accuracy", "met"):
        if result[key] != expected[key]:
            return Verdict.WRONG, f"{key} is {result[key]}, not {expected[key]}"
    actual, truth = (Counter(map(as_text, record["trials"])) for record in (result, expected))
    if actual != truth:
        return Verdict.WRONG, f"trials: {list(actual - truth)[:2]}, not {list(truth - actual)[:2]}"
    return None


KILLS = Family(NAME, 200, findings)

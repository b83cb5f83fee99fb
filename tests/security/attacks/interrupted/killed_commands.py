"""Kills of what takes long besides a search, which then goes on to the same end."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

from attacks import short_runs
from attacks.interrupted.short_commands import COMMANDS, JOBS, done, started, write_jobs
from attacks.own_time import ends_within
from attacks.short_runs import NET, Setting, left, write_nets
from attacks.verdicts import Family, Finding, Verdict

_HANG = 120.0
#: Passes over the data of a job: FP32 and its trials.
_PASSES = 2


@cache
def _home(name: str, nets: Path) -> Path:
    """Return a folder with all that a command needs."""
    folder = nets / f"prepared {name}"
    folder.mkdir()
    if name == "tune-many":
        write_jobs(folder, nets / NET)
    elif name == "report":
        process = short_runs.started(nets, folder, Setting(trials=3), resume=False)
        process.join()
        (folder / "page.html").write_text("<p>an earlier page</p>")
    return folder


@cache
def _undisturbed(name: str, nets: Path) -> tuple[dict[str, Any], float]:
    """Return what comes of a command that nobody kills, and its seconds."""
    folder = nets / f"undisturbed {name}"
    shutil.copytree(_home(name, nets), folder)
    begun = time.monotonic()
    process = started(name, folder)
    assert ends_within(process, _HANG), f"{name} does not end by itself"
    outcome = _outcome(folder, process.name)
    assert outcome is not None, name
    assert outcome["end"] == "right", outcome
    return outcome, time.monotonic() - begun


def _outcome(folder: Path, mark: str) -> dict[str, Any] | None:
    file = folder / f"{mark}.json"
    return json.loads(file.read_text()) if file.exists() else None


def _stored(name: str, folder: Path) -> str:
    """Return a fault of what a killed command has left, or nothing."""
    if name == "report":
        text = (folder / "page.html").read_text("utf-8")
        whole = text == "<p>an earlier page</p>" or text.rstrip().endswith("</html>")
        return "" if whole else "the page is cut off"
    if name == "tune-many":
        for file in (folder / "out").glob("*/job.json"):
            json.loads(file.read_text())
    return ""


def _repeated(name: str, folder: Path, kills: int) -> str:
    """Return what was done more often than a kill can cut off, or nothing."""
    count = len(done(folder))
    if name == "quantization-aware training" and count > (6 + kills) * 4:
        return f"{count} steps"
    if name == "tune-many" and count > len(JOBS) * _PASSES + kills * _PASSES:
        return f"{count} evaluations"
    return ""


def _attack(name: str, nets: Path, folder: Path, dice: random.Random) -> tuple[Verdict, str]:
    expected, seconds = _undisturbed(name, nets)
    shutil.copytree(_home(name, nets), folder)
    kills = 1 + dice.randrange(2)
    for _ in range(kills):
        process = started(name, folder)
        process.join(dice.uniform(0.2, 1) * seconds)
        assert process.pid is not None
        if process.is_alive():
            os.kill(process.pid, signal.SIGKILL)
        process.join()
        behind = left(process.name, process.pid)
        fault = f"left behind: {behind}" if behind else _stored(name, folder)
        if fault:
            return Verdict.LOST, fault
    process = started(name, folder)
    if not ends_within(process, _HANG):
        process.kill()
        return Verdict.HANG, ""
    outcome = _outcome(folder, process.name)
    if outcome is None:
        return Verdict.TRACEBACK, "it ended without words"
    if outcome != expected:
        return Verdict.WRONG, f"{outcome}, not {expected}"[:1500]
    repeated = _repeated(name, folder, kills)
    return (Verdict.REPEATED, repeated) if repeated else (Verdict.RIGHT, "")


def _findings(name: str) -> Callable[[int, Path, int], Iterator[Finding]]:
    def findings(count: int, folder: Path, seed: int) -> Iterator[Finding]:
        dice, nets = random.Random(f"{seed} {name}"), folder / "nets"
        nets.mkdir()
        write_nets(nets)
        for number in range(count):
            verdict, message = _attack(name, nets, folder / f"run {number}", dice)
            yield Finding(f"kills of {name}", f"{number}", verdict, message)

    return findings


KILLED_COMMANDS = tuple(Family(f"kills of {name}", 50, _findings(name)) for name in COMMANDS)
QAT, CALIBRATION, TUNE_MANY, REPORT = KILLED_COMMANDS

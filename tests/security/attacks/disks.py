"""Disks that are full, read-only or gone: a right result, or one error before anything is computed.

Some of these need a file system of their own, which only root can have on Linux; where that cannot
be had, a limit on the size of files stands for it.
"""

from __future__ import annotations

import ctypes
import os
import random
import resource
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from attacks.own_time import ends_within
from attacks.short_runs import Noting, Setting, Trouble, outcome, passes, started, write_nets
from attacks.verdicts import Family, Finding, Verdict

from neural_mp import MixedPrecision
from neural_mp.amp import AutoMixedPrecisionOptions
from neural_mp.api.optimized_model import OptimizedModel
from neural_mp.io.measurement_cache import CACHE_FOLDER

NAME = "disks"
_HANG = 120.0
_NEW_MOUNTS = 0x00020000


def _mounted(folder: Path, options: str) -> bool:
    """Put an empty file system in memory at a place, for this process and what it starts alone."""
    folder.mkdir(exist_ok=True)
    if os.geteuid() or not hasattr(ctypes.CDLL(None), "unshare"):
        return False
    if ctypes.CDLL(None).unshare(_NEW_MOUNTS):
        return False
    private = ["mount", "--make-rprivate", "/"]
    mount = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)]
    return all(not subprocess.run(command, check=False).returncode for command in (private, mount))


def _limited(size: int) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))


@dataclass
class FullDisk(Trouble):
    """The workspace has so many bytes; or no file may be larger, if `each`."""

    size: int
    each: bool = False

    def before(self, tuner: MixedPrecision, folder: Path) -> None:
        if self.each or not _mounted(folder / "workspace", f"size={self.size}"):
            _limited(self.size)

    def over(self) -> None:
        _limited(resource.RLIM_INFINITY)


@dataclass
class ReadOnly(Trouble):
    """The workspace, or all of `place`, cannot be written."""

    place: str = ""

    def before(self, tuner: MixedPrecision, folder: Path) -> None:
        target = Path(self.place) if self.place else folder / "workspace"
        if not _mounted(target, "ro,size=64k"):
            tuner.workspace = "/proc/workspace"


class FileForFolder(Trouble):
    """The workspace is a file."""

    def before(self, tuner: MixedPrecision, folder: Path) -> None:
        (folder / "workspace").write_text("no folder")


class NoFolderForCache(Trouble):
    """What is kept for later runs has a file in its way."""

    def before(self, tuner: MixedPrecision, folder: Path) -> None:
        (folder / "workspace").mkdir()
        (folder / "workspace" / CACHE_FOLDER).write_text("no folder")


class NoTemporaryFolder(Trouble):
    """There is no folder for temporary files."""

    def before(self, tuner: MixedPrecision, folder: Path) -> None:
        tempfile.tempdir = "/nowhere"
        os.environ["TMPDIR"] = os.environ["TEMP"] = os.environ["TMP"] = "/nowhere"


class _Accident(Noting):
    """Accuracy; when the n-th pass begins, something happens to the workspace."""

    def __init__(self, folder: Path, number: int, happens: Callable[[Path], None]) -> None:
        super().__init__(folder, 0.05)
        self.about |= {"number": number, "happens": happens, "workspace": folder / "workspace"}
        self.passes = 0

    def reset(self) -> None:
        super().reset()
        self.passes += 1
        if self.passes == self.about["number"]:
            self.about["happens"](self.about["workspace"])


@dataclass
class Accident(Trouble):
    """Something happens to the workspace in the middle of a run, when the n-th pass begins."""

    happens: Callable[[Path], None]
    number: int

    def before(self, tuner: MixedPrecision, folder: Path) -> None:
        tuner.metric = _Accident(folder, self.number, self.happens)


def vanishes(workspace: Path) -> None:
    """The workspace is gone."""
    shutil.rmtree(workspace)


def is_garbage(workspace: Path) -> None:
    """The database holds something else."""
    file = workspace / "history.db"
    with file.open("r+b") as stream:
        stream.write(random.Random(0).randbytes(file.stat().st_size))


def is_replaced(workspace: Path) -> None:
    """Another file has the name of the database."""
    (workspace / "scratch").write_bytes(b"garbage" * 1000)
    (workspace / "scratch").replace(workspace / "history.db")


def is_empty(workspace: Path) -> None:
    """The database holds nothing."""
    os.truncate(workspace / "history.db", 0)


class LogFolderVanishes(Accident):
    """The folder that a log is wanted in is gone when there is something to log."""

    def __init__(self) -> None:
        super().__init__(_log_vanishes, 2)

    def before(self, tuner: MixedPrecision, folder: Path) -> None:
        super().before(tuner, folder)
        tuner.amp = AutoMixedPrecisionOptions(log_path=str(folder / "log" / "inner"))


def _log_vanishes(workspace: Path) -> None:
    shutil.rmtree(workspace.parent / "log")
    (workspace.parent / "log").write_text("no folder")


@dataclass
class OutputOnFullDisk(Trouble):
    """There is no room for the result; somewhere else there is."""

    size: int

    def after(self, result: OptimizedModel, folder: Path) -> None:
        from neural_mp.errors import NeuralMPError

        out = folder / "small"
        if not _mounted(out, f"size={self.size}"):
            _limited(self.size)
        try:
            result.save(out / "result")
        except NeuralMPError:
            assert not any(path.is_file() for path in out.rglob("*")), "it left a part behind"
        else:
            raise AssertionError("it was saved where there is no room")
        self.over()
        result.save(folder / "elsewhere")

    def over(self) -> None:
        _limited(resource.RLIM_INFINITY)


class OutputVanishes(Accident):
    """The folder for the result is gone when there is one."""

    def __init__(self) -> None:
        super().__init__(_output_vanishes, 2)

    def before(self, tuner: MixedPrecision, folder: Path) -> None:
        super().before(tuner, folder)
        (folder / "out").mkdir()

    def after(self, result: OptimizedModel, folder: Path) -> None:
        result.save(folder / "out" / "result")


def _output_vanishes(workspace: Path) -> None:
    shutil.rmtree(workspace.parent / "out")


#: What happens, and the workers of the run.
_CASES: tuple[tuple[str, Trouble, int], ...] = (
    *((f"a disk of {size} kB", FullDisk(size << 10), 0) for size in (16, 100, 160, 200, 260)),
    *((f"files of {s} kB at most", FullDisk(s << 10, True), 0) for s in (4, 100, 130, 150, 180)),
    ("a read-only workspace", ReadOnly(), 0),
    ("a file for a workspace", FileForFolder(), 0),
    ("a file for what is known", NoFolderForCache(), 0),
    *((f"pass {n}: the workspace vanishes", Accident(vanishes, n), 0) for n in (1, 2, 4)),
    *((f"pass {n}: the database is garbage", Accident(is_garbage, n), 0) for n in (1, 3)),
    ("pass 3: the database is another file", Accident(is_replaced, 3), 0),
    ("pass 2: the database is empty", Accident(is_empty, 2), 0),
    ("no /dev/shm", ReadOnly("/dev/shm"), 2),
    ("no folder for temporary files", NoTemporaryFolder(), 0),
    ("no folder for temporary files of workers", NoTemporaryFolder(), 2),
    ("the folder for logs vanishes", LogFolderVanishes(), 0),
    ("no room for the result", OutputOnFullDisk(8 << 10), 0),
    ("the folder for the result vanishes", OutputVanishes(), 0),
)


def _judged(
    actual: dict[str, Any] | None, expected: dict[str, Any], evaluated: int
) -> tuple[Verdict, str]:
    """Whether it ended right, or was refused before anything was computed."""
    if actual is None:
        return Verdict.TRACEBACK, "it ended without words"
    if actual["end"] == "right":
        same = all(actual[key] == expected[key] for key in ("best", "accuracy", "met", "trials"))
        message = "; ".join(w for w in actual["warnings"] if "written down" in w)
        return (Verdict.RIGHT, message) if same else (Verdict.WRONG, str(actual)[:1000])
    if actual["end"] == "refused" and evaluated:
        return Verdict.LOST, f"{evaluated} evaluations, then {actual['words']}"
    return Verdict(actual["end"]), actual["words"]


def findings(count: int, folder: Path, seed: int) -> Iterator[Finding]:
    """Let disks fail; a short form takes cases from all over the list."""
    nets, home = folder / "nets", folder / "undisturbed"
    nets.mkdir()
    write_nets(nets)
    order = list(_CASES)
    if count < len(order):
        random.Random(seed).shuffle(order)
    expected: dict[int, dict[str, Any]] = {}
    for index, (label, trouble, workers) in enumerate(order[:count]):
        setting = Setting("exhaustive" if workers else "basic", workers)
        if workers not in expected:
            home = folder / f"undisturbed {workers}"
            home.mkdir()
            process = started(nets, home, setting, resume=False)
            ends_within(process, _HANG)
            expected[workers] = outcome(process, home) or {}
        home = folder / f"disk {index}"
        home.mkdir()
        process = started(nets, home, setting, resume=False, trouble=trouble)
        if not ends_within(process, _HANG):
            process.kill()
            process.join()
            yield Finding(NAME, label, Verdict.HANG)
            continue
        end = _judged(outcome(process, home), expected[workers], passes(home))
        yield Finding(NAME, label, *end)


DISKS = Family(NAME, len(_CASES), findings)

"""Users without the rights of root, whose folders and files are not readable or not writable."""

from __future__ import annotations

import ctypes
import functools
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from attacks.formats.scratch import tune_in_scratch
from attacks.hostile import Attacks, command_here
from attacks.users_ways import tiny_onnx

import neural_mp
from neural_mp import ExitPolicy, MixedPrecision
from neural_mp.errors import NeuralMPError
from neural_mp.testing import digits

ORDINARY_USERS = Attacks("unprivileged users")
_VERSION = 0x20080522
#: Rights of root that are switched off: to read, write and enter everything, whoever owns it.
_RIGHTS = (1 << 1) | (1 << 2) | (1 << 3)


class _Header(ctypes.Structure):
    _fields_ = (("version", ctypes.c_uint32), ("pid", ctypes.c_int))


class _Sets(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_uint32) for name in ("effective", "permitted", "inheritable"))


@contextmanager
def _without_rights() -> Iterator[None]:
    """Make this thread respect the modes of files, as for every user but root."""
    libc = ctypes.CDLL(None, use_errno=True)
    header, original = _Header(_VERSION, 0), (_Sets * 2)()
    if os.geteuid() or libc.capget(ctypes.byref(header), original):
        yield
        return
    reduced = (_Sets * 2)(*original)
    reduced[0].effective &= ~_RIGHTS
    assert not libc.capset(ctypes.byref(header), reduced), os.strerror(ctypes.get_errno())
    try:
        yield
    finally:
        libc.capset(ctypes.byref(header), original)


#: Mode → (mode of folders, mode of files).
_MODES = {
    "read-only": (0o555, 0o444),
    "read-only files": (0o755, 0o444),
    "unreadable files": (0o755, 0o000),
    "nothing permitted": (0o000, 0o000),
    "no names listed": (0o311, 0o644),
    "not entered": (0o644, 0o644),
    "write-only": (0o300, 0o200),
}


def _converter(folder: Path) -> MixedPrecision:
    converter = MixedPrecision(workspace=folder / "workspace", precisions="int8")
    images, labels = digits()[1].images[:200], digits()[1].labels[:200]
    converter.model = _net()
    converter.metric = "accuracy"
    converter.eval_dataloader = [(images, labels)]
    converter.strategy, converter.objective = "basic", "modelsize"
    converter.cache = False
    converter.accuracy_criterion = {"absolute": 1.0, "any_tolerance": True}
    converter.exit_policy = ExitPolicy(max_trials=1)
    return converter


@functools.cache
def _net() -> Path:
    file = Path(tempfile.mkdtemp()) / "net.onnx"
    file.write_bytes(tiny_onnx().SerializeToString())
    return file


@functools.cache
def _tuned() -> Any:
    return tune_in_scratch(_converter)


@dataclass(frozen=True)
class _Use:
    """A preparation and a use of a folder.

    Attributes:
        prepare: fills the folder, with all rights.
        use: reads or writes there.
    """

    prepare: Callable[[Path], Any]
    use: Callable[[Path], Any]


def _save(folder: Path) -> None:
    _tuned().save(folder / "saved")


def _save_again(folder: Path) -> None:
    _tuned().save(folder)


def _load(folder: Path) -> None:
    outputs = neural_mp.load(folder / "saved")(digits()[1].images[:2])
    assert np.asarray(outputs).shape == (2, 10)


def _run(folder: Path) -> None:
    assert _converter(folder).fit().met


def _resume(folder: Path) -> None:
    converter = _converter(folder)
    converter.resume = True
    assert converter.fit().met


def _write_inputs(folder: Path) -> None:
    (folder / "net.onnx").write_bytes(_net().read_bytes())
    images, labels = digits()[1].images[:100], digits()[1].labels[:100]
    np.savez(folder / "data.npz", inputs=images, labels=labels)
    (folder / "conf.yaml").write_text(f"""
model: {{name: {folder}/net.onnx}}
mixed_precision: {{precisions: int8}}
evaluation:
  accuracy:
    metric: {{topk: 1}}
    dataloader: {{batch_size: 50, dataset: {{numpy: {{path: {folder}/data.npz}}}}}}
tuning: {{objective: modelsize, accuracy_criterion: {{relative: 0.4}},
  exit_policy: {{max_trials: 1}}}}
""")


def _tune(folder: Path) -> None:
    output = folder.with_name("out")
    command_here("tune", str(folder / "conf.yaml"), "--output", str(output))


def _inspect(folder: Path) -> None:
    command_here("inspect", str(folder / "net.onnx"))


def _report(folder: Path) -> None:
    page = folder.with_name("page.html")
    command_here("report", str(folder / "workspace"), "--output", str(page))
    assert page.stat().st_size > 1000


def _report_there(folder: Path) -> None:
    command_here("report", str(folder / "workspace"), "--output", str(folder / "page.html"))


def _nothing(folder: Path) -> None:
    """Leave the folder empty."""


_USES = {
    "saving into a folder": _Use(_nothing, _save),
    "saving over a result": _Use(_save_again, _save_again),
    "loading a result": _Use(_save, _load),
    "a run in a workspace": _Use(_nothing, _run),
    "a second run": _Use(_run, _run),
    "going on with a run": _Use(_run, _resume),
    "tuning by files": _Use(_write_inputs, _tune),
    "inspecting a model": _Use(_write_inputs, _inspect),
    "reporting a workspace": _Use(_run, _report),
    "a page beside a workspace": _Use(_run, _report_there),
}


def _contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def _play(folder: Path, use: _Use, modes: tuple[int, int]) -> None:
    home, cwd = folder / "home", Path.cwd()
    home.mkdir()
    use.prepare(home)
    inside = sorted(home.rglob("*"), reverse=True)
    before = _contents(home)
    originals = {path: path.stat().st_mode & 0o777 for path in [*inside, home]}
    for path in originals:
        path.chmod(modes[0] if path.is_dir() else modes[1])
    os.chdir(folder)
    refusal: NeuralMPError | None = None
    try:
        with _without_rights():
            use.use(home)
    except NeuralMPError as error:
        refusal = error
    finally:
        os.chdir(cwd)
        for path in [home, *reversed(inside)]:
            if path.exists():
                path.chmod(originals[path])
    after = _contents(home)
    lost = [str(path) for path in before if path not in after]
    assert not lost, f"files are gone: {lost}"
    if refusal is not None:
        changed = [path.name for path, content in before.items() if after[path] != content]
        assert not set(changed) - {"history.db"}, f"refused, but changed: {changed}"
        assert str(home) in str(refusal) or "home" in str(refusal), f"no path: {refusal}"
        raise refusal


for _title, _used in _USES.items():

    def _is_limited(folder: Path, canary: Path, mode: str, use: _Use = _used) -> None:
        _play(folder, use, _MODES[mode])

    ORDINARY_USERS.here(f"{_title}:", *_MODES, refused=None)(_is_limited)


FAMILY = ORDINARY_USERS.as_family()

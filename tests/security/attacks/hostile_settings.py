"""Tuning files that name code of others, and working directories with modules of attackers'."""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from attacks.hostile import Attacks

from neural_mp.api import config_objects
from neural_mp.config import load_settings

SETTINGS = Attacks()

#: What could be called that is installed; each is given what makes the canary as its options.
_DATASETS = (
    ("os:system", "{{command: 'touch {canary}'}}"),
    ("subprocess:run", "{{args: [touch, '{canary}']}}"),
    ("pathlib:Path.touch", "{{self: '{canary}'}}"),
    ("builtins:open", "{{file: '{canary}', mode: w}}"),
    ("numpy:save", "{{file: '{canary}', arr: 1}}"),
    ("yours:system", "{{command: 'touch {canary}'}}"),
    ("yours:os.system", "{{command: 'touch {canary}'}}"),
    ("yours:numpy.save", "{{file: '{canary}', arr: 1}}"),
    ("yours:__builtins__.open", "{{file: '{canary}', mode: w}}"),
    ("yours:Data.__init__.__globals__", "{{}}"),
    ("yours:Data.runs", "{{args: [touch, '{canary}']}}"),
    ("yours:shuffle", "{{x: []}}"),
    ("yours:Data.__class__", "{{}}"),
)
_YOURS = """
import os
import subprocess
from os import system
from random import shuffle
import numpy

class Data:
    runs = subprocess.run
    def __len__(self): return 1
    def __getitem__(self, index): return 0, 0
"""


@contextlib.contextmanager
def _inside(folder: Path) -> Iterator[None]:
    """Work in a folder, and forget what was imported of it."""
    cwd, paths, loaded = Path.cwd(), list(sys.path), set(sys.modules)
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(cwd)
        sys.path[:] = paths
        for name in set(sys.modules) - loaded:
            file = getattr(sys.modules[name], "__file__", None)
            if file and Path(file).is_relative_to(folder):
                del sys.modules[name]


def _touching(folder: Path, name: str, canary: Path, more: str = "") -> None:
    text = f"open({str(canary)!r}, 'w').close()\n{more}"
    (folder / name).write_text(text)


def _dataset(name: str, options: str) -> str:
    return f"quantization: {{calibration: {{dataloader: {{dataset: {{'{name}': {options}}}}}}}}}"


@SETTINGS.here("a dataset named", *_DATASETS)
def _names_a_dataset(folder: Path, canary: Path, named: tuple[str, str]) -> None:
    (folder / "yours.py").write_text(_YOURS)
    (folder / "conf.yaml").write_text(_dataset(named[0], named[1].format(canary=canary)))
    with _inside(folder):
        config_objects.build_loader(load_settings("conf.yaml"), config_objects.CALIBRATION)


@SETTINGS.here("a metric named", "os:system", "subprocess:getoutput", "yours:system")
def _names_a_metric(folder: Path, canary: Path, name: str) -> None:
    (folder / "yours.py").write_text(_YOURS)
    option = "cmd" if "getoutput" in name else "command"
    text = f"evaluation: {{accuracy: {{metric: {{'{name}': {{{option}: 'touch {canary}'}}}}}}}}"
    (folder / "conf.yaml").write_text(text)
    with _inside(folder):
        config_objects.build_metrics(load_settings("conf.yaml"))


@SETTINGS.here("a model named", "os:getcwd", "yours:os.getcwd", "tempfile:mkdtemp")
def _names_a_model(folder: Path, canary: Path, name: str) -> None:
    (folder / "yours.py").write_text(_YOURS)
    (folder / "conf.yaml").write_text(f"model: {{name: '{name}'}}")
    with _inside(folder):
        settings = load_settings("conf.yaml")
        config_objects.build_model(settings, settings.options.model)


@SETTINGS.here("what is applied to predictions, named subprocess:call")
def _names_a_transform(folder: Path, canary: Path) -> None:
    named = f"{{'subprocess:call': {{args: [touch, '{canary}']}}}}"
    text = f"evaluation: {{accuracy: {{postprocess: {{transform: {named}}}}}}}"
    (folder / "conf.yaml").write_text(text)
    with _inside(folder):
        config_objects.build_postprocess(load_settings("conf.yaml"))


@SETTINGS.here("the user's module json", refused=True)
def _names_json(folder: Path, canary: Path) -> None:
    _touching(folder, "json.py", canary)
    (folder / "conf.yaml").write_text(_dataset("json:Data", "{}"))
    with _inside(folder):
        config_objects.build_loader(load_settings("conf.yaml"), config_objects.CALIBRATION)


@SETTINGS.here("a neighbour called as a standard module", refused=False)
def _stands_beside(folder: Path, canary: Path) -> None:
    (folder / "yours.py").write_text(_YOURS)
    _touching(folder, "netrc.py", canary)
    (folder / "conf.yaml").write_text(_dataset("yours:Data", "{}"))
    sys.modules.pop("netrc", None)
    with _inside(folder):
        loader = config_objects.build_loader(load_settings("conf.yaml"), config_objects.CALIBRATION)
        assert loader is not None
        importlib.import_module("netrc")


@SETTINGS.command("modules of a working directory, while a model of the user's is inspected")
def _shadows(folder: Path, canary: Path) -> list[str]:
    for name in ("json", "random", "decimal", "tempfile", "queue", "numpy", "yaml", "rich"):
        _touching(folder, f"{name}.py", canary)
    text = "import torch\ndef net(): return torch.nn.Sequential(torch.nn.Linear(4, 2))\n"
    (folder / "yours.py").write_text(text)
    return ["inspect", "yours:net", "--input-shape", "2,4"]


@SETTINGS.command("a tuning file that names os:system, as the data of compare")
def _compares(folder: Path, canary: Path) -> list[str]:
    (folder / "conf.yaml").write_text(_dataset("os:system", f"{{command: 'touch {canary}'}}"))
    return ["compare", "a.onnx", "b.onnx", "--data", "conf.yaml"]


_YAML = {
    "a tag that calls": "model: {{name: !!python/object/apply:os.system ['touch {canary}']}}",
    "a tag of a module": "model: {{name: !!python/module:netrc ''}}",
    "a tag of a name": "model: {{name: !!python/name:os.system ''}}",
    "a tag of an object": "model: !!python/object:pathlib.Path {{}}",
    "aliases that multiply": "a: &a [x,x,x,x,x,x,x,x,x]\n"
    + "\n".join(
        f"{new}: &{new} [{', '.join([f'*{old}'] * 9)}]"
        for old, new in zip("abcdefgh", "bcdefghi", strict=True)
    ),
    "aliases that merge without end": "a: &a {{<<: *a}}",
    "deep nesting": "model: " + "[" * 30_000,
    "deep mappings": "model: " + "{{a: " * 5_000,
}


@SETTINGS.here("YAML with", *_YAML)
def _is_yaml(folder: Path, canary: Path, name: str) -> None:
    (folder / "conf.yaml").write_text(_YAML[name].format(canary=canary))
    load_settings(folder / "conf.yaml")

"""Names of files and folders that few programs expect, for all that has a name."""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from attacks.formats.scratch import tune_in_scratch
from attacks.hostile import Attacks, command_here
from attacks.user_objects import Given

import neural_mp
from neural_mp import MixedPrecision
from neural_mp.testing import digits

PATHS = Attacks("strange paths")

_NAMES = {
    "a line break": "a\nb",
    "spaces at both ends": "  a b  ",
    "bytes that are not UTF-8": os.fsdecode(b"a\xff\xfeb"),
    "letters of other scripts": "ünï 日本語 😀",
    "accents of their own": "e\u0301",
    "letters from right to left": "a\u202eb",
    "quotes": "a'b\"c`d",
    "brackets": "[red]a[b]{c}(d)",
    "a question mark": "a?b=c&d",
    "a hash": "a#b",
    "percents": "a%20b%s%(x)s%",
    "dollars": "a$HOME${x}",
    "a colon": "a:b",
    "a star": "a*b",
    "a backslash": "a\\b",
    "a dash in front": "-a",
    "a tilde in front": "~a",
    "a dot in front": ".a",
    "control characters": "a\x1b[31m\x07b",
    "a semicolon": "a;b|c>d",
    "180 letters": "x" * 180,
    "an at and a colon": "u:p@h",
}


@functools.cache
def _tuned() -> Any:
    return tune_in_scratch(_converter)


def _converter(folder: Path) -> MixedPrecision:
    converter = MixedPrecision(workspace=folder / "workspace", precisions="int8")
    Given(converter).set_up_rightly()
    converter.objective = "modelsize"
    return converter


@functools.cache
def _net() -> bytes:
    from attacks.users_ways import tiny_onnx

    data: bytes = tiny_onnx().SerializeToString()
    return data


def _data(path: Path) -> None:
    _, test = digits()
    np.savez(path, inputs=test.images[:100], labels=test.labels[:100])


_TUNING = """
model: {{name: {model}}}
mixed_precision: {{precisions: int8}}
evaluation:
  accuracy:
    metric: {{topk: 1}}
    dataloader: {{batch_size: 50, dataset: {{numpy: {{path: {data}}}}}}}
tuning: {{objective: modelsize, accuracy_criterion: {{relative: 0.4}}, workspace: {workspace},
  exit_policy: {{max_trials: 1}}}}
"""


def _quoted(path: Path) -> str:
    """Return a name as YAML; relative to its folder if YAML cannot express the name."""
    text = str(path)
    return json.dumps(
        text if text.encode("utf-8", "replace").decode() == text else path.name, ensure_ascii=False
    )


def _workspace(home: Path) -> None:
    """Tune, go on and report with a workspace of the name."""
    converter = _converter(home)
    converter.fit()
    again = _converter(home)
    again.resume = True
    again.fit()
    command_here("report", str(home / "workspace"), "--output", str(home / "page.html"))
    assert (home / "page.html").stat().st_size > 1000


def _output(home: Path) -> None:
    """Save into a folder of the name, twice, and load."""
    _tuned().save(home / "saved")
    _tuned().save(home / "saved")
    batch = digits()[1].images[:2]
    assert neural_mp.load(home / "saved")(batch).shape == (2, 10)
    command_here("report", str(home / "saved"), "--output", str(home / "page.html"))


def _model(home: Path) -> None:
    """Inspect a model of the name."""
    (home / "net.onnx").write_bytes(_net())
    command_here("inspect", str(home / "net.onnx"))


def _tuning_file(home: Path) -> None:
    """Tune by a file that names all of the rest."""
    (home / "net.onnx").write_bytes(_net())
    _data(home / "data.npz")
    names = {"model": home / "net.onnx", "data": home / "data.npz", "workspace": home / "ws"}
    text = _TUNING.format(**{key: _quoted(path) for key, path in names.items()})
    (home / "conf.yaml").write_text(text, "utf-8")
    os.chdir(home)
    command_here("tune", str(home / "conf.yaml"), "--output", str(home / "out"))
    assert (home / "out").exists()


def _at(use: Callable[[Path], None]) -> Callable[[Path, Path, str], None]:
    def play(folder: Path, canary: Path, name: str) -> None:
        before = {path.name for path in folder.parent.iterdir()}
        home = folder / _NAMES[name]
        home.mkdir()
        cwd = Path.cwd()
        os.chdir(folder)  # where files would lie that were named wrongly
        try:
            use(home)
        finally:
            os.chdir(cwd)
        assert {path.name for path in folder.iterdir()} == {home.name}, list(folder.iterdir())
        assert {path.name for path in folder.parent.iterdir()} == before

    return play


for _title, _use in {
    "a workspace": _workspace,
    "a result": _output,
    "a model": _model,
    "a tuning file": _tuning_file,
}.items():
    PATHS.here(f"{_title} in a folder whose name has", *_NAMES, refused=False)(_at(_use))

_LONG = {"255 letters": "x" * 255, "256 letters": "x" * 256, "5,000 letters": "x" * 5000}
_LONG |= {"NUL": "a\0b", "too many folders": "a/" * 3000}


@PATHS.here("a workspace whose name has", *_LONG, refused=None)
def _is_long_workspace(folder: Path, canary: Path, name: str) -> None:
    converter = _converter(folder)
    converter.workspace = folder / _LONG[name]
    converter.fit()


@PATHS.here("a result whose name has", *_LONG, refused=None)
def _is_long_result(folder: Path, canary: Path, name: str) -> None:
    _tuned().save(folder / _LONG[name])


@PATHS.here("a model whose name has", *_LONG)
def _is_long_model(folder: Path, canary: Path, name: str) -> None:
    command_here("inspect", str(folder / f"{_LONG[name]}.onnx"))


@PATHS.here("a page whose name has", *_LONG, refused=None)
def _is_long_page(folder: Path, canary: Path, name: str) -> None:
    _tuned().save(folder / "saved")
    command_here("report", str(folder / "saved"), "--output", str(folder / _LONG[name]))


FAMILY = PATHS.as_family()

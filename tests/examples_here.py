"""Examples and their commands, run in this process: frameworks are imported only once."""

from __future__ import annotations

import io
import os
import re
import runpy
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from unittest import mock

import pytest
from command_here import run_main
from quick_runs import give_nominal_times, search_briefly, trace_once

EXAMPLES = Path(__file__).parent.parent / "examples"
#: Module → its number of epochs, and how many are enough to learn what an example is about.
_BRIEFER = {
    "pytorch_digits/digits.py": ("epochs: int = 8", "epochs: int = 3"),
    "tensorflow_digits/digits.py": ("epochs=8", "epochs=3"),
    "litert_digits/digits.py": ("epochs=8", "epochs=3"),
    "onnx_digits/digits.py": ("range(6)", "range(3)"),
    "huggingface_text/docstrings.py": ("epochs: int = 6", "epochs: int = 4"),
    "tune_lists/net.py": ("epochs=8", "epochs=1"),
}


def copied_to(folder: Path) -> Path:
    """A copy of the examples without results of earlier runs, whose nets are trained briefly."""
    ignored = shutil.ignore_patterns("out", "__pycache__")
    copies = Path(shutil.copytree(EXAMPLES, folder / "examples", ignore=ignored))
    for name, (written, briefer) in _BRIEFER.items():
        text = (copies / name).read_text("utf-8")
        assert text.count(written) == 1, name
        (copies / name).write_text(text.replace(written, briefer), "utf-8")
    return copies


def run_script(file: Path) -> str:
    """Run `python FILE` in the folder of the file; return the standard output."""
    printed = io.TextIOWrapper(io.BytesIO(), "utf-8", write_through=True)
    with _fresh(file.parent), mock.patch("sys.argv", [file.name]), redirect_stdout(printed):
        runpy.run_path(str(file), run_name="__main__")
    return printed.detach().getvalue().decode()


def run_command(folder: Path, *arguments: str) -> str:
    """Run `neural-mp` in a folder; return the standard output of a successful command."""
    with _fresh(folder):
        code, out, err = run_main(*arguments)
    assert code == 0, err
    return out


def run_process(folder: Path, *command: str | Path) -> str:
    """Run a command in a process of its own; return the standard output."""
    done = subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True)
    return done.stdout


@contextmanager
def _fresh(folder: Path) -> Iterator[None]:
    """The state of a new process as far as an example can see; undone at the end."""
    if "keras" in sys.modules:
        # Layers are numbered from the start again; garbage is not collected.
        sys.modules["keras"].utils.clear_session(free_memory=False)
    modules = set(sys.modules)
    with pytest.MonkeyPatch.context() as patch, mock.patch.dict(os.environ):
        give_nominal_times(patch)
        search_briefly(patch)
        trace_once(patch)
        patch.chdir(folder)
        patch.setattr(sys, "path", [str(folder), *sys.path])
        yield
    for name in set(sys.modules) - modules:  # several examples have a module `digits`
        file = getattr(sys.modules[name], "__file__", None) or ""
        if file.startswith(str(folder.parent)):
            del sys.modules[name]


def without_figures(output: str) -> list[str]:
    """Return printed lines without the figures, lists and plans that differ between machines."""
    return re.sub(r"PrecisionPlan\(.*?\)|\[.*?\]|[\d.]+", "…", output).splitlines()

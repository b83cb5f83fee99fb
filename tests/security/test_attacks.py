"""Attacks end in a right result or in one error: a part of them, and all of them in full."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ATTACK, SOAK = (Path(__file__).with_name(name) for name in ("attack.py", "soak.py"))
ROOT = Path(__file__).parents[2]
#: Arguments of the short form, some 100 CPU seconds.
SHORT = (
    "--scale",
    "0.0004",
    "--whole",
    "hostile files",
    "--count",
    "ONNX files=20",
    "tokenizers=20",
)


def attack(folder: Path, *arguments: str) -> str:
    """Return what `attack.py` prints, after all attacks ended without harm."""
    # The attacks need what `.[all]` installs, and pytest is no part of that.
    (folder / "without").mkdir()
    (folder / "without" / "pytest.py").write_text("raise ImportError('not installed')")
    paths = os.pathsep.join([str(folder / "without"), str(ROOT), os.environ["PYTHONPATH"]])
    done = subprocess.run(
        [sys.executable, str(ATTACK), *arguments],
        cwd=folder,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": paths, "COLUMNS": "80"},
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


@pytest.mark.slow
def test_attacks_end_in_a_right_result_or_in_one_error(tmp_path):
    """Every hostile file, and some of all other attacks."""
    printed = attack(tmp_path, *SHORT)
    (heading,) = [line for line in printed.splitlines() if "family" in line]
    for column in ("attacks", "right", "refused", "harmful", "seconds"):
        assert column in heading


@pytest.mark.slow
def test_models_are_served_while_others_are_tuned_and_calls_interrupted(tmp_path):
    """A short form; the memory settles later."""
    command = [sys.executable, "-W", "ignore", SOAK, "--seconds", "8", "--growth", "1000"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "failures" in done.stdout


@pytest.mark.full
def test_all_attacks_end_in_a_right_result_or_in_one_error(tmp_path):
    attack(tmp_path)

"""A test whose process crashes fails by its name, and the run goes on to its end."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("xdist")

FILE = """
import os, signal, pytest

@pytest.mark.parametrize("case", range({count}))
def test(case):
    if case == {killed}:
        os.kill(os.getpid(), signal.SIGKILL)
"""
FILES, COUNT = 24, 3
PLAIN = {"PYTHONPATH": str(Path(__file__).parent), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
OPTIONS = "-p xdist -p file_scheduler -n 2 --dist loadfile -p no:cacheprovider"


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="needs SIGKILL")
@pytest.mark.parametrize(("place", "killed"), [(FILES // 2, 0), (FILES - 1, COUNT - 1)])
def test_a_crash_fails_one_test_by_its_name_and_all_others_run(tmp_path, place, killed):
    for number in range(FILES):
        content = FILE.format(count=COUNT, killed=killed if number == place else -1)
        (tmp_path / f"test_{number:02}.py").write_text(content)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    done = subprocess.run(
        [sys.executable, "-m", "pytest"],
        cwd=tmp_path,
        env={**os.environ, **PLAIN, "PYTEST_ADDOPTS": OPTIONS},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert re.search(rf"crashed while running 'test_{place:02}.py::test\[{killed}\]'", done.stdout)
    assert f"1 failed, {FILES * COUNT - 1} passed" in done.stdout

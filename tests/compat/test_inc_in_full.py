"""Programs that compare with the files, scripts, values and tests of Intel Neural Compressor.

`INC_REPOSITORY` is the folder of a git clone with all tags; `INC_PACKAGES` one of further packages
of its scripts (`fire`, `scikit-image`). Without packages that versions 1 needs, e.g. torchvision,
rows of values are reported as not compared.
"""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

FOLDER, ROOT = Path(__file__).parent, Path(__file__).parents[2]
CLONE = os.environ.get("INC_REPOSITORY", "")
PACKAGES = os.environ.get("INC_PACKAGES", "")
pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(not CLONE, reason="INC_REPOSITORY names no clone"),
]


def run(program: str, *arguments: str) -> str:
    """Return what a program prints; it must end without an error."""
    done = subprocess.run(
        [sys.executable, str(FOLDER / program), *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ['PYTHONPATH']}"},
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


def first_numbers(pattern: str, printed: str) -> list[int]:
    match = re.search(pattern, printed)
    assert match, printed
    return [int(number) for number in match.groups()]


@pytest.fixture(scope="module")
def version_1(tmp_path_factory) -> str:
    """A folder with the files of version 1.14."""
    folder = tmp_path_factory.mktemp("version_1")
    command = ["git", "-C", CLONE, "archive", "v1.14", "neural_compressor", "examples"]
    content = subprocess.run(command, capture_output=True, check=True).stdout
    with tarfile.open(fileobj=io.BytesIO(content)) as packed:
        packed.extractall(folder, filter="data")
    return str(folder)


@pytest.mark.parametrize("program", ["inc_values.py", "inc_metric_values.py"])
def test_values_are_those_of_its_own_code(program, version_1):
    printed = run(program, "--repository", version_1)
    if program == "inc_values.py":  # in an environment of another time, nothing is compared
        assert any(int(count) for count in re.findall(r"(\d+) of \d+", printed)), printed


def test_all_tuning_files_for_a_framework_that_is_supported_are_usable(version_1):
    printed = run("inc_files.py", "v1.14", "--repository", version_1)
    files, usable, refused = first_numbers(r"│ all +│ +(\d+) │ +(\d+) │ +(\d+) │", printed)
    assert files == usable + refused
    of_other_frameworks = first_numbers(r"framework mxnet +│ +(\d+)", printed)
    of_other_frameworks += first_numbers(r"framework engine +│ +(\d+)", printed)
    assert refused == sum(of_other_frameworks)


def test_scripts_find_what_they_name(version_1):
    passed, total = first_numbers(
        r"(\d+) of (\d+) scripts pass", run("inc_scripts.py", "--repository", version_1)
    )
    assert total == 148
    assert passed >= 109  # the others prune, distill, or are for other frameworks
    printed = run("inc_imports.py", "--repository", CLONE, "--tag", "v3.9")
    assert first_numbers(r"scripts: (\d+)", printed) == [80]
    assert first_numbers(r"find all names: (\d+)", printed) == [72]  # the others are for JAX


@pytest.mark.parametrize(("options", "failures"), [((), 2), (("--files",), 0)])
def test_scripts_reach_their_end_and_print_their_lines(options, failures):
    packages = ("--packages", PACKAGES) if PACKAGES else ()
    printed = run("inc_run.py", "--repository", CLONE, *options, *packages)
    pattern = r"(\d+) of (\d+) reached their end, (\d+) printed all lines"
    _, total, complete = first_numbers(pattern, printed)
    assert total - complete <= failures + (0 if PACKAGES or options else 2)


def test_unit_tests_pass():
    passed, _ = first_numbers(
        r"(\d+) of (\d+) passed", run("inc_unit_tests.py", "--repository", CLONE)
    )
    assert passed >= 123

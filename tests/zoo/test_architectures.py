"""A slice of the zoo of architectures: caches of two kinds, and a net without attention.

`python benchmarks/architectures.py` runs all of them.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from zoo.harness import MIN_INT8_SQNR_DB

ROOT = Path(__file__).parents[2]
NAMES = ("bart", "fnet", "mamba")


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    folder = tmp_path_factory.mktemp("architectures")
    results, page = folder / "results.jsonl", folder / "page.md"
    program = ROOT / "benchmarks" / "architectures.py"
    options = ["--sources", "transformers", "--results", results, "--page", page]
    done = subprocess.run(
        [sys.executable, program, *options, "--only", *NAMES],
        cwd=folder,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"},
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    rows = [json.loads(line) for line in results.read_text().splitlines()]
    for row in rows:
        assert f"| {row['name']} |" in page.read_text()
    return {row["name"]: row for row in rows}


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_an_architecture_converts_and_reloads(rows, name):
    row = rows[name]
    assert row["precisions"]["int8"] > 0
    assert row["sqnr_db"] >= MIN_INT8_SQNR_DB
    assert not row["unlike"]
    assert row["reload"] == "equal"

"""A slice of the zoo of architectures, and all of them in full.

The slice has caches of two kinds, and a net without attention.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from zoo.harness import MIN_INT8_SQNR_DB
from zoo.zoo_cases.page import page_of, verdict

ROOT = Path(__file__).parents[2]
NAMES = ("bart", "fnet", "mamba")


def run_program(folder, *options):
    """Return the rows that the program writes, and its page."""
    results, page = folder / "results.jsonl", folder / "page.md"
    program = Path(__file__).with_name("all_architectures.py")
    done = subprocess.run(
        [sys.executable, program, "--results", results, "--page", page, *options],
        cwd=folder,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"},
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    rows = [json.loads(line) for line in results.read_text().splitlines()]
    return rows, page.read_text()


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    folder = tmp_path_factory.mktemp("architectures")
    rows, page = run_program(folder, "--sources", "transformers", "--only", *NAMES)
    for row in rows:
        assert f"| {row['name']} |" in page
    return {row["name"]: row for row in rows}


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_an_architecture_converts_and_reloads(rows, name):
    row = rows[name]
    assert row["precisions"]["int8"] > 0
    assert row["sqnr_db"] >= MIN_INT8_SQNR_DB
    assert not row["unlike"]
    assert row["reload"] == "equal"


def test_the_page_names_no_folder_of_a_machine():
    reason = "ValueError: no Model in 'net' from '/folder/lib/site-packages/net/__init__.py'"
    page = page_of([{"source": "transformers", "name": "net", "not_built": reason}])
    assert "from 'net/" in page
    assert "/folder" not in page


@pytest.mark.full
def test_every_architecture_converts_or_is_refused_in_one_error(tmp_path):
    rows, _ = run_program(tmp_path)
    assert rows
    assert [row for row in rows if verdict(row) in ("crashed", "unlike", "not equal")] == []

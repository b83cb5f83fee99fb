"""Names of a hostile model in a CSV: no cell is run by a spreadsheet program, numbers stay."""

from __future__ import annotations

import csv
import io
import re

import numpy as np
import onnx
import pytest
from command_here import run_main
from onnx_nets import graph, op

from neural_mp.util.text import write_table

FORMULAS = (
    '=HYPERLINK("http://x")',
    "+1+1",
    "-2+cmd|' /C calc'!A0",
    "@SUM(A1)",
    "\t=1+1",
    "\r=1+1",
    "\n=1+1",
    "＝1+1",
)


def written(rows, **options) -> str:
    text = io.StringIO()
    write_table(text, rows, **options)
    return text.getvalue()


@pytest.mark.parametrize("formula", FORMULAS)
def test_a_formula_becomes_a_text(formula):
    ((name, number),) = csv.reader(io.StringIO(written([(formula, 1.5)]), newline=""))
    assert (name, number) == (f"'{formula}", "1.5")


def test_numbers_and_ordinary_names_stay_as_they_are():
    rows = [("name", "a-b=c@d+e"), (-1.5, -2), (float("-inf"), np.float32(-3.5)), (None, "")]
    assert written(rows) == "name,a-b=c@d+e\n-1.5,-2\n-inf,-3.5\n,\n"


@pytest.mark.parametrize("delimiter", [";", "\t", ",", "|"])
def test_no_other_separator_reveals_a_formula(delimiter):
    """Spreadsheet programs in many languages split at semicolons."""
    text = written([(f"x{delimiter}=1+1", "Conv", -1.0)])
    cells = next(csv.reader(io.StringIO(text), delimiter=delimiter))
    assert not [cell for cell in cells if cell.startswith("=")]


@pytest.fixture
def hostile_file(tmp_path, monkeypatch):
    """A model whose ops have names that are formulas."""
    draw = np.random.default_rng(0)
    weights = {name: draw.normal(size=(8, 8)).astype(np.float32) for name in ("w", "v")}
    nodes = [op("MatMul", "x w", "a"), op("Relu", "a", "b"), op("MatMul", "b v", "y")]
    model = graph(nodes, {"x": ["batch", 8]}, ["y"], weights)
    for node, name in zip(
        model.graph.node, ("=1+1", "@SUM(A1)", "-1+cmd|'/C calc'!A0"), strict=True
    ):
        node.name = name
    onnx.save(model, tmp_path / "net.onnx")
    monkeypatch.chdir(tmp_path)
    return "net.onnx"


@pytest.mark.usefixtures("quick_runs")
@pytest.mark.parametrize("command", ["compare net.onnx net.onnx", "sensitivity net.onnx"])
def test_commands_print_no_cell_that_runs(hostile_file, command):
    code, out, err = run_main(*command.split(), "--input-shape", "4,8", "--csv")
    assert code == 0, err
    _, *rows = csv.reader(io.StringIO(out))
    assert len(rows) >= 2
    cells = [cell for row in rows for cell in row]
    assert any(cell.startswith("'=1+1") for cell in cells)
    dangerous = [cell for cell in cells if re.match(r"[=+@-]", cell)]
    assert all(np.isfinite(float(cell)) for cell in dangerous)  # negative numbers
    assert any(re.fullmatch(r"-?\d+\.\d+(e-?\d+)?", cell) for cell in cells)

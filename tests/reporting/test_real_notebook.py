"""Notebooks in a real kernel, if Jupyter's packages are installed."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from examples_here import without_figures

pytest.importorskip("ipykernel")
nbformat = pytest.importorskip("nbformat")
nbclient = pytest.importorskip("nbclient")

CELLS = (
    """
import torch
from torch import nn
from neural_mp import MixedPrecision
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 4)).eval()
x = torch.randn(64, 16)
batches = x.split(16)
converter = MixedPrecision(model=net, precisions="int8", metric="topk", cache=False)
converter.eval_dataloader = [(batch, net(batch).argmax(1)) for batch in batches]
""",
    "result = converter()",
    "result.trials",
)


NOTEBOOKS = sorted((Path(__file__).parents[2] / "examples" / "notebooks").glob("*.ipynb"))


@pytest.fixture
def run(tmp_path, monkeypatch):
    """A function that executes a notebook in a folder of its own."""
    kernel = tmp_path / "kernels" / "python3"
    kernel.mkdir(parents=True)
    command = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    text = json.dumps({"argv": command, "display_name": "Python", "language": "python"})
    (kernel / "kernel.json").write_text(text)
    monkeypatch.setenv("JUPYTER_PATH", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    return lambda book: nbclient.NotebookClient(book, timeout=600, kernel_name="python3").execute()


@pytest.mark.slow
def test_a_run_has_one_output_that_is_updated_and_trials_are_a_table(run):
    book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in CELLS])
    run(book)
    (shown,) = book.cells[1].outputs
    assert shown.output_type == "display_data"
    assert "trial" in shown.data["text/html"]
    (table,) = book.cells[2].outputs
    assert "outcome" in table.data["text/html"]


def printed(book):
    """Printed lines of all cells, without figures."""
    outputs = [output for cell in book.cells for output in cell.get("outputs", ())]
    text = "".join(output.text for output in outputs if output.get("name") == "stdout")
    return without_figures(text)


@pytest.mark.slow
@pytest.mark.parametrize("file", NOTEBOOKS, ids=lambda file: file.stem)
def test_a_notebook_of_the_gallery_runs_and_prints_what_is_stored(file, run):
    stored = nbformat.read(file, as_version=4)
    nbformat.validate(stored)
    book = nbformat.read(file, as_version=4)
    run(book)
    assert printed(stored)
    assert printed(book) == printed(stored)
    shown = book.cells[-1].outputs[-1]
    assert shown.output_type == "execute_result"
    assert "target" in shown.data["text/html"]

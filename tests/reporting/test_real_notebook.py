"""A run in the kernel of a real notebook, if Jupyter's packages are installed."""

from __future__ import annotations

import json
import sys

import pytest

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


@pytest.mark.slow
def test_a_run_has_one_output_that_is_updated_and_trials_are_a_table(tmp_path, monkeypatch):
    kernel = tmp_path / "kernels" / "python3"
    kernel.mkdir(parents=True)
    command = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    text = json.dumps({"argv": command, "display_name": "Python", "language": "python"})
    (kernel / "kernel.json").write_text(text)
    monkeypatch.setenv("JUPYTER_PATH", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in CELLS])
    nbclient.NotebookClient(book, timeout=300, kernel_name="python3").execute()
    (shown,) = book.cells[1].outputs
    assert shown.output_type == "display_data"
    assert "trial" in shown.data["text/html"]
    (table,) = book.cells[2].outputs
    assert "outcome" in table.data["text/html"]

"""Progress in the output of a notebook's cell."""

import sys
import types

import numpy as np
import pytest

from neural_mp import ExitPolicy, MixedPrecision, compare
from neural_mp.reporting import NotebookListener, is_notebook, live


@pytest.fixture
def cell(monkeypatch):
    """What the output of the cell held, one picture after the other."""
    pictures = []

    class Handle:
        def update(self, html):
            pictures.append(html)

    def display(html, display_id):
        assert display_id
        pictures.append(html)
        return Handle()

    module = types.ModuleType("IPython.display")
    module.HTML, module.display = str, display
    package = types.ModuleType("IPython")
    package.display, package.get_ipython = module, object
    monkeypatch.setitem(sys.modules, "IPython", package)
    monkeypatch.setitem(sys.modules, "IPython.display", module)
    monkeypatch.setitem(sys.modules, "ipykernel", types.ModuleType("ipykernel"))
    monkeypatch.setattr(live, "_BETWEEN", 0.0)
    return pictures


def test_a_script_is_no_notebook():
    assert not is_notebook()


@pytest.mark.slow
def test_a_run_in_a_notebook_shows_its_progress_in_one_place(
    cell, quick_runs, net, digits, accuracy, tmp_path, capfd
):
    MixedPrecision(
        model=net,
        precisions="int8",
        metric=accuracy,
        eval_dataloader=digits[1].loader(),
        workspace=tmp_path,
    )()
    assert any("Loading the model" in picture for picture in cell)
    assert any("Calibrating" in picture for picture in cell)
    assert "met" in cell[-1]
    assert "FP32" in cell[-1]
    assert capfd.readouterr().err == ""


def test_what_is_shown_cannot_break_out_of_its_place(cell):
    listener = NotebookListener()
    listener.phase("<script>alert(1)</script>")
    assert "<script" not in "".join(cell)


@pytest.mark.slow
def test_audit_comparison_and_sensitivity_are_shown_as_tables(net, digits, quick_runs, tmp_path):
    converter = MixedPrecision(model=net, precisions="int8", workspace=tmp_path)
    converter.calib_dataloader = digits[1].loader()
    converter.exit_policy = ExitPolicy(performance_only=True)
    result = converter()
    images = digits[1].images[:8].astype(np.float32)
    for shown, words in (
        (result.audit(), "as planned"),
        (compare(net, result, [images]), "SQNR"),
        (result.sensitivity(), "quantization noise"),
    ):
        html = shown._repr_html_()
        assert html.startswith("<pre>")
        assert words in html

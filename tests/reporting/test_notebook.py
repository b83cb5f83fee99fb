"""Progress in the output of a notebook's cell."""

import pickle
import sys
import types

import numpy as np
import pytest

from neural_mp import ExitPolicy, MixedPrecision, PrecisionPlan, compare
from neural_mp.core.precision import FP32, OpConfig, Precision
from neural_mp.core.trial import Outcome, Trial, Trials
from neural_mp.errors import MissingFrameworkError
from neural_mp.reporting import LiveListener, NotebookListener, console, is_notebook
from neural_mp.reporting.jobs import LiveJobs
from neural_mp.runs.report import Report
from neural_mp.tuning.job_outcome import JobOutcome, JobStatus


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
    monkeypatch.setattr(console, "_BETWEEN", 0.0)
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


@pytest.mark.parametrize("listener", [NotebookListener, LiveListener])
def test_trials_are_shown_in_one_place_and_not_one_by_one(cell, monkeypatch, listener):
    """`display` without an identifier, as rich prints in a notebook, would be an error here."""
    monkeypatch.setattr("rich.console._is_jupyter", lambda: True)
    observer = listener()
    observer.baseline(0.9, 0.89)
    for number in range(3):
        observer.trial(Trial(PrecisionPlan({}), Outcome.MET, 0.9, number=number), 1.5)
    observer.close()
    observer.result(Report(), None)
    assert "0.89" in cell[-1]
    assert cell[-1].count("1.50×") == 3


def test_jobs_are_shown_in_one_place(cell, monkeypatch):
    monkeypatch.setattr("rich.console._is_jupyter", lambda: True)
    jobs = LiveJobs()
    jobs.began(2)
    jobs.report("first", "Calibrating")
    assert "Calibrating" in cell[-1]
    for name in ("first", "second"):
        jobs.ended(JobOutcome(name, "", "", JobStatus.MET))
    jobs.close()
    assert "first: met its target" in cell[-1]
    assert "2 of 2 jobs ended" in cell[-1]
    assert "Calibrating" not in cell[-1]


TRIALS = Trials(
    (
        Trial(
            PrecisionPlan({"a": OpConfig(Precision.INT8), "b": FP32}),
            Outcome.MET,
            0.97,
            0.01,
            {"relative_latency": 0.5, "relative_latency_low": 0.4, "relative_latency_high": 0.625},
            2.0,
        ),
        Trial(PrecisionPlan({"a": FP32}), Outcome.FAILED, error="no memory", number=1),
    )
)


def test_trials_are_a_tuple_shown_as_a_table():
    html = TRIALS._repr_html_()
    assert "2.00× (1.60 to 2.50)" in html
    assert "no memory" in html
    assert tuple(TRIALS) == TRIALS
    assert pickle.loads(pickle.dumps(TRIALS)) == TRIALS


def test_trials_and_plans_become_data_frames():
    pandas = pytest.importorskip("pandas")
    frame = TRIALS.to_dataframe()
    assert frame.index.name == "trial"
    assert list(frame.index) == [1, 2]
    first, second = frame.loc[1], frame.loc[2]
    assert (first["outcome"], first["speedup"], first["int8 ops"]) == ("met", 2.0, 1)
    assert (first["speedup_low"], first["speedup_high"]) == (1.6, 2.5)
    assert second["error"] == "no memory"
    assert pandas.isna(second["accuracy"])
    plan = TRIALS[0].plan.to_dataframe()
    assert plan["precision"].to_dict() == {"a": "int8", "b": "fp32"}
    assert Trials().to_dataframe().empty


def test_without_pandas_an_error_names_the_command_that_installs_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "pandas", None)
    for value in (TRIALS, TRIALS[0].plan):
        with pytest.raises(MissingFrameworkError, match=r"requires pandas: pip install .*pandas"):
            value.to_dataframe()


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
    for shown, text in (
        (result.audit(), "as planned"),
        (compare(net, result, [images]), "SQNR"),
        (result.sensitivity(), "quantization noise"),
    ):
        html = shown._repr_html_()
        assert html.startswith("<pre>")
        assert text in html

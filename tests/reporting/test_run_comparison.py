"""Two runs on one page."""

from dataclasses import replace

import page_records
import pytest
from test_page import HOSTILE, Reader

from neural_mp.core.plan import PrecisionPlan
from neural_mp.core.precision import FP32
from neural_mp.reporting.page import build_comparison_page
from neural_mp.runs.report import Setting


@pytest.fixture(scope="module")
def run():
    return page_records.record(page_records.chain(30))


def changed(run):
    """The same run with one op less in INT8 and another strategy."""
    plan = PrecisionPlan({**run.ending.plan, "op0": FP32})
    settings = {**run.setup.settings, "strategy": Setting("tpe", "Python")}
    return replace(
        run,
        name="tuning-0009",
        setup=replace(run.setup, settings=settings),
        ending=replace(run.ending, plan=plan),
    )


def test_the_page_shows_both_results_and_in_what_the_runs_differ(run):
    page = build_comparison_page(run, changed(run))
    reader = Reader(page)
    assert reader.texts["h2"] == [
        run.name.rpartition("/")[2],
        "tuning-0009",
        "Figures",
        "Differences",
        "Ops",
    ]
    cells = reader.texts["td"]
    assert "tpe" in cells
    assert not [tag for tag, _ in reader.elements if tag == "script"]
    assert "op0" in reader.texts["code"]
    assert "op3" not in reader.texts["code"]  # INT8 in both
    assert {"INT8", "FP32"} <= set(reader.texts["span"])


def test_a_run_compared_with_itself_differs_in_nothing(run):
    reader = Reader(build_comparison_page(run, run))
    assert "Settings, machine and versions are the same." in reader.texts["p"]
    assert any(text.startswith("0 of 30 common ops") for text in reader.texts["p"])
    assert reader.texts["h2"][:2] == ["Net (first)", "Net (second)"]


def test_killed_runs_and_models_without_common_ops_have_a_page(run):
    killed = page_records.killed(page_records.transformer(45))
    for pair in ((run, killed), (killed, run), (killed, killed)):
        assert Reader(build_comparison_page(*pair)).texts["h1"]
    assert "The models have no op with the same name." in build_comparison_page(run, killed)


def test_no_name_breaks_out_of_the_page(run):
    graph = page_records.chain(3 * len(HOSTILE), named=lambda i: f"{HOSTILE[i % len(HOSTILE)]}{i}")
    hostile = page_records.record(graph)
    reader = Reader(build_comparison_page(hostile, replace(hostile, ending=None)))
    assert not [tag for tag, _ in reader.elements if tag in ("script", "img", "b", "i")]

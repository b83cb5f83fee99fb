"""The browser view in a real Chromium: search, comparison, a running run, edits and replays."""

from __future__ import annotations

import re
import shutil
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from served_runs import LAYERS, serve_workspace

from neural_mp import MixedPrecision
from neural_mp.core.precision import Precision
from neural_mp.ui.workspace import Workspace

playwright = pytest.importorskip("playwright.sync_api", reason="Playwright is not installed")
expect = playwright.expect

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "chrome"))), None)
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(BROWSER is None, reason="there is no Chromium here"),
]
VIEWS = [(width, scheme) for width in (1400, 390) for scheme in ("light", "dark")]
#: Milliseconds for a replay, or a run, on a busy machine.
PATIENCE = 600_000


@pytest.fixture(scope="module")
def address(served_folder) -> Iterator[str]:
    with serve_workspace(served_folder) as url:
        yield url


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture(params=VIEWS, ids=lambda view: f"{view[0]} {view[1]}")
def page(request, chromium, address) -> Iterator[Any]:
    """The list of runs; no page has an error, a request elsewhere, or scrolls sideways."""
    width, scheme = request.param
    context = chromium.new_context(
        viewport={"width": width, "height": 900}, color_scheme=scheme, accept_downloads=True
    )
    context.set_default_timeout(PATIENCE)
    page, problems, origin = context.new_page(), [], address.partition("/?")[0]
    page.on("console", lambda message: problems.append(message.text))
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("requestfailed", lambda failed: problems.append(str(failed.failure)))
    page.on(
        "request", lambda sent: sent.url.startswith((origin, "blob:")) or problems.append(sent.url)
    )
    page.on("load", lambda shown: shown.evaluate(WIDTH) <= width or problems.append(shown.url))
    page.goto(address)
    yield page
    context.close()
    # A page that is left ends its requests.
    assert [problem for problem in problems if problem != "net::ERR_ABORTED"] == []


WIDTH = "document.documentElement.scrollWidth"


@pytest.fixture
def workspace(served_folder) -> Workspace:
    return Workspace(served_folder / "neural_mp_workspace")


def points(page) -> Any:
    """The trials of the chart that this width shows."""
    return page.locator("[data-trial]:visible")


def test_a_search_shows_the_runs_with_all_of_its_words(page):
    rows = page.locator("#runs tbody tr:visible")
    everything = rows.count()
    assert everything >= 3
    page.get_by_label("Search runs").fill("tuning-0002 DIGITS")
    expect(rows).to_have_count(1)
    expect(page.locator("#shown")).to_have_text(f"1 of {everything} runs")
    page.get_by_label("Search runs").fill("no such run")
    expect(rows).to_have_count(0)
    page.get_by_label("Search runs").fill("")
    expect(rows).to_have_count(everything)


def test_two_selected_runs_are_compared(page):
    compare = page.get_by_role("button", name="Compare two")
    expect(compare).to_be_disabled()
    for number in ("tuning-0001", "tuning-0003"):
        page.locator("#runs tr", has_text=number).get_by_role("checkbox").check()
    compare.click()
    expect(page.get_by_role("heading", level=1)).to_contain_text("tuning-0003")
    expect(page.get_by_role("heading", name="Differences")).to_be_visible()
    expect(page.get_by_role("cell", name="random")).to_be_visible()  # a strategy
    page.get_by_role("link", name="All runs").click()
    expect(page.get_by_role("heading", name="Runs")).to_be_visible()


def test_the_page_of_a_run_follows_its_trials_until_its_end(page, served_folder, workspace):
    may_go_on, calls = threading.Semaphore(0), []

    def evaluate(model) -> float:
        calls.append(model)
        if len(calls) > 1:  # FP32 is evaluated at once
            may_go_on.acquire(timeout=600)
        return 0.9

    converter = MixedPrecision(
        model=str(served_folder / "digits.onnx"),
        eval_func=evaluate,
        workspace=workspace.folder,
        strategy="random",
        precisions="int8",
        approach="dynamic",  # without calibration
        objective="modelsize",
        exit_policy={"max_trials": 2},
    )
    running = threading.Thread(target=converter, daemon=True)
    running.start()
    try:
        # The list is reloaded when the run begins.
        row = page.locator("#runs tr", has_text="Running")
        expect(row).to_have_count(1, timeout=PATIENCE)
        row.get_by_role("link").click()
        badge = page.locator(".live")
        expect(badge).to_contain_text("running, 0 trials")
        expect(points(page)).to_have_count(0)
        may_go_on.release()
        expect(badge).to_contain_text("running, 1 trial;", timeout=PATIENCE)
        expect(points(page)).to_have_count(1)
    finally:
        may_go_on.release(9)
        running.join(600)
    expect(page.locator(".verdict .big")).to_have_text("Target met", timeout=PATIENCE)
    expect(badge).to_have_count(0)


def find_untried_edit(record) -> tuple[int, str]:
    """Return a trial and an op: in FP32, the op makes a plan that no trial has."""
    tried = [{op: trial.plan[op].precision for op in LAYERS} for trial in record.trials]
    return next(
        (trial.number, op)
        for trial, precisions in zip(record.trials, tried, strict=True)
        for op in LAYERS
        if (edited := {**precisions, op: Precision.FP32}) not in tried
        and Precision.INT8 in edited.values()
    )


def test_an_op_that_is_edited_to_fp32_and_replayed_is_a_new_point(page, workspace):
    run = workspace.list_runs()[-1]  # of the tuning file
    record = run.require_record()
    base, op = find_untried_edit(record)
    page.locator(f'a[href="/run/{run.name}"]').click()
    expect(points(page).first).to_be_visible()
    before = points(page).count()
    page.get_by_label("Plan to edit").select_option(str(base))
    page.wait_for_url(f"**?base={base}#edit")
    page.get_by_label("Find ops to edit").fill(op)
    page.get_by_label(f"Precision of {op}", exact=True).select_option("fp32")
    expect(page.locator("#edits tr.changed")).to_have_count(1)

    page.get_by_role("button", name="Predict").click()
    predicted = page.locator("#prediction")
    expect(predicted).to_contain_text(re.compile(r"\d+% → \d+% of the time of FP32"))
    expect(predicted).to_contain_text(re.compile(r"SQNR .*dB → .*dB \([+-]?\d+\.\d dB\)"))

    page.get_by_role("button", name="Replay").click()
    page.wait_for_url(f"**?base={before}#trial={before + 1}", timeout=PATIENCE)
    expect(points(page)).to_have_count(before + 1)
    expect(page.locator(f'[data-trial="{before}"].on:visible')).to_have_count(1)
    expect(page.locator("#replayed")).to_contain_text(f"Replayed: trial {before + 1}")
    expect(page.locator("#replayed")).to_contain_text("SQNR of the outputs")
    trial = workspace.get_run(run.name).require_record().trials[before]
    assert trial.plan[op].precision is Precision.FP32


@pytest.mark.parametrize("page", VIEWS[-1:], indirect=True)
def test_a_plan_can_be_saved_where_the_run_cannot_be_loaded(page, workspace, tmp_path):
    """Objects of Python are not stored; the page shows the lines to convert by the plan."""
    run = workspace.list_runs()[-3]
    page.locator(f'a[href="/run/{run.name}"]').click()
    expect(page.get_by_role("button", name="Replay")).to_be_disabled()
    expect(page.locator("#edit pre")).to_contain_text("convert_with_plan")
    with page.expect_download() as download:
        page.get_by_role("button", name="Save plan.yaml").click()
    download.value.save_as(tmp_path / "plan.yaml")
    assert "observations" in (tmp_path / "plan.yaml").read_text()


@pytest.mark.parametrize("page", VIEWS[:1], indirect=True)
def test_a_replay_that_fails_or_is_stopped_is_reported_and_keeps_the_edit(
    page, workspace, served_folder
):
    run = workspace.list_runs()[-1]
    page.locator(f'a[href="/run/{run.name}"]').click()
    choice = page.get_by_label(f"Precision of {LAYERS[0]}", exact=True)
    other = "fp32" if choice.input_value() == "int8" else "int8"
    choice.select_option(other)
    replay, state = page.get_by_role("button", name="Replay"), page.locator("#replayed")
    replay.click()
    page.get_by_role("button", name="Stop").click()
    expect(state).to_have_text("Not replayed: stopped")
    data = served_folder / "test.npz"
    data.rename(served_folder / "elsewhere.npz")
    try:
        replay.click()
        expect(state).to_contain_text("Not replayed: DataError", timeout=PATIENCE)
    finally:
        (served_folder / "elsewhere.npz").rename(data)
    page.reload()
    expect(choice).to_have_value(other)
    expect(page.locator("#edits tr.changed")).to_have_count(1)

"""HTML of the browser view, around the pages of reports."""

from __future__ import annotations

import json
from collections.abc import Sequence
from importlib import resources
from typing import Any
from xml.etree import ElementTree

from neural_mp.core.precision import Precision
from neural_mp.reporting import formatting
from neural_mp.reporting.page import Surroundings, build_html_page, page_header, page_of
from neural_mp.reporting.page.charts import draw_card, draw_empty_note
from neural_mp.reporting.page.page_model import View
from neural_mp.reporting.page.summary import run_verdict
from neural_mp.reporting.page.trials_section import describe_trial, time_fraction
from neural_mp.runs.report import RunRecord
from neural_mp.tuning.further_trial import (
    Prediction,
    edit_plan,
    list_plans,
    predict_plan,
    restore_space,
)
from neural_mp.ui.workspace import MAX_RUNS, RESULT, Replay, StoredRun
from neural_mp.util.html import Child, Element, create_element, create_raw_element
from neural_mp.util.noise import nsr_to_decibels
from neural_mp.util.text import format_count

_PYTHON = """\
from neural_mp import convert_with_plan
result = convert_with_plan(model, "plan.yaml")  # the model of the run
result.save("replayed")"""


def surround_page(top: Child, sections: Child = (), *, has_script: bool = True) -> Surroundings:
    """Return the surroundings of a served page, which may send requests to its server."""
    note = "Served by neural-mp ui to this machine only, without external resources."
    requests = "form-action 'self'; connect-src 'self'"
    script = _read("ui.js") if has_script else ""
    return Surroundings(top, sections, script, _read("ui.css"), note, requests)


def _read(name: str) -> str:
    return resources.files(__package__).joinpath(name).read_text(encoding="utf-8")


def _load_template(name: str, **content: Child) -> Element:
    """Return the element in a file of this package, with content at places named by their IDs."""
    root = ElementTree.fromstring(_read(name))
    for place in root.iter():
        children = content.get((place.get("id") or "").replace("-", "_"))
        if children is not None:
            filled = create_element(place.tag, children)
            place.text = filled.text
            place.extend(filled)
    return root


def _build_page(title: str, content: Child, **state: object) -> str:
    around = surround_page(_draw_state(**state) if state else ())
    script = '"use strict";\n' + around.script
    end = create_raw_element("script", script)
    return build_html_page(f"{title}: neural-mp ui", content, end, script, around)


def _draw_state(**state: object) -> Element:
    """Return values for the script of the page as an element that is not shown."""
    data = {f"data_{name}": value for name, value in state.items()}
    return create_element("div", id="ui", hidden=True, **data)


def build_error_page(message: str) -> str:
    """Return a page with an error."""
    return _build_page("Error", [draw_way_back(), draw_card("Not shown", message)])


def sign_runs(runs: Sequence[StoredRun]) -> str:
    """Return the state of runs as text; another one if their pages have more to show."""
    states = [
        (run.name, run.is_in_use, *((len(r.trials), r.ending is not None) if r else ()))
        for run in runs
        for r in [run.record]
    ]
    return str(hash(tuple(states)))


def draw_way_back(*more: Child) -> Element:
    """Return the link to the list of runs, and further content of the top."""
    back = create_element("a", "← All runs", class_="button", href="/")
    return create_element("nav", back, more, class_="ui-nav", aria_label="Runs")


def build_list_page(runs: Sequence[StoredRun], folder: str) -> str:
    """Return the page of all runs, with a search and a choice of two runs to compare."""
    table = _load_template(
        "runs.html",
        rows=[_draw_run_row(run) for run in runs],
        limit=f"The latest {MAX_RUNS} runs." if len(runs) == MAX_RUNS else None,
    )
    return _build_page("Runs", [page_header("Runs", folder), table], state=sign_runs(runs))


def _draw_run_row(run: StoredRun) -> Element:
    model, number = run.name.split("/")
    box = create_element(
        "input", type="checkbox", name="run", value=run.name, aria_label=f"Select {run.name}"
    )
    record = run.record
    if record is None:
        cells = [(run.problem, ""), ("–", "accuracy"), ("–", "speed"), ("–", "trials"), ("–", "")]
        title, kind = model, "bad"
    else:
        view = View(record)
        verdict, _, kind = run_verdict(view)
        best = view.best_trial
        if record.ending is None:
            verdict = "Running" if run.is_in_use else "Killed"
        figures = view.report or best
        accuracy, speedup = (figures.accuracy, figures.speedup) if figures else (None, None)
        title = record.setup.model
        cells = [
            (verdict, ""),
            (formatting.format_number(accuracy), "accuracy"),
            (formatting.format_ratio(speedup), "speed"),
            (str(len(record.trials)), "trials"),
            (record.setup.started.replace("T", " ")[:16], ""),
        ]
    link = create_element("a", title, href=f"/run/{run.name}")
    framework = "" if record is None else f"{record.setup.framework} · "
    name = create_element("span", f"{framework}{number} of {model}", class_="sub")
    first = create_element("label", box, create_element("span", link, name), class_="pair")
    drawn = [create_element("th", first, scope="row")]
    for index, (text, label) in enumerate(cells):
        dot = create_element("i", class_=f"dot {kind}") if index == 0 else None
        drawn.append(create_element("td", dot, text, data_label=label or None))
    return create_element("tr", drawn)


def build_run_page(
    run: StoredRun,
    base: str,
    others: Sequence[StoredRun],
    replay: Replay | None,
    token: str,
) -> str:
    """Return the report page of a run, with the editor of the plan `base`; empty for a default.

    Raises:
        HistoryError: the run has no record, or no such trial.
    """
    record, base = run.require_record(), base or run.default_base
    state = _draw_state(run=run.name, state=sign_runs([run]), token=token, base=base)
    top = [draw_way_back(_draw_live_badge(run), _draw_other_runs(run, others)), state]
    return page_of(record, surround_page(top, _draw_editor(run, base, replay)))


def _draw_live_badge(run: StoredRun) -> Element | None:
    record = run.require_record()
    if not run.is_in_use:
        return None
    what = "running" if record.ending is None else "a plan is being tried"
    count = format_count(len(record.trials), "trial")
    return create_element(
        "span", f"● {what}, {count}; this page follows", class_="live", role="status"
    )


def _draw_other_runs(run: StoredRun, others: Sequence[StoredRun]) -> Element | None:
    choices = [
        create_element("option", f"{other.record.setup.model}, {other.name}", value=other.name)
        for other in others
        if other.record is not None
    ]
    if not choices:
        return None
    return create_element(
        "form",
        create_element("input", type="hidden", name="run", value=run.name),
        create_element("select", choices, name="run", aria_label="Other run"),
        create_element("button", "Compare", type="submit"),
        action="/compare",
        method="get",
    )


def explain_missing_replay(run: StoredRun) -> str:
    """Return why plans of a run cannot be replayed here; empty if they can."""
    record = run.require_record()
    if run.source is None:
        return (
            "The run was started with objects in Python, which are not stored: this page can "
            "predict plans, but not load the model."
        )
    if record.baseline is None:
        return "The run has no accuracy of FP32 to compare with."
    if record.ending is None and run.is_in_use:
        return "The run is still in progress; plans can be replayed when it has ended."
    return ""


def _draw_editor(run: StoredRun, base: str, replay: Replay | None) -> Element:
    record, reason = run.require_record(), explain_missing_replay(run)
    if not record.setup.tunable_ops:
        return create_element("div", draw_card("Edit", "No op has a choice."), class_="one")
    bases = {str(t.number): f"trial {t.number + 1} ({t.outcome})" for t in record.trials}
    if record.ending is not None:
        bases = {RESULT: "the result", **bases}
    data = create_raw_element(
        "script", _encode_editor_data(run, base), type="application/json", id="edit-data"
    )
    notes = [draw_empty_note(reason), create_element("pre", _PYTHON)] if reason else None
    editor = _load_template(
        "editor.html",
        base=[create_element("option", t, value=v, selected=v == base) for v, t in bases.items()],
        replayed=_describe_replay(record, replay),
        no_replay=[data, notes],
    )
    button = editor.find(".//button[@id='replay']")
    if reason and button is not None:
        button.set("disabled", "")
    return editor


def _encode_editor_data(run: StoredRun, base: str) -> str:
    """Return the tunable ops as JSON: name, type, precision, precision in the plan, choices."""
    record, plan = run.require_record(), run.get_plan(base)
    flow = record.setup.follow_plan(plan).effective
    ops = [
        [
            op,
            record.setup.graph[op].type,
            flow[op].value,
            plan[op].precision.value if op in plan else flow[op].value,
            [p.value for p in record.setup.capabilities[op].precisions],
        ]
        for op in record.setup.tunable_ops
    ]
    return json.dumps(ops, ensure_ascii=True).replace("<", "\\u003c")


def _describe_replay(record: RunRecord, replay: Replay | None) -> str:
    if replay is None:
        return ""
    trial = next((t for t in record.trials if t.number == replay.trial), None)
    if trial is None:
        return f"{replay.message} …" if replay.is_running else f"Not replayed: {replay.message}"
    time, parts = time_fraction(trial), [describe_trial(trial, View(record).metric)]
    if time is not None:
        foretold = "" if replay.predicted is None else f" (predicted {replay.predicted:.0%})"
        parts.append(f"{time:.0%} of the time of FP32{foretold}")
    if replay.nsr is not None:
        parts.append(f"SQNR of the outputs {_format_decibels(replay.nsr)}")
    return "Replayed: " + "; ".join(parts)


def _format_decibels(nsr: float) -> str:
    return f"{nsr_to_decibels(nsr):.1f} dB" if nsr > 0 else "without noise"


def describe_prediction(run: StoredRun, base: str, edits: dict[str, Precision]) -> dict[str, Any]:
    """Return the prediction for an edited plan as text, and the plan as YAML.

    Raises:
        NeuralMPError: an op is unknown or does not support its precision.
    """
    record, plan = run.require_record(), run.get_plan(base)
    before = predict_plan(record, plan, {})
    after = predict_plan(record, plan, edits)
    edited = edit_plan(restore_space(record), plan, edits, list_plans(record))
    time = "not predicted: the run timed no single ops"
    if after.time is not None and before.time is not None:
        time = f"{before.time:.0%} → {after.time:.0%} of the time of FP32"
    rows = [["Time", time], _describe_noise(after)]
    same = next((t.number for t in record.trials if t.plan == edited), None)
    if same is not None:
        rows.append(["Tried before", f"This is the plan of trial {same + 1}."])
    if after.followers:
        changes = [f"{op} ({a} → {b})" for op, (a, b) in list(after.followers.items())[:8]]
        more = f" and {len(after.followers) - 8} more" if len(after.followers) > 8 else ""
        rows.append(["Also changed", f"{', '.join(changes)}{more}: they follow adjacent ops."])
    text = edited.to_yaml(framework=record.setup.framework, observations=record.observations)
    return {"rows": rows, "plan": text}


def _describe_noise(after: Prediction) -> list[str]:
    name = "SQNR of the outputs" if after.measured else "SQNR of quantized tensors"
    if not after.nsr:
        return [name, "no quantized tensor remains"]
    text = _format_decibels(after.nsr)
    if after.nsr_before:
        change = nsr_to_decibels(after.nsr) - nsr_to_decibels(after.nsr_before)
        text = f"{_format_decibels(after.nsr_before)} → {text} ({change:+.1f} dB)"
    tensors = format_count(after.tensors, "quantized tensor")
    if after.measured:
        return [name, f"{text}; {after.measured} of {tensors} measured at the outputs"]
    return [name, f"{text}; sum over {tensors}, not measured at the outputs: the change counts"]

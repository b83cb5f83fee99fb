"""Top of the page: result of the run."""

from __future__ import annotations

from neural_mp.core.trial import Outcome
from neural_mp.reporting import formatting
from neural_mp.reporting.page.charts import NAMES, Part, draw_for_screens, stacked_bar
from neural_mp.reporting.page.page_model import View
from neural_mp.runs.report import Report
from neural_mp.util.html import Child, Element, element
from neural_mp.util.text import counted


def describe_run(view: View) -> str:
    """Return date, framework, strategy, trial count and machine of the run."""
    setup = view.record.setup
    report = view.report
    started = setup.started.replace("T", " ")[:16]
    strategy = setup.settings.get("strategy")
    parts = (
        f"{started} UTC" if started else "",
        setup.framework,
        f"strategy {strategy.value}" if strategy else "",
        counted(len(view.trials), "trial"),
        counted(report.evaluations, "evaluation") if report else "",
        f"{setup.machine.name}, {counted(setup.machine.cores, 'core')}",
        view.record.name,
    )
    return " · ".join(part for part in parts if part)


def verdict(view: View) -> tuple[str, str, str]:
    """Return the verdict, its explanation, and the CSS class of its tile."""
    ending = view.ending
    if ending is None:
        return "Unfinished", "killed or still in progress", "open"
    if ending.met is None:
        return "Accuracy not checked", formatting.speed(ending.report), "open"
    if ending.met:
        return "Target met", formatting.speed(ending.report), "good"
    rejected = ending.report.best_rejected
    if rejected is not None and rejected.outcome is Outcome.SLOW:
        return "No faster plan", f"the result is the {view.source} model", "bad"
    closest = f"; closest: trial {rejected.number + 1}" if rejected is not None else ""
    return "Target not met", f"the result is the {view.source} model{closest}", "bad"


def tiles(view: View) -> Element:
    """Return tiles of the verdict and four figures."""
    title, detail, kind = verdict(view)
    report = view.report
    figures = _figure_texts(report) if report else _figures_so_far(view)
    return element(
        "section",
        tile("Verdict", title, detail, precision_bar(view, small=True), kind=f"verdict {kind}"),
        [tile(*figure) for figure in figures],
        class_="tiles",
        aria_label="Result",
    )


def tile(what: str, big: str, explanation: Child, *more: Child, kind: str = "") -> Element:
    """Return a tile: name, value and explanation of a figure."""
    return element(
        "div",
        element("div", what, class_="what"),
        element("div", big, class_="big"),
        element("div", explanation, class_="more"),
        more,
        class_=f"card tile {kind}".rstrip(),
    )


def _figure_texts(report: Report) -> list[tuple[str, str, Child]]:
    name, baseline, result = formatting.time_of(report)
    speed = f"; {formatting.times(report.speedup)}" if report.speedup else ""
    return [
        (_capitalize_first(name), result, f"{report.source_name} {baseline}{speed}"),
        _accuracy_texts(report),
        _bytes_texts("Weights", report, report.baseline_size, report.size),
        _bytes_texts("Memory footprint", report, report.baseline_footprint, report.footprint),
    ]


def _accuracy_texts(report: Report) -> tuple[str, str, Child]:
    metrics = [
        element(
            "div",
            f"{name} {formatting.number(m.value)}; "
            f"{report.source_name} {formatting.number(m.baseline)}{_format_target(m.target)}",
        )
        for name, m in report.metrics.items()
    ]
    title = "Metrics" if metrics else _capitalize_first(report.metric or "accuracy")
    if report.accuracy is None:
        if report.output_sqnr_db is None:
            return title, "not checked", ""
        explanation = f"SQNR of the outputs, compared with {report.source_name}"
        return title, f"{report.output_sqnr_db:.1f} dB", explanation
    baseline = formatting.number(report.baseline_accuracy)
    explanation = f"{report.source_name} {baseline}{_format_target(report.target)}"
    return title, formatting.number(report.accuracy), metrics or explanation


def _format_target(target: float | None) -> str:
    return "" if target is None else f"; target {formatting.number(target)}"


def _bytes_texts(
    what: str, report: Report, baseline: float | None, result: float | None
) -> tuple[str, str, Child]:
    fraction = f"; {result / baseline:.0%}" if baseline and result is not None else ""
    explanation = f"{report.source_name} {formatting.size(baseline)}{fraction}"
    return what, formatting.size(result), explanation


def _figures_so_far(view: View) -> list[tuple[str, str, Child]]:
    best = view.best
    objectives = best.objectives if best else {}
    base = f"{view.source} {formatting.number(view.baseline_accuracy)}"
    speed = ""
    if best and best.speedup:
        speed = f"{formatting.times(best.speedup)} as fast as {view.source}"
    so_far = "best so far"
    return [
        (
            f"Latency, {so_far}",
            formatting.seconds(objectives.get("performance")),
            speed or ("" if best else "no trial has met the target"),
        ),
        (
            f"{_capitalize_first(view.metric)}, {so_far}",
            formatting.number(best.accuracy if best else None),
            base,
        ),
        (
            f"Weights, {so_far}",
            formatting.size(objectives.get("modelsize")),
            _format_fraction(view, objectives.get("relative_modelsize")),
        ),
        (
            f"Memory footprint, {so_far}",
            formatting.size(objectives.get("footprint")),
            _format_fraction(view, objectives.get("relative_footprint")),
        ),
    ]


def _capitalize_first(text: str) -> str:
    return text[:1].upper() + text[1:]


def _format_fraction(view: View, value: float | None) -> str:
    return f"{value:.0%} of {view.source}" if value else ""


def precision_bar(view: View, small: bool = False) -> Element:
    """Return a bar of the number of ops per precision; `small` inside a tile."""
    parts = [
        Part(
            count,
            precision.value,
            f"{counted(count, 'op')} in {NAMES[precision]}",
            NAMES[precision],
        )
        for precision, count in view.counts.items()
    ]
    if small:
        return element("div", stacked_bar(parts, narrow=True), class_="precisions")
    return element("div", draw_for_screens(lambda narrow: stacked_bar(parts, narrow)))


def low_words(view: View) -> str:
    """Return the number of ops below the precision of the given model as text."""
    low = sum(view.runs_in[op.name].bits < op.source_precision.bits for op in view.graph)
    return f"{low} of {counted(len(view.graph), 'op')} below {view.source}"


def notices(view: View) -> list[Child]:
    """Return the warnings of the run, and a note if it has not ended."""
    report = view.report
    if report is None:
        return [
            element(
                "p",
                "This run is unfinished: killed, or still in progress when this page was "
                "generated. The page shows the data stored until then; ",
                element("code", "resume"),
                " continues the run.",
                class_="card warn",
            )
        ]
    if not report.warnings:
        return []
    return [
        element(
            "details",
            element("summary", counted(len(report.warnings), "warning")),
            element("ul", [element("li", warning) for warning in report.warnings]),
            class_="card warn",
            open=view.ending is not None and view.ending.met is False,
        )
    ]

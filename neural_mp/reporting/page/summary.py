"""Top of the page: result of the run."""

from __future__ import annotations

from neural_mp.reporting import formatting
from neural_mp.reporting.page.charts import NAMES, Part, draw_for_screens, draw_stacked_bar
from neural_mp.reporting.page.page_model import View
from neural_mp.runs.report import Report
from neural_mp.util.html import Child, Element, create_element
from neural_mp.util.text import format_count


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
        format_count(len(view.trials), "trial"),
        format_count(report.evaluations, "evaluation") if report else "",
        f"{setup.machine.name}, {format_count(setup.machine.cores, 'core')}",
        view.record.name,
    )
    return " · ".join(part for part in parts if part)


def run_verdict(view: View) -> tuple[str, str, str]:
    """Return the verdict, its explanation, and the CSS class of its tile."""
    ending = view.run_end
    if ending is None:
        return "Unfinished", "killed or still in progress", "open"
    if ending.met is None:
        return "Accuracy not checked", formatting.format_speedup(ending.report), "open"
    if ending.met:
        return "Target met", formatting.format_speedup(ending.report), "good"
    rejected = ending.report.best_rejected
    if rejected is not None and rejected.lacks_gain:
        return "No faster plan", f"the result is the {view.source} model", "bad"
    closest = f"; closest: trial {rejected.number + 1}" if rejected is not None else ""
    return "Target not met", f"the result is the {view.source} model{closest}", "bad"


def draw_tiles(view: View) -> Element:
    """Return tiles of the verdict and four figures."""
    title, detail, kind = run_verdict(view)
    report = view.report
    figures = _format_figure_texts(report) if report else _figures_so_far(view)
    return create_element(
        "section",
        draw_tile(
            "Verdict", title, detail, draw_precision_bar(view, small=True), kind=f"verdict {kind}"
        ),
        [draw_tile(*figure) for figure in figures],
        class_="tiles",
        aria_label="Result",
    )


def draw_tile(what: str, big: str, explanation: Child, *more: Child, kind: str = "") -> Element:
    """Return a tile: name, value and explanation of a figure."""
    return create_element(
        "div",
        create_element("div", what, class_="what"),
        create_element("div", big, class_="big"),
        create_element("div", explanation, class_="more"),
        more,
        class_=f"card tile {kind}".rstrip(),
    )


def _format_figure_texts(report: Report) -> list[tuple[str, str, Child]]:
    name, baseline, result = formatting.time_of(report)
    speed = f"; {formatting.format_ratio(report.speedup)}" if report.speedup else ""
    if speed and report.cpu_speedup:
        speed += f", {formatting.format_ratio(report.cpu_speedup)} in CPU time"
    return [
        (_capitalize_first(name), result, f"{report.source_name} {baseline}{speed}"),
        _format_accuracy_texts(report),
        _format_bytes_texts("Weights", report, report.baseline_size, report.size),
        _format_bytes_texts(
            "Memory footprint", report, report.baseline_footprint, report.footprint
        ),
    ]


def _format_accuracy_texts(report: Report) -> tuple[str, str, Child]:
    metrics = [
        create_element(
            "div",
            f"{name} {formatting.format_number(m.value)}; "
            f"{report.source_name} "
            f"{formatting.format_number(m.baseline)}{_format_target(m.target)}",
        )
        for name, m in report.metrics.items()
    ]
    title = "Metrics" if metrics else _capitalize_first(report.metric or "accuracy")
    if any(m.target is not None for m in report.metrics.values()):
        # The score of several metrics is relative; their own values are those of the user.
        name, first = next(iter(report.metrics.items()))
        score = create_element("div", f"score {formatting.format_number(report.accuracy)}")
        return name, formatting.format_number(first.value), [*metrics, score]
    if report.accuracy is None:
        if report.output_sqnr_db is None:
            return title, "not checked", ""
        explanation = f"SQNR of the outputs, compared with {report.source_name}"
        return title, f"{report.output_sqnr_db:.1f} dB", explanation
    baseline = formatting.format_number(report.baseline_accuracy)
    explanation = f"{report.source_name} {baseline}{_format_target(report.target)}"
    return title, formatting.format_number(report.accuracy), metrics or explanation


def _format_target(target: float | None) -> str:
    return "" if target is None else f"; target {formatting.format_number(target)}"


def _format_bytes_texts(
    what: str, report: Report, baseline: float | None, result: float | None
) -> tuple[str, str, Child]:
    fraction = f"; {result / baseline:.0%}" if baseline and result is not None else ""
    explanation = f"{report.source_name} {formatting.format_size(baseline)}{fraction}"
    return what, formatting.format_size(result), explanation


def _figures_so_far(view: View) -> list[tuple[str, str, Child]]:
    best = view.best_trial
    objectives = best.objectives if best else {}
    base = f"{view.source} {formatting.format_number(view.baseline_accuracy)}"
    speed = ""
    if best and best.speedup:
        speed = f"{formatting.format_ratio(best.speedup)} as fast as {view.source}"
    so_far = "best so far"
    return [
        (
            f"Latency, {so_far}",
            formatting.format_seconds(objectives.get("performance")),
            speed or ("" if best else "no trial has met the target"),
        ),
        (
            f"{_capitalize_first(view.metric)}, {so_far}",
            formatting.format_number(best.accuracy if best else None),
            base,
        ),
        (
            f"Weights, {so_far}",
            formatting.format_size(objectives.get("modelsize")),
            _format_fraction(view, objectives.get("relative_modelsize")),
        ),
        (
            f"Memory footprint, {so_far}",
            formatting.format_size(objectives.get("footprint")),
            _format_fraction(view, objectives.get("relative_footprint")),
        ),
    ]


def _capitalize_first(text: str) -> str:
    return text[:1].upper() + text[1:]


def _format_fraction(view: View, value: float | None) -> str:
    return f"{value:.0%} of {view.source}" if value else ""


def draw_precision_bar(view: View, small: bool = False) -> Element:
    """Return a bar of the number of ops per precision; `small` inside a tile."""
    parts = [
        Part(
            count,
            precision.value,
            f"{format_count(count, 'op')} in {NAMES[precision]}",
            NAMES[precision],
        )
        for precision, count in view.counts.items()
    ]
    if small:
        return create_element("div", draw_stacked_bar(parts, narrow=True), class_="precisions")
    return create_element("div", draw_for_screens(lambda narrow: draw_stacked_bar(parts, narrow)))


def format_lowered_ops(view: View) -> str:
    """Return the number of ops below the precision of the given model as text."""
    low = sum(view.runs_in[op.name].bits < op.source_precision.bits for op in view.graph)
    return f"{low} of {format_count(len(view.graph), 'op')} below {view.source}"


def draw_notices(view: View) -> list[Child]:
    """Return the warnings of the run, and a note if it has not ended."""
    report = view.report
    if report is None:
        return [
            create_element(
                "p",
                "This run is unfinished: killed, or still in progress when this page was "
                "generated. The page shows the data stored until then; ",
                create_element("code", "resume"),
                " continues the run.",
                class_="card warn",
            )
        ]
    if not report.warnings:
        return []
    return [
        create_element(
            "details",
            create_element("summary", format_count(len(report.warnings), "warning")),
            create_element("ul", [create_element("li", warning) for warning in report.warnings]),
            class_="card warn",
            open=view.run_end is not None and view.run_end.met is False,
        )
    ]

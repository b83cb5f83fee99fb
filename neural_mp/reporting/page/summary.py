"""Top of the page: result of the run."""

from __future__ import annotations

from neural_mp.core.precision import Precision
from neural_mp.core.trial import Outcome
from neural_mp.reporting import formatting
from neural_mp.reporting.page.charts import NAMES, Part, both, joined, stacked
from neural_mp.reporting.page.page_model import View
from neural_mp.runs.report import Report
from neural_mp.util.html import Child, Element, element
from neural_mp.util.text import counted


def about(view: View) -> str:
    """Return date, framework, strategy, trial count and machine of the run."""
    setup = view.record.setup
    report = view.report
    started = setup.started.replace("T", " ")[:16]
    strategy = setup.settings.get("strategy")
    return joined(
        (
            f"{started} UTC" if started else "",
            setup.framework,
            f"strategy {strategy.value}" if strategy else "",
            counted(len(view.trials), "trial"),
            counted(report.evaluations, "evaluation") if report else "",
            f"{setup.machine.name}, {counted(setup.machine.cores, 'core')}",
            view.record.name,
        )
    )


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
        return "No faster plan", "the result is the FP32 model", "bad"
    closest = f"; closest: trial {rejected.number + 1}" if rejected is not None else ""
    return "Target not met", f"the result is the FP32 model{closest}", "bad"


def tiles(view: View) -> Element:
    """Return tiles of the verdict and four figures."""
    title, words, kind = verdict(view)
    report = view.report
    figures = _figures(report) if report else _figures_so_far(view)
    return element(
        "section",
        tile("Verdict", title, words, precision_bar(view, small=True), kind=f"verdict {kind}"),
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


def _figures(report: Report) -> list[tuple[str, str, Child]]:
    name, before, after = formatting.time_of(report)
    speed = f"; {formatting.times(report.speedup)}" if report.speedup else ""
    return [
        (_capitalized(name), after, f"FP32 {before}{speed}"),
        _accuracy(report),
        ("Weights", formatting.size(report.size), _size_of_fp32(report.baseline_size, report.size)),
        (
            "Memory footprint",
            formatting.size(report.footprint),
            _size_of_fp32(report.baseline_footprint, report.footprint),
        ),
    ]


def _accuracy(report: Report) -> tuple[str, str, Child]:
    each = [
        element(
            "div",
            f"{name} {formatting.number(m.value)}; "
            f"FP32 {formatting.number(m.baseline)}{_goal(m.target)}",
        )
        for name, m in report.metrics.items()
    ]
    title = "Metrics" if each else _capitalized(report.metric or "accuracy")
    if report.accuracy is None:
        if report.output_sqnr_db is None:
            return title, "not checked", ""
        return title, f"{report.output_sqnr_db:.1f} dB", "SQNR of the outputs, compared with FP32"
    explanation = f"FP32 {formatting.number(report.baseline_accuracy)}{_goal(report.target)}"
    return title, formatting.number(report.accuracy), each or explanation


def _goal(target: float | None) -> str:
    return "" if target is None else f"; target {formatting.number(target)}"


def _size_of_fp32(before: float | None, after: float | None) -> str:
    fraction = f"; {after / before:.0%}" if before and after is not None else ""
    return f"FP32 {formatting.size(before)}{fraction}"


def _figures_so_far(view: View) -> list[tuple[str, str, Child]]:
    best = view.best
    found = best.objectives if best else {}
    base = f"FP32 {formatting.number(view.baseline_accuracy)}"
    speed = f"{formatting.times(best.speedup)} as fast as FP32" if best and best.speedup else ""
    so_far = "best so far"
    return [
        (
            f"Latency, {so_far}",
            formatting.seconds(found.get("performance")),
            speed or ("" if best else "no trial has met the target"),
        ),
        (
            f"{_capitalized(view.metric)}, {so_far}",
            formatting.number(best.accuracy if best else None),
            base,
        ),
        (
            f"Weights, {so_far}",
            formatting.size(found.get("modelsize")),
            _fraction(found.get("relative_modelsize")),
        ),
        (
            f"Memory footprint, {so_far}",
            formatting.size(found.get("footprint")),
            _fraction(found.get("relative_footprint")),
        ),
    ]


def _capitalized(words: str) -> str:
    return words[:1].upper() + words[1:]


def _fraction(value: float | None) -> str:
    return f"{value:.0%} of FP32" if value else ""


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
        return element("div", stacked(parts, narrow=True), class_="precisions")
    return element("div", both(lambda narrow: stacked(parts, narrow)))


def low_words(view: View) -> str:
    """Return the number of ops below FP32 as text."""
    whole = len(view.graph)
    low = whole - view.counts.get(Precision.FP32, 0)
    return f"{low} of {counted(whole, 'op')} below FP32"


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

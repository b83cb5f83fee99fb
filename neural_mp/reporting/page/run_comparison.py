"""HTML page that compares two runs: results, settings, machines, and ops in other precisions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from neural_mp.reporting.page.charts import NAMES, both, card, name, none, scrolling
from neural_mp.reporting.page.document import header, html_page
from neural_mp.reporting.page.page_model import View
from neural_mp.reporting.page.summary import about, low_words, precision_bar, verdict
from neural_mp.reporting.page.trials_chart import trials_chart
from neural_mp.reporting.tables import before_and_after
from neural_mp.runs.report import RunRecord
from neural_mp.space import why_int8
from neural_mp.util.html import Child, Element, element, table
from neural_mp.util.text import counted

_MAX_OPS = 500
_MISSING = "–"


def comparison_page(first: RunRecord, second: RunRecord) -> str:
    """Return a page with two runs side by side, finished or not; the page has no script."""
    views = View(first), View(second)
    titles = _titles(views)
    subtitle = "Both runs on one page; figures of different machines are not comparable."
    heading = f"{titles[0]} and {titles[1]}"
    content: list[Child] = [
        header(heading, subtitle),
        element("div", [_run(*pair) for pair in zip(titles, views, strict=True)], class_="two"),
        element("div", _figures(titles, views), class_="one"),
        element("div", _differences(titles, views), class_="one"),
        element("div", _ops(titles, views), class_="one"),
    ]
    return html_page(f"{heading}: neural-mp report", content)


def _titles(views: Sequence[View]) -> list[str]:
    """Return names for the runs, which differ."""
    models = [view.record.setup.model for view in views]
    if len(set(models)) == len(models):
        return models
    runs = [view.record.name.rpartition("/")[2] for view in views]
    if all(runs) and len(set(runs)) == len(runs):
        return runs
    return [f"{model} ({order})" for model, order in zip(models, ("first", "second"), strict=True)]


def _run(title: str, view: View) -> Element:
    """Return the verdict, the precisions and the trials of a run."""
    result, detail, kind = verdict(view)
    return element(
        "section",
        element("h2", title),
        element("p", about(view), class_="lead"),
        element("div", result, class_="big"),
        element("p", f"{detail}; {low_words(view)}", class_="lead"),
        precision_bar(view),
        both(lambda narrow: trials_chart(view, narrow, chosen=False)) if view.drawn else None,
        class_=f"card tile verdict {kind}",
    )


def _figures(titles: Sequence[str], views: Sequence[View]) -> Element:
    rows: dict[str, list[str]] = {}
    for index, view in enumerate(views):
        entries = before_and_after(view.report) if view.report else []
        for figure, baseline, result, change in entries:
            cells = rows.setdefault(figure, [_MISSING] * 2 * len(views))
            cells[2 * index : 2 * index + 2] = [
                baseline,
                f"{result} ({change})" if result else change,
            ]
    if not rows:
        return card("Figures", None, none("Neither run has ended."))
    columns = [
        f"{what}, {title}"
        for title, view in zip(titles, views, strict=True)
        for what in (view.source, "result")
    ]
    body = [[figure, *cells] for figure, cells in rows.items()]
    return card(
        "Figures",
        "The change in brackets is relative to the given model in the same run.",
        scrolling(table(["", *columns], body), "Figures"),
    )


def _differences(titles: Sequence[str], views: Sequence[View]) -> Element:
    """Return the settings and versions in which the runs differ."""
    first, second = (_surroundings(view) for view in views)
    rows = [
        [key, first.get(key, _MISSING), second.get(key, _MISSING)]
        for key in dict.fromkeys((*first, *second))
        if first.get(key) != second.get(key)
    ]
    if not rows:
        return card("Differences", None, none("Settings, machine and versions are the same."))
    body = table(["setting", *titles], rows, class_="left")
    return card(
        "Differences",
        "Settings, machine and versions in which the runs differ.",
        scrolling(body, "Differences", "middle"),
    )


def _surroundings(view: View) -> Mapping[str, str]:
    setup = view.record.setup
    return {
        "framework": setup.framework,
        **{option: setting.value for option, setting in setup.settings.items()},
        "CPU": f"{setup.machine.name}, {counted(setup.machine.cores, 'core')}",
        **{f"version of {package}": version for package, version in setup.versions.items()},
    }


def _ops(titles: Sequence[str], views: Sequence[View]) -> Element:
    """Return the ops of both models that run in another precision."""
    first, second = views
    shared = [op.name for op in first.graph if op.name in second.graph]
    if not shared:
        return card("Ops", None, none("The models have no op with the same name."))
    rows = list(_differing(shared, first, second))
    what = f"{len(rows)} of {counted(len(shared), 'common op')} in another precision."
    headings = ["op", "type", *titles, f"reason in {titles[0]}", f"reason in {titles[1]}"]
    remaining = len(rows) - _MAX_OPS
    shown = scrolling(table(headings, rows[:_MAX_OPS], class_="left names-first"), "Ops")
    more = element("p", f"… and {remaining} more.", class_="lead after") if remaining > 0 else None
    return card("Ops", what, shown if rows else None, more)


def _differing(shared: Sequence[str], first: View, second: View) -> Iterator[list[Child]]:
    for op in shared:
        runs = first.runs_in[op], second.runs_in[op]
        if runs[0] is not runs[1]:
            chips = [element("span", NAMES[p], class_=f"chip {p.value}") for p in runs]
            reasons = [_reason(first, op), _reason(second, op)]
            yield [name(op), first.graph[op].type, *chips, *reasons]


def _reason(view: View, op: str) -> str:
    if view.flow is None:
        return ""
    setup = view.record.setup
    return why_int8(setup.graph, setup.capabilities, view.plan, view.flow, op)

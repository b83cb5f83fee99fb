"""Page sections of the trials, the finalists, and predicted against measured times."""

from __future__ import annotations

from neural_mp.core.trial import Outcome, Trial
from neural_mp.reporting import formatting
from neural_mp.reporting.page.charts import (
    Part,
    Row,
    Scale,
    both,
    card,
    line,
    mark,
    none,
    picture,
    ranges,
    scrolling,
    text,
    time_grid,
    titled,
)
from neural_mp.reporting.page.page_model import View
from neural_mp.reporting.page.trials_chart import described, time_fraction, trials_chart
from neural_mp.util.html import Element, element, table
from neural_mp.util.text import counted

_MARKS = (
    ("circle", "trial met", "met the target", {Outcome.MET}),
    ("triangle", "trial slow", "speed-up too small", {Outcome.SLOW}),
    ("cross", "trial missed", "missed, stopped early or failed", set(Outcome)),
)
#: Minimum number of pairs for a chart of predictions.
_LEAST_PAIRS = 3
#: Maximum number of trials listed outside the chart, which lack an accuracy.
_MOST = 12


def trials_section(view: View) -> Element:
    """Return the trials as a chart, and the failed trials as a list."""
    if not view.trials:
        why = "Accuracy was not checked." if view.baseline_accuracy is None else ""
        return card("Trials", None, none(f"No plan was evaluated. {why}"))
    drawn = view.drawn
    failed = [trial for trial in view.trials if trial not in drawn]
    better = "accurate" if view.higher_is_better else "accurate (a lower value)"
    return card(
        "Trials",
        f"Higher is more {better}, further left is faster. Select a trial to show its plan on "
        "the map.",
        both(lambda narrow: trials_chart(view, narrow)) if drawn else None,
        _draw_legend(view) if drawn else None,
        [
            element("p", described(trial, view.metric), class_="lead after")
            for trial in failed[:_MOST]
        ],
        none(f"… and {len(failed) - _MOST} more failed trials.") if len(failed) > _MOST else None,
    )


def _draw_legend(view: View) -> Element:
    remaining = set(Outcome)
    shown = []
    for shape, kind, label, outcomes in _MARKS:
        matching = outcomes & remaining
        remaining -= matching
        if any(t.outcome in matching for t in view.drawn if t is not view.best):
            shown.append((shape, kind, label))
    if view.best is not None:
        shown.append(("star", "trial met chosen", view.subject))
    return element(
        "ul",
        [
            element(
                "li",
                element("svg", mark(shape, 8, 8, kind, 5), viewBox="0 0 16 16", aria_hidden="true"),
                label,
            )
            for shape, kind, label in shown
        ],
        class_="legend",
    )


def finalists_section(view: View) -> Element | None:
    """Return the finalists, measured in interleaved rounds, with confidence intervals."""
    finalists = view.ending.finalists if view.ending else ()
    timed = [trial for trial in finalists if time_fraction(trial)]
    if not timed:
        return None
    rows = [_finalist_row(view, trial) for trial in timed]
    first = {trial.number: trial for trial in view.record.trials}
    predicted = view.ending.predicted if view.ending else {}
    changed = [
        [
            f"trial {t.number + 1}",
            formatting.number(t.accuracy),
            _format_time_fraction(first.get(t.number)),
            _format_time_fraction(t),
            formatting.seconds(t.objectives.get("performance")),
            _format_percent(predicted.get(t.number)),
        ]
        for t in timed
    ]
    headings = ["trial", "accuracy", "first measured", "interleaved", "time per batch", "predicted"]
    return card(
        "Finalists",
        f"{counted(len(timed), 'trial')} measured again in interleaved rounds, because single "
        "measurements drift. Time as a fraction of FP32, with its 99 % confidence interval.",
        both(lambda narrow: ranges(rows, narrow, 1.0)),
        scrolling(table(headings, changed), "Finalists", "middle after"),
    )


def _format_time_fraction(trial: Trial | None) -> str:
    return _format_percent(time_fraction(trial) if trial else None)


def _format_percent(value: float | None) -> str:
    return "–" if value is None else f"{value:.1%}"


def _finalist_row(view: View, trial: Trial) -> Row:
    fraction = time_fraction(trial) or 0.0
    low = trial.objectives.get("relative_latency_low", fraction)
    high = trial.objectives.get("relative_latency_high", fraction)
    chosen = view.ending is not None and trial.number == view.ending.chosen
    kind = "trial met chosen" if chosen else "trial met"
    tooltip = f"trial {trial.number + 1}: {fraction:.1%} of the FP32 time ({low:.1%} to {high:.1%})"
    shape = "star" if chosen else "circle"
    middle = Part(fraction, kind, tooltip, shape=shape)
    parts = (middle, Part(low, "", ""), Part(high, "", ""))
    return Row(f"trial {trial.number + 1}", parts, f"{fraction:.0%} ({low:.0%}–{high:.0%})")


def predicted_section(view: View) -> Element | None:
    """Return a chart of times predicted from op times against measured times."""
    predicted = view.ending.predicted if view.ending else {}
    pairs = [
        (trial, predicted[trial.number], fraction)
        for trial in view.trials
        if trial.number in predicted and (fraction := time_fraction(trial))
    ]
    if len(pairs) < _LEAST_PAIRS:
        return None
    off = sorted(abs(foretold - fraction) / fraction for _, foretold, fraction in pairs)
    return card(
        "Predicted and measured time",
        "Time as a fraction of FP32: predicted from the times of single ops and conversions, and "
        "measured. On the diagonal, both are equal; the median error is "
        f"{off[len(off) // 2]:.0%}.",
        both(lambda narrow: _predicted_chart(view, pairs, narrow)),
    )


def _predicted_chart(view: View, pairs: list[tuple[Trial, float, float]], narrow: bool) -> Element:
    width, height, left, foot = (350, 260, 52, 214) if narrow else (560, 300, 66, 252)
    most = max(1.0, *(max(foretold, fraction) for _, foretold, fraction in pairs)) * 1.06
    across, up = Scale(0.0, most, left, width - 12), Scale(0.0, most, foot, 10)
    drawn = time_grid(across, 5, 10, foot, foot + 16)
    for fraction in across.ticks(5):
        drawn.append(line(left, up(fraction), width - 12, up(fraction), "grid"))
        drawn.append(text(f"{fraction:.0%}", left - 8, up(fraction) + 4, "tick", "end"))
    drawn.append(line(left, foot, width - 12, 10, "link"))
    drawn.append(text("measured", (left + width) / 2, foot + 36, "axis", "middle"))
    drawn.append(text("predicted", left, 8, "axis"))
    for trial, foretold, fraction in pairs:
        chosen = trial is view.best
        tooltip = f"trial {trial.number + 1}: predicted {foretold:.0%}, measured {fraction:.0%}"
        kind = f"trial {trial.outcome.value}{' chosen' if chosen else ''}"
        point = mark("star" if chosen else "circle", across(fraction), up(foretold), kind, 5)
        drawn.append(titled(tooltip, point))
    return picture(width, height, "Predicted and measured time of trials", drawn)

"""Page sections of the trials, the finalists, and predicted against measured times."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

from neural_mp.core.trial import Outcome, Trial
from neural_mp.reporting import formatting
from neural_mp.reporting.page.charts import (
    NAMES,
    Part,
    Row,
    Scale,
    draw_card,
    draw_empty_note,
    draw_for_screens,
    draw_line,
    draw_mark,
    draw_picture,
    draw_ranges,
    draw_scroll_area,
    draw_text,
    time_grid,
    with_tooltip,
)
from neural_mp.reporting.page.page_model import View
from neural_mp.util.html import Child, Element, create_element, create_table
from neural_mp.util.text import format_count

_MARKS = (
    ("circle", "trial met", "met the target", {Outcome.MET}),
    ("triangle", "trial slow", "speed-up too small", {Outcome.SLOW}),
    ("triangle", "trial uncertain", "speed-up within noise", {Outcome.UNCERTAIN}),
    ("cross", "trial missed", "missed, stopped early or failed", set(Outcome)),
)
#: Minimum number of pairs for a chart of predictions.
_LEAST_PAIRS = 3
#: Maximum number of trials listed outside the chart, which lack an accuracy.
_MOST = 12


def draw_trials_section(view: View) -> Element:
    """Return the trials as a chart, and the failed trials as a list."""
    if not view.trials:
        why = "Accuracy was not checked." if view.baseline_accuracy is None else ""
        return draw_card("Trials", None, draw_empty_note(f"No plan was evaluated. {why}"))
    drawn = view.drawable_trials
    failed = [trial for trial in view.trials if trial not in drawn]
    better = "accurate" if view.higher_is_better else "accurate (a lower value)"
    return draw_card(
        "Trials",
        f"Higher is more {better}, further left is faster. Select a trial to show its plan on "
        "the map.",
        draw_for_screens(lambda narrow: draw_trials_chart(view, narrow)) if drawn else None,
        _draw_legend(view) if drawn else None,
        [
            create_element("p", describe_trial(t, view.metric), class_="lead after")
            for t in failed[:_MOST]
        ],
        draw_empty_note(f"… and {len(failed) - _MOST} more failed trials.")
        if len(failed) > _MOST
        else None,
    )


def _draw_legend(view: View) -> Element:
    remaining = set(Outcome)
    shown = []
    for shape, kind, label, outcomes in _MARKS:
        matching = outcomes & remaining
        remaining -= matching
        if any(t.outcome in matching for t in view.drawable_trials if t is not view.best_trial):
            shown.append((shape, kind, label))
    if view.best_trial is not None:
        shown.append(("star", "trial met chosen", view.page_subject))
    return create_element(
        "ul",
        [
            create_element(
                "li",
                create_element(
                    "svg", draw_mark(shape, 8, 8, kind, 5), viewBox="0 0 16 16", aria_hidden="true"
                ),
                label,
            )
            for shape, kind, label in shown
        ],
        class_="legend",
    )


def draw_finalists_section(view: View) -> Element | None:
    """Return the finalists, measured in interleaved rounds, with confidence intervals."""
    finalists = view.run_end.finalists if view.run_end else ()
    timed = [trial for trial in finalists if time_fraction(trial)]
    if not timed:
        return None
    rows = [_make_finalist_row(view, trial) for trial in timed]
    first = {trial.number: trial for trial in view.record.trials}
    predicted = view.run_end.predicted if view.run_end else {}
    changed = [
        [
            f"trial {t.number + 1}",
            formatting.format_number(t.accuracy),
            _format_time_fraction(first.get(t.number)),
            _format_time_fraction(t),
            formatting.format_seconds(t.objectives.get("performance")),
            _format_percent(predicted.get(t.number)),
        ]
        for t in timed
    ]
    headings = ["trial", "accuracy", "first measured", "interleaved", "time per batch", "predicted"]
    return draw_card(
        "Finalists",
        f"{format_count(len(timed), 'trial')} measured again in interleaved rounds, because single "
        "measurements drift. Time as a fraction of FP32, with its 99 % confidence interval.",
        draw_for_screens(lambda narrow: draw_ranges(rows, narrow, 1.0)),
        draw_scroll_area(create_table(headings, changed), "Finalists", "middle after"),
    )


def _format_time_fraction(trial: Trial | None) -> str:
    return _format_percent(time_fraction(trial) if trial else None)


def _format_percent(value: float | None) -> str:
    return "–" if value is None else f"{value:.1%}"


def _make_finalist_row(view: View, trial: Trial) -> Row:
    fraction = time_fraction(trial) or 0.0
    low = trial.objectives.get("relative_latency_low", fraction)
    high = trial.objectives.get("relative_latency_high", fraction)
    chosen = view.run_end is not None and trial.number == view.run_end.chosen
    kind = "trial met chosen" if chosen else "trial met"
    tooltip = f"trial {trial.number + 1}: {fraction:.1%} of the FP32 time ({low:.1%} to {high:.1%})"
    middle = Part(fraction, kind, tooltip, shape="star" if chosen else "circle")
    parts = (middle, Part(low, "", ""), Part(high, "", ""))
    return Row(f"trial {trial.number + 1}", parts, f"{fraction:.0%} ({low:.0%}–{high:.0%})")


def draw_predicted_section(view: View) -> Element | None:
    """Return a chart of times predicted from op times against measured times."""
    predicted = view.run_end.predicted if view.run_end else {}
    pairs = [
        (trial, predicted[trial.number], fraction)
        for trial in view.trials
        if trial.number in predicted and (fraction := time_fraction(trial))
    ]
    if len(pairs) < _LEAST_PAIRS:
        return None
    off = sorted(abs(foretold - fraction) / fraction for _, foretold, fraction in pairs)
    return draw_card(
        "Predicted and measured time",
        "Time as a fraction of FP32: predicted from the times of single ops and conversions, and "
        "measured. On the diagonal, both are equal; the median error is "
        f"{off[len(off) // 2]:.0%}.",
        draw_for_screens(lambda narrow: _draw_predicted_chart(view, pairs, narrow)),
    )


def _draw_predicted_chart(
    view: View, pairs: list[tuple[Trial, float, float]], narrow: bool
) -> Element:
    width, height, left, foot = (350, 260, 52, 214) if narrow else (560, 300, 66, 252)
    most = max(1.0, *(max(foretold, fraction) for _, foretold, fraction in pairs)) * 1.06
    across, up = Scale(0.0, most, left, width - 12), Scale(0.0, most, foot, 10)
    drawn = time_grid(across, 5, 10, foot, foot + 16)
    for fraction in across.round_ticks(5):
        drawn.append(draw_line(left, up(fraction), width - 12, up(fraction), "grid"))
        drawn.append(draw_text(f"{fraction:.0%}", left - 8, up(fraction) + 4, "tick", "end"))
    drawn.append(draw_line(left, foot, width - 12, 10, "link"))
    drawn.append(draw_text("measured", (left + width) / 2, foot + 36, "axis", "middle"))
    drawn.append(draw_text("predicted", left, 8, "axis"))
    for trial, foretold, fraction in pairs:
        chosen = trial is view.best_trial
        tooltip = f"trial {trial.number + 1}: predicted {foretold:.0%}, measured {fraction:.0%}"
        kind = f"trial {trial.outcome.value}{' chosen' if chosen else ''}"
        point = draw_mark("star" if chosen else "circle", across(fraction), up(foretold), kind, 5)
        drawn.append(with_tooltip(tooltip, point))
    return draw_picture(width, height, "Predicted and measured time of trials", drawn)


SHAPES = {
    Outcome.MET: "circle",
    Outcome.MISSED: "cross",
    Outcome.PRUNED: "cross",
    Outcome.SLOW: "triangle",
    Outcome.UNCERTAIN: "triangle",
    Outcome.FAILED: "cross",
}
_SAID = {
    Outcome.MET: "met the target",
    Outcome.MISSED: "missed the target",
    Outcome.PRUNED: "stopped early, target out of reach",
    Outcome.SLOW: "met the accuracy target, speed-up too small",
    Outcome.UNCERTAIN: "met the accuracy target, speed-up within noise",
    Outcome.FAILED: "failed",
}
#: Trials that miss the target by more than this multiple of the tolerance lie at the bottom.
_REACH = 2.5
_TOP = 14
_FOOT = 46


def time_fraction(trial: Trial) -> float | None:
    """Return the time of a trial as a fraction of FP32; None if not measured."""
    return trial.objectives.get("relative_latency")


def draw_trials_chart(view: View, narrow: bool, chosen: bool = True) -> Element:
    """Draw accuracy (up) against time (left is faster); untimed trials are on the right.

    If `chosen`, the page's script can select trials.
    """
    frame = _Frame.from_view(view, narrow)
    parts: list[Child] = [
        frame.draw_grid(),
        frame.draw_target_line(),
        _draw_pareto_front(view, frame),
    ]
    last = sorted(view.drawable_trials, key=lambda trial: trial is view.best_trial)
    parts.extend(_draw_trial(view, trial, frame, chosen) for trial in last)
    parts.append(_draw_baseline(view, frame))
    label = f"Trials: {view.metric} against time per batch"
    return draw_picture(frame.width, frame.height, label, parts)


@dataclass(frozen=True)
class _Frame:
    """Mapping of trials to chart positions.

    Attributes:
        right: right end of the time axis; untimed trials lie beyond.
        worst: trials of worse accuracy lie at the bottom.
    """

    view: View
    narrow: bool
    width: int
    height: int
    right: float
    time: Scale
    accuracy: Scale
    worst: float

    @classmethod
    def from_view(cls, view: View, narrow: bool) -> _Frame:
        width, height = (360, 330) if narrow else (700, 450)
        timed = [trial for trial in view.drawable_trials if time_fraction(trial)]
        aside = [trial for trial in view.drawable_trials if not time_fraction(trial)]
        right = width - ((54 if narrow else 72) if aside else 12)
        fractions = [time_fraction(trial) or 0.0 for trial in timed]
        time = Scale(0.0, max([*fractions, 1.0]) * 1.06, 52 if narrow else 74, right)
        worst, best = _find_accuracy_range(view, timed, aside)
        pad = (best - worst) * 0.07
        hidden = any(_is_worse(view, t.accuracy, worst) for t in (*timed, *aside))
        foot = height - _FOOT - (22 if hidden else 0)
        low, high = sorted((worst - pad, best + pad))
        ends = (foot, _TOP) if view.higher_is_better else (_TOP, foot)
        return cls(view, narrow, width, height, right, time, Scale(low, high, *ends), worst)

    @property
    def limit_position(self) -> float:
        """Vertical position of the worst accuracy."""
        return max(self.accuracy.start, self.accuracy.end)

    def place_trial(self, trial: Trial) -> tuple[float, float]:
        """Return the position of a trial."""
        fraction = time_fraction(trial)
        room = self.width - self.right - 30
        x = self.time(fraction) if fraction else self.right + 22 + trial.number * 13 % max(room, 1)
        if trial.accuracy is None or _is_worse(self.view, trial.accuracy, self.worst):
            return x, self.limit_position + 12
        return x, self.accuracy(trial.accuracy)

    def draw_grid(self) -> list[Element]:
        """Return grid lines and labels of both axes."""
        under, middle = self.height - _FOOT + 16, (self.time.start + self.right) / 2
        parts = time_grid(self.time, 4 if self.narrow else 6, _TOP, self.limit_position, under)
        for value in self.accuracy.round_ticks():
            y = self.accuracy(value)
            parts.append(draw_line(self.time.start, y, self.right, y, "grid"))
            parts.append(draw_text(f"{value:.4g}", self.time.start - 8, y + 4, "tick", "end"))
        what = "time, fraction of FP32" if self.narrow else "time per batch, as a fraction of FP32"
        parts.append(draw_text(what, middle, self.height - 8, "axis", "middle"))
        if not self.narrow:
            better = "" if self.view.higher_is_better else " (lower is better)"
            label = f"{self.view.metric}{better}"
            name = draw_text(label, -(_TOP + self.limit_position) / 2, 14, "axis", "middle")
            name.set("transform", "rotate(-90)")
            parts.append(name)
        if self.right < self.width - 20:
            parts.append(
                draw_line(self.right + 8, _TOP, self.right + 8, self.limit_position, "split")
            )
            # On a narrow screen, the label has no room beside the last tick.
            x, y = (self.right + 8 + self.width) / 2, self.height - 8 if self.narrow else under
            anchor = ("end", self.width) if self.narrow else ("middle", x)
            parts.append(draw_text("not timed", anchor[1], y, "tick", anchor[0]))
        return parts

    def draw_target_line(self) -> list[Element]:
        """Return the target line and the zone that misses the target."""
        target, start = self.view.target, self.time.start
        if target is None:
            return []
        y = self.accuracy(target)
        return [
            create_element(
                "rect",
                x=start,
                y=y,
                width=self.right - start,
                height=max(self.limit_position - y, 0.0),
                class_="missed-zone",
            ),
            draw_line(start, y, self.width - 6, y, "target"),
            draw_text(
                f"target {formatting.format_number(target)}", start + 8, y - 6, "target-word"
            ),
        ]


def _find_accuracy_range(
    view: View, timed: Sequence[Trial], aside: Sequence[Trial]
) -> tuple[float, float]:
    """Return the worst and the best accuracy shown to scale."""
    base, target = view.baseline_accuracy, view.target
    step = abs((base or 0.0) - target) if target is not None and base is not None else 0.0
    step = step or abs(base or 0.0) * 0.01 or 0.01
    sign = 1 if view.higher_is_better else -1
    values = [sign * value for value in (base, target) if value is not None]
    values += [sign * t.accuracy for t in timed if t.accuracy is not None]
    limit = (sign * target if target is not None else min(values, default=0.0)) - _REACH * step
    if not any(trial.meets_accuracy for trial in (*timed, *aside)):
        limit = -inf  # use the room for the misses if no trial met the target
    values += [
        sign * t.accuracy for t in aside if t.accuracy is not None and sign * t.accuracy >= limit
    ]
    shown = [value for value in values if value >= limit] or [0.0]
    return sign * (min(shown) - 0.35 * step), sign * max(shown)


def _is_worse(view: View, accuracy: float | None, limit: float) -> bool:
    if accuracy is None:
        return False
    return accuracy < limit if view.higher_is_better else accuracy > limit


def _draw_pareto_front(view: View, frame: _Frame) -> Element | None:
    met = [trial for trial in view.drawable_trials if trial.met and time_fraction(trial)]
    points = sorted(frame.place_trial(trial) for trial in met)
    steps: list[tuple[float, float]] = []
    for x, y in points:
        if not steps or y < steps[-1][1]:
            if steps:
                steps.append((x, steps[-1][1]))
            steps.append((x, y))
    if len(steps) < 2:
        return None
    return create_element(
        "path", d="M" + "L".join(f"{x:g},{y:g}" for x, y in steps), class_="front"
    )


def _draw_baseline(view: View, frame: _Frame) -> Element | None:
    base = view.baseline_accuracy
    if base is None:
        return None
    x, y = frame.time(1.0), frame.accuracy(base)
    latency = view.report.baseline_latency if view.report else None
    tooltip = f"{view.source}: {view.metric} {formatting.format_number(base)}"
    tooltip += f", {formatting.format_seconds(latency)} per batch" if latency else ""
    label = draw_text(view.source, x, y - 12, "point-word", "middle")
    return with_tooltip(tooltip, draw_mark("diamond", x, y, "fp32"), label)


def describe_trial(trial: Trial, metric: str) -> str:
    """Describe a trial as text, its accuracy under the name of the metric."""
    parts = [formatting.format_accuracy(trial, metric)]
    speed = f"{formatting.format_ratio(trial.speedup)} as fast as FP32"
    parts.append(speed if trial.speedup else "not timed")
    parts.extend(f"{count} {NAMES[p]}" for p, count in trial.plan.counts().items())
    error = f"; {trial.error}" if trial.error else ""
    return f"trial {trial.number + 1} {_SAID[trial.outcome]}: {', '.join(parts)}{error}"


def _draw_trial(view: View, trial: Trial, frame: _Frame, chosen: bool) -> Element:
    best = trial is view.best_trial
    kind = f"trial {trial.outcome.value}{' chosen' if best else ''}"
    shape = "star" if best else SHAPES[trial.outcome]
    tooltip = describe_trial(trial, view.metric)
    drawn = draw_mark(shape, *frame.place_trial(trial), kind)
    if not chosen:
        return with_tooltip(tooltip, drawn)
    button = {"tabindex": 0, "role": "button", "aria_label": tooltip, "data_trial": trial.number}
    return with_tooltip(tooltip, drawn, class_="pick", **button)

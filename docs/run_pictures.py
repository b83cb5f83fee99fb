"""The pictures of the documentation, drawn from runs that are made here.

    python -m docs.run_pictures [--net residual3] [--out docs/pictures]

`trials.svg`: every plan that three strategies tried on a net that is hostile to INT8, by accuracy
and by latency. All plans are converted once more and timed in one loop. `phases.svg`: where the
seconds of a run go, in every framework. The machine and the date stand in the pictures.
"""

from __future__ import annotations

import argparse
import datetime
import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from xml.sax.saxutils import escape

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

from benchmarks.measurement.search_run import Case
from neural_mp import ExitPolicy, convert_with_plan
from neural_mp.api.optimized_model import OptimizedModel
from neural_mp.core import hardware
from neural_mp.profiling import time_interleaved_medians

STRATEGIES = ("mincut", "basic", "random")
FRAMEWORKS = ("pytorch", "tensorflow", "onnx")
MAX_TRIALS = 12
#: Phases of a run, in order; `probe` is part of `search`.
PHASES = ("load", "baseline", "calibrate", "search", "measure")
#: Size and margins of a picture, in pixels.
WIDTH, HEIGHT = 720, 400
LEFT, RIGHT, TOP, BOTTOM = 80, 24, 64, 84
#: Told apart by people who do not see all colours, too (Okabe and Ito).
COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#999999")
INK, LINES = "#333333", "#dddddd"


@dataclass(frozen=True)
class Point:
    """One mark: where it is, to which series it belongs, and whether it stands out."""

    x: float
    y: float
    series: str
    large: bool = False


@dataclass(frozen=True)
class Axis:
    """An axis: what it shows, where it begins and ends, and where it is marked."""

    label: str
    low: float
    high: float
    ticks: Sequence[float]
    form: str = "g"

    def place(self, value: float, begin: float, end: float) -> float:
        """Where a value lies between two pixels."""
        return begin + (value - self.low) / (self.high - self.low) * (end - begin)


def scatter(
    title: str,
    note: str,
    x: Axis,
    y: Axis,
    points: Sequence[Point],
    lines: Mapping[str, float],
) -> str:
    """Points by series, with a dashed line at every `label → y` of `lines`."""
    bottom, right = HEIGHT - BOTTOM, WIDTH - RIGHT
    parts = [_frame(title, note, [*dict.fromkeys(point.series for point in points)])]
    for tick in x.ticks:
        at = x.place(tick, LEFT, right)
        parts.append(_line(at, TOP, at, bottom, LINES))
        parts.append(_text(at, bottom + 16, format(tick, x.form), "middle"))
    for tick in y.ticks:
        at = y.place(tick, bottom, TOP)
        parts.append(_line(LEFT, at, right, at, LINES))
        parts.append(_text(LEFT - 8, at + 4, format(tick, y.form), "end"))
    parts.append(_text((LEFT + right) / 2, bottom + 34, x.label, "middle"))
    parts.append(_text(LEFT, TOP - 10, y.label))
    for label, value in lines.items():
        at = y.place(value, bottom, TOP)
        parts.append(_line(LEFT, at, right, at, INK, dashed=True))
        parts.append(_text(right - 4, at - 5, label, "end"))
    colours = _colours(point.series for point in points)
    for point in points:
        at = x.place(point.x, LEFT, right), y.place(point.y, bottom, TOP)
        size = 9 if point.large else 5
        edge = f' stroke="{INK}" stroke-width="2"' if point.large else ""
        parts.append(
            f'<circle cx="{at[0]:.1f}" cy="{at[1]:.1f}" r="{size}" '
            f'fill="{colours[point.series]}" fill-opacity="0.8"{edge}/>'
        )
    return _document(parts)


def bars(title: str, note: str, label: str, rows: Mapping[str, Mapping[str, float]]) -> str:
    """One bar a row, made of its parts in order, with the sum at its end."""
    parts_of_all = [*dict.fromkeys(name for row in rows.values() for name in row)]
    colours = _colours(parts_of_all)
    longest = max(sum(row.values()) for row in rows.values())
    bottom, right = HEIGHT - BOTTOM, WIDTH - RIGHT - 60
    step = (bottom - TOP) / len(rows)
    parts = [_frame(title, note, parts_of_all)]
    for index, (name, row) in enumerate(rows.items()):
        top, at = TOP + (index + 0.2) * step, float(LEFT)
        parts.append(_text(LEFT - 8, top + step * 0.3 + 4, name, "end"))
        for part, value in row.items():
            wide = value / longest * (right - LEFT)
            parts.append(
                f'<rect x="{at:.1f}" y="{top:.1f}" width="{wide:.1f}" height="{step * 0.6:.1f}" '
                f'fill="{colours[part]}"><title>{escape(part)}: {value:.1f}</title></rect>'
            )
            at += wide
        parts.append(_text(at + 8, top + step * 0.3 + 4, f"{sum(row.values()):.1f}"))
    parts.append(_text((LEFT + right) / 2, bottom + 16, label, "middle"))
    return _document(parts)


def _colours(names: Sequence[str]) -> dict[str, str]:
    return dict(zip(dict.fromkeys(names), COLOURS, strict=False))


def _frame(title: str, note: str, series: Sequence[str]) -> str:
    """Background, title, legend and the note on where the figures are from."""
    parts = [
        f'<rect width="{WIDTH}" height="{HEIGHT}" rx="8" fill="#ffffff"/>',
        _text(LEFT, 26, title, size=16),
        _text(WIDTH - RIGHT, HEIGHT - 10, note, "end", size=11),
    ]
    at = LEFT
    for name, colour in _colours(series).items():
        parts.append(f'<circle cx="{at}" cy="{HEIGHT - 34}" r="5" fill="{colour}"/>')
        parts.append(_text(at + 10, HEIGHT - 30, name))
        at += 34 + 7 * len(name)
    return "\n".join(parts)


def _text(x: float, y: float, content: str, anchor: str = "start", size: int = 12) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}" '
        f'fill="{INK}">{escape(content)}</text>'
    )


def _line(x1: float, y1: float, x2: float, y2: float, colour: str, dashed: bool = False) -> str:
    dashes = ' stroke-dasharray="6 4"' if dashed else ""
    return (
        f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{colour}"{dashes}/>'
    )


def _document(parts: Sequence[str]) -> str:
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        f'width="{WIDTH}" height="{HEIGHT}" font-family="sans-serif">'
    )
    return "\n".join([head, *parts, "</svg>"]) + "\n"


def case_of(framework: str, net: str) -> Case:
    """Return a net in INT8, in a framework."""
    return Case(framework, net, "int8", MAX_TRIALS, Path())


def tuned(case: Case, strategy: str) -> OptimizedModel:
    """Return the result of a strategy."""
    # The picture shows the accuracy on all of the data.
    with tempfile.TemporaryDirectory() as workspace:
        case = replace(case, workspace=Path(workspace))
        return case.tuned(strategy, ExitPolicy(max_trials=MAX_TRIALS), early_stopping=False)


def trials_picture(net: str, note: str) -> str:
    """Accuracy against latency, of every plan that was tried."""
    case = case_of("pytorch", net)
    source = case.source
    results = {strategy: tuned(case, strategy) for strategy in STRATEGIES}
    any_result = results[STRATEGIES[0]]
    batch, _ = next(iter(case.loader("test")))
    baseline = any_result.adaptor.load(source, example=batch)
    tried = [
        (strategy, trial, trial.plan == result.plan)
        for strategy, result in results.items()
        for trial in result.trials
        if trial.accuracy is not None
    ]
    models = {
        trial.plan: convert_with_plan(
            source, trial.plan, observations=any_result.observations, inputs=(batch,)
        )
        for _, trial, _ in tried
    }
    runs = [
        partial(any_result.adaptor.predict, baseline, batch),
        *(partial(model, batch) for model in models.values()),
    ]
    in_float, *seconds = time_interleaved_medians(runs, warmup=3, iterations=51)
    shares = {plan: latency / in_float for plan, latency in zip(models, seconds, strict=True)}
    report = any_result.report
    points = [Point(1.0, report.baseline_accuracy, "FP32", large=True)] + [
        Point(shares[trial.plan], trial.accuracy, strategy, large=chosen)
        for strategy, trial, chosen in tried
    ]
    slowest = max(1.0, *(point.x for point in points))
    return scatter(
        f"Plans tried on '{net}': up and to the left is better",
        note,
        Axis("latency as a share of FP32's", 0, slowest * 1.05, [0, 0.2, 0.4, 0.6, 0.8, 1.0]),
        Axis("accuracy", 0, 1.05, [0, 0.2, 0.4, 0.6, 0.8, 1.0], ".1f"),
        points,
        {f"target {report.target:.3f}": report.target},
    )


def phases_picture(net: str, note: str) -> str:
    """Where the seconds of a run go."""
    rows = {}
    for framework in FRAMEWORKS:
        seconds = tuned(case_of(framework, net), "mincut").report.seconds
        rows[framework] = {phase: seconds.get(phase, 0.0) for phase in PHASES}
    return bars(f"A run of the default search on '{net}'", note, "seconds", rows)


def main() -> None:
    """Draw both pictures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--net", default="residual3")
    parser.add_argument("--out", type=Path, default=Path("docs/pictures"))
    chosen = parser.parse_args()
    machine = hardware.detect()
    exact = "with" if machine.int8_accumulation.value == "exact" else "without"
    today = datetime.date.today()
    threads = os.environ.get("OMP_NUM_THREADS", "all")
    note = f"{machine.name}, {exact} exact products of bytes, {threads} thread(s), {today}"
    chosen.out.mkdir(parents=True, exist_ok=True)
    (chosen.out / "trials.svg").write_text(trials_picture(chosen.net, note), encoding="utf-8")
    (chosen.out / "phases.svg").write_text(phases_picture(chosen.net, note), encoding="utf-8")


if __name__ == "__main__":
    main()

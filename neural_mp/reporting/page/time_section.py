"""Time per op type, single op and conversion."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

from neural_mp.core.op_timings import MAX_GAIN
from neural_mp.core.precision import Precision
from neural_mp.reporting import formatting
from neural_mp.reporting.page.charts import (
    NAMES,
    Part,
    Row,
    draw_bars,
    draw_card,
    draw_empty_note,
    draw_for_screens,
    draw_legend,
    draw_name,
    draw_scroll_area,
    draw_stacked_bar,
)
from neural_mp.reporting.page.page_model import View
from neural_mp.reporting.page.summary import draw_precision_bar, format_lowered_ops
from neural_mp.util.html import Child, Element, create_element, create_table
from neural_mp.util.text import format_count

CONVERSIONS, OTHER = "conversions", "other"
#: Number of op types with their own colour.
_SHOWN = 5
_MOST_OPS, _MOST_CONVERSIONS = 14, 100
#: Length of the longest bar, relative to the median row's.
_MAX_OVER_MEDIAN = 8.0


def time_section(view: View) -> Element:
    """Return the time of both models by op type, and the ops per precision."""
    what = "Precisions of ops." if view.run_end else "Precisions of ops in the best trial so far."
    return create_element(
        "section",
        create_element("h2", "Time by op"),
        _time_bars(view),
        create_element("h2", format_lowered_ops(view), class_="second"),
        create_element("p", what, class_="lead"),
        draw_precision_bar(view),
        _count_by_type(view),
        _draw_ineligible_contractions(view),
        class_="card",
    )


def _draw_ineligible_contractions(view: View) -> Element | None:
    reasons = view.report.ineligible if view.report else ()
    if not reasons:
        return None
    lines = [
        f"{format_count(r.num_ops, 'op')} not in {NAMES[r.precision]}: {r.reason}" for r in reasons
    ]
    return create_element(
        "details",
        create_element("summary", "Ineligible contractions"),
        create_element("ul", [create_element("li", item) for item in lines]),
        class_="ineligible",
    )


def time_by_type(view: View, times: Mapping[str, float]) -> dict[str, float]:
    """Return op type → seconds; nodes that only the result has are conversions."""
    baseline = view.run_end.baseline_times if view.run_end else {}
    totals: dict[str, float] = defaultdict(float)
    for entry, seconds in times.items():
        if entry in view.graph:
            totals[view.graph[entry].type] += seconds
        else:
            totals[OTHER if entry in baseline else CONVERSIONS] += seconds
    return dict(totals)


def _time_bars(view: View) -> list[Child]:
    ending = view.run_end
    if ending is None or not ending.baseline_times:
        why = "the run is unfinished" if ending is None else "the framework does not time ops"
        if ending is not None and ending.report.accelerator is not None:
            why = "only the accelerator could"
        return [draw_empty_note(f"The ops of the result were not timed: {why}.")]
    timed = {view.source: ending.baseline_times, "result": ending.result_times}
    sums = {title: time_by_type(view, times) for title, times in timed.items() if times}
    colours = _colours_by_type(sums, sums[view.source])
    longest = max(sum(by.values()) for by in sums.values())
    sampled = ""
    if ending.timed_samples is not None:
        sampled = (
            f" Since the batch of {view.record.setup.batch_size} takes long, ops were timed on "
            f"{format_count(ending.timed_samples, 'sample')}."
        )
    scale = f"Both bars have the same scale.{sampled}"
    drawn: list[Child] = [create_element("p", scale, class_="lead")]
    drawn += [_draw_bar(title, by, colours, longest) for title, by in sums.items()]
    rest = any(kind not in colours and kind != CONVERSIONS for by in sums.values() for kind in by)
    keys = [(colour, kind) for kind, colour in colours.items()]
    keys += [("k5", OTHER)] if rest else []
    keys += [("kc", CONVERSIONS)] if any(by.get(CONVERSIONS) for by in sums.values()) else []
    drawn.append(draw_legend(keys))
    conversions = ending.report.conversions
    drawn.append(
        create_element(
            "p",
            f"Per inference: {conversions.quantize} quantize, {conversions.dequantize} dequantize, "
            f"{format_count(conversions.casts, 'cast')}. The bars are sums of ops timed one by "
            "one; the latency of the whole model is "
            f"{formatting.format_seconds(ending.report.latency)}.",
            class_="lead after",
        )
    )
    return drawn


def _colours_by_type(
    sums: Mapping[str, Mapping[str, float]], baseline: Mapping[str, float]
) -> dict[str, str]:
    """Return op type → CSS class, for the types with the longest time in the given model."""
    kinds = dict.fromkeys(kind for by in sums.values() for kind in by)
    op_types = [kind for kind in kinds if kind not in (CONVERSIONS, OTHER)]
    ordered = sorted(op_types, key=lambda kind: -baseline.get(kind, 0.0))
    return {kind: f"k{index}" for index, kind in enumerate(ordered[:_SHOWN])}


def _draw_bar(
    title: str, by: Mapping[str, float], colours: Mapping[str, str], longest: float
) -> list[Element]:
    heading = f"{title}: {formatting.format_seconds(sum(by.values()))}"
    parts = _make_bar_parts(title, by, colours)
    return [
        create_element("p", heading, class_="lead bar-title"),
        *draw_for_screens(lambda narrow: draw_stacked_bar(parts, narrow, longest)),
    ]


def _make_bar_parts(title: str, by: Mapping[str, float], colours: Mapping[str, str]) -> list[Part]:
    whole = sum(by.values()) or 1.0

    def build_part(label: str, seconds: float, kind: str) -> Part:
        tooltip = f"{title}, {label}: {formatting.format_seconds(seconds)}, {seconds / whole:.0%}"
        return Part(seconds, kind, tooltip, label)

    parts = [build_part(kind, by[kind], colour) for kind, colour in colours.items() if by.get(kind)]
    rest = sum(s for kind, s in by.items() if kind not in colours and kind != CONVERSIONS)
    if rest:
        parts.append(build_part(OTHER, rest, "k5"))
    if by.get(CONVERSIONS):
        parts.append(build_part(CONVERSIONS, by[CONVERSIONS], "kc"))
    return parts


def _count_by_type(view: View) -> Element:
    counts: dict[str, dict[Precision, int]] = defaultdict(lambda: defaultdict(int))
    for op in view.graph:
        counts[op.type][view.runs_in[op.name]] += 1
    shown = list(view.counts)
    ordered = sorted(counts.items(), key=lambda item: (-sum(item[1].values()), item[0]))
    rows = [[kind, *(by.get(p) or "" for p in shown)] for kind, by in ordered]
    content = create_table(["type", *(NAMES[p] for p in shown)], rows)
    return draw_scroll_area(content, "Ops by type and precision", "short")


def single_ops_section(view: View) -> Element | None:
    """Return the times of single ops in each precision; None if not measured."""
    times = view.record.measured.times.ops
    if not times:
        return None
    slowest = sorted(times, key=lambda op: -max(times[op].values(), default=0.0))[:_MOST_OPS]
    rows = [_make_op_row(view, op) for op in slowest if times[op]]
    limit = _choose_bar_limit(rows)
    precisions = [p for p in reversed(Precision) if any(p in by for by in times.values())]
    more = f"The slowest {len(rows)} of {len(times)} timed ops." if len(times) > len(rows) else None
    return draw_card(
        "Time of single ops",
        "Each op with the ops fused into its kernel: first quartile of the runs, in brackets the "
        "fastest and the median; the number is the speed-up of the chosen precision over FP32, "
        f"clipped at {MAX_GAIN:.0f}×." + _clip_words(limit, rows),
        draw_for_screens(lambda narrow: draw_bars(rows, narrow, limit)),
        draw_legend(
            [*((p.value, NAMES[p]) for p in precisions), ("fp32 weak", "pale: not chosen")]
        ),
        create_element("p", more, class_="lead after") if more else None,
    )


def _choose_bar_limit(rows: Sequence[Row]) -> float | None:
    """Return the length at which bars are clipped, lest a few flatten all others; None for none."""
    longest = sorted(max(part.value for part in row.parts) for row in rows)
    if not longest:
        return None
    limit = _MAX_OVER_MEDIAN * longest[len(longest) // 2]
    return limit if longest[-1] > limit else None


def _clip_words(limit: float | None, rows: Sequence[Row]) -> str:
    if limit is None:
        return ""
    longer = sum(any(part.value > limit for part in row.parts) for row in rows)
    bound = formatting.format_seconds(limit)
    return f" Bars are clipped at {bound}: {format_count(longer, 'op')} longer."


def _make_op_row(view: View, op: str) -> Row:
    timings, runs = view.record.measured.times, view.effective.get(op)
    parts = []
    for precision in reversed(Precision):
        duration = timings.op_duration(op, precision)
        if duration is not None:
            chosen = precision is runs
            low, high = (
                formatting.format_seconds(duration.low),
                formatting.format_seconds(duration.high),
            )
            value = f"{formatting.format_seconds(duration.seconds)} ({low} to {high})"
            tooltip = f"{op} in {NAMES[precision]}: {value}"
            kind = precision.value if chosen else f"{precision.value} weak"
            parts.append(Part(duration.seconds, kind, tooltip + (", chosen" if chosen else "")))
    lower = runs is not None and runs is not Precision.FP32
    gain = timings.op_gain(op, runs) if lower and runs else None
    if gain is None:
        return Row(op, parts, "")
    words = f"≥ {MAX_GAIN:.0f}×, clipped" if gain.clipped else formatting.format_ratio(gain.value)
    return Row(op, parts, words)


def draw_conversions_section(view: View) -> Element | None:
    """Return the conversions in the result, slowest first; None without any."""
    ending = view.run_end
    if ending is None or not ending.conversions:
        return None
    conversions = sorted(ending.conversions, key=lambda c: -(c.seconds or 0.0))
    rows = [
        [
            draw_name(c.source),
            c.kind,
            create_element(
                "span",
                ", ".join(c.readers[:3]),
                f" and {len(c.readers) - 3} more" if len(c.readers) > 3 else None,
                class_="names",
            ),
            formatting.format_seconds(c.seconds),
        ]
        for c in conversions[:_MOST_CONVERSIONS]
    ]
    remaining = len(conversions) - len(rows)
    return draw_card(
        "Conversions",
        f"{format_count(len(conversions), 'data type conversion')} per inference.",
        draw_scroll_area(
            create_table(
                ["tensor", "conversion", "consumers", "time"], rows, class_="left names-first"
            ),
            "Conversions",
            "middle",
        ),
        create_element("p", f"… and {remaining} more.", class_="lead after")
        if remaining > 0
        else None,
    )

"""Page sections: phases and settings of the run, machine, accelerator, map, ops and noise."""

from __future__ import annotations

from math import isfinite
from typing import TypeGuard

from neural_mp.core.precision import Precision
from neural_mp.reporting import formatting
from neural_mp.reporting.page.charts import (
    NAMES,
    Part,
    Row,
    draw_card,
    draw_empty_note,
    draw_facts,
    draw_for_screens,
    draw_legend,
    draw_points,
    draw_scroll_area,
    draw_stacked_bar,
    format_percent,
)
from neural_mp.reporting.page.page_model import View
from neural_mp.reporting.tables import RUNTIME_HEADINGS, make_runtime_rows, make_stage_rows
from neural_mp.runs.report import STAGE_WORDS, AcceleratorFigures
from neural_mp.targets import Widths
from neural_mp.tuning.measurement.sensitivity import Sensitivity
from neural_mp.util.html import Element, create_element, create_table
from neural_mp.util.text import format_count

_PHASES = {
    "load": "loading and capture",
    "baseline": "FP32 evaluation",
    "calibrate": "calibration",
    "search": "search",
    "measure": "final measurement",
}
#: A part of the search, listed separately.
_PROBE = "probe"
#: Number of refused ops with their names.
_MOST_NAMES = 100
_EVIDENCE = {"measured": "measured with its compiler", "documents": "from documents, untested"}


def run_section(view: View) -> Element:
    """Return the durations and the settings of the run."""
    record = view.record
    pairs = [
        ("run", record.name or "not stored"),
        ("started", record.setup.started),
        ("ended", view.run_end.ended if view.run_end else "not recorded"),
        ("calibration", f"{record.observations.samples} samples"),
    ]
    rows = [[option, s.value, s.origin] for option, s in record.setup.settings.items()]
    settings = create_table(["setting", "value", "origin"], rows, class_="left")
    return draw_card(
        "Run",
        None,
        _draw_phases(view),
        draw_facts(pairs),
        draw_scroll_area(settings, "Settings", "middle after") if rows else None,
    )


def draw_runtimes_section(view: View) -> Element | None:
    """Return the compared runtimes, and the hint at a faster one; None without both."""
    report = view.report
    runtimes = report.runtimes if report else view.record.setup.runtimes
    hint = report.hint if report else None
    if not runtimes and hint is None:
        return None
    rows = [list(row) for row in make_runtime_rows(runtimes)]
    figures = create_table(list(RUNTIME_HEADINGS), rows, class_="left")
    return draw_card(
        "Runtimes",
        None if hint is None else str(hint),
        draw_scroll_area(figures, "Runtimes", "middle after") if rows else None,
    )


def _draw_phases(view: View) -> list[Element]:
    if view.report is None:
        tried = sum(trial.seconds for trial in view.trials)
        return [
            draw_empty_note(
                "Phases are recorded when a run ends. The trials took "
                f"{formatting.format_seconds(tried)}."
            )
        ]
    seconds = view.report.seconds
    labels = {**_PHASES, **{name: name for name in seconds if name not in (*_PHASES, _PROBE)}}
    spent = [(labels[name], seconds[name]) for name in labels if seconds.get(name)]
    if not spent:
        return []
    parts = [
        Part(duration, f"k{index % 6}", f"{name}: {formatting.format_seconds(duration)}", name)
        for index, (name, duration) in enumerate(spent)
    ]
    keys = [(part.kind, part.tooltip) for part in parts]
    whole = f"{formatting.format_seconds(sum(duration for _, duration in spent))} in total"
    if seconds.get(_PROBE):
        whole += (
            f"; the search includes {formatting.format_seconds(seconds[_PROBE])} of op measurements"
        )
    whole += formatting.format_effort_suffix(view.report)
    return [
        create_element("p", f"{whole}.", class_="lead"),
        *draw_for_screens(lambda narrow: draw_stacked_bar(parts, narrow)),
        draw_legend(keys),
    ]


def draw_machine_section(view: View) -> Element:
    """Return the machine and the versions."""
    machine, versions = view.record.setup.machine, view.record.setup.versions
    supports = [
        (NAMES[p], f"{how}: {why}")
        for p in Precision
        for how, why in [machine.supports.get(p.value, ("", ""))]
        if how
    ]
    cores = f"{machine.cores} core{'' if machine.cores == 1 else 's'}"
    return draw_card(
        "Machine and versions",
        "The figures hold for this machine and these versions.",
        draw_facts(
            [
                ("CPU", f"{machine.name}, {cores}"),
                ("relevant CPU flags", " ".join(machine.flags) or "none"),
                *supports,
                *([("system", machine.system)] if machine.system else []),
                *versions.items(),
            ]
        ),
    )


def map_section(view: View) -> Element:
    """Return the map of the model, one box per kernel, coloured by a selectable property."""
    colours = {"precision": "precision", "noise": "quantization noise"}
    if view.output_nsr:
        colours["output_noise"] = "output noise"
    is_timed = view.run_end is not None and bool(view.run_end.baseline_times)
    if is_timed or view.record.measured.times.ops:
        colours |= {"time": "time", "gain": "gain over FP32"}
    select = create_element(
        "select",
        [create_element("option", label, value=v) for v, label in colours.items()],
        id="colour",
    )
    canvas = create_element(
        "canvas",
        id="map",
        tabindex=0,
        role="application",
        aria_label=f"Map of {format_count(len(view.graph), 'op')}; arrow keys follow the edges, "
        "plus and minus zoom. The table of ops below contains the same data as text.",
    )
    buttons = [
        create_element("button", sign, aria_label=label, data_zoom=by)
        for sign, label, by in (
            ("+", "Zoom in", 1.4),
            ("−", "Zoom out", 0.714),
            ("⤢", "Show all", 0),
        )
    ]
    return create_element(
        "section",
        create_element(
            "div",
            create_element(
                "div",
                create_element("h2", "Map"),
                create_element(
                    "p",
                    "One box per kernel or module, from top to bottom, then the next column. ",
                    create_element("span", id="showing", class_="showing"),
                    class_="lead",
                ),
            ),
            create_element(
                "div",
                create_element(
                    "label", "boxes ", create_element("select", id="fold"), id="folds", hidden=True
                ),
                create_element("label", "colour by ", select),
                _search_input("find", "find an op", "Find an op"),
                create_element("button", "Show the result", id="back", hidden=True),
                class_="tools",
            ),
            class_="head",
        ),
        create_element(
            "div",
            canvas,
            create_element("div", buttons, class_="zoom"),
            create_element("div", "drag to move · ctrl + wheel or pinch to zoom", class_="hint"),
            class_="map",
        ),
        create_element("ul", id="maplegend", class_="legend"),
        create_element("div", id="detail", aria_live="polite"),
        create_element(
            "noscript", create_element("p", "The map and the table of ops require scripts.")
        ),
        class_="card one",
    )


def draw_ops_section() -> Element:
    """Return the table of ops."""
    return create_element(
        "section",
        create_element(
            "div",
            create_element("h2", "Ops"),
            create_element(
                "div", _search_input("filter", "name, type or reason", "Filter ops"), class_="tools"
            ),
            class_="head",
        ),
        draw_scroll_area(create_element("table", id="ops"), "Table of ops"),
        create_element("p", id="more", class_="lead after"),
        class_="card one",
    )


def stage_noise_section(view: View) -> Element | None:
    """Return the noise of each op before and after its weights recovered accuracy; or None."""
    noise = view.report.stage_noise if view.report else None
    if noise is None:
        return None
    rows = make_stage_rows(noise, len(noise.ops))
    figures = create_table(["op", *(STAGE_WORDS[stage] for stage in noise.measured_stages)], rows)
    return draw_card(
        "Noise before and after recovery",
        f"SQNR of results against FP32, on {format_count(noise.samples, 'calibration sample')}: "
        "higher is closer to FP32. Training on labels may move a result away from FP32.",
        draw_scroll_area(figures, "Noise before and after recovery", "middle after"),
    )


def _search_input(name: str, hint: str, label: str) -> Element:
    return create_element("input", type="search", id=name, placeholder=hint, aria_label=label)


#: NSR above which the default strategy lets tensors fall back first.
NOISY = 0.05
_MOST = 24


def draw_noise_section(view: View, wide: bool) -> Element:
    """Return a chart of the decisions with the highest degradation, `wide` for a full page."""
    rows = [row for row in map(_draw_decision_row, view.sensitivities) if row.parts]
    if not rows:
        return draw_card(
            "Sensitivity",
            None,
            draw_empty_note("No quantization noise was measured: no op can run in INT8."),
        )
    shown = rows[:_MOST]
    kinds = {part.kind for row in shown for part in row.parts}
    keys = (
        ("int8", f"INT8 in {view.page_subject}"),
        ("fp32", "not in INT8"),
        ("was", "before correction"),
        ("output-noise", "output noise of this tensor or op alone"),
    )
    more = f"The {len(shown)} most sensitive decisions; the table of ops lists all {len(rows)}."
    return draw_card(
        "Sensitivity",
        "Quantization noise of a tensor in INT8, as a fraction of its signal power (logarithmic "
        f"scale). In the search, tensors above {format_percent(NOISY)} fall back first.",
        draw_for_screens(lambda narrow: draw_points(shown, narrow, wide, NOISY)),
        draw_legend([(kind, label) for kind, label in keys if kind in kinds]),
        create_element("p", more, class_="lead after") if len(rows) > len(shown) else None,
    )


def _draw_decision_row(row: Sensitivity) -> Row:
    """Show noise without corrections, actual noise, and output noise."""
    kind = "int8" if row.runs_in == Precision.INT8.value else "fp32"
    suffix = f" after {row.correction.replace('_', ' ')}" if row.correction else ""
    gain = f", {formatting.format_seconds(row.seconds_gained)} saved" if row.seconds_gained else ""
    behind = f"in {row.runs_in}: {row.reason}{gain}"
    parts, notes = [], []
    if _fits_log_axis(row.noise) and row.correction:
        parts.append(
            Part(row.noise, "was", f"{row.name}: {format_percent(row.noise)} before correction")
        )
        notes.append(f"{format_percent(row.noise)} →")
    now = row.corrected_noise if row.correction else row.noise
    if _fits_log_axis(now):
        tooltip = f"{row.name}: quantization noise {format_percent(now)}{suffix}; {behind}"
        parts.append(Part(now, kind, tooltip))
        notes.append(format_percent(now))
    linked, out = len(parts), row.output_nsr
    if _fits_log_axis(out):
        tooltip = f"{row.name}: output noise {format_percent(out)}{suffix}; {behind}"
        parts.append(Part(out, "output-noise", tooltip, shape="diamond"))
        notes = notes or [format_percent(out)]
    return Row(row.name, parts, " ".join(notes), linked)


def _fits_log_axis(value: float | None) -> TypeGuard[float]:
    return value is not None and isfinite(value) and value > 0


def draw_accelerator_section(view: View) -> Element | None:
    """Return the estimates for the accelerator of the run; None for CPUs and unfinished runs."""
    figures = None if view.report is None else view.report.accelerator
    if figures is None:
        return None
    cost = f"{figures.relative_cost:.3g} of the estimated cost of all ops in float"
    parts = _make_width_parts(figures)
    return draw_card(
        f"Multiplications by width, {figures.title}",
        f"{cost}; rules {_EVIDENCE.get(figures.evidence, figures.evidence)}. This CPU only "
        f"simulates the accelerator: its times are not shown.",
        draw_for_screens(lambda narrow: draw_stacked_bar(parts, narrow)) if parts else None,
        draw_legend([(part.kind, part.tooltip) for part in parts]),
        _draw_refused_ops(view, figures),
    )


def _make_width_parts(figures: AcceleratorFigures) -> list[Part]:
    """Return the shares of the multiplications, the narrowest first, float types last."""
    words = [*(w.value for w in Widths), *(w for w in figures.shares if w not in set(Widths))]
    shares = [(word, figures.shares[word]) for word in words if figures.shares.get(word)]
    return [
        Part(share, f"k{index % 6}", f"{share:.0%} of MACs in {word}", word)
        for index, (word, share) in enumerate(shares)
    ]


def _draw_refused_ops(view: View, figures: AcceleratorFigures) -> Element | None:
    refused = [op for op in view.graph if op.type in figures.refused]
    if not refused:
        return None
    lines = [f"{op.name} ({op.type})" for op in refused[:_MOST_NAMES]]
    remaining = len(refused) - len(lines)
    lines += [f"… and {remaining} more"] if remaining else []
    return create_element(
        "details",
        create_element(
            "summary", f"{format_count(len(refused), 'op')} that the compiler does not take"
        ),
        create_element("ul", [create_element("li", line) for line in lines]),
        class_="ineligible",
    )

"""Sensitivity: what storing a tensor in INT8, or an op in fewer bits, does to the numbers."""

from __future__ import annotations

from math import isfinite
from typing import TypeGuard

from neural_mp.core.precision import Precision
from neural_mp.reporting import formatting
from neural_mp.reporting.page.axes import both, legend, percent
from neural_mp.reporting.page.bars import Part, Row, points
from neural_mp.reporting.page.page_model import View, arriving
from neural_mp.reporting.page.parts import card, none
from neural_mp.tuning.sensitivity import Sensitivity
from neural_mp.util.html import Element, element

#: Above this share the default strategy takes a tensor out of INT8 first.
NOISY = 0.05
_MOST = 24


def noise_section(view: View, wide: bool) -> Element:
    """The decisions that do most harm.

    Args:
        view: the run.
        wide: whether it has the whole width of the page.
    """
    rows = [row for row in map(_row, view.sensitivities) if row.parts]
    if not rows:
        return card("Sensitivity", None, none("No noise was measured: nothing could run in INT8."))
    shown = rows[:_MOST]
    kinds = {part.kind for row in shown for part in row.parts}
    keys = (
        ("int8", f"in INT8 in {view.subject}"),
        ("fp32", "not in INT8"),
        ("was", "before repair"),
        ("arriving", "at the outputs, this one alone"),
    )
    more = f"The {len(shown)} of most harm; the table of ops has all {len(rows)}."
    return card(
        "Sensitivity",
        "Noise that storing a tensor in INT8 adds to it, as a share of its power; logarithmic "
        f"scale. Above {percent(NOISY)} the search takes it out of INT8 first.",
        both(lambda narrow: points(shown, narrow, wide, NOISY)),
        legend([(kind, said) for kind, said in keys if kind in kinds]),
        element("p", more, class_="lead after") if len(rows) > len(shown) else None,
    )


def _row(row: Sensitivity) -> Row:
    """A decision: before repair, as it is, and what arrives at the outputs."""
    kind = "int8" if row.runs_in == Precision.INT8.value else "fp32"
    repair = f" after {row.repair.replace('_', ' ')}" if row.repair else ""
    gain = f", {formatting.seconds(row.seconds_gained)} gained" if row.seconds_gained else ""
    behind = f"in {row.runs_in}: {row.reason}{gain}"
    parts, notes = [], []
    if _is_shown(row.noise) and row.repair:
        parts.append(Part(row.noise, "was", f"{row.name}: {percent(row.noise)} before repair"))
        notes.append(f"{percent(row.noise)} →")
    now = row.repaired_noise if row.repair else row.noise
    if _is_shown(now):
        said = f"{row.name}: {percent(now)} of noise{repair}; {behind}"
        parts.append(Part(now, kind, said))
        notes.append(percent(now))
    linked, out = len(parts), arriving(row)
    if _is_shown(out):
        said = f"{row.name}: {percent(out)} of noise at the outputs{repair}; {behind}"
        parts.append(Part(out, "arriving", said, shape="diamond"))
        notes = notes or [percent(out)]
    return Row(row.name, parts, " ".join(notes), linked)


def _is_shown(value: float | None) -> TypeGuard[float]:
    """Whether a value has a place on a logarithmic scale."""
    return value is not None and isfinite(value) and value > 0

"""Section of the page for an accelerator: widths of its multiplications, and ops it refuses."""

from __future__ import annotations

from neural_mp.reporting.page.charts import (
    Part,
    draw_card,
    draw_for_screens,
    draw_legend,
    draw_stacked_bar,
)
from neural_mp.reporting.page.page_model import View
from neural_mp.runs.report import AcceleratorFigures
from neural_mp.targets import Widths
from neural_mp.util.html import Element, create_element
from neural_mp.util.text import format_count

#: Number of refused ops with their names.
_MOST_NAMES = 100
_EVIDENCE = {"measured": "measured with its compiler", "documents": "from documents, untested"}


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

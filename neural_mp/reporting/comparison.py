"""Table and CSV of a model comparison."""

from __future__ import annotations

import io

from rich.console import Group, RenderableType
from rich.text import Text

from neural_mp.reporting import formatting
from neural_mp.tuning.measurement.comparison import EQUAL, Comparison, LayerDifference
from neural_mp.tuning.measurement.sqnr import MIN_SQNR_DB
from neural_mp.util.csv_table import write_table
from neural_mp.util.text import format_count

#: Default number of worst ops to mark.
MARKED = 5
_STYLES = {"first": "red", "worst": "yellow"}
_FIGURES = ("sqnr", "sqnr_drop", "introduced_nsr", "cosine", "max_abs_error")


def build_comparison_tables(comparison: Comparison, worst: int | None = None) -> RenderableType:
    """Return tables of the outputs, and of the ops in graph order with the worst marked.

    With `worst`, only the N ops that introduce the most quantization noise are shown.
    """
    chosen = comparison.worst(MARKED if worst is None else worst)
    marked = {layer.name for layer in chosen}
    shown = comparison.layers if worst is None else chosen
    batches = format_count(comparison.batches, "batch", "batches")
    title = f"Outputs: {format_count(comparison.samples, 'sample')} in {batches}"
    figures = ("SQNR", "SQNR drop", "cosine", "max. abs. error")
    headings = ("output", "SQNR", "cosine", "max. abs. error")
    outputs = formatting.create_table(title, *headings, right=figures)
    for output in comparison.outputs:
        outputs.add_row(
            output.name,
            formatting.format_decibels(output.sqnr),
            f"{output.cosine:.6f}",
            f"{output.max_abs_error:.3g}",
        )
    of_all = "" if worst is None else f"; {len(shown)} that introduce the most quantization noise"
    title = f"{format_count(len(comparison.layers), 'op')}{of_all}"
    layers = formatting.create_table(title, "op", "type", "A → B", *figures, "", right=figures)
    for layer in shown:
        mark = "worst" if layer.name in marked else ""
        if comparison.first is not None and layer.name == comparison.first.name:
            mark = "first"
        layers.add_row(*_format_layer_cells(layer), mark, style=_STYLES.get(mark, ""))
    parts: list[RenderableType] = [outputs] if comparison.outputs else []
    parts += [layers, Text(_describe_divergence(comparison))]
    parts += [
        Text(f"{format_count(len(names), 'op')} not compared: they {reason}", style="dim")
        for reason, names in comparison.left_out.items()
    ]
    return Group(*parts)


def format_comparison_csv(comparison: Comparison, worst: int | None = None) -> str:
    """Return CSV with a header and one line per op; the SQNR of equal values is `inf`."""
    text = io.StringIO()
    layers = comparison.layers if worst is None else comparison.worst(worst)
    rows = (
        (layer.name, layer.type, *layer.dtypes, *(getattr(layer, name) for name in _FIGURES))
        for layer in layers
    )
    write_table(text, [("name", "type", "dtype_a", "dtype_b", *_FIGURES), *rows])
    return text.getvalue()


def _format_layer_cells(layer: LayerDifference) -> tuple[str, ...]:
    first, second = layer.dtypes
    names, types = zip(*layer.fused_ops, (layer.name, layer.type), strict=True)
    return (
        ", ".join(names),
        ", ".join(types),
        first if first == second else f"{first} → {second}",
        formatting.format_decibels(layer.sqnr),
        _format_drop(layer),
        f"{layer.cosine:.6f}",
        f"{layer.max_abs_error:.3g}",
    )


def _describe_divergence(comparison: Comparison) -> str:
    first = comparison.first
    if first is None:
        return "No divergence: no op has an SQNR clearly below the SQNR of its inputs"
    low = first.sqnr < MIN_SQNR_DB
    why = f"first op below {MIN_SQNR_DB:.0f} dB" if low else "largest SQNR drop"
    below = "inputs equal" if _from_equal(first) else f"{_format_drop(first)} below its inputs"
    location = f"{first.name} ({first.type})"
    return (
        f"First divergence at {location}: {formatting.format_decibels(first.sqnr)}, {below}; {why}"
    )


def _format_drop(layer: LayerDifference) -> str:
    if layer.sqnr_drop <= 0:
        return "–"
    return "from equal" if _from_equal(layer) else f"{layer.sqnr_drop:.1f} dB"


def _from_equal(layer: LayerDifference) -> bool:
    return layer.sqnr_drop > 0 and layer.sqnr_drop + layer.sqnr >= EQUAL

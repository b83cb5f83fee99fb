"""Tables of the precisions supported by the ops of a model.

Tables of very many rows have the layout of rich, in a fraction of its time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from rich.box import HEAVY_HEAD
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.measure import Measurement
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from neural_mp.core.graph import Op
from neural_mp.core.precision import CPU_PRECISIONS, Precision
from neural_mp.errors import visible
from neural_mp.reporting import formatting
from neural_mp.reporting.formatting import TitledTable
from neural_mp.space import Capability, Reason, TuningSpace, count_ineligible_reasons
from neural_mp.util.text import format_count

#: Maximum number of op types listed for a reason of the summary.
_SHOWN_TYPES = 4
#: Width that fits any table.
_AMPLE = 100_000
#: Width of the type column in the narrow table.
_NARROW = 20


class LongTable:
    """Table of plain texts, with its title above.

    Rich lays out every cell of a `Table` on its own, half a millisecond per row. Here it lays out
    the longest cells of each column, and the rows follow in the same columns.

    Args:
        heading: the title.
        columns: heading → maximum width, None for any.
        rows: the texts of a row, and the style of the row.
    """

    def __init__(
        self,
        heading: str,
        columns: dict[str, int | None],
        rows: Sequence[tuple[Sequence[str], str]],
    ) -> None:
        self._heading, self._columns = heading, columns
        self._rows = [(tuple(map(visible, texts)), style) for texts, style in rows]

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        """Return the least and the full width."""
        return Measurement.get(console, options, self._longest)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Render the title and the table."""
        box = HEAVY_HEAD.substitute(options, safe=console.safe_box)
        widths = self._longest.measure_columns(console, options)
        separator = box.get_row(widths, "head")
        lines = console.render_lines(self._longest, options, pad=False)
        texts = ["".join(segment.text for segment in line) for line in lines]
        head = texts.index(separator) + 1
        for line in lines[:head]:
            yield from (*line, Segment.line())
        wrapped: dict[tuple[str, int], list[str]] = {}
        edges = box.mid_left, box.mid_vertical, box.mid_right
        for cells, style in self._rows:
            parts = [
                _wrap_cell(console, text, width - 2, wrapped)
                for text, width in zip(cells, widths, strict=True)
            ]
            yield from _render_row(parts, widths, edges, console, style)
        yield from (*lines[-1], Segment.line())

    @cached_property
    def _longest(self) -> _Columns:
        """The table of the cells that decide on the width of each column."""
        table = _Columns(self._heading)
        cells = []
        for index, (heading, width) in enumerate(self._columns.items()):
            table.add_column(heading, overflow="fold", max_width=width)
            texts = {texts[index] for texts, _ in self._rows} or {""}
            longest_line = max(texts, key=lambda text: max(map(cell_len, text.split("\n"))))
            longest_word = max(texts, key=lambda text: max(map(cell_len, text.split()), default=0))
            cells.append((longest_line, longest_word))
        for row in zip(*cells, strict=True):
            table.add_row(*row)
        return table


class _Columns(TitledTable):
    def measure_columns(self, console: Console, options: ConsoleOptions) -> list[int]:
        """Return the width of each column with its padding."""
        within = options.update_width(options.max_width - self._extra_width)
        return self._calculate_column_widths(console, within)


def _wrap_cell(
    console: Console, text: str, width: int, wrapped: dict[tuple[str, int], list[str]]
) -> list[str]:
    """Return the lines of a cell, padded to the width of its column; `wrapped` caches them."""
    key = text, width
    if key not in wrapped:
        lines = [text]
        if "\n" in text or cell_len(text) > width:
            lines = [line.plain for line in Text(text).wrap(console, width, overflow="fold")]
        wrapped[key] = [f" {line}{' ' * (width - cell_len(line))} " for line in lines]
    return wrapped[key]


def _render_row(
    cells: Sequence[list[str]],
    widths: Sequence[int],
    edges: tuple[str, str, str],
    console: Console,
    style: str,
) -> Iterator[Segment]:
    left, between, right = edges
    for index in range(max(map(len, cells))):
        line = [
            cell[index] if index < len(cell) else " " * width
            for cell, width in zip(cells, widths, strict=True)
        ]
        if not style:
            yield from (Segment(f"{left}{between.join(line)}{right}"), Segment.line())
            continue
        yield Segment(left)
        for position, text in enumerate(line):
            yield Segment(text, console.get_style(style))
            yield Segment(between if position < len(line) - 1 else right)
        yield Segment.line()


@dataclass(frozen=True)
class _Row:
    """Ops that share a table row: names, types, supported precisions, reasons against others."""

    names: tuple[str, ...]
    types: tuple[str, ...]
    runs_in: str
    because: str
    style: str


def build_capability_table(
    space: TuningSpace, ops: Sequence[Op] | None = None, *, each: bool = False
) -> RenderableType:
    """Return a table of ops, their supported precisions, and the reasons for ineligible ones.

    If the console is too narrow, a row shows only its first op, and the reasons follow the table as
    numbered notes. Ops of a layer with equal capabilities share a row, unless `each` is set.
    """
    shown = list(space.graph) if ops is None else list(ops)
    groups = [[op] for op in shown] if each else _group_by_layer(space, shown)
    title = format_count(len(shown), "op")
    notes = ["dim ops follow adjacent ops unless a plan names them"]
    if len(groups) < len(shown):
        title = f"{title} in {format_count(len(groups), 'group')}"
        notes.append("ops of one layer share a row; --all shows one row per op")
    if space.graph.source_precisions != (Precision.FP32,):
        notes.append(
            f"the model is in {space.graph.source_name}; fp32 stands for ops that are not lowered"
        )
    # Many ops share their capability.
    distinct = {id(own): own for own in (space.capabilities[op.name] for op in space.graph)}
    shown_reasons = {key: _select_shown_reasons(space, own) for key, own in distinct.items()}
    # Reasons common to all ops stem from the machine.
    first, *remaining = list(shown_reasons.values()) or [{}]
    shared = {p: why for p, why in first.items() if all(o.get(p) == why for o in remaining)}
    notes.extend(f"no {p} for any op: {why}" for p, why in shared.items())
    precisions = {
        key: ", ".join(f"{p}{' (emulated)' * (p in own.emulated)}" for p in own.precisions)
        for key, own in distinct.items()
    }
    obstacles = {
        key: "; ".join(f"no {p}: {why}" for p, why in reasons.items() if p not in shared)
        for key, reasons in shown_reasons.items()
    }
    tunable, rows = frozenset(space.tunable_ops), []
    for group in groups:
        first_op, key = group[0].name, id(space.capabilities[group[0].name])
        names, types = tuple(op.name for op in group), tuple(op.type for op in group)
        style = "" if first_op in tunable else "dim"
        rows.append(_Row(names, types, precisions[key], obstacles[key], style))
    return _Capabilities(title, rows, notes)


@dataclass(frozen=True)
class _Capabilities:
    """Capability table with a layout that depends on the console width."""

    title: str
    rows: Sequence[_Row]
    notes: Sequence[str]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        columns: dict[str, int | None] = dict.fromkeys(("op", "type", "supported", "reason"))
        wide = [
            ((", ".join(row.names), ", ".join(row.types), row.runs_in, row.because), row.style)
            for row in self.rows
        ]
        table, marks = LongTable(self.title, columns, wide), dict[str, int]()
        if Measurement.get(console, options.update(width=_AMPLE), table).maximum > (
            options.max_width
        ):
            reasons = dict.fromkeys(row.because for row in self.rows if row.because)
            marks = {reason: number for number, reason in enumerate(reasons, start=1)}
            table = self._build_narrow_table(marks)
        yield table
        for reason, number in marks.items():
            yield Text(f"({number}) {reason}")
        for note in self.notes:
            yield Text(note, style="dim")

    def _build_narrow_table(self, marks: Mapping[str, int]) -> LongTable:
        """Return the table with numbers instead of reasons."""
        rows = []
        for row in self.rows:
            mark = f" ({marks[row.because]})" if row.because else ""
            rows.append(((row.names[0], ", ".join(row.types), row.runs_in + mark), row.style))
        return LongTable(self.title, {"op": None, "type": _NARROW, "supported": None}, rows)


def _select_shown_reasons(space: TuningSpace, capability: Capability) -> dict[Precision, str]:
    """Return the reasons of an op; of low bits, only if the model has ops that support them."""
    reasons = dict(capability.reasons)
    for precision in [candidate for candidate in reasons if candidate.is_low_bit]:
        supported = precision in space.usable_precisions
        if not supported or reasons[precision] == reasons.get(Precision.INT8):
            reasons.pop(precision)
    for precision in (Precision.INT2, Precision.INT3):
        if reasons.get(precision) == reasons.get(Precision.INT4):
            reasons.pop(precision, None)
    return reasons


def _group_by_layer(space: TuningSpace, ops: Sequence[Op]) -> list[list[Op]]:
    """Group the ops, in their order, by layer and capabilities.

    The first op represents its group, since its kernel also computes ops fused into it.
    """
    groups: dict[Any, list[Op]] = {}
    shown = {op.name for op in ops}
    for op in ops:
        layer = op.fusion_group
        leads = layer is not None and layer in shown
        if leads and _follows_layer(space, op, space.graph[layer or ""]):
            groups.setdefault(layer, []).append(op)
        elif layer is not None:
            capability = space.capabilities[op.name]
            kind = (layer, capability.precisions, tuple(capability.reasons.items()))
            groups.setdefault(kind, []).append(op)
        else:
            groups.setdefault(op.name, []).insert(0, op)
    position = {op.name: index for index, op in enumerate(ops)}
    return sorted(groups.values(), key=lambda group: position[group[0].name])


def _follows_layer(space: TuningSpace, op: Op, layer: Op) -> bool:
    """Whether an op differs from its layer at most in support of integers."""

    def beside_integers(name: str) -> tuple[Any, ...]:
        capability = space.capabilities[name]
        reasons = {p: why for p, why in capability.reasons.items() if not p.is_integer}
        runs = [p for p in capability.precisions if not p.is_integer]
        return runs, reasons, capability.emulated

    return beside_integers(op.name) == beside_integers(layer.name)


@dataclass(frozen=True)
class CapabilitySummary:
    """Counts of the precisions supported by the ops of a model.

    Attributes:
        types: op type → number of ops.
        able: op type → precision → number of ops that support the precision.
        reasons: reasons for ineligible ops, most frequent first.
    """

    types: Mapping[str, int]
    able: Mapping[str, Mapping[Precision, int]]
    reasons: tuple[Reason, ...]

    @classmethod
    def from_ops(cls, space: TuningSpace, ops: Sequence[Op]) -> CapabilitySummary:
        """Count the given ops."""
        able: dict[str, Counter[Precision]] = {}
        for op in ops:
            able.setdefault(op.type, Counter()).update(space.capabilities[op.name].precisions)
        types = dict(sorted(Counter(op.type for op in ops).items()))
        return cls(types, able, count_ineligible_reasons(space, ops))

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON-serializable dict."""
        return {
            "ops": sum(self.types.values()),
            "types": {
                kind: {"ops": count, **{p.value: self.able[kind][p] for p in CPU_PRECISIONS}}
                for kind, count in self.types.items()
            },
            "reasons": [reason.to_dict() for reason in self.reasons],
        }


def build_summary_table(summary: CapabilitySummary) -> RenderableType:
    """Return a table of supported precisions by op type, and the reasons for the others.

    Precisions below 8 bits have a column only if an op supports them.
    """
    total = sum(summary.types.values())
    able = {p: sum(by[p] for by in summary.able.values()) for p in CPU_PRECISIONS}
    shown = [p for p in CPU_PRECISIONS if able[p] or not p.is_low_bit]
    title, figures = (
        f"Supported precisions of {format_count(total, 'op')}",
        ("ops", *map(str, shown)),
    )
    table = formatting.create_table(title, "op type", *figures, right=figures)
    for kind, count in summary.types.items():
        table.add_row(kind, str(count), *(str(summary.able[kind][p] or "") for p in shown))
    table.add_section()
    table.add_row("all", str(total), *(str(able[p] or "") for p in shown))
    if not summary.reasons:
        return table
    return Group(table, build_reasons_table("Reasons for ineligible precisions", summary.reasons))


def build_reasons_table(title: str, reasons: Sequence[Reason]) -> Table:
    """Return a table of reasons for ineligible precisions, with the number of ops.

    Precisions with the same reason for as many ops of the same types share a row.
    """
    table = formatting.create_table(title, "no", "ops", "op types", "reason", right=("ops",))
    rows: dict[tuple[str, tuple[tuple[str, int], ...]], list[Reason]] = {}
    for reason in reasons:
        rows.setdefault((reason.reason, tuple(reason.types.items())), []).append(reason)
    for (text, types), alike in rows.items():
        more = len(types) - _SHOWN_TYPES
        named = ", ".join(kind for kind, _ in types[:_SHOWN_TYPES])
        named += f" and {more} more" if more > 0 else ""
        precisions = ", ".join(reason.precision.value for reason in alike)
        table.add_row(precisions, str(alike[0].num_ops), named, text)
    return table

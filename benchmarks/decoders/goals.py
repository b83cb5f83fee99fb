"""The table of numbers to reach, with the figures that sections of the benchmark measure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum

from benchmarks.measurement.tables import markdown_table

HEADINGS = ("figure", "measured", "peer", "to reach")


class Goal(Enum):
    """A line of the table: what is measured, and the number to reach."""

    FEW_LEVELS = "bytes at +1 % perplexity, hostile, 4 and 8 bits, over 8 bits", "≤ .85"
    ALL_LEVELS = "the same with 2 bits and corrections", "≤ .66"
    EVALUATIONS = "evaluations of that run", "≤ 4"
    RANK = "rank correlation of the sensitivity with exact divergence", "≥ .95"
    UNIFORM = "perplexity on unseen text, uniform 4 bits, hostile", "≤ +.6 %"
    UNSEEN = "plans accepted on tuning text that miss on unseen text", "0 of 30"
    DECODE_ONNX = "decode, ONNX Runtime over FP32", "≥ 4.5"
    DECODE_TORCH = "decode, PyTorch over FP32", "≥ 4"
    OVER_BF16 = "PyTorch over BF16 at 1, 8 and 128 rows, one form for all layers", "≥ 1"
    CHOSEN = "PyTorch over BF16 at 1, 8, 32 and 128 rows, forms chosen by a search", "≥ 1"
    PREFILL_ONNX = "prefill of 128, ONNX Runtime over FP32", "≥ 3"
    PREFILL_TORCH = "prefill of 128, PyTorch over FP32", "≥ 3"
    MEMORY = "peak of calibration beside the model, in blocks", "≤ 2"
    FOLDER = "peak of a folder, converted, saved and loaded, over its bytes", "≤ 1.5"
    FOLDER_OWN = "the same without pages of files, which need not stay in memory", "< 1"
    TWIN_BYTES = "bytes of the hostile twin over its plain twin, 4 and 8 bits, at most", "≤ 1.1"
    TWIN_MISSES = "plans of the hostile twin that miss on unseen text", "0 of 30"
    TWIN_EVALUATIONS = "evaluations of these runs, at most", "≤ 4"
    AUTO_SCHEME = "bytes / seconds at +1 % over AutoRound's AutoScheme", "≤ .75 / ≤ 1"
    ROWS = "W8A8 by token: error over torchao's of the same name", "≤ 1.0"
    CACHE = "INT8 cache: perplexity, bytes over BF16, decode seconds at 2,048", "≤ +.1 % / .52 / 1"
    KILLED = "SIGKILL in the middle", "resumes at the block"


@dataclass(frozen=True)
class Figure:
    """A measured value.

    Attributes:
        goal: the line of the table.
        value: the value as shown.
        is_peer: whether another tool reached it.
    """

    goal: Goal
    value: str
    is_peer: bool = False


@dataclass(frozen=True)
class Detail:
    """A row of a table of a section: heading of the table, and its cells."""

    headings: Sequence[str]
    cells: Sequence[str]


def table_of_goals(figures: Iterable[Figure]) -> str:
    """Return the table; values of several seeds stand side by side."""
    by_goal: defaultdict[tuple[Goal, bool], list[str]] = defaultdict(list)
    for figure in figures:
        by_goal[figure.goal, figure.is_peer].append(figure.value)
    rows = []
    for goal in Goal:
        values, peers = (by_goal.get((goal, is_peer), []) for is_peer in (False, True))
        if values or peers:
            label, reach = goal.value
            rows.append([label, " / ".join(values), " / ".join(peers), reach])
    return markdown_table(HEADINGS, rows)


def tables_of(details: Iterable[Detail]) -> str:
    """Return a table per kind of details, in the order of their first rows."""
    kinds: defaultdict[tuple[str, ...], list[list[str]]] = defaultdict(list)
    for detail in details:
        kinds[tuple(detail.headings)].append(list(detail.cells))
    return "\n".join(markdown_table(headings, rows) for headings, rows in kinds.items())

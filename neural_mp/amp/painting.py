"""Graph painting: the ops that run in 16 bits, by list and neighbourhood.

There are two rule sets. `advanced`, the default, follows Intel Extension for TensorFlow's guide
"Advanced Auto Mixed Precision": INFER ops downstream of a 16-bit op join. `stock` follows
TensorFlow's own pass (`auto_mixed_precision.cc`): INFER or CLEAR ops join only between two ALLOW
ops or directly downstream of ops that joined, then 16 bits spread through CLEAR ops.

Each op joins a set at most once, and its edges are visited once: linear in edges, loops included.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from neural_mp.amp.lists import AmpList, FourLists
from neural_mp.core.enums import RuleSet
from neural_mp.core.graph import Op, OpGraph
from neural_mp.util.string_enum import StringEnum

ALLOW, DENY, INFER, CLEAR = AmpList

#: List → its name in reasons.
_WORDS: Mapping[AmpList | None, str] = {None: "on no list", **{kind: kind.name for kind in AmpList}}
#: Maximum ops that a reason names on the path.
_MAX_PATH_OPS = 3


class Colour(StringEnum):
    """Painting decision for an op."""

    #: Runs in 16 bits.
    ALLOWED = "allowed"
    #: Stays in FP32: 16 bits are dangerous.
    DENIED = "denied"
    #: Stays in FP32: no neighbour draws the op to 16 bits.
    PLAIN = "plain"


@dataclass(frozen=True)
class Paint:
    """Painting decision for an op, with its reason.

    Attributes:
        list: list of the op type; None for none.
        colour: the decision.
        reason: the reason as text.
    """

    list: AmpList | None
    colour: Colour
    reason: str


@dataclass(frozen=True)
class Painting:
    """A painted graph.

    Attributes:
        paints: op → decision, in graph order.
        casts: number of casts: one for every tensor that is also needed in the other precision.
    """

    paints: Mapping[str, Paint]
    casts: int

    @property
    def allowed(self) -> frozenset[str]:
        """The ops that run in 16 bits."""
        return frozenset(op for op, p in self.paints.items() if p.colour is Colour.ALLOWED)

    @property
    def denied(self) -> frozenset[str]:
        """The ops in which 16 bits are dangerous."""
        return frozenset(op for op, p in self.paints.items() if p.colour is Colour.DENIED)


def graph_of(ops: Iterable[tuple[str, str, Iterable[str]]]) -> OpGraph:
    """Return a graph from triples: name, type, names of the ops and inputs read.

    Names without an op are inputs; ops without consumers are outputs.
    """
    nodes = [Op(name, kind, tuple(inputs)) for name, kind, inputs in ops]
    names = {op.name for op in nodes}
    sources = dict.fromkeys(source for op in nodes for source in op.inputs)
    inputs = [source for source in sources if source not in names]
    return OpGraph(nodes, inputs, [op.name for op in nodes if op.name not in sources])


def paint(
    graph: OpGraph,
    lists: FourLists,
    rules: RuleSet = RuleSet.ADVANCED,
    *,
    boundaries: Mapping[str, str] | None = None,
    unable: Mapping[str, str] | None = None,
    chosen: Mapping[str, str] | None = None,
) -> Painting:
    """Decide for every op of a graph whether to run in 16 bits.

    Args:
        graph: the ops; loops are allowed.
        lists: the op types.
        rules: `advanced` or `stock`.
        boundaries: op → reason why nothing spreads through the op, e.g. INT8 or fetched.
        unable: op → reason why the op stays out of 16 bits regardless of its list, e.g. no kernel
            or set to FP32. Danger still spreads through the op.
        chosen: op → reason why the op runs in 16 bits regardless of its list.

    Raises:
        ConfigurationError: the rule set does not exist.
    """
    rules = RuleSet.parse(rules, "rules")
    painter = _Painter(graph, lists, boundaries or {}, unable or {}, chosen or {})
    painter.deny_ops()
    if rules is RuleSet.ADVANCED:
        painter.allow_advanced()
    else:
        painter.allow_stock()
    return painter.build_painting()


class _Painter:
    """Growing sets of ops; maps each op to its predecessor on the path of spreading."""

    def __init__(
        self,
        graph: OpGraph,
        lists: FourLists,
        boundaries: Mapping[str, str],
        unable: Mapping[str, str],
        chosen: Mapping[str, str],
    ) -> None:
        self.graph, self.boundaries, self.unable, self.chosen = graph, boundaries, unable, chosen
        kinds = {kind: lists.of(kind) for kind in graph.types}
        self.kind = {op.name: kinds[op.type] for op in graph}
        self.above = {op.name: [s for s in op.inputs if s in graph] for op in graph}
        self.below = {op.name: graph.consumer_names(op.name) for op in graph}
        #: Op → list as seen by spreading; None at a boundary.
        self.seen = {op: None if op in boundaries else kind for op, kind in self.kind.items()}
        self.denied: dict[str, str | None] = {}
        self.allowed: dict[str, str | None] = {}
        self.begins: dict[str, str] = {}

    def is_on_list(self, name: str, *lists: AmpList) -> bool:
        return self.seen[name] in lists

    def can_join(self, name: str, *lists: AmpList) -> bool:
        free = name not in self.unable and name not in self.denied
        return free and self.is_on_list(name, *lists)

    def spread_from(
        self,
        starts: Iterable[str],
        *directions: tuple[Mapping[str, Sequence[str]], Callable[[str], bool]],
        found: dict[str, str | None] | None = None,
    ) -> dict[str, str | None]:
        """Return the ops reachable from `starts`, each with its predecessor, added to `found`.

        A direction is a mapping op → neighbours, and the condition for a neighbour to be entered.
        """
        found = {} if found is None else found
        waiting = deque(starts)
        for start in waiting:
            found.setdefault(start, None)
        while waiting:
            name = waiting.popleft()
            for neighbours, enters in directions:
                for adjacent in neighbours[name]:
                    if adjacent not in found and enters(adjacent):
                        found[adjacent] = name
                        waiting.append(adjacent)
        return found

    def find_seeds(self) -> list[str]:
        """Return the ops in 16 bits regardless of their neighbours."""
        names = (op.name for op in self.graph)
        return [name for name in names if name in self.chosen or self.can_join(name, ALLOW)]

    def deny_ops(self) -> None:
        """Deny DENY ops, INFER ops downstream, and the CLEAR ops between."""

        def may_deny(name: str, *lists: AmpList) -> bool:
            return name not in self.chosen and self.is_on_list(name, *lists)

        def ops_on_lists(*lists: AmpList) -> list[str]:
            return [op.name for op in self.graph if may_deny(op.name, *lists)]

        matters = self.spread_from(
            ops_on_lists(DENY, INFER), (self.above, lambda n: may_deny(n, CLEAR))
        )
        self.denied = self.spread_from(
            ops_on_lists(DENY),
            (self.below, lambda name: name in matters and may_deny(name, INFER, CLEAR)),
        )

    def allow_advanced(self) -> None:
        """Allow ALLOW ops, INFER ops downstream of 16-bit ops, and adjacent CLEAR ops."""
        self.allowed = self.spread_from(
            self.find_seeds(),
            (self.below, lambda name: self.can_join(name, INFER, CLEAR)),
            (self.above, lambda name: self.can_join(name, CLEAR)),
        )

    def allow_stock(self) -> None:
        """Allow ALLOW ops, ops between two of them, INFER ops downstream, adjacent CLEAR ops."""
        starts = self.find_seeds()
        downstream = self.spread_from(
            starts, (self.below, lambda name: self.can_join(name, INFER, CLEAR))
        )
        self.allowed = self.spread_from(starts, (self.above, lambda name: name in downstream))
        for op in self.graph:
            predecessor = next((name for name in self.above[op.name] if name in self.allowed), None)
            is_new = predecessor is not None and op.name not in self.allowed
            if is_new and self.can_join(op.name, INFER):
                self.allowed[op.name] = predecessor

        def joins_clear(name: str) -> bool:
            return self.can_join(name, CLEAR)

        self.spread_from(
            list(self.allowed),
            (self.above, joins_clear),
            (self.below, joins_clear),
            found=self.allowed,
        )

    def build_painting(self) -> Painting:
        self.begins = {**_starts_by_op(self.denied), **_starts_by_op(self.allowed)}
        return Painting({op.name: self._paint_op(op) for op in self.graph}, self._count_casts())

    def _paint_op(self, op: Op) -> Paint:
        kind = self.kind[op.name]
        label = self._get_kind_word(op.name)
        if op.name in self.chosen:
            return Paint(kind, Colour.ALLOWED, f"{label}, allowed: {self.chosen[op.name]}")
        if op.name in self.boundaries:
            return Paint(kind, Colour.PLAIN, f"{label}, not in 16 bits: {self.boundaries[op.name]}")
        if op.name in self.allowed:
            path = self._describe_path(op.name, self.allowed)
            return Paint(kind, Colour.ALLOWED, f"{label}, allowed{path}")
        if op.name in self.denied:
            path = self._describe_path(op.name, self.denied)
            return Paint(kind, Colour.DENIED, f"{label}, denied{path}")
        if op.name in self.unable:
            return Paint(kind, Colour.PLAIN, f"{label}, not in 16 bits: {self.unable[op.name]}")
        if kind is None:
            return Paint(kind, Colour.PLAIN, f"{op.type} is on no list")
        return Paint(kind, Colour.PLAIN, f"{label}, not in 16 bits: no neighbour to follow")

    def _get_kind_word(self, name: str) -> str:
        return _WORDS[self.kind[name]]

    def _describe_path(self, name: str, predecessors: Mapping[str, str | None]) -> str:
        predecessor = predecessors[name]
        if predecessor is None:
            return ""
        begin = self.begins[name]
        side = "downstream of" if predecessor in self.above[name] else "upstream of"
        passed: list[str] = []
        while predecessor is not None and predecessor != begin and len(passed) <= _MAX_PATH_OPS:
            passed.append(predecessor)
            predecessor = predecessors[predecessor]
        parts = [f"{self._get_kind_word(op)} {op!r}" for op in passed[:_MAX_PATH_OPS]]
        if len(passed) > _MAX_PATH_OPS:
            parts.append("…")
        through = f" through {', '.join(parts)}" if parts else ""
        return f": {side} {self.graph[begin].type} {begin!r}{through}"

    def _count_casts(self) -> int:
        """Count the tensors with a consumer in the other precision."""
        count = 0
        outputs = set(self.graph.outputs)
        for source in (*self.graph.inputs, *(op.name for op in self.graph)):
            in_16_bits = source in self.allowed
            consumers = self.graph.consumer_names(source)
            differs = any((op in self.allowed) != in_16_bits for op in consumers)
            count += differs or (in_16_bits and source in outputs)
        return count


def _starts_by_op(predecessors: Mapping[str, str | None]) -> dict[str, str]:
    """Return op → start of its set; `predecessors` lists an op after its predecessor."""
    begins: dict[str, str] = {}
    for name, predecessor in predecessors.items():
        begins[name] = name if predecessor is None else begins[predecessor]
    return begins

"""Graph painting: the ops that run in 16 bits, by four lists of op types and by neighbourhood.

Names and semantics of the lists (ALLOW, DENY, INFER, CLEAR) are those of TensorFlow's auto mixed
precision pass (`auto_mixed_precision_lists.h`) and of Intel Extension for TensorFlow's guide
"Advanced Auto Mixed Precision". Frameworks name a kind of op differently: adaptors map their op
types to the kinds listed here, and `FourLists.translated` returns the lists of a framework.

There are two rule sets. `advanced`, the default, follows the guide: INFER ops downstream of a
16-bit op join. `stock` follows TensorFlow's own pass (`auto_mixed_precision.cc`): INFER or CLEAR
ops join only between two ALLOW ops or directly downstream of ops that joined, then 16 bits spread
through CLEAR ops.

Each op joins a set at most once, and its edges are visited once: linear in edges, loops included.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from neural_mp.core.enums import RuleSet
from neural_mp.core.graph import Op, OpGraph
from neural_mp.core.precision import Precision
from neural_mp.errors import ConfigurationError, UnknownOperatorError, did_you_mean
from neural_mp.util.string_enum import StringEnum


class AmpList(StringEnum):
    """Effect of 16 bits on the ops of a type."""

    #: Safe and faster: always in 16 bits.
    ALLOW = "allow"
    #: Numerically dangerous, and makes downstream ops dangerous.
    DENY = "deny"
    #: Safe unless downstream of a dangerous op.
    INFER = "infer"
    #: No effect on the numerics: follows its neighbours.
    CLEAR = "clear"


@dataclass(frozen=True)
class FourLists:
    """Op types, grouped by the effect of 16 bits."""

    allow: frozenset[str] = frozenset()
    deny: frozenset[str] = frozenset()
    infer: frozenset[str] = frozenset()
    clear: frozenset[str] = frozenset()

    def of(self, op_type: str) -> AmpList | None:
        """Return the list of an op type; None if on no list."""
        return next((name for name in AmpList if op_type in self.types(name)), None)

    def types(self, name: AmpList) -> frozenset[str]:
        """Return the op types on a list."""
        op_types: frozenset[str] = getattr(self, name.value)
        return op_types

    def translated(self, names: Mapping[str, Iterable[str]]) -> FourLists:
        """Return the lists with each name replaced by its names (zero or more) in a framework."""
        translations = (
            frozenset[str]().union(*(names.get(name, ()) for name in self.types(which)))
            for which in AmpList
        )
        return FourLists(*translations)

    def allowing(self, op_types: Iterable[str]) -> FourLists:
        """Return the lists with these types moved to ALLOW, dangerous or not."""
        moved = frozenset(op_types)
        return FourLists(
            self.allow | moved, self.deny - moved, self.infer - moved, self.clear - moved
        )

    def edited(self, edits: Iterable[ListEdit]) -> FourLists:
        """Return the lists after edits: first all removals, then all additions.

        Raises:
            ConfigurationError: a type is added that is on another list, or removed from a list
                without the type.
        """
        changed = self
        for edit in sorted(edits, key=lambda edit: edit.adds):
            changed = changed._apply_edit(edit)
        return changed

    def _apply_edit(self, edit: ListEdit) -> FourLists:
        types = self.types(edit.list)
        current = self.of(edit.op_type)
        if not edit.adds:
            if edit.op_type not in types:
                location = f"the {current} list" if current else "no list"
                raise ConfigurationError(
                    f"{edit.origin} removes {edit.op_type!r} from the {edit.list} list, but "
                    f"{edit.op_type!r} is on {location}"
                )
            return replace(self, **{edit.list.value: types - {edit.op_type}})
        if current not in (None, edit.list):
            raise ConfigurationError(
                f"{edit.origin} adds {edit.op_type!r} to the {edit.list} list, but "
                f"{edit.op_type!r} is on the {current} list; remove the type from that list with "
                f"{current}list_remove"
            )
        return replace(self, **{edit.list.value: types | {edit.op_type}})


@dataclass(frozen=True)
class ListEdit:
    """Addition of an op type to a list, or its removal.

    Attributes:
        adds: True for an addition.
        list: the list.
        op_type: the framework's name of the type.
        origin: source of the edit in the user's settings, for messages.
    """

    adds: bool
    list: AmpList
    op_type: str
    origin: str


#: Option name → list, whether adding: `allowlist_add`, …, `clearlist_remove`.
EDIT_OPTIONS: Mapping[str, tuple[AmpList, bool]] = {
    f"{name}list_{action}": (name, action == "add")
    for name in AmpList
    for action in ("add", "remove")
}


def check_known(edits: Iterable[ListEdit], known: Collection[str]) -> None:
    """Check that the op types of edits are among the framework's.

    Raises:
        UnknownOperatorError: an op type does not exist.
    """
    for edit in edits:
        if edit.op_type not in known:
            raise UnknownOperatorError(
                f"{edit.origin} names {edit.op_type!r}, which is not an op type of the framework"
                f"{did_you_mean(edit.op_type, known)}"
            )


ALLOW, DENY, INFER, CLEAR = AmpList

_TENSORFLOW = "TensorFlow 2.21, auto_mixed_precision_lists.h"
_TORCH = "PyTorch 2.13, ATen/autocast_mode.h, lower_precision_fp"
_TORCH_FLOAT32 = "PyTorch 2.13, ATen/autocast_mode.h, fp32 (CUDA)"


@dataclass(frozen=True)
class Kind:
    """A kind of op.

    Attributes:
        name: canonical name.
        bf16, fp16: list for the precision; None for none.
        source: reference of the assignment; for composites, the parts.
    """

    name: str
    bf16: AmpList | None
    fp16: AmpList | None
    source: str


def _iterate_canonical_kinds() -> Iterator[Kind]:
    for names, bf16, fp16, source in (
        ("matmul conv conv_transpose einsum", ALLOW, ALLOW, _TENSORFLOW),
        ("attention recurrent", ALLOW, ALLOW, _TORCH),
        ("add sub mul div avg_pool batch_norm", INFER, INFER, _TENSORFLOW),
        ("elu selu leaky_relu sigmoid tanh softplus softsign", INFER, INFER, _TENSORFLOW),
        ("erf log log1p sqrt reciprocal softmax log_softmax prod", INFER, INFER, _TENSORFLOW),
        ("celu prelu", INFER, INFER, "as elu and leaky_relu, of which they are forms"),
        ("gelu", INFER, INFER, "of erf or tanh, mul and add"),
        ("silu", INFER, INFER, "of sigmoid and mul"),
        ("mish", INFER, INFER, "of softplus, tanh and mul"),
        ("hard_sigmoid hard_swish", INFER, INFER, "of add, mul and clip"),
        ("instance_norm group_norm", INFER, INFER, "as batch_norm, over other axes"),
        ("mean sum", INFER, DENY, f"{_TENSORFLOW}: sums overflow the range of FP16"),
        ("rsqrt square squared_difference", INFER, None, _TENSORFLOW),
        ("variance", INFER, DENY, "of mean and squared_difference"),
        ("layer_norm rms_norm", INFER, DENY, f"of mean, square and rsqrt; {_TORCH_FLOAT32}"),
        ("exp expm1 pow l2_norm cross_entropy", DENY, DENY, _TENSORFLOW),
        ("logsumexp", DENY, DENY, "of exp, sum and log"),
        ("cumsum cumprod sinh cosh tan asin acos erfinv", DENY, DENY, _TORCH_FLOAT32),
        ("abs ceil floor round sign neg clip relu", CLEAR, CLEAR, _TENSORFLOW),
        ("concat split stack unstack slice gather tile pad", CLEAR, CLEAR, _TENSORFLOW),
        ("broadcast identity reshape transpose reverse where", CLEAR, CLEAR, _TENSORFLOW),
        ("max_pool maximum minimum max min", CLEAR, CLEAR, _TENSORFLOW),
        ("resize_nearest space_to_depth depth_to_space", CLEAR, CLEAR, _TENSORFLOW),
        ("resize_bilinear", CLEAR, None, _TENSORFLOW),
        ("triangle", CLEAR, CLEAR, "as where, with a mask of ones"),
    ):
        for name in names.split():
            yield Kind(name, bf16, fp16, source)


#: Name → kind.
KINDS: Mapping[str, Kind] = {kind.name: kind for kind in _iterate_canonical_kinds()}


def build_canonical_lists(precision: Precision) -> FourLists:
    """Return the four lists of a 16-bit precision, by names of kinds."""
    attribute = "fp16" if precision is Precision.FP16 else "bf16"
    return FourLists(
        *(
            frozenset(kind.name for kind in KINDS.values() if getattr(kind, attribute) is amp_list)
            for amp_list in AmpList
        )
    )


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
    painter.begins = {**_starts_by_op(painter.denied), **_starts_by_op(painter.allowed)}
    return Painting({op.name: painter.paint_op(op) for op in graph}, painter.count_casts())


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

    def paint_op(self, op: Op) -> Paint:
        """Return the decision for an op, with its reason."""
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

    def count_casts(self) -> int:
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

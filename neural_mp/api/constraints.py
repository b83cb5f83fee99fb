"""User constraints on the precisions of ops, and the four lists, from a tuning file and Python."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeVar

from neural_mp.adaptors.common.naming import find_source_op
from neural_mp.adaptors.contract import Adaptor
from neural_mp.amp import (
    PREFIXES,
    SWITCH,
    AmpSettings,
    AutoMixedPrecisionOptions,
    FourLists,
    ListEdit,
    keep_known_edits,
    merge_options,
)
from neural_mp.api.foreign_configs import parse_foreign_config
from neural_mp.config import Settings, settings_from
from neural_mp.config.source import Source
from neural_mp.core.enums import Dialect
from neural_mp.core.graph import OpGraph
from neural_mp.core.precision import Precision
from neural_mp.errors import ConfigurationError, UnknownOperatorError
from neural_mp.space import FP32_ONLY, Constraints, OpConstraint, TuningSpace
from neural_mp.space.capability import Capability
from neural_mp.util.system.environment import restore_users_environment
from neural_mp.util.text import format_count

_SECTIONS = ("quantization", "mixed_precision", "graph_optimization")
_NO_LIMIT = OpConstraint()


class Limits(Protocol):
    """Constraints set in Python; see `MixedPrecision`."""

    exclude: str | Iterable[str]
    op_wise: Mapping[str, Any]
    optype_wise: Mapping[str, Any]
    model_wise: Any


S = TypeVar("S", bound="_Constrainable")


class _Constrainable(Protocol):
    """A tuning space, or a collection of constraints on one."""

    @property
    def graph(self) -> OpGraph:
        """The ops of the space."""

    @property
    def capabilities(self) -> Mapping[str, Capability]:
        """Op → its configurations."""

    def apply_constraints(self: S, constraints: Constraints) -> S:
        """Return the space with further constraints."""


def apply_constraints(
    space: S, settings: Settings, given: Limits | None = None
) -> tuple[S, tuple[str, ...]]:
    """Return the space after all constraints, and warnings about those of the file.

    Raises:
        UnknownOperatorError: a constraint matches no op of the model.
        ConfigurationError: a constraint set in Python is invalid.
    """
    space, warnings = _apply_file_constraints(space, settings)
    if given is None:
        return space, warnings
    space = space.apply_constraints(_parse_python_limits(given))
    for name in _parse_excluded_names(given.exclude):
        try:
            space = space.apply_constraints(Constraints(op_wise={name: FP32_ONLY}))
        except UnknownOperatorError as error:
            message = str(error).replace("op_wise names", "exclude names", 1)
            raise UnknownOperatorError(message) from None
    return space, warnings


def names_ops(settings: Settings, given: Limits) -> bool:
    """Whether a constraint names ops or op types, which differ between runtimes."""
    by_file = settings.constraints
    return any((given.exclude, given.op_wise, given.optype_wise)) or bool(
        by_file.op_wise or by_file.optype_wise
    )


@dataclass(frozen=True)
class _NamedLimits:
    """Constraints on single ops of a space, collected like those of the space itself.

    Attributes:
        space: the space whose ops the constraints name.
        by_op: op → its constraints, without those of the whole model.
        whole: constraints of the whole model.
    """

    space: TuningSpace
    by_op: Mapping[str, tuple[OpConstraint, ...]] = field(default_factory=dict)
    whole: tuple[OpConstraint, ...] = ()

    @property
    def graph(self) -> OpGraph:
        return self.space.graph

    @property
    def capabilities(self) -> Mapping[str, Capability]:
        return self.space.capabilities

    def apply_constraints(self, constraints: Constraints) -> _NamedLimits:
        """Return the limits with further constraints.

        Raises:
            UnknownOperatorError: as for `TuningSpace.apply_constraints`.
        """
        matched = self.space.constraints_by_op(replace(constraints, model_wise=_NO_LIMIT))
        by_op = {
            op: self.by_op.get(op, ()) + tuple(limit for limit in limits if limit != _NO_LIMIT)
            for op, limits in matched.items()
        }
        whole = (*self.whole, constraints.model_wise)
        return replace(
            self, by_op={op: op_limits for op, op_limits in by_op.items() if op_limits}, whole=whole
        )


@dataclass(frozen=True)
class SourceConstraints:
    """The user's constraints by names of the source's ops, for the same model in another runtime.

    Attributes:
        source: the tuning space of the source, before constraints.
        settings: the tuning file.
        given: constraints set in Python.
    """

    source: TuningSpace
    settings: Settings
    given: Limits

    def apply_to_space(self, space: TuningSpace) -> tuple[TuningSpace, tuple[str, ...]]:
        """Return the space of another runtime after all constraints, and warnings.

        An op of the source is found by its name; ops that it was split into have the name, a slash
        and a word.

        Raises:
            ConfigurationError: an op with constraints does not exist in the other runtime.
            UnknownOperatorError: a constraint matches no op of the source.
        """
        limits, warnings = apply_constraints(_NamedLimits(self.source), self.settings, self.given)
        parts = _runtime_ops_by_source_op(limits.by_op, self.source, space)
        tunable = {*self.source.tunable_ops}
        missing = [op for op in limits.by_op if op in tunable and not parts[op]]
        if missing:
            raise ConfigurationError(
                f"the constraints name {missing[0]!r}, which has no counterpart there"
            )
        by_op = {op: limits.whole for op in space.capabilities}
        for op, op_limits in limits.by_op.items():
            by_op |= {part: (*by_op[part], *op_limits) for part in parts[op]}
        return space.apply_op_constraints(by_op), warnings


def _runtime_ops_by_source_op(
    named: Iterable[str], source: TuningSpace, space: TuningSpace
) -> dict[str, tuple[str, ...]]:
    by_op: dict[str, list[str]] = {op: [] for op in named}
    for op in space.graph:
        origin = find_source_op(op.name, source.capabilities)
        if origin in by_op:
            by_op[origin].append(op.name)
    return {op: tuple(parts) for op, parts in by_op.items()}


def _parse_python_limits(given: Limits) -> Constraints:
    whole = parse_foreign_config(given.model_wise)
    by_name = {
        option: {
            name: _to_file_schema(limit)
            for name, limit in _limit_items(option, getattr(given, option))
        }
        for option in ("op_wise", "optype_wise")
    }
    if given.model_wise is not None and whole is None:
        by_name["model_wise"] = _to_file_schema(given.model_wise)
    constraints = settings_from(
        {"quantization": by_name}, "MixedPrecision", Dialect.OWN
    ).constraints
    return constraints if whole is None else replace(constraints, model_wise=whole)


def _limit_items(option: str, limits: object) -> Iterable[tuple[str, Any]]:
    if isinstance(limits, Mapping):
        return limits.items()
    raise ConfigurationError(
        f"{option} must be a dict of names and allowed precisions, e.g. {{'fc': 'fp32'}}, got "
        f"{limits!r}"
    )


def _to_file_schema(limit: object) -> Any:
    """Return a constraint in the schema of a tuning file; a string means `precisions`."""
    return limit if isinstance(limit, Mapping) else {"precisions": limit}


def _parse_excluded_names(exclude: object) -> tuple[str, ...]:
    names = (exclude,) if isinstance(exclude, str) else exclude
    if isinstance(names, Iterable):
        names = tuple(names)
        if all(isinstance(name, str) for name in names):
            return names
    raise ConfigurationError(
        f"exclude must be names or patterns of ops, e.g. ['fc', 'layer4.*'], got {exclude!r}"
    )


def _apply_file_constraints(space: S, settings: Settings) -> tuple[S, tuple[str, ...]]:
    limits = settings.constraints
    warnings: list[str] = []
    with _locating_constraint_errors(settings.source):
        if settings.dialect is Dialect.INC:
            limits = _make_lenient(limits)
            for kind, types in _map_inc_op_types(space, limits).items():
                if not types:
                    warnings.append(f"optype_wise limits {kind}; the model has no such op")
                by_type = dict.fromkeys(types, limits.optype_wise[kind])
                space = space.apply_constraints(Constraints(optype_wise=by_type))
            for pattern, limit in limits.op_wise.items():
                names = _ops_matching_prefix(pattern, space)
                if not names:
                    warnings.append(
                        f"op_wise limits {pattern!r}; no op of the model has such a name"
                    )
                space = space.apply_constraints(Constraints(op_wise=dict.fromkeys(names, limit)))
            limits = replace(limits, optype_wise={}, op_wise={})
            warnings += _unoffered_limit_warnings(space, limits.model_wise)
        return space.apply_constraints(limits), tuple(warnings)


def _make_lenient(limits: Constraints) -> Constraints:
    """Return constraints whose values are ignored for ops that do not offer them, as in INC."""
    return Constraints(
        replace(limits.model_wise, is_lenient=True),
        {kind: replace(limit, is_lenient=True) for kind, limit in limits.optype_wise.items()},
        {name: replace(limit, is_lenient=True) for name, limit in limits.op_wise.items()},
    )


def _unoffered_limit_warnings(space: _Constrainable, limit: OpConstraint) -> Iterator[str]:
    """Yield a warning for every limit of the whole model that some INT8 ops do not offer."""
    for tensor in ("weight", "activation"):
        ignored = Counter(
            name
            for capability in space.capabilities.values()
            for name in limit.find_unmet_limits(capability.configs)[tensor]
        )
        for name, count in ignored.items():
            values = " or ".join(getattr(getattr(limit, tensor), name))
            yield (
                f"model_wise {tensor}.{name} is ignored for {format_count(count, 'op')}, which "
                f"cannot run with {values} here"
            )


def _ops_matching_prefix(pattern: str, space: _Constrainable) -> list[str]:
    """Return the ops that match from the first character, as in INC, not as a whole."""
    try:
        regex = re.compile(pattern)
    except re.error:
        regex = re.compile(re.escape(pattern))
    return [op.name for op in space.graph if regex.match(op.name)]


def _map_inc_op_types(space: _Constrainable, limits: Constraints) -> dict[str, tuple[str, ...]]:
    """Map INC op types to op types of the model; an unknown type maps to itself."""
    from neural_mp.compat.inc.constraints import matching_op_types

    meant = {kind: matching_op_types(space.graph.types, kind) for kind in limits.optype_wise}
    return {kind: (kind,) if types is None else types for kind, types in meant.items()}


@contextmanager
def _locating_constraint_errors(source: Source) -> Iterator[None]:
    try:
        yield
    except UnknownOperatorError as error:
        written = (name for name in _SECTIONS if (name, *error.keys) in source.lines)
        with source.locate_errors((next(written, _SECTIONS[0]),)):
            raise


def gather_amp(
    given: AutoMixedPrecisionOptions | None, configured: AutoMixedPrecisionOptions | None
) -> AmpSettings:
    """Merge the AMP options: Python overrides the YAML file, which overrides the environment.

    Raises:
        ConfigurationError: an option is invalid.
    """
    sources = {"amp.{option}": given, "mixed_precision.{option}": configured}
    return merge_options(sources, restore_users_environment())


def with_data_type(
    explicit: tuple[Precision, ...] | None, default: tuple[Precision, ...], amp: AmpSettings
) -> tuple[tuple[Precision, ...], tuple[str, ...]]:
    """Return the precisions with the 16-bit type of `data_type` as the only one, and warnings.

    If mixed precision is enabled as a whole, BF16 is added if there is no 16-bit type. Environment
    variables without effect cause a warning. `explicit` is None if the user has set no precisions.

    Raises:
        ConfigurationError: `explicit` and `data_type` contradict each other.
    """
    dtype = amp.data_type
    names = ",".join(map(str, explicit or ()))
    if dtype is None:
        chosen = explicit or default
        if not amp.switched_on or any(precision.is_16_bit for precision in chosen):
            return chosen, ()
        if explicit is not None:  # explicit precisions override environment variables
            return explicit, (
                f"{SWITCH} requires a 16-bit precision, but precisions are {names}; the variable "
                f"is ignored",
            )
        return tuple(p for p in Precision if p in (*chosen, Precision.BF16)), ()
    origin = amp.origins["data_type"]
    if explicit is not None and dtype not in explicit:
        if origin.startswith(PREFIXES):  # explicit precisions override environment variables
            return explicit, (
                f"{origin} requires {dtype}, but precisions are {names}; the variable is ignored",
            )
        raise ConfigurationError(
            f"{origin} requires {dtype}, but precisions are {names}; add {dtype} to precisions, "
            f"or remove one of the two options"
        )
    remaining = [p for p in explicit or default if not p.is_16_bit]
    return tuple(p for p in Precision if p in (*remaining, dtype)), ()


def edit_lists(
    adaptor: Adaptor[Any], amp: AmpSettings, precisions: tuple[Precision, ...]
) -> tuple[Mapping[Precision, FourLists], tuple[str, ...]]:
    """Return the four lists of every 16-bit precision, edited for `precisions`, and warnings.

    Edits without effect cause a warning.

    Raises:
        UnknownOperatorError: an edit names an op type that the framework lacks.
        ConfigurationError: an edit contradicts the lists.
    """
    edits, warnings = keep_known_edits(amp.edits, adaptor.framework, adaptor.op_types)
    used = [p for p in precisions if p.is_16_bit]
    if edits and not used:
        warnings = (
            *warnings,
            f"{edits[0].origin} has no effect: no 16-bit precision is requested and supported",
        )
    lists = {p: adaptor.amp_lists(p) for p in Precision if p.is_16_bit}
    originals = [lists[p] for p in used]
    edited = {p: lists[p].edited(_list_relevant_edits(lists[p], edits, originals)) for p in used}
    if amp.infer_as_deny:
        edited = {
            p: FourLists(own.allow, own.deny | own.infer, frozenset(), own.clear)
            for p, own in edited.items()
        }
    return lists | edited, warnings


def _list_relevant_edits(
    lists: FourLists, edits: tuple[ListEdit, ...], used: list[FourLists]
) -> list[ListEdit]:
    """Return the edits, without removals that match only the lists of another precision."""
    return [
        edit
        for edit in edits
        if edit.adds
        or lists.of(edit.op_type) is edit.list
        or not any(four_lists.of(edit.op_type) is edit.list for four_lists in used)
    ]


def apply_force_all(space: TuningSpace, amp: AmpSettings) -> TuningSpace:
    """Return the space with every op type on the ALLOW list if `force_all` is set."""
    if not amp.force_all:
        return space
    every = space.graph.types
    return replace(space, lists={p: lists.allowing(every) for p, lists in space.lists.items()})

"""User options for the four lists, from Python, YAML or the environment."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from enum import Enum
from functools import cache
from typing import Any

from neural_mp.amp.painting import EDIT_OPTIONS, ListEdit, check_known
from neural_mp.core.precision import Precision, parse_precisions
from neural_mp.errors import ConfigurationError, did_you_mean
from neural_mp.util.validators import StrictOptions

logger = logging.getLogger(__name__)

#: Prefixes of environment variables, highest priority first.
PREFIXES = (
    "NEURAL_MP_AUTO_MIXED_PRECISION_",
    "ITEX_AUTO_MIXED_PRECISION_",
    "TF_AUTO_MIXED_PRECISION_GRAPH_REWRITE_",
)
#: Prefixes defined by TensorFlow and its extension.
TENSORFLOW_PREFIXES = PREFIXES[1:]
#: Variable that enables the extension's mixed precision.
SWITCH = "ITEX_AUTO_MIXED_PRECISION"
#: Variable for the level of TensorFlow's pass, and its values (case-insensitive).
LEVEL = f"{PREFIXES[2]}LEVEL"
FORCE_ALL, INFER_AS_DENY = LEVELS = ("UNSAFE_FORCE_ALL", "TREAT_INFER_AS_DENY")


class AmpDataType(str, Enum):
    """The 16-bit type, as named by Intel Extension for TensorFlow."""

    #: As set by `precisions`.
    DEFAULT_DATA_TYPE = "default"
    FLOAT16 = "float16"
    BFLOAT16 = "bfloat16"

    @property
    def precision(self) -> Precision | None:
        """The equivalent `Precision`; None for the default."""
        return {self.FLOAT16: Precision.FP16, self.BFLOAT16: Precision.BF16}.get(self)


@dataclass
class AutoMixedPrecisionOptions(StrictOptions):
    """Options of the four lists, as in Intel Extension for TensorFlow's class of this name.

    An option without a value is read from the environment: `allowlist_add` from
    `NEURAL_MP_AUTO_MIXED_PRECISION_ALLOWLIST_ADD`, then with the prefixes
    `ITEX_AUTO_MIXED_PRECISION_` and `TF_AUTO_MIXED_PRECISION_GRAPH_REWRITE_`. Two variables have no
    option: `ITEX_AUTO_MIXED_PRECISION`, and TensorFlow's prefix with `LEVEL`.

    Attributes:
        data_type: `FLOAT16`, `BFLOAT16` or `DEFAULT_DATA_TYPE`.
        unsafe_force_all: run every op with a 16-bit kernel in 16 bits, dangerous or not.
        allowlist_add, …, clearlist_remove: op types to add to a list or to remove, as a list or
            separated by commas.
        log_path: folder for the graph before and after, and the decision for every op.
    """

    data_type: AmpDataType | str | None = None
    unsafe_force_all: bool | str | None = None
    allowlist_add: str | Sequence[str] | None = None
    allowlist_remove: str | Sequence[str] | None = None
    denylist_add: str | Sequence[str] | None = None
    denylist_remove: str | Sequence[str] | None = None
    inferlist_add: str | Sequence[str] | None = None
    inferlist_remove: str | Sequence[str] | None = None
    clearlist_add: str | Sequence[str] | None = None
    clearlist_remove: str | Sequence[str] | None = None
    log_path: Any = None


#: Options of whole lists, not of single types.
_WHOLE_LISTS = ("unsafe_force_all", "treat_infer_as_deny")
#: Option names.
OPTIONS = tuple(item.name for item in fields(AutoMixedPrecisionOptions))
#: Variables with one of the prefixes that have an effect.
_VARIABLES = (*(f"{prefix}{option.upper()}" for prefix in PREFIXES for option in OPTIONS), LEVEL)


@dataclass(frozen=True)
class AmpSettings:
    """Effective settings, merged from all sources.

    Attributes:
        data_type: 16-bit precision; None if unset.
        force_all: whether every op runs in 16 bits.
        edits: edits of the lists.
        log_path: folder for the decisions; None for none.
        infer_as_deny: whether INFER types count as DENY.
        switched_on: whether mixed precision was enabled as a whole, regardless of type.
        origins: option → its source.
    """

    data_type: Precision | None = None
    force_all: bool = False
    edits: tuple[ListEdit, ...] = ()
    log_path: str | None = None
    infer_as_deny: bool = False
    switched_on: bool = False
    origins: Mapping[str, str] = field(default_factory=dict)

    def list_words(self) -> tuple[str, ...]:
        """The effective list options as text, without sources."""
        changed = [option for option in self.origins if option in EDIT_OPTIONS]
        whole = [
            option for option in _WHOLE_LISTS if _describe_option_value(self, option) == "True"
        ]
        return tuple(
            f"{option}: {_describe_option_value(self, option)}" for option in (*changed, *whole)
        )

    def describe_options(self) -> tuple[str, ...]:
        """One line per given option: its value and source."""
        return tuple(
            f"{option}: {_describe_option_value(self, option)} (from {origin})"
            for option, origin in self.origins.items()
        )


def _describe_option_value(settings: AmpSettings, option: str) -> str:
    if option in EDIT_OPTIONS:
        which = EDIT_OPTIONS[option]
        return ", ".join(e.op_type for e in settings.edits if (e.list, e.adds) == which) or "none"
    if option == "data_type":
        return "default" if settings.data_type is None else str(settings.data_type)
    values = {
        "unsafe_force_all": settings.force_all,
        "treat_infer_as_deny": settings.infer_as_deny,
        "auto_mixed_precision": "on" if settings.switched_on else "off",
        "log_path": settings.log_path,
    }
    return str(values[option])


def merge_options(
    sources: Mapping[str, AutoMixedPrecisionOptions | None], environment: Mapping[str, str]
) -> AmpSettings:
    """Merge the sources: the first value of each option takes precedence, then the environment.

    Args:
        sources: name of an option in the source, e.g. `amp.{option}` → its options.
        environment: variable → value.

    Raises:
        ConfigurationError: a value is invalid; the message names its source.
    """
    for name, options in sources.items():
        if options is not None and not isinstance(options, AutoMixedPrecisionOptions):
            raise ConfigurationError(
                f"{name.partition('.')[0]} must be AutoMixedPrecisionOptions, "
                f"got {type(options).__name__}"
            )
    for name in sorted(environment):
        if name.startswith(PREFIXES) and name not in _VARIABLES:
            _warn_unknown_variable(name)
    first = {option: _find_first_setting(option, sources, environment) for option in OPTIONS}
    values = {option: value for option, value in first.items() if value is not None}
    values = {**values, **_from_other_variables(environment), **values}

    def source_and_value(option: str) -> tuple[str, Any]:
        return values.get(option, ("", None))

    edits = tuple(
        ListEdit(adds, name, op_type, values[option][0])
        for option, (name, adds) in EDIT_OPTIONS.items()
        if option in values
        for op_type in parse_op_types(*values[option])
    )
    _, path = source_and_value("log_path")
    return AmpSettings(
        _parse_data_type(*source_and_value("data_type")),
        _parse_switch(*source_and_value("unsafe_force_all")),
        edits,
        str(path) if path not in (None, "") else None,
        infer_as_deny="treat_infer_as_deny" in values,
        switched_on=_parse_switch(*source_and_value("auto_mixed_precision")),
        origins={option: origin for option, (origin, _) in values.items()},
    )


@cache
def _warn_unknown_variable(variable: str) -> None:
    """Log once that a variable has no effect, with the nearest one that has."""
    hint = did_you_mean(variable, _VARIABLES)
    logger.warning("the environment variable %s has no effect%s", variable, hint)


def _find_first_setting(
    option: str,
    sources: Mapping[str, AutoMixedPrecisionOptions | None],
    environment: Mapping[str, str],
) -> tuple[str, Any] | None:
    """Return source and value of an option at its first occurrence."""
    for name, options in sources.items():
        value = getattr(options, option) if options is not None else None
        if value is not None:
            return name.format(option=option), value
    for prefix in PREFIXES:
        variable = f"{prefix}{option.upper()}"
        if environment.get(variable, "").strip():
            return variable, environment[variable]
    return None


def _from_other_variables(environment: Mapping[str, str]) -> dict[str, tuple[str, Any]]:
    """Return option → source and value, for the variables without an option."""
    values: dict[str, tuple[str, Any]] = {}
    if environment.get(SWITCH, "").strip():
        values["auto_mixed_precision"] = SWITCH, environment[SWITCH]
    level = environment.get(LEVEL, "").strip().upper()
    if level and level not in LEVELS:
        raise ConfigurationError(
            f"{LEVEL} cannot be {environment[LEVEL]!r}{did_you_mean(level, LEVELS)}"
        )
    if level == FORCE_ALL:
        values["unsafe_force_all"] = LEVEL, True
    elif level == INFER_AS_DENY:
        values["treat_infer_as_deny"] = LEVEL, True
    return values


def parse_op_types(origin: str, value: object) -> tuple[str, ...]:
    """Read op types from a list or a comma-separated string.

    Raises:
        ConfigurationError: the value is neither; the message names `origin`.
    """
    names = value.split(",") if isinstance(value, str) else value
    if not isinstance(names, list | tuple | set | frozenset) or not all(
        isinstance(name, str) for name in names
    ):
        raise ConfigurationError(
            f"{origin} must be op types, separated by commas or as a list, got {value!r}"
        )
    return tuple(dict.fromkeys(name.strip() for name in names if name.strip()))


def _parse_data_type(origin: str, value: object) -> Precision | None:
    if value is None or isinstance(value, AmpDataType):
        return value.precision if value is not None else None
    names = {
        **{kind.name.lower(): kind.precision for kind in AmpDataType},
        **{kind.value: kind.precision for kind in AmpDataType},
        **{precision.value: precision for precision in Precision if precision.is_16_bit},
    }
    name = str(value).strip().lower()
    if name not in names:
        raise ConfigurationError(
            f"{origin} must be one of {', '.join(kind.name for kind in AmpDataType)}, got {value!r}"
        )
    return names[name]


def _parse_switch(origin: str, value: object) -> bool:
    if value is None or isinstance(value, bool):
        return bool(value)
    switches = {"1": True, "true": True, "on": True, "0": False, "false": False, "off": False}
    state = switches.get(str(value).strip().lower())
    if state is None:
        raise ConfigurationError(f"{origin} must be on or off, got {value!r}")
    return state


def resolve_precision(
    asker: str,
    precision: str | Precision | None,
    amp: AutoMixedPrecisionOptions | None,
    environment: Mapping[str, str],
) -> tuple[Precision, AmpSettings]:
    """Return the effective precision, by default BF16, and all other mixed-precision settings.

    Raises:
        ConfigurationError: more than one precision is given, `precision` and `amp.data_type`
            contradict each other, or an option is invalid; `asker` names the caller.
    """
    settings = merge_options({"amp.{option}": amp}, environment)
    if precision is None:
        return settings.data_type or Precision.BF16, settings
    (chosen, *remaining) = parse_precisions(precision)
    from_options = settings.origins.get("data_type") == "amp.data_type"
    in_options = settings.data_type if from_options else None
    if remaining or in_options not in (None, chosen):
        raise ConfigurationError(
            f"{asker} requires a single 16-bit precision, got {precision!r}"
            + (f" and amp.data_type {in_options}" if in_options else "")
        )
    return chosen, settings


def keep_known_edits(
    edits: Iterable[ListEdit], framework: str, op_types: Callable[[], Collection[str]]
) -> tuple[tuple[ListEdit, ...], tuple[str, ...]]:
    """Return the edits of existing op types, and a warning for every skipped edit.

    TensorFlow's variables may be set while another framework is in use: their edits of missing
    types are skipped.

    Raises:
        UnknownOperatorError: any other edit names a type that does not exist.
    """
    edits = tuple(edits)
    if not edits:
        return (), ()  # listing all op types is slow
    available = op_types()
    foreign = [
        edit
        for edit in edits
        if framework != "tensorflow"
        and edit.origin.startswith(TENSORFLOW_PREFIXES)
        and edit.op_type not in available
    ]
    warnings = tuple(
        f"{edit.origin} names {edit.op_type!r}, which is not an op type of {framework}; the edit "
        f"is ignored"
        for edit in foreign
    )
    supported = tuple(edit for edit in edits if edit not in foreign)
    check_known(supported, available)
    return supported, warnings

"""Validators of the values and sections of a tuning file; they return a normalized value."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

from neural_mp.adaptors.detect import FRAMEWORKS as DETECTED
from neural_mp.amp import AmpDataType
from neural_mp.config.inc_dialect import FRAMEWORKS, INT8_APPROACHES, QUANT_WORDS
from neural_mp.core.criterion import AccuracyCriterion
from neural_mp.core.enums import (
    AUTO_RUNTIME,
    COMPILED_RUNTIME,
    SOURCE_RUNTIME,
    Approach,
    Capture,
    Dialect,
    ObjectiveName,
)
from neural_mp.core.hardware import TARGETS
from neural_mp.core.precision import Precision, parse_precisions
from neural_mp.core.quant_spec import MAX_GROUP_SIZE, QUANT_CHOICES, ROUNDINGS
from neural_mp.errors import ConfigurationError, did_you_mean, error_path
from neural_mp.targets.profile import is_profile, profile_names
from neural_mp.tuning.executors import read_workers
from neural_mp.util.plug_ins import read_entry_points
from neural_mp.util.text import format_count
from neural_mp.util.validators import (
    MOST,
    MOST_SECONDS,
    InvalidValueError,
    Validator,
    boolean,
    invalid_value_error,
    is_finite,
    is_integer,
    json_schema,
    keep_original_value,
    one_of,
    validate_at,
    values_matching,
    with_json_schema,
)

#: Instead of precisions: no limit.
ANY = "any"
#: Instead of weights: every metric has to meet the target.
EACH = "each"
#: Keys among metrics that are not metrics.
NO_METRICS = ("weight", "higher_is_better")
OBJECTIVES = tuple(word.value for word in ObjectiveName)
_WEIGHTS = "numbers from 0, not all of them 0"


def _is_any_share(value: object) -> bool:
    percent = isinstance(value, str) and re.fullmatch(r"-?\d+(\.\d+)?\s*%", value.strip())
    return bool(percent) or is_finite(value)


def _parse_share(value: Any) -> float:
    return float(value.strip().rstrip("%")) / 100 if isinstance(value, str) else float(value)


def _is_words(value: object) -> bool:
    if isinstance(value, list):
        return all(isinstance(item, str) or is_integer(item) for item in value)
    return isinstance(value, str) or is_integer(value)


def split_items(value: object) -> list[str]:
    """Split a string at commas, or else at spaces; return the items of a list as strings."""
    if isinstance(value, list):
        return [str(item) for item in value]
    text = str(value)
    items = text.split(",") if "," in text else text.split()
    return [item.strip() for item in items if item.strip()]


def _is_sizes(value: object) -> bool:
    items = split_items(value) if _is_words(value) else []
    sizes = [int(item) for item in items if re.fullmatch(r"[0-9]{1,12}", item.strip())]
    return 0 < len(items) == len(sizes) and all(1 <= size <= MOST for size in sizes)


def _is_named(value: object) -> bool:
    return isinstance(value, dict) and all(isinstance(name, str) for name in value)


def _fill_empty_options(value: dict[str, Any]) -> dict[str, Any]:
    return {name: {} if options is None else options for name, options in value.items()}


def _is_one_named(value: Any) -> bool:
    if isinstance(value, str):
        return bool(value.strip())
    single = _is_named(value) and len(value) == 1
    return single and all(isinstance(item, dict) for item in _fill_empty_options(value).values())


def _is_objective(value: object) -> bool:
    if isinstance(value, dict):
        weighted = all(is_finite(weight) and weight > 0 for weight in value.values())
        return bool(value) and set(value) <= set(OBJECTIVES) and weighted
    return isinstance(value, str) and value in OBJECTIVES


def parse_number_list(option: str, value: object, count: int) -> list[float]:
    """Return `count` weights, from a list or from words.

    Raises:
        ConfigurationError: a weight is not a number from 0, all are 0, or the count differs.
    """
    try:
        weights = [
            float(item) for item in (value if isinstance(value, list) else split_items(value))
        ]
    except (TypeError, ValueError) as error:
        raise ConfigurationError(f"{option}: {invalid_value_error(_WEIGHTS, value)}") from error
    if any(not math.isfinite(w) or w < 0 for w in weights) or (weights and not any(weights)):
        raise ConfigurationError(f"{option}: {invalid_value_error(_WEIGHTS, value)}")
    if len(weights) != count:
        raise ConfigurationError(
            f"{option}: expected {format_count(count, 'weight')}, found {len(weights)}: {value!r}"
        )
    return weights


def parse_bool_list(option: str, value: object, count: int) -> list[bool]:
    """Return `count` booleans, from a list, from words, or from one value for all.

    Raises:
        ConfigurationError: a value is not a boolean, or the count differs.
    """
    items = [value] if isinstance(value, bool) else split_items(value)
    literals = {"true": True, "false": False}
    if any(str(item).lower() not in literals for item in items) or len(items) not in (1, count):
        expected = f"true or false for each of {count} metrics"
        raise ConfigurationError(f"{option}: {invalid_value_error(expected, value)}")
    flags = [literals[str(item).lower()] for item in items]
    return flags * count if len(flags) == 1 else flags


def validate_quant_words(kind: str) -> Validator[list[str]]:
    """Return a validator of words, ours or INC's, for one field of a `QuantSpec`."""
    names = [*QUANT_CHOICES[kind]]
    if kind == "dtype":
        names += [p.value for p in Precision if not p.is_integer]
    theirs = [name for name, ours in QUANT_WORDS.items() if ours in names]

    def split_lower_words(value: object) -> list[str]:
        return [name.lower() for name in split_items(value)]

    return values_matching(
        f"one or more of {', '.join(names + theirs)}",
        lambda value: (
            _is_words(value)
            and split_items(value)
            and {*split_lower_words(value)} <= {*names, *theirs}
        ),
        lambda value: [
            *dict.fromkeys(QUANT_WORDS.get(name, name) for name in split_lower_words(value))
        ],
    )


def parse_roundings(value: object) -> list[str]:
    """Validate roundings of a weight: corrections in one text, `rtn`, or a list of such texts."""
    names = [TEXT(text).lower() for text in (value if isinstance(value, list) else [value])]
    wrong = next((name for name in names if name not in ROUNDINGS), None)
    if wrong is not None:
        expected = f"one or more of {', '.join(ROUNDINGS)}"
        raise invalid_value_error(expected, wrong, did_you_mean(wrong, ROUNDINGS))
    return names


def precisions(value: object) -> tuple[Precision, ...] | None:
    """Validate precisions; None for `any`."""
    names = [part for name in split_items(_PRECISION_WORDS(value)) for part in split_items(name)]
    return None if [name.lower() for name in names] == [ANY] else parse_precisions(names)


def parse_framework(value: object) -> str | None:
    """Validate the name of a framework, ours, a plug-in's or INC's; None for INC's `NA`."""
    name = TEXT(value)
    plug_ins = {entry.name for entry in read_entry_points("neural_mp.adaptors")}
    adaptors = {**FRAMEWORKS, **{name: name for name in plug_ins}}
    if name not in adaptors and name.lower() not in adaptors:
        raise invalid_value_error(
            "the name of a framework with an adaptor", name, did_you_mean(name, adaptors)
        )
    return adaptors.get(name) or adaptors[name.lower()]


def parse_approach(value: object) -> str | None:
    """Validate an INT8 approach, ours or INC's; None for INC's that allows all."""
    name = _APPROACH(value)
    return INT8_APPROACHES.get(name, name)


def parse_amount(value: Any) -> float:
    """Validate an absolute tolerance, which is in the unit of the metric; no percentage."""
    if is_finite(value) and value >= 0:
        return float(value)
    percentage = isinstance(value, str) and value.strip().endswith("%")
    hint = f"; write relative: {value.strip()} for a fraction of the baseline" if percentage else ""
    raise invalid_value_error("a number from 0, in the unit of the metric", value, hint)


def validate_raised_integer(least: int, most: int = MOST) -> Validator[int]:
    """Return a validator of integers up to `most`; values below `least` become `least`."""
    return values_matching(
        f"a whole number up to {most}",
        lambda value: is_integer(value) and value <= most,
        lambda value: max(value, least),
    )


Section = Validator[dict[str, Any]]


def section_of(needed: str = "", default_key: str = "", /, **keys: Validator[Any]) -> Section:
    """Return a validator for a section; a key without a value counts as missing.

    Args:
        needed: the required key; empty if none.
        default_key: key of the value if the section is a single word; empty if not allowed.
        keys: validator of each key.
    """

    def read_section(value: object) -> dict[str, Any]:
        data = {default_key: value} if default_key and isinstance(value, str) else value
        if not isinstance(data, dict):
            kinds = f"{'a word, or ' if default_key else ''}a mapping of the keys"
            raise invalid_value_error(f"{kinds} {', '.join(keys)}", data)
        for key in data:
            if key not in keys:
                with error_path(key):
                    raise InvalidValueError(f"there is no such key{did_you_mean(key, keys)}")
        if needed and data.get(needed) is None:
            raise invalid_value_error(f"the key {needed!r}", data)
        return _validate_each_value(data, keys)

    mapping = {
        "type": "object",
        "properties": {key: json_schema(validator) for key, validator in keys.items()},
        "additionalProperties": False,
        **({"required": [needed]} if needed else {}),
    }
    return with_json_schema(
        read_section, **({"anyOf": [{"type": "string"}, mapping]} if default_key else mapping)
    )


def validate_named_values(validator: Validator[Any]) -> Section:
    """Return a validator for a mapping of names to values of one type."""

    def read_mapping(value: object) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise invalid_value_error("a mapping of names", value)
        return _validate_each_value(value, dict.fromkeys(value, validator))

    return with_json_schema(
        read_mapping, type="object", additionalProperties=json_schema(validator)
    )


def validate_single_named(kind: str, choices: Mapping[str, Section]) -> Section:
    """Return a validator for one name with its options, or the name alone.

    Args:
        kind: word for the named things in messages.
        choices: name → validator of its options.
    """

    def read_choice(value: object) -> dict[str, Any]:
        data = {value: None} if isinstance(value, str) else value
        if not isinstance(data, dict) or len(data) != 1:
            raise invalid_value_error(f"one of {', '.join(choices)} with its options", value)
        ((name, options),) = data.items()
        if name not in choices:
            hint = did_you_mean(str(name), choices)
            raise InvalidValueError(
                f"there is no {kind} {name!r} here{hint}; train with others by train_func in Python"
            )
        return {name: validate_at(name, choices[name], {} if options is None else options)}

    return read_choice


def _validate_each_value(
    data: Mapping[str, Any], keys: Mapping[str, Validator[Any]]
) -> dict[str, Any]:
    defined = {key: value for key, value in data.items() if value is not None}
    return {key: validate_at(key, keys[key], value) for key, value in defined.items()}


def refuse_all(reason: str) -> Validator[Any]:
    """Return a validator that refuses every value."""

    def refuse_value(value: object) -> Any:
        raise InvalidValueError(f"must not be given: {reason}")

    return refuse_value


#: Words for `target`: CPUs and accelerators; a profile's path is another.
TARGET_NAMES = (*TARGETS, *profile_names())


def _read_target(value: object) -> str:
    if not isinstance(value, str) or (value not in TARGET_NAMES and not is_profile(value)):
        names = ", ".join(TARGET_NAMES)
        hint = did_you_mean(str(value), TARGET_NAMES)
        raise invalid_value_error(f"one of {names}, or the path of a profile (.yaml)", value, hint)
    return value


TARGET = with_json_schema(
    _read_target,
    type="string",
    anyOf=[{"enum": list(TARGET_NAMES)}, {"pattern": r"\.ya?ml$"}],
)
RUNTIME = one_of((SOURCE_RUNTIME, AUTO_RUNTIME, *DETECTED, COMPILED_RUNTIME))
TEXT = values_matching("a word", lambda value: isinstance(value, str) or is_finite(value), str)
VERSION = values_matching(
    "a version such as 1.0", lambda value: isinstance(value, str | int | float)
)
NAME_LIST = values_matching("a list of names, or names separated by commas", _is_words, split_items)
NAMES = values_matching(
    "a list of names, or names separated by commas", _is_words, lambda v: (*split_items(v),)
)
SHARE = values_matching(
    "a number from 0, or a percentage such as 1%",
    lambda value: _is_any_share(value) and not str(value).strip().startswith("-"),
    _parse_share,
)
ANY_SHARE = values_matching("a number, or a percentage such as 1%", _is_any_share, _parse_share)
SIZES = values_matching(
    "a whole number from 1, or several", _is_sizes, lambda v: max(map(int, split_items(v)))
)
GROUP_SIZES = values_matching(
    f"group sizes: whole numbers from 1 to {MAX_GROUP_SIZE}",
    lambda value: all(
        is_integer(size) and 1 <= size <= MAX_GROUP_SIZE
        for size in (value if isinstance(value, list) else [value])
    ),
    lambda value: value if isinstance(value, list) else [value],
)
SECONDS = values_matching(
    f"a number of seconds from 0 to {MOST_SECONDS}",
    lambda value: is_finite(value) and 0 <= value <= MOST_SECONDS,
    float,
)
#: -1 means no limit in files of Intel Neural Compressor, as 0 does here.
ANY_SECONDS = values_matching(
    f"a number of seconds up to {MOST_SECONDS}",
    lambda value: is_finite(value) and value <= MOST_SECONDS,
    lambda value: max(float(value), 0.0),
)
DATA_TYPE = values_matching(
    f"one of {', '.join(kind.name for kind in AmpDataType)}",
    lambda value: isinstance(value, str) and value.upper() in AmpDataType.__members__,
    lambda value: AmpDataType[value.upper()],
)
_PRECISION_WORDS = values_matching("precisions such as int8,bf16", _is_words)
TRANSFORMS = values_matching(
    "a mapping of transform names to their options", _is_named, _fill_empty_options
)
DATASET = values_matching(
    "one dataset name with a mapping of its options",
    _is_one_named,
    lambda value: {value.strip(): {}} if isinstance(value, str) else _fill_empty_options(value),
)
METRIC = values_matching(
    "a metric name, or one name with its options",
    lambda value: isinstance(value, str | dict),
    lambda value: {value: None} if isinstance(value, str) else value,
)
METRICS = values_matching("a mapping of metric names to their options", _is_named)
ITERATIONS = values_matching(
    "a whole number from 1",
    # -1 means all data in files of Intel Neural Compressor.
    lambda value: is_integer(value) and (1 <= value <= MOST or value == -1),
)
RESUME = values_matching("true, false or a path", lambda value: isinstance(value, bool | str))
CAPTURE = one_of(word.value for word in Capture)
_APPROACH = one_of([*(word.value for word in Approach), *INT8_APPROACHES])
OBJECTIVE = values_matching(
    f"one of {', '.join(OBJECTIVES)}, or several with their weights", _is_objective
)
_WORKERS = values_matching(
    "a whole number from 1, an engine such as ray:10.0.0.1:6379, or a mapping with engine, count",
    lambda value: isinstance(value, str) or _is_named(value) or (is_integer(value) and value >= 1),
)
WORKERS = keep_original_value(lambda value: read_workers(_WORKERS(value)))


def criterion_section(share: Validator[Any], amount: Validator[Any]) -> Validator[Any]:
    """Return the validator of an accuracy criterion in a tuning file."""
    return section_of(
        relative=share,
        absolute=amount,
        higher_is_better=boolean,
        any_tolerance=boolean,
        any_baseline=boolean,
    )


def exit_section(seconds: Validator[Any], trials: Validator[Any]) -> Validator[Any]:
    """Return the validator of an exit policy in a tuning file."""
    return section_of(
        timeout=seconds, max_trials=trials, performance_only=boolean, train_seconds=seconds
    )


def build_section_criterion(data: Mapping[str, Any], dialect: Dialect) -> AccuracyCriterion:
    """Return the criterion of a section of a tuning file.

    Raises:
        ConfigurationError: two keys contradict each other.
    """
    if "relative" in data and "absolute" in data:
        raise ConfigurationError(
            f"relative ({data['relative']}) and absolute ({data['absolute']}) exclude each "
            f"other; remove one of the two"
        )
    return AccuracyCriterion(
        tolerance=data.get("relative", data.get("absolute", AccuracyCriterion.tolerance)),
        relative="absolute" not in data,
        higher_is_better=data.get("higher_is_better"),
        any_tolerance=data.get("any_tolerance", dialect is Dialect.INC),
        any_baseline=data.get("any_baseline", dialect is Dialect.INC),
    )

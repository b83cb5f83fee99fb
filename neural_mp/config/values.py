"""What a single value in a tuning file may be: checked, and brought into one form."""

from __future__ import annotations

import math
import re
from typing import Any

from schema import And, Use

from neural_mp.amp import AmpDataType
from neural_mp.config.inc_dialect import (
    IGNORED_APPROACHES,
    IGNORED_OBJECTIVES,
    IGNORED_QUANT_WORDS,
    INT8_APPROACHES,
    QUANT_WORDS,
)
from neural_mp.core.enums import Approach, Capture, Objective
from neural_mp.core.precision import QUANT_CHOICES, Precision
from neural_mp.errors import ConfigurationError
from neural_mp.util.argument_checks import MOST, MOST_SECONDS
from neural_mp.util.text import counted

#: In the place of weights: every metric has to meet the target.
EACH = "each"
OBJECTIVES = tuple(word.value for word in Objective)


def value_of(expected: str, *checks: Any) -> And:
    """A value that passes all checks, in order; `expected` says in words what they ask for."""
    return And(*checks, error=f"expected {expected}")


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    if isinstance(value, float):
        return math.isfinite(value)
    # Larger whole numbers have no float.
    return _is_whole(value) and abs(value) < 1 << 1023


def _is_any_share(value: Any) -> bool:
    percent = isinstance(value, str) and re.fullmatch(r"-?\d+(\.\d+)?\s*%", value.strip())
    return bool(percent) or _is_number(value)


def _is_share(value: Any) -> bool:
    return _is_any_share(value) and not str(value).strip().startswith("-")


def _share(value: Any) -> float:
    return float(value.strip().rstrip("%")) / 100 if isinstance(value, str) else float(value)


def _is_words(value: Any) -> bool:
    if isinstance(value, list):
        return all(isinstance(word, str) or _is_whole(word) for word in value)
    return isinstance(value, str) or _is_whole(value)


def split(value: Any) -> list[str]:
    """The words of a list, or of a string that separates them with commas or else spaces."""
    if isinstance(value, list):
        return [str(word) for word in value]
    text = str(value)
    words = text.split(",") if "," in text else text.split()
    return [word.strip() for word in words if word.strip()]


def _is_sizes(value: Any) -> bool:
    return _is_words(value) and bool(split(value)) and all(map(_is_size, split(value)))


def _is_size(word: str) -> bool:
    return re.fullmatch(r"[0-9]{1,12}", word.strip()) is not None and 1 <= int(word) <= MOST


def _largest(value: Any) -> int:
    return max(int(word) for word in split(value))


def _is_named(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(name, str) for name in value)


def _options(value: dict[str, Any]) -> dict[str, Any]:
    return {name: {} if options is None else options for name, options in value.items()}


def _is_one_named(value: Any) -> bool:
    if isinstance(value, str):
        return bool(value.strip())
    single = _is_named(value) and len(value) == 1
    return single and all(isinstance(item, dict) for item in _options(value).values())


def _one_named(value: Any) -> dict[str, Any]:
    return {value.strip(): {}} if isinstance(value, str) else _options(value)


def _is_objective(value: Any) -> bool:
    if isinstance(value, dict):
        weighted = all(_is_number(weight) and weight > 0 for weight in value.values())
        return bool(value) and set(value) <= set(OBJECTIVES) and weighted
    return isinstance(value, str) and value in (*OBJECTIVES, *IGNORED_OBJECTIVES)


def numbers_of(option: str, value: Any, count: int) -> list[float]:
    """So many weights, from a list or from words.

    Raises:
        ConfigurationError: they are no numbers from 0, all of them 0, or not as many.
    """
    try:
        weights = [float(word) for word in (value if isinstance(value, list) else split(value))]
    except (TypeError, ValueError) as error:
        raise _bad_weights(option, value) from error
    if any(not math.isfinite(w) or w < 0 for w in weights) or (weights and not any(weights)):
        raise _bad_weights(option, value)
    if len(weights) != count:
        raise ConfigurationError(
            f"{option}: expected {counted(count, 'weight')}, found {len(weights)}: {value!r}"
        )
    return weights


def _bad_weights(option: str, value: Any) -> ConfigurationError:
    return ConfigurationError(
        f"{option}: expected numbers from 0, not all of them 0; found {value!r}"
    )


def bools_of(option: str, value: Any, count: int) -> list[bool]:
    """So many answers, true or false, from a list, from words, or from one for all.

    Raises:
        ConfigurationError: they are something else, or not as many.
    """
    words = [value] if isinstance(value, bool) else split(value)
    known = {"true": True, "false": False}
    if any(str(word).lower() not in known for word in words) or len(words) not in (1, count):
        raise ConfigurationError(
            f"{option}: expected true or false for each of {count} metrics, found {value!r}"
        )
    found = [known[str(word).lower()] for word in words]
    return found * count if len(found) == 1 else found


def quant_words(kind: str) -> And:
    """Words for one field of a `QuantSpec`, ours or theirs."""
    known = [*QUANT_CHOICES[kind]]
    if kind == "dtype":
        known += [p.value for p in Precision if p is not Precision.INT8]
    theirs = [word for word, ours in QUANT_WORDS.items() if ours in known]
    accepted = {*known, *theirs, *IGNORED_QUANT_WORDS.get(kind, ())}
    return value_of(
        f"one or more of {', '.join(known + theirs)}",
        _is_words,
        lambda value: bool(split(value)) and all(word.lower() in accepted for word in split(value)),
        Use(lambda value: [word.lower() for word in split(value)]),
    )


def _is_workers(value: Any) -> bool:
    return isinstance(value, str) or _is_named(value) or (_is_whole(value) and value >= 1)


def whole_from(least: int, most: int = MOST) -> And:
    """A whole number within bounds."""
    return value_of(
        f"a whole number from {least} to {most}",
        lambda value: _is_whole(value) and least <= value <= most,
    )


def raised_to(least: int, most: int = MOST) -> And:
    """A whole number up to a bound; `least` where it is lower."""
    return value_of(
        f"a whole number up to {most}",
        lambda value: _is_whole(value) and value <= most,
        Use(lambda value: max(value, least)),
    )


def one_of(*words: str) -> And:
    """One of these words."""
    return value_of(f"one of {', '.join(words)}", str, lambda value: value in words)


TEXT = value_of("a word", lambda value: isinstance(value, str) or _is_number(value), Use(str))
VERSION = value_of("a version such as 1.0", lambda value: isinstance(value, str | int | float))
NAMES = value_of("a list of names, or names separated by commas", _is_words, Use(split))
BOOL = value_of("true or false", bool)
SHARE = value_of("a number from 0, or a percentage such as 1%", _is_share, Use(_share))
RATIO = value_of("a number, such as 1.03", _is_number)
ANY_SHARE = value_of("a number, or a percentage such as 1%", _is_any_share, Use(_share))
SIZES = value_of("a whole number from 1, or several", _is_sizes, Use(_largest))
SECONDS = value_of(
    f"a number of seconds from 0 to {MOST_SECONDS}",
    lambda value: _is_number(value) and 0 <= value <= MOST_SECONDS,
    Use(float),
)
#: -1 sets no limit in files of Intel Neural Compressor, as 0 does here.
ANY_SECONDS = value_of(
    f"a number of seconds up to {MOST_SECONDS}",
    lambda value: _is_number(value) and value <= MOST_SECONDS,
    Use(lambda value: max(float(value), 0.0)),
)
DATA_TYPE = value_of(
    f"one of {', '.join(kind.name for kind in AmpDataType)}",
    str,
    lambda value: value.upper() in AmpDataType.__members__,
    Use(lambda value: AmpDataType[value.upper()]),
)
PRECISIONS = value_of("precisions such as int8,bf16", _is_words)
TRANSFORMS = value_of("a mapping of transform names to their options", _is_named, Use(_options))
DATASET = value_of("one dataset name with a mapping of its options", _is_one_named, Use(_one_named))
METRIC = value_of(
    "a metric name, or one name with its options", lambda value: isinstance(value, str | dict)
)
METRICS = value_of("a mapping of metric names to their options", _is_named)
ITERATIONS = value_of(
    "a whole number from 1",
    # -1 stands for all of the data in files of Intel Neural Compressor.
    lambda value: _is_whole(value) and (1 <= value <= MOST or value == -1),
)
RESUME = value_of("true, false or a path", lambda value: isinstance(value, bool | str))
CAPTURE = one_of(*(word.value for word in Capture))
APPROACH = one_of(*(word.value for word in Approach), *INT8_APPROACHES, *IGNORED_APPROACHES)
OBJECTIVE = value_of(
    f"one of {', '.join(OBJECTIVES)}, or several with their weights", _is_objective
)
WORKERS = value_of(
    "a whole number from 1, an engine such as ray:10.0.0.1:6379, or a mapping with engine, count",
    _is_workers,
)

"""Schema of tuning files: the allowed keys and a validator for each value."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from neural_mp.amp import EDIT_OPTIONS
from neural_mp.config import values
from neural_mp.config.inc_dialect import why_ignored
from neural_mp.config.source import KeyPath, Source
from neural_mp.core.enums import Dialect
from neural_mp.core.hardware import TARGETS
from neural_mp.core.precision import QUANT_CHOICES
from neural_mp.errors import did_you_mean
from neural_mp.util.validators import (
    MAX_SEED,
    InvalidValueError,
    boolean,
    integer_between,
    invalid,
    one_of,
    seed_number,
)

#: Instead of precisions: no limit.
ANY = "any"


#: Key of the schema shared by all names in a section.
_NAMED = "*"
#: Required keys of the sections that have them.
_NEEDED = ("dataset",)
#: Key → a validator, or a section of further keys.
_Section = dict[str, Any]

_TENSOR = {kind: values.quant_words(kind) for kind in QUANT_CHOICES}
_LIMITS = dict(precisions=values.PRECISIONS, weight=_TENSOR, activation=_TENSOR)
_CONVERSION = dict(precisions=values.PRECISIONS, op_wise={_NAMED: _LIMITS})
_AMP = dict(
    data_type=values.DATA_TYPE,
    unsafe_force_all=boolean,
    **dict.fromkeys(EDIT_OPTIONS, values.NAMES),
    log_path=values.TEXT,
)
_DATALOADER = dict(
    dataset=values.DATASET,
    batch_size=integer_between(1),
    last_batch=one_of(("rollover", "discard")),
    shuffle=boolean,
    seed=integer_between(0),
    transform=values.TRANSFORMS,
)


def _sections(share: Any, seconds: Any, trials: Any, seed: Any) -> _Section:
    return dict(
        version=values.VERSION,
        model=dict(
            name=values.TEXT,
            framework=values.TEXT,
            inputs=values.NAMES,
            outputs=values.NAMES,
            capture=values.CAPTURE,
        ),
        device=one_of(("cpu", "gpu")),
        target=one_of(TARGETS),
        use_bf16=boolean,
        mixed_precision={**_CONVERSION, **_AMP},
        graph_optimization=_CONVERSION,
        quantization=dict(
            approach=values.APPROACH,
            use_bf16=boolean,
            calibration=dict(sampling_size=values.SIZES, dataloader=_DATALOADER),
            model_wise=_LIMITS,
            optype_wise={_NAMED: _LIMITS},
            op_wise={_NAMED: _LIMITS},
        ),
        tuning=dict(
            strategy=dict(name=values.TEXT),
            accuracy_criterion=dict(relative=share, absolute=share, higher_is_better=boolean),
            objective=values.OBJECTIVE,
            min_speedup=values.RATIO,
            exit_policy=dict(timeout=seconds, max_trials=trials, performance_only=boolean),
            random_seed=seed,
            workspace=dict(path=values.TEXT, resume=values.RESUME),
            storage=values.TEXT,
            early_stopping=boolean,
            cache=boolean,
            workers=values.WORKERS,
        ),
        evaluation=dict(
            accuracy=dict(
                metric=values.METRIC,
                multi_metrics=values.METRICS,
                dataloader=_DATALOADER,
                max_batches=integer_between(1),
                postprocess=dict(transform=values.TRANSFORMS),
            ),
            performance=dict(
                warmup=integer_between(0),
                iteration=values.ITERATIONS,
                cores_per_instance=integer_between(1),
                configs=dict(cores_per_instance=integer_between(1)),
                dataloader=_DATALOADER,
            ),
        ),
    )


#: Schema per dialect; INC accepts numbers below the meaningful range.
_SECTIONS: Mapping[Dialect, _Section] = {
    Dialect.OWN: _sections(values.SHARE, values.SECONDS, integer_between(1), seed_number),
    Dialect.INC: _sections(
        values.ANY_SHARE, values.ANY_SECONDS, values.raised_to(1), values.raised_to(0, MAX_SEED)
    ),
}

#: Sections that may be given as a single word → the key of this word.
_SHORT = {("tuning", "strategy"): "name", ("tuning", "workspace"): "path"}

_WHOLE_MODEL = [("mixed_precision", "op_wise"), ("graph_optimization", "op_wise")]


def validated(source: Source, dialect: Dialect) -> dict[str, Any]:
    """Return the content of a file, validated and normalized.

    Keys of Intel Neural Compressor without effect are removed with a warning; a key without a
    value counts as missing.

    Raises:
        ConfigurationError: a key is unknown, or a value is of the wrong type or out of range.
    """
    found: dict[str, Any] = _checked(source, source.data, _SECTIONS[dialect], ())
    return found


def _checked(source: Source, data: Any, level: Any, path: KeyPath) -> Any:
    if callable(level):
        try:
            return level(data)
        except InvalidValueError as error:
            raise source.error((*path, *error.keys), str(error)) from None
    if path in _SHORT and isinstance(data, str):
        data = {_SHORT[path]: data}
    if path in _WHOLE_MODEL and _is_limits(data):
        data = {".*": data}
    if not isinstance(data, dict):
        keys = "names" if _NAMED in level else f"the keys {', '.join(level)}"
        word = "a word, or " if path in _SHORT else ""
        raise source.error(path, str(invalid(f"{word}a mapping of {keys}", data)))
    kept = {}
    for key, value in data.items():
        here = (*path, key)
        why = why_ignored(here)
        if why is not None:
            source.ignored(here, why)
        elif key not in level and _NAMED not in level:
            raise source.error(here, f"there is no such key{did_you_mean(key, level)}")
        elif value is not None:
            kept[key] = _checked(source, value, level.get(key, level.get(_NAMED)), here)
    for key in _NEEDED:
        if key in level and key not in kept:
            raise source.error(path, str(invalid(f"the key {key!r}", data)))
    return kept


def _is_limits(data: Any) -> bool:
    """Whether the limits of one op stand in place of a mapping of ops, as INC's schema allows."""
    if not isinstance(data, dict):
        return False
    tensors = [value for key, value in data.items() if key in ("weight", "activation")]
    plain = all(value is None or isinstance(value, dict) for value in tensors)
    named = {key for value in tensors if plain and value for key in value}
    return len(tensors) == len(data) and bool(named & set(QUANT_CHOICES))

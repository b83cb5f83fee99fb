"""Which keys a tuning file may have, and what each of them may be."""

from __future__ import annotations

import re
import reprlib
from collections.abc import Mapping
from typing import Any

from schema import Optional, Schema, SchemaError

from neural_mp.amp import EDIT_OPTIONS
from neural_mp.config.inc_dialect import why_ignored
from neural_mp.config.source import KeyPath, Source
from neural_mp.config.values import (
    ANY_SECONDS,
    ANY_SHARE,
    APPROACH,
    BOOL,
    CAPTURE,
    DATA_TYPE,
    DATASET,
    ITERATIONS,
    METRIC,
    METRICS,
    NAMES,
    OBJECTIVE,
    PRECISIONS,
    RATIO,
    RESUME,
    SECONDS,
    SHARE,
    SIZES,
    TEXT,
    TRANSFORMS,
    VERSION,
    WORKERS,
    one_of,
    quant_words,
    raised_to,
    whole_from,
)
from neural_mp.core.enums import Dialect
from neural_mp.core.hardware import TARGETS
from neural_mp.core.precision import QUANT_CHOICES
from neural_mp.errors import did_you_mean
from neural_mp.util.argument_checks import SEEDS, brief

#: In place of precisions: no limit.
ANY = "any"


def _section(**keys: object) -> dict[Any, Any]:
    return {Optional(name): value for name, value in keys.items()}


_TENSOR = _section(**{kind: quant_words(kind) for kind in QUANT_CHOICES})
_LIMITS = _section(precisions=PRECISIONS, weight=_TENSOR, activation=_TENSOR)
_CONVERSION = _section(precisions=PRECISIONS, op_wise={Optional(str): _LIMITS})
_AMP = _section(
    data_type=DATA_TYPE,
    unsafe_force_all=BOOL,
    **dict.fromkeys(EDIT_OPTIONS, NAMES),
    log_path=TEXT,
)
_DATALOADER = {
    "dataset": DATASET,
    **_section(
        batch_size=whole_from(1),
        last_batch=one_of("rollover", "discard"),
        shuffle=BOOL,
        seed=whole_from(0),
        transform=TRANSFORMS,
    ),
}


def _sections(share: object, seconds: object, trials: object, seed: object) -> dict[Any, Any]:
    return _section(
        version=VERSION,
        model=_section(
            name=TEXT,
            framework=TEXT,
            inputs=NAMES,
            outputs=NAMES,
            capture=CAPTURE,
        ),
        device=one_of("cpu", "gpu"),
        target=one_of(*TARGETS),
        use_bf16=BOOL,
        mixed_precision={**_CONVERSION, **_AMP},
        graph_optimization=_CONVERSION,
        quantization=_section(
            approach=APPROACH,
            use_bf16=BOOL,
            calibration=_section(sampling_size=SIZES, dataloader=_DATALOADER),
            model_wise=_LIMITS,
            optype_wise={Optional(str): _LIMITS},
            op_wise={Optional(str): _LIMITS},
        ),
        tuning=_section(
            strategy=_section(name=TEXT),
            accuracy_criterion=_section(relative=share, absolute=share, higher_is_better=BOOL),
            objective=OBJECTIVE,
            min_speedup=RATIO,
            exit_policy=_section(timeout=seconds, max_trials=trials, performance_only=BOOL),
            random_seed=seed,
            workspace=_section(path=TEXT, resume=RESUME),
            storage=TEXT,
            early_stopping=BOOL,
            cache=BOOL,
            workers=WORKERS,
        ),
        evaluation=_section(
            accuracy=_section(
                metric=METRIC,
                multi_metrics=METRICS,
                dataloader=_DATALOADER,
                max_batches=whole_from(1),
                postprocess=_section(transform=TRANSFORMS),
            ),
            performance=_section(
                warmup=whole_from(0),
                iteration=ITERATIONS,
                cores_per_instance=whole_from(1),
                configs=_section(cores_per_instance=whole_from(1)),
                dataloader=_DATALOADER,
            ),
        ),
    )


#: What the files of whose words may hold: theirs may go below what has a meaning, as it does there.
_SECTIONS: Mapping[Dialect, dict[Any, Any]] = {
    Dialect.OWN: _sections(SHARE, SECONDS, whole_from(1), whole_from(0, SEEDS[-1])),
    Dialect.INC: _sections(ANY_SHARE, ANY_SECONDS, raised_to(1), raised_to(0, SEEDS[-1])),
}

#: Sections that a single word may stand for → the key that the word then is.
_SHORT = {("tuning", "strategy"): "name", ("tuning", "workspace"): "path"}

_WHOLE_MODEL = [("mixed_precision", "op_wise"), ("graph_optimization", "op_wise")]


def validated(source: Source, dialect: Dialect) -> dict[str, Any]:
    """The content of a file with every value checked and in one form.

    Keys of Intel Neural Compressor without effect are taken out with a warning; a key without a
    value counts as not given.

    Raises:
        ConfigurationError: a key is unknown, or a value is of the wrong type or out of range.
    """
    sections = _SECTIONS[dialect]
    sifted = _sifted(source, source.data, sections, ())
    try:
        return dict(Schema(sections).validate(sifted))
    except SchemaError as error:
        raise source.error(*_explained(error, sifted, sections)) from error


def _sifted(source: Source, data: object, level: object, path: KeyPath) -> Any:
    if path in _SHORT and isinstance(data, str):
        data = {_SHORT[path]: data}
    if not isinstance(data, dict) or not isinstance(level, dict):
        return data
    if path in _WHOLE_MODEL and _is_limits(data):
        data = {".*": data}
    known = _known(level)
    kept = {}
    for key, value in data.items():
        here = (*path, key)
        why = why_ignored(here)
        if why is not None:
            source.ignored(here, why)
        elif key not in known and str not in known:
            raise source.error(here, f"there is no such key{did_you_mean(key, known)}")
        elif value is not None:
            kept[key] = _sifted(source, value, known.get(key, known.get(str)), here)
    return kept


def _is_limits(data: dict[str, Any]) -> bool:
    """Whether this is one op's limits where a mapping of ops was due, as INC's schema has it."""
    tensors = [value for key, value in data.items() if key in ("weight", "activation")]
    plain = all(value is None or isinstance(value, dict) for value in tensors)
    named = {key for value in tensors if plain and value for key in value}
    return len(tensors) == len(data) and bool(named & set(QUANT_CHOICES))


def _known(level: dict[Any, Any]) -> dict[Any, Any]:
    return {getattr(key, "schema", key): value for key, value in level.items()}


def _explained(error: SchemaError, data: Any, level: Any) -> tuple[KeyPath, str]:
    """Where a value is wrong, and what was expected there."""
    path: KeyPath = ()
    for auto in error.autos:
        match = re.fullmatch(r"Key '(.*)' error:", auto or "", re.DOTALL)
        if match and isinstance(level, dict):
            known = _known(level)
            path, data = (*path, match[1]), data[match[1]]
            level = known.get(match[1], known.get(str))
    if str(error.autos[-1]).startswith("Missing key"):
        missing = [repr(key) for key in level if isinstance(key, str) and key not in data]
        return path, f"expected the key {', '.join(missing)}, found {_shown(data)}"
    if isinstance(level, dict):
        word = "a word, or " if path in _SHORT else ""
        names = ", ".join(str(name) for name in _known(level) if name is not str)
        keys = f"the keys {names}" if names else "names"
        return path, f"expected {word}a mapping of {keys}, found {_shown(data)}"
    expected = next((text for text in reversed(error.errors) if text), "expected another value")
    return path, f"{expected}, found {_shown(data)}"


def _shown(value: object) -> str:
    # Values may be nested, and hold texts of megabytes.
    return reprlib.Repr().repr(value) if isinstance(value, dict | list) else brief(value)

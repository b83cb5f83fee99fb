"""Schema of tuning files: the allowed keys and a validator for each value."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from neural_mp.adaptors.common.training_choices import LOSSES, OPTIMIZERS, REDUCTIONS
from neural_mp.amp import EDIT_OPTIONS
from neural_mp.config import values
from neural_mp.core.criterion import check_min_speedup
from neural_mp.core.enums import Dialect
from neural_mp.core.hardware import TARGETS
from neural_mp.core.quant_spec import MAX_ROUNDING_STEPS, QUANT_CHOICES
from neural_mp.core.workload import Workload
from neural_mp.errors import did_you_mean, error_path
from neural_mp.tuning.size_limit import SIZE_LIMITS
from neural_mp.util.validators import (
    MAX_SEED,
    MOST_STREAMS,
    InvalidValueError,
    Validator,
    boolean,
    checked,
    integer_between,
    invalid,
    is_finite,
    matching,
    non_negative_float,
    one_of,
    positive_float,
    seed_number,
    validate_at,
)

Section = Validator[dict[str, Any]]


def _section(needed: str = "", default_key: str = "", /, **keys: Validator[Any]) -> Section:
    """Return a validator for a section; a key without a value counts as missing.

    Args:
        needed: the required key; empty if none.
        default_key: key of the value if the section is a single word; empty if not allowed.
        keys: validator of each key.
    """

    def read(value: Any) -> dict[str, Any]:
        data = {default_key: value} if default_key and isinstance(value, str) else value
        if not isinstance(data, dict):
            kinds = f"{'a word, or ' if default_key else ''}a mapping of the keys"
            raise invalid(f"{kinds} {', '.join(keys)}", data)
        for key in data:
            if key not in keys:
                with error_path(key):
                    raise InvalidValueError(f"there is no such key{did_you_mean(key, keys)}")
        if needed and data.get(needed) is None:
            raise invalid(f"the key {needed!r}", data)
        return _each_valid(data, keys)

    return read


def _by_name(validator: Validator[Any]) -> Section:
    """Return a validator for a mapping of names to values of one type."""

    def read(value: Any) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise invalid("a mapping of names", value)
        return _each_valid(value, dict.fromkeys(value, validator))

    return read


def _one_named(kind: str, choices: Mapping[str, Section]) -> Section:
    """Return a validator for one name with its options, or the name alone.

    Args:
        kind: word for the named things in messages.
        choices: name → validator of its options.
    """

    def read(value: Any) -> dict[str, Any]:
        data = {value: None} if isinstance(value, str) else value
        if not isinstance(data, dict) or len(data) != 1:
            raise invalid(f"one of {', '.join(choices)} with its options", value)
        ((name, options),) = data.items()
        if name not in choices:
            hint = did_you_mean(str(name), choices)
            raise InvalidValueError(
                f"there is no {kind} {name!r} here{hint}; train with others by train_func in Python"
            )
        return {name: validate_at(name, choices[name], {} if options is None else options)}

    return read


def _each_valid(data: Mapping[str, Any], keys: Mapping[str, Validator[Any]]) -> dict[str, Any]:
    defined = {key: value for key, value in data.items() if value is not None}
    return {key: validate_at(key, keys[key], value) for key, value in defined.items()}


def _refused(reason: str) -> Validator[Any]:
    """Return a validator that refuses every value."""

    def read(value: Any) -> Any:
        raise InvalidValueError(f"must not be given: {reason}")

    return read


_BELOW_ONE = matching(
    "a number from 0, below 1", lambda value: is_finite(value) and 0 <= value < 1, float
)
_TENSOR = _section(
    **{kind: values.quant_words(kind) for kind in QUANT_CHOICES},
    group_size=values.GROUP_SIZES,
    rounding=values.roundings,
)
_LIMITS = _section(precisions=values.precisions, weight=_TENSOR, activation=_TENSOR)
_CONVERSION = dict(precisions=values.precisions, op_wise=_by_name(_LIMITS))
_AMP = dict(
    data_type=values.DATA_TYPE,
    unsafe_force_all=boolean,
    **dict.fromkeys(EDIT_OPTIONS, values.NAME_LIST),
    log_path=values.TEXT,
)
_DATALOADER = _section(
    "dataset",
    dataset=values.DATASET,
    batch_size=integer_between(1),
    last_batch=one_of(("rollover", "discard")),
    shuffle=boolean,
    seed=integer_between(0),
    transform=values.TRANSFORMS,
)

_OPTIONS: Mapping[str, Validator[Any]] = dict(
    learning_rate=positive_float,
    momentum=non_negative_float,
    nesterov=boolean,
    weight_decay=non_negative_float,
    epsilon=positive_float,
    amsgrad=boolean,
    **dict.fromkeys(("beta_1", "beta_2"), _BELOW_ONE),
)
_LOSS = _one_named(
    "loss",
    dict.fromkeys(LOSSES, _section(reduction=one_of(REDUCTIONS), from_logits=boolean)),
)
_OPTIMIZER = _one_named(
    "optimizer",
    {
        name: _section(**{option: _OPTIONS[option] for option in ("learning_rate", *options)})
        for name, options in OPTIMIZERS.items()
    },
)
_TRAIN = _section(
    dataloader=_DATALOADER,
    **dict.fromkeys(("loss", "criterion"), _LOSS),
    optimizer=_OPTIMIZER,
    **dict.fromkeys(("epochs", "epoch", "end_epoch"), integer_between(1)),
    start_epoch=integer_between(0),
    **dict.fromkeys(("max_batches", "iteration"), integer_between(1)),
    postprocess=_refused("transforms have no gradients; set train_func in Python"),
)


def _schema(share: Any, amount: Any, seconds: Any, trials: Any, seed: Any) -> Section:
    return _section(
        version=values.VERSION,
        model=_section(
            name=values.TEXT,
            framework=values.framework,
            inputs=values.NAMES,
            outputs=values.NAMES,
            capture=values.CAPTURE,
            runtime=values.RUNTIME,
        ),
        device=one_of(("cpu", "gpu")),
        target=one_of(TARGETS),
        use_bf16=boolean,
        mixed_precision=_section(**_CONVERSION, **_AMP),
        graph_optimization=_section(**_CONVERSION),
        quantization=_section(
            approach=values.approach,
            use_bf16=boolean,
            calibration=_section(sampling_size=values.SIZES, dataloader=_DATALOADER),
            train=_TRAIN,
            model_wise=_LIMITS,
            optype_wise=_by_name(_LIMITS),
            op_wise=_by_name(_LIMITS),
        ),
        tuning=_section(
            strategy=_section("", "name", name=values.TEXT),
            accuracy_criterion=_section(
                relative=share,
                absolute=amount,
                higher_is_better=boolean,
                any_tolerance=boolean,
                any_baseline=boolean,
            ),
            objective=values.OBJECTIVE,
            min_speedup=checked(check_min_speedup),
            **SIZE_LIMITS,
            workload=checked(Workload.parse),
            exit_policy=_section(
                timeout=seconds,
                max_trials=trials,
                performance_only=boolean,
                train_seconds=seconds,
            ),
            random_seed=seed,
            rounding_steps=integer_between(1, MAX_ROUNDING_STEPS),
            workspace=_section("", "path", path=values.TEXT, resume=values.RESUME),
            storage=values.TEXT,
            early_stopping=boolean,
            cache=boolean,
            workers=values.workers,
        ),
        evaluation=_section(
            accuracy=_section(
                metric=values.METRIC,
                multi_metrics=values.METRICS,
                dataloader=_DATALOADER,
                max_batches=integer_between(1),
                label_key=values.TEXT,
                postprocess=_section(transform=values.TRANSFORMS),
            ),
            performance=_section(
                warmup=integer_between(0),
                iteration=values.ITERATIONS,
                cores_per_instance=integer_between(1),
                instances=integer_between(1),
                streams=integer_between(1, MOST_STREAMS),
                configs=_section(
                    cores_per_instance=integer_between(1), num_of_instance=integer_between(1)
                ),
                dataloader=_DATALOADER,
            ),
        ),
    )


#: Schema per dialect; INC accepts numbers below the meaningful range.
SCHEMAS: Mapping[Dialect, Section] = {
    Dialect.OWN: _schema(
        values.SHARE, values.amount, values.SECONDS, integer_between(1), seed_number
    ),
    Dialect.INC: _schema(
        values.ANY_SHARE,
        values.ANY_SHARE,
        values.ANY_SECONDS,
        values.raised_to(1),
        values.raised_to(0, MAX_SEED),
    ),
}

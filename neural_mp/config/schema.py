"""Schema of tuning files: the allowed keys and a validator for each value."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from neural_mp.adaptors.common.simulation import LOSSES, OPTIMIZERS, REDUCTIONS
from neural_mp.amp import EDIT_OPTIONS
from neural_mp.config import values
from neural_mp.config.options import rules_below
from neural_mp.config.values import Section, by_name, one_named, refused, section
from neural_mp.core.enums import Dialect
from neural_mp.core.quant_spec import QUANT_CHOICES
from neural_mp.util.validators import (
    MOST_STREAMS,
    Validator,
    boolean,
    integer_between,
    is_finite,
    matching,
    non_negative_float,
    one_of,
    positive_float,
)

_BELOW_ONE = matching(
    "a number from 0, below 1", lambda value: is_finite(value) and 0 <= value < 1, float
)
_TENSOR = section(
    **{kind: values.quant_words(kind) for kind in QUANT_CHOICES},
    group_size=values.GROUP_SIZES,
    rounding=values.roundings,
)
_LIMITS = section(precisions=values.precisions, weight=_TENSOR, activation=_TENSOR)
_CONVERSION = dict(**rules_below(("mixed_precision",), Dialect.OWN), op_wise=by_name(_LIMITS))
_AMP = dict(
    data_type=values.DATA_TYPE,
    unsafe_force_all=boolean,
    **dict.fromkeys(EDIT_OPTIONS, values.NAME_LIST),
    log_path=values.TEXT,
)
_DATALOADER = section(
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
_LOSS = one_named(
    "loss", dict.fromkeys(LOSSES, section(reduction=one_of(REDUCTIONS), from_logits=boolean))
)
_OPTIMIZER = one_named(
    "optimizer",
    {
        name: section(**{option: _OPTIONS[option] for option in ("learning_rate", *options)})
        for name, options in OPTIMIZERS.items()
    },
)
_TRAIN = section(
    dataloader=_DATALOADER,
    **dict.fromkeys(("loss", "criterion"), _LOSS),
    optimizer=_OPTIMIZER,
    **dict.fromkeys(("epochs", "epoch", "end_epoch"), integer_between(1)),
    start_epoch=integer_between(0),
    **dict.fromkeys(("max_batches", "iteration"), integer_between(1)),
    postprocess=refused("transforms have no gradients; set train_func in Python"),
)


def _build_schema(dialect: Dialect) -> Section:
    """Return the schema in a dialect; INC accepts numbers below the meaningful range."""

    def option_rules(*path: str) -> dict[str, Validator[Any]]:
        return rules_below(path, dialect)

    return section(
        version=values.VERSION,
        model=section(**option_rules("model")),
        device=one_of(("cpu", "gpu")),
        **option_rules(),
        use_bf16=boolean,
        mixed_precision=section(**_CONVERSION, **_AMP),
        graph_optimization=section(**_CONVERSION),
        quantization=section(
            **option_rules("quantization"),
            use_bf16=boolean,
            calibration=section(
                **option_rules("quantization", "calibration"), dataloader=_DATALOADER
            ),
            train=_TRAIN,
            model_wise=_LIMITS,
            optype_wise=by_name(_LIMITS),
            op_wise=by_name(_LIMITS),
        ),
        tuning=section(
            strategy=section("", "name", **option_rules("tuning", "strategy")),
            **option_rules("tuning"),
            workspace=section("", "path", **option_rules("tuning", "workspace")),
        ),
        evaluation=section(
            accuracy=section(
                metric=values.METRIC,
                multi_metrics=values.METRICS,
                dataloader=_DATALOADER,
                **option_rules("evaluation", "accuracy"),
                postprocess=section(transform=values.TRANSFORMS),
            ),
            performance=section(
                warmup=integer_between(0),
                iteration=values.ITERATIONS,
                cores_per_instance=integer_between(1),
                instances=integer_between(1),
                streams=integer_between(1, MOST_STREAMS),
                configs=section(
                    cores_per_instance=integer_between(1), num_of_instance=integer_between(1)
                ),
                dataloader=_DATALOADER,
            ),
        ),
    )


SCHEMAS: Mapping[Dialect, Section] = {dialect: _build_schema(dialect) for dialect in Dialect}

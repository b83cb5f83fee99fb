"""Schema of tuning files: the allowed keys and a validator for each value."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from neural_mp.adaptors.common.simulation import LOSSES, OPTIMIZERS, REDUCTIONS
from neural_mp.amp import EDIT_OPTIONS
from neural_mp.config import values
from neural_mp.config.options import list_rules_below
from neural_mp.config.values import (
    Section,
    refuse_all,
    section_of,
    validate_named_values,
    validate_single_named,
)
from neural_mp.core.enums import Dialect
from neural_mp.core.quant_spec import QUANT_CHOICES
from neural_mp.util.validators import (
    MOST_STREAMS,
    Validator,
    boolean,
    integer_between,
    is_finite,
    non_negative_float,
    one_of,
    positive_float,
    values_matching,
)

_BELOW_ONE = values_matching(
    "a number from 0, below 1", lambda value: is_finite(value) and 0 <= value < 1, float
)
_TENSOR = section_of(
    **{kind: values.validate_quant_words(kind) for kind in QUANT_CHOICES},
    group_size=values.GROUP_SIZES,
    rounding=values.parse_roundings,
)
_LIMITS = section_of(precisions=values.precisions, weight=_TENSOR, activation=_TENSOR)
_CONVERSION = dict(
    **list_rules_below(("mixed_precision",), Dialect.OWN), op_wise=validate_named_values(_LIMITS)
)
_AMP = dict(
    data_type=values.DATA_TYPE,
    unsafe_force_all=boolean,
    **dict.fromkeys(EDIT_OPTIONS, values.NAME_LIST),
    log_path=values.TEXT,
)
_DATALOADER = section_of(
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
_LOSS = validate_single_named(
    "loss", dict.fromkeys(LOSSES, section_of(reduction=one_of(REDUCTIONS), from_logits=boolean))
)
_OPTIMIZER = validate_single_named(
    "optimizer",
    {
        name: section_of(**{option: _OPTIONS[option] for option in ("learning_rate", *options)})
        for name, options in OPTIMIZERS.items()
    },
)
_TRAIN = section_of(
    dataloader=_DATALOADER,
    **dict.fromkeys(("loss", "criterion"), _LOSS),
    optimizer=_OPTIMIZER,
    **dict.fromkeys(("epochs", "epoch", "end_epoch"), integer_between(1)),
    start_epoch=integer_between(0),
    **dict.fromkeys(("max_batches", "iteration"), integer_between(1)),
    postprocess=refuse_all("transforms have no gradients; set train_func in Python"),
)


def _build_schema(dialect: Dialect) -> Section:
    """Return the schema in a dialect; INC accepts numbers below the meaningful range."""

    def list_option_rules(*path: str) -> dict[str, Validator[Any]]:
        return list_rules_below(path, dialect)

    return section_of(
        version=values.VERSION,
        model=section_of(**list_option_rules("model")),
        device=one_of(("cpu", "gpu")),
        **list_option_rules(),
        use_bf16=boolean,
        mixed_precision=section_of(**_CONVERSION, **_AMP),
        graph_optimization=section_of(**_CONVERSION),
        quantization=section_of(
            **list_option_rules("quantization"),
            use_bf16=boolean,
            calibration=section_of(
                **list_option_rules("quantization", "calibration"), dataloader=_DATALOADER
            ),
            train=_TRAIN,
            model_wise=_LIMITS,
            optype_wise=validate_named_values(_LIMITS),
            op_wise=validate_named_values(_LIMITS),
        ),
        tuning=section_of(
            strategy=section_of("", "name", **list_option_rules("tuning", "strategy")),
            **list_option_rules("tuning"),
            workspace=section_of("", "path", **list_option_rules("tuning", "workspace")),
        ),
        evaluation=section_of(
            accuracy=section_of(
                metric=values.METRIC,
                multi_metrics=values.METRICS,
                dataloader=_DATALOADER,
                **list_option_rules("evaluation", "accuracy"),
                postprocess=section_of(transform=values.TRANSFORMS),
            ),
            performance=section_of(
                warmup=integer_between(0),
                iteration=values.ITERATIONS,
                cores_per_instance=integer_between(1),
                instances=integer_between(1),
                streams=integer_between(1, MOST_STREAMS),
                configs=section_of(
                    cores_per_instance=integer_between(1), num_of_instance=integer_between(1)
                ),
                dataloader=_DATALOADER,
            ),
        ),
    )


SCHEMAS: Mapping[Dialect, Section] = {dialect: _build_schema(dialect) for dialect in Dialect}

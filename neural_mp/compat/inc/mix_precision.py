"""`mix_precision.fit` of their version 2."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from neural_mp.compat.inc.config import MixedPrecisionConfig
from neural_mp.compat.inc.model import Result
from neural_mp.compat.inc.quantization import tuned
from neural_mp.errors import ConfigurationError


def fit(
    model: object,
    conf: MixedPrecisionConfig | None = None,
    eval_func: Callable[[Any], float] | None = None,
    eval_dataloader: object = None,
    eval_metric: object = None,
    **ignored: object,
) -> Result:
    """Put a trained model into 16 bits where that is safe.

    Args:
        model: the framework's object, a path, or a `Model`.
        conf: how; BF16 by default.
        eval_func: native model → accuracy.
        eval_dataloader: batches of `(inputs, labels)`.
        eval_metric: an object with update, reset and result, a `Metric`, or a dict of names.
        **ignored: what their `fit` takes for other purposes.

    Returns:
        A usable model, always.

    Raises:
        NeuralMPError: something asked for does not exist or does not fit.
    """
    conf = conf or MixedPrecisionConfig()
    if not isinstance(conf, MixedPrecisionConfig):
        raise ConfigurationError(
            f"mix_precision.fit takes a MixedPrecisionConfig, got {type(conf).__name__}"
        )
    return tuned(model, conf.settings(), None, eval_func, eval_dataloader, eval_metric)

"""`mix_precision.fit` of INC 2.x."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from neural_mp.compat.inc.config import MixedPrecisionConfig
from neural_mp.compat.inc.model import Result
from neural_mp.compat.inc.quantization import tune
from neural_mp.errors import ConfigurationError


def fit(
    model: object,
    conf: MixedPrecisionConfig | None = None,
    eval_func: Callable[[Any], float] | None = None,
    eval_dataloader: object = None,
    eval_metric: object = None,
    **ignored: object,
) -> Result:
    """Convert a trained model to 16 bits while it meets the accuracy target.

    Arguments and result are those of `quantization.fit`; the default of `conf` is BF16.
    """
    conf = conf or MixedPrecisionConfig()
    if not isinstance(conf, MixedPrecisionConfig):
        raise ConfigurationError(f"conf must be a MixedPrecisionConfig, got {type(conf).__name__}")
    return tune(model, conf.settings(), None, eval_func, eval_dataloader, eval_metric)

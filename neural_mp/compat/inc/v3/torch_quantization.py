"""The names of `neural_compressor.torch.quantization` and of its modules."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from neural_mp.api.input_data import CalibrationInputs, calibration
from neural_mp.api.mixed_precision import MixedPrecision
from neural_mp.compat.inc.import_aliases import make_absent_getter
from neural_mp.compat.inc.v3.base_config import BaseConfig, ComposableConfig, expanded
from neural_mp.compat.inc.v3.base_tuning import EvaluationFuncWrapper, OrderedTrials, TuningConfig
from neural_mp.compat.inc.v3.common_names import get_all_config_set_from_config_registry
from neural_mp.compat.inc.v3.flow import (
    convert,
    finalize_calibration,
    get_own_module,
    list_algorithm_configs,
    load,
    prepare,
    prepare_qat,
    quantize,
    save,
)
from neural_mp.compat.inc.v3.torch_configs import (
    DOUBLE_QUANT_CONFIGS,
    AutoRoundConfig,
    AWQConfig,
    DynamicQuantConfig,
    FP8Config,
    GPTQConfig,
    HQQConfig,
    INT8StaticQuantConfig,
    MixedPrecisionConfig,
    RTNConfig,
    SmoothQuantConfig,
    StaticQuantConfig,
    TEQConfig,
    get_default_AutoRound_config,
    get_default_awq_config,
    get_default_double_quant_config,
    get_default_dynamic_config,
    get_default_fp8_config,
    get_default_gptq_config,
    get_default_hqq_config,
    get_default_mixed_precision_config,
    get_default_mixed_precision_config_set,
    get_default_rtn_config,
    get_default_sq_config,
    get_default_static_config,
    get_default_teq_config,
)
from neural_mp.compat.inc.v3.torch_helpers import is_ipex_imported, load_empty_model
from neural_mp.core.criterion import ExitPolicy
from neural_mp.core.enums import Capture
from neural_mp.core.precision import Precision

if TYPE_CHECKING:
    from torch.nn import Module

__all__ = [
    "AWQConfig",
    "AutoRoundConfig",
    "BaseConfig",
    "ComposableConfig",
    "DynamicQuantConfig",
    "FP8Config",
    "GPTQConfig",
    "HQQConfig",
    "INT8StaticQuantConfig",
    "MixedPrecisionConfig",
    "RTNConfig",
    "SmoothQuantConfig",
    "StaticQuantConfig",
    "TEQConfig",
    "TuningConfig",
    "autotune",
    "convert",
    "finalize_calibration",
    "get_all_config_set",
    "get_default_AutoRound_config",
    "get_default_awq_config",
    "get_default_double_quant_config",
    "get_default_dynamic_config",
    "get_default_fp8_config",
    "get_default_gptq_config",
    "get_default_hqq_config",
    "get_default_mixed_precision_config",
    "get_default_mixed_precision_config_set",
    "get_default_rtn_config",
    "get_default_sq_config",
    "get_default_static_config",
    "get_default_teq_config",
    "get_rtn_double_quant_config_set",
    "get_woq_tuning_config",
    "is_ipex_imported",
    "load",
    "load_empty_model",
    "prepare",
    "prepare_qat",
    "quantize",
    "save",
]


def autotune(
    model: Module,
    tune_config: TuningConfig,
    eval_fn: Callable[..., Any],
    eval_args: Iterable[Any] | None = None,
    run_fn: Callable[..., Any] | None = None,
    run_args: Iterable[Any] | None = None,
    example_inputs: object = None,
) -> Module:
    """Return a converted module that meets the target; the given one, in FP32, if none does.

    Args:
        model: a module, which stays unchanged.
        tune_config: configurations to try, or a tolerance alone; see `TuningConfig`.
        eval_fn: model, `*eval_args` → accuracy.
        eval_args: further arguments of `eval_fn`.
        run_fn: model, `*run_args` → None; runs the model on calibration data.
        run_args: further arguments of `run_fn`.
        example_inputs: inputs of one call, if there is no `run_fn`.

    Raises:
        ConfigurationError: the direction of `eval_fn` is unclear.
        NeuralMPError: a configuration is invalid, or the model cannot be converted.
    """
    evaluation = EvaluationFuncWrapper(eval_fn, eval_args)
    if tune_config.searches:
        data: CalibrationInputs | None = None
        if run_fn is not None:
            with calibration(model) as data:
                run_fn(model, *(run_args or ()))
        return _search_model(model, tune_config, evaluation, data, example_inputs)

    def convert_model(config: BaseConfig) -> Module:
        return quantize(
            model, copy.deepcopy(config), run_fn, run_args, example_inputs=example_inputs
        )

    return OrderedTrials(tune_config, evaluation).select_model(model, convert_model)


def _search_model(
    model: Module,
    options: TuningConfig,
    evaluation: EvaluationFuncWrapper,
    data: CalibrationInputs | None,
    example_inputs: object,
) -> Module:
    tuning = MixedPrecision()
    tuning.model = model
    tuning.accuracy_criterion = options.criterion(evaluation.eval_fn)
    tuning.exit_policy = ExitPolicy(max_trials=options.max_trials)
    tuning.eval_func = evaluation.evaluate
    tuning.calib_dataloader = data
    if data is None:
        tuning.inputs = example_inputs
    precisions = _list_searched_precisions(options.config_set, model)
    if precisions:
        tuning.precisions = precisions
    if hasattr(model, "generate"):
        tuning.capture = Capture.LAYERS
    if any(precision.is_low_bit for precision in precisions):
        tuning.objective = "footprint"
    result = tuning.fit()
    return model if result.model is model else get_own_module(result)


def _list_searched_precisions(
    config_set: BaseConfig | Iterable[BaseConfig] | None, model: Module
) -> tuple[Precision, ...]:
    """Return the precisions that a set names; those of decoders, or none, without a set."""
    if config_set is None:
        return (Precision.INT4, Precision.INT8) if hasattr(model, "generate") else ()
    precisions: set[Precision] = set()
    for config in expanded(config_set):
        for algorithm in list_algorithm_configs(config):
            precisions.update(algorithm.constraint().precisions or ())
    return tuple(precision for precision in Precision if precision in precisions)


def get_all_config_set() -> list[BaseConfig]:
    """Return the configurations to try of every algorithm."""
    return get_all_config_set_from_config_registry("torch")


def get_rtn_double_quant_config_set() -> list[RTNConfig]:
    """Return the configurations with quantized scales."""
    return [get_default_double_quant_config(name) for name in DOUBLE_QUANT_CONFIGS]


def get_woq_tuning_config() -> list[BaseConfig]:
    """Return four configurations of weights in 4 bits and groups of 32."""
    return [
        RTNConfig(use_sym=False, group_size=32),
        AutoRoundConfig(use_sym=False, group_size=32, seqlen=512),
        GPTQConfig(use_sym=False, group_size=32),
        AWQConfig(use_sym=False, group_size=32),
    ]


__getattr__ = make_absent_getter(globals())

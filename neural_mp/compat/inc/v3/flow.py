"""`neural_compressor.torch.quantization`: prepare, calibrate, convert, save and load.

A configuration of INC 3.x means rules of conversion.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from neural_mp.api.input_data import CalibrationInputs, calibration
from neural_mp.api.mixed_precision import MixedPrecision
from neural_mp.api.optimized_model import OptimizedModel
from neural_mp.api.optimized_model import load as load_saved
from neural_mp.api.quantization_aware import finish
from neural_mp.api.replay import Conversion, convert_by_rules
from neural_mp.compat.inc.config import QuantizationAwareTrainingConfig
from neural_mp.compat.inc.import_aliases import NotHereError
from neural_mp.compat.inc.script_log import logger
from neural_mp.compat.inc.training import train_in_place
from neural_mp.compat.inc.v3.base_config import (
    EVERY_OP,
    AlgorithmConfig,
    BaseConfig,
    ComposableConfig,
    get_type_name,
)
from neural_mp.compat.inc.v3.torch_configs import CONFIGS, AutoRoundConfig
from neural_mp.core.enums import Capture
from neural_mp.errors import ConfigurationError
from neural_mp.space import ConversionRules, OpConstraint

if TYPE_CHECKING:
    from torch.nn import Module

    from neural_mp.adaptors.pytorch.training.in_place import InPlaceTraining

#: Attributes of a module: its calibration, and the result that it belongs to.
_PREPARED, _RESULT = "_neural_mp_prepared", "_neural_mp_result"
#: Attribute of a module in training.
_TRAINED = "_neural_mp_trained"
_FORMATS = ("default", "huggingface")


def parse_config_dict(given: object, known: Mapping[str, type[BaseConfig]] = CONFIGS) -> BaseConfig:
    """Return a configuration; a dict holds one for each algorithm, by the names in `known`.

    Raises:
        ConfigurationError: the value is neither.
    """
    if isinstance(given, Mapping):
        return ComposableConfig.from_dict(given, known)
    if isinstance(given, BaseConfig):
        return given
    raise ConfigurationError(
        f"quant_config must be a configuration or a dict, got {type(given).__name__}; give e.g. "
        f"RTNConfig()"
    )


def list_algorithm_configs(config: BaseConfig) -> tuple[AlgorithmConfig, ...]:
    """Return the configurations of algorithms that a configuration consists of."""
    algorithms = tuple(member for member in config.members() if isinstance(member, AlgorithmConfig))
    if not algorithms:
        raise ConfigurationError(
            f"quant_config must be of an algorithm, got {type(config).__name__}"
        )
    return algorithms


def build_conversion_rules(config: BaseConfig, model: object) -> Conversion:
    """Return rules and capture for a configuration and a model.

    Decoders of `transformers` keep their class, with `generate`; so does a module whose graph
    cannot be captured, if only weights are quantized.
    """
    algorithms = list_algorithm_configs(config)
    for used in _list_used_configs(algorithms):
        used.warn_without_effect()
    is_decoder = hasattr(model, "generate")
    in_layers = all(algorithm.in_layers for algorithm in algorithms)
    return Conversion(
        merge_algorithm_rules(algorithms),
        capture=Capture.LAYERS if is_decoder else Capture.WHOLE,
        otherwise=Capture.LAYERS if in_layers else Capture.MODULES,
        corrects=any(algorithm.corrects for algorithm in algorithms),
    )


def _list_used_configs(algorithms: tuple[AlgorithmConfig, ...]) -> list[AlgorithmConfig]:
    configs: list[AlgorithmConfig] = []
    for algorithm in algorithms:
        usual = [algorithm] if algorithm.white_list == EVERY_OP else []
        local = [
            single for c in algorithm.local_config.values() for single in list_algorithm_configs(c)
        ]
        configs += [config for config in (*usual, *local) if config not in configs]
    return configs


def merge_algorithm_rules(algorithms: tuple[AlgorithmConfig, ...]) -> ConversionRules:
    """Return the rules of several algorithms: of two for one op, the later one counts."""
    defaults: list[tuple[frozenset[str], OpConstraint]] = []
    excluded: list[str] = []
    by_type: dict[str, OpConstraint] = {}
    by_name: dict[str, OpConstraint] = {}
    for algorithm in algorithms:
        if algorithm.white_list == EVERY_OP:
            defaults.append((algorithm.types, algorithm.constraint()))
            excluded += algorithm.kept()
        for key, local in algorithm.local_config.items():
            (single,) = list_algorithm_configs(local)
            if isinstance(key, str):
                by_name[key] = single.constraint()
            else:
                by_type[get_type_name(key)] = single.constraint()
    return ConversionRules(tuple(defaults), tuple(excluded), by_type, by_name)


class Prepared:
    """Calibration of a model in the user's own loop.

    Args:
        model: the model that the loop calls.
        config: the configuration to convert by.
        example_inputs: inputs of one call, or None.
    """

    def __init__(self, model: Module, config: BaseConfig, example_inputs: object) -> None:
        self.config, self.example_inputs = config, example_inputs
        self._open = ExitStack()
        self.inputs: CalibrationInputs = self._open.enter_context(calibration(model))

    def __deepcopy__(self, memo: dict[int, Any]) -> Prepared:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()

    def close(self) -> None:
        """End the recording of inputs."""
        self._open.close()


def prepare(
    model: Module, quant_config: object, inplace: bool = True, example_inputs: object = None
) -> Module:
    """Return the model, whose calls from now on are calibration.

    Args:
        model: a module.
        quant_config: a configuration, several joined by `+`, or a dict.
        inplace: whether the given model, and not a copy, is observed and returned.
        example_inputs: inputs of one call, if the model is not called before `convert`.
    """
    config = parse_config_dict(quant_config)
    # Errors of options come before the calibration loop.
    merge_algorithm_rules(list_algorithm_configs(config))
    model = model if inplace else copy.deepcopy(model)
    previous: Prepared | None = getattr(model, _PREPARED, None)
    if previous is not None:
        previous.close()
    setattr(model, _PREPARED, Prepared(model, config, example_inputs))
    model.is_prepared, model.quant_config = True, config
    return model


def finalize_calibration(model: Module) -> None:
    """End the calibration of a prepared model."""
    prepared: Prepared | None = getattr(model, _PREPARED, None)
    if prepared is not None:
        prepared.close()


def convert(
    model: Module, quant_config: object = None, inplace: bool = True, **ignored: object
) -> Module:
    """Return the converted module; the given one stays as it was.

    Args:
        model: a module, prepared or not, or trained after `prepare_qat`.
        quant_config: the configuration, for a model that is not prepared.
        inplace: ignored: the result is a new module.
        **ignored: ignored.

    Raises:
        ConfigurationError: the model is not prepared, and no configuration is given.
        DataError: the prepared model was not called, and needs calibration or training.
    """
    trained: InPlaceTraining | None = getattr(model, _TRAINED, None)
    if trained is not None:
        result = finish(trained.simulated_module())
        trained.restore_forward()
        delattr(model, _TRAINED)
        return get_own_module(result)
    prepared: Prepared | None = getattr(model, _PREPARED, None)
    if prepared is None and quant_config is None:
        raise ConfigurationError(
            "quant_config must be given for a model that was not prepared, got None; give a "
            "configuration, or call prepare first"
        )
    config = parse_config_dict(quant_config) if prepared is None else prepared.config
    if prepared is None:
        return get_own_module(_convert_model(model, config, None, None), config)
    if quant_config is not None:
        logger.warning("quant_config is ignored: the model was prepared with another one")
    prepared.close()
    for name in (_PREPARED, "is_prepared", "quant_config"):
        delattr(model, name)
    data = prepared.inputs if len(prepared.inputs) else None
    return get_own_module(_convert_model(model, config, data, prepared.example_inputs), config)


def quantize(
    model: Module,
    quant_config: object,
    run_fn: Callable[..., Any] | None = None,
    run_args: Iterable[Any] | None = None,
    inplace: bool = True,
    example_inputs: object = None,
) -> Module:
    """Prepare, calibrate by `run_fn(model, *run_args)`, and convert.

    Args:
        model: a module.
        quant_config: as in `prepare`.
        run_fn: runs the model on calibration data; None if the configuration needs none.
        run_args: further arguments of `run_fn`.
        inplace: as in `prepare`.
        example_inputs: as in `prepare`.
    """
    model = prepare(model, quant_config, inplace, example_inputs)
    if run_fn is not None:
        run_fn(model, *(run_args or ()))
    return convert(model)


def prepare_qat(model: Module, mapping: object = None, inplace: bool = True) -> Module:
    """Return the model, whose calls from now on have the rounding of INT8, for training.

    The first call calibrates. The model keeps its parameters; `convert` ends the training.

    Args:
        model: a module.
        mapping: not supported: modules are not replaced.
        inplace: whether the given model, and not a copy, is trained and returned.

    Raises:
        NotHereError: `mapping` is given.
    """
    if mapping is not None:
        raise NotHereError(
            "mapping of prepare_qat is not supported, as modules are not replaced; leave it out, "
            "or train a plan with neural_mp.training.quantization_aware"
        )
    model = model if inplace else copy.deepcopy(model)
    setattr(model, _TRAINED, train_in_place(model, QuantizationAwareTrainingConfig().rules()))
    return model


def save(
    model: Module, checkpoint_dir: str | Path = "saved_results", format: object = "default"
) -> None:
    """Save a converted model.

    Args:
        model: the module that `convert` returned.
        checkpoint_dir: the folder to write.
        format: `default` for a folder of neural-mp; `huggingface` for a checkpoint of
            `transformers` with compressed weights.

    Raises:
        ConfigurationError: the module is not converted, or the format does not exist.
    """
    result = find_module_result(model)
    if _format_name(format) == "huggingface":
        result.save_pretrained(checkpoint_dir)
    else:
        result.save(checkpoint_dir)


def load(
    model_name_or_path: str | Path,
    original_model: object = None,
    format: object = "default",
    device: str = "cpu",
    **ignored: object,
) -> Module:
    """Load a saved model: the module itself.

    Args:
        model_name_or_path: the folder.
        original_model: ignored: the folder holds the whole model.
        format: ignored: the folder names its format.
        device: ignored: models run on the CPU.
        **ignored: ignored.

    Raises:
        ModelLoadError: the folder holds no saved model, or is damaged.
    """
    _format_name(format)
    return get_own_module(load_saved(model_name_or_path))


def find_module_result(model: Module) -> OptimizedModel:
    """Return the result that a converted module belongs to: its plan and its report.

    Raises:
        ConfigurationError: the module is not converted.
    """
    result: OptimizedModel | None = getattr(model, _RESULT, None)
    if result is None:
        raise ConfigurationError(
            f"model must be a module that convert returned, got {type(model).__name__}"
        )
    return result


def _convert_model(
    model: Module, config: BaseConfig, data: CalibrationInputs | None, example: object
) -> OptimizedModel:
    for member in config.members():
        if isinstance(member, AutoRoundConfig) and member.target_bits is not None:
            return _search_mean_bits(model, member, data)
    conversion = build_conversion_rules(config, model)
    for algorithm in list_algorithm_configs(config):
        logger.info(f"Start to apply {algorithm.name} on the model.")
    if isinstance(example, tuple) and len(example) == 1:
        example = example[0]  # as a batch: a single input is not in a tuple
    result = convert_by_rules(model, conversion, data, example)
    for line in result.report.warnings:
        logger.warning("%s", line)
    return result


def _search_mean_bits(
    model: Module, config: AutoRoundConfig, data: CalibrationInputs | None
) -> OptimizedModel:
    """Search the most accurate model with a mean number of bits."""
    tuning = MixedPrecision()
    tuning.model, tuning.capture = model, Capture.LAYERS
    tuning.precisions = config.searched
    tuning.objective = "modelsize"
    tuning.max_bits = config.target_bits
    tuning.calib_dataloader = data
    return tuning.fit()


def get_own_module(result: OptimizedModel, config: BaseConfig | None = None) -> Module:
    """Return the module of a result, with the attributes that scripts read."""
    module = result.model
    setattr(module, _RESULT, result)
    module.is_quantized, module.qconfig = True, config

    def save_module(*folder: str | Path, **options: Any) -> None:
        named = (options.get(name) for name in ("checkpoint_dir", "output_dir", "save_directory"))
        chosen = next((path for path in (*folder, *named) if path is not None), "saved_results")
        save(module, chosen, options.get("format", "default"))

    module.save = save_module
    return module


def _format_name(format: object) -> str:
    """Accept a name or an enumeration's member."""
    name = str(getattr(format, "value", format))
    if name not in _FORMATS:
        raise ConfigurationError(f"format must be {' or '.join(_FORMATS)}, got {name!r}")
    return name

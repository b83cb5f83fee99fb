"""The names of `neural_compressor.torch.quantization` and of its modules."""

from neural_mp.compat.inc.import_aliases import absent_names
from neural_mp.compat.inc.v3.autoround import AutoRoundConfig, get_default_AutoRound_config
from neural_mp.compat.inc.v3.autotune import (
    autotune,
    get_all_config_set,
    get_rtn_double_quant_config_set,
    get_woq_tuning_config,
)
from neural_mp.compat.inc.v3.base_config import BaseConfig, ComposableConfig
from neural_mp.compat.inc.v3.base_tuning import TuningConfig
from neural_mp.compat.inc.v3.flow import (
    convert,
    finalize_calibration,
    load,
    prepare,
    prepare_qat,
    quantize,
    save,
)
from neural_mp.compat.inc.v3.torch_configs import (
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
from neural_mp.compat.inc.v3.torch_helpers import is_ipex_imported

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
    "prepare",
    "prepare_qat",
    "quantize",
    "save",
]

__getattr__ = absent_names(globals())

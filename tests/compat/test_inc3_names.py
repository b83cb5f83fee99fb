"""Module names of Intel Neural Compressor 3.x, and hints for those that do not exist."""

from __future__ import annotations

import importlib
import sys

import pytest

from neural_mp.compat.inc.import_aliases import THEIRS, NotHereError, register


@pytest.fixture(autouse=True)
def their_names(monkeypatch):
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    for name in [name for name in sys.modules if name.partition(".")[0] == THEIRS]:
        monkeypatch.delitem(sys.modules, name)
    register(THEIRS)
    yield
    for name in [name for name in sys.modules if name.partition(".")[0] == THEIRS]:
        del sys.modules[name]


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("torch.quantization", "prepare"),
        ("torch.quantization.quantize", "convert"),
        ("torch.quantization.config", "INT8StaticQuantConfig"),
        ("torch.quantization.autotune", "TuningConfig"),
        ("torch.quantization.save_load_entry", "load"),
        ("torch.export", "export"),
        ("torch.utils", "get_torch_version"),
        ("torch.utils", "GT_OR_EQUAL_TORCH_VERSION_2_5"),
        ("torch.algorithms.smooth_quant", "move_input_to_device"),
        ("tensorflow", "quantize_model"),
        ("tensorflow.quantization", "TuningConfig"),
        ("tensorflow.utils.data", "default_collate"),
        ("tensorflow.keras", "StaticQuantConfig"),
        ("common", "set_random_seed"),
        ("common.utils", "LazyImport"),
        ("common.base_tuning", "ConfigSet"),
        ("transformers", "AutoModelForCausalLM"),
        ("transformers", "RtnConfig"),
        ("evaluation.lm_eval", "LMEvalParser"),
    ],
)
def test_a_name_is_found_where_scripts_import_it(module, name):
    assert getattr(importlib.import_module(f"{THEIRS}.{module}"), name) is not None


@pytest.mark.parametrize(
    "name", ["torch.quantization.quantize", "torch.quantization.autotune", "torch.export.export"]
)
def test_a_function_with_the_name_of_a_module_is_the_function(name):
    package, _, function = name.rpartition(".")
    exec(f"from {THEIRS}.{package} import {function}; assert callable({function})", {})


def test_unknown_modules_and_names_give_a_hint():
    with pytest.raises(ModuleNotFoundError, match="no adaptor for JAX"):
        importlib.import_module("neural_compressor.jax")
    with pytest.raises(ModuleNotFoundError, match=r"did you mean .*'torch\.quantization'"):
        importlib.import_module("neural_compressor.torch.quantisation")
    quantization = importlib.import_module("neural_compressor.torch.quantization")
    with pytest.raises(AttributeError, match="did you mean 'RTNConfig'"):
        _ = quantization.RtnConfig


def test_a_placeholder_names_the_way_here():
    utilities = importlib.import_module("neural_compressor.torch.utils.llm_utility")
    with pytest.raises(NotHereError, match="call the prepared model"):
        utilities.get_default_llm_dataloader()

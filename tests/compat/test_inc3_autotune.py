"""`autotune` of Intel Neural Compressor 3.x: the order of a set, or a search of our own."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from neural_mp.compat.inc.import_aliases import NotHereError
from neural_mp.compat.inc.v3.base_tuning import ConfigSet, Sampler
from neural_mp.compat.inc.v3.flow import find_module_result
from neural_mp.compat.inc.v3.torch_quantization import (
    MixedPrecisionConfig,
    RTNConfig,
    StaticQuantConfig,
    TuningConfig,
    autotune,
)
from neural_mp.errors import ConfigurationError, MetricError


@pytest.fixture
def net(tmp_path, monkeypatch) -> nn.Module:
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 16)).eval()


@pytest.fixture
def agreement(net):
    """Fraction of outputs within a bound of those of the given model, and the models seen."""
    torch.manual_seed(1)
    x = torch.randn(512, 64)
    with torch.no_grad():
        expected = net(x)

    def measured(model: nn.Module) -> float:
        models.append(model)
        with torch.no_grad():
            return float(((model(x) - expected).abs() < 0.05).float().mean())

    models: list[nn.Module] = []
    return measured, models, x


def test_the_first_configuration_that_meets_the_target_is_taken(net, agreement):
    measured, models, _ = agreement
    options = TuningConfig([RTNConfig(bits=[2, 8]), RTNConfig(bits=4)], tolerable_loss=0.02)
    tuned = autotune(net, options, measured)
    assert find_module_result(tuned).plan["0"].precision == "int8"
    assert len(models) == 3
    assert tuned is models[-1]


def test_a_sampler_of_the_user_decides_on_the_order(net, agreement):
    class Reversed(Sampler):
        def __iter__(self):
            return iter(reversed(range(len(self.config_source))))

    measured, models, _ = agreement
    options = TuningConfig([RTNConfig(bits=[2, 8])], sampler=Reversed, tolerable_loss=0.02)
    tuned = autotune(net, options, measured)
    assert find_module_result(tuned).plan["0"].precision == "int8"
    assert len(models) == 2


def test_the_given_model_is_returned_if_no_configuration_meets_the_target(net, agreement, caplog):
    measured, models, _ = agreement
    tuned = autotune(net, TuningConfig(RTNConfig(bits=[2, 3]), tolerable_loss=0.0), measured)
    assert tuned is net
    assert len(models) == 3
    assert "sampler='neural_mp'" in caplog.text


def test_configurations_without_a_kernel_are_skipped(net, agreement, caplog):
    measured, models, _ = agreement
    options = TuningConfig([RTNConfig(dtype="mxfp4"), RTNConfig(bits=[9, 8])], tolerable_loss=0.02)
    assert find_module_result(autotune(net, options, measured)).plan["0"].precision == "int8"
    assert len(models) == 2
    assert caplog.text.count("skipped") == 2
    with pytest.raises(NotHereError, match="mxfp4"):
        autotune(net, TuningConfig(RTNConfig(dtype="mxfp4")), measured)


def test_no_more_trials_than_allowed_and_none_twice(net, agreement):
    measured, models, _ = agreement
    same = TuningConfig([RTNConfig(bits=2), RTNConfig(bits=2)], tolerable_loss=0.0)
    autotune(net, same, measured)
    assert len(models) == 2
    limited = TuningConfig(RTNConfig(bits=[2, 3, 4]), tolerable_loss=0.0, max_trials=1)
    autotune(net, limited, measured)
    assert len(models) == 4


@pytest.mark.slow
@pytest.mark.parametrize("config_set", [None, StaticQuantConfig()])
def test_a_tolerance_alone_and_our_sampler_search_each_op(net, agreement, config_set):
    measured, _, x = agreement
    options = TuningConfig(config_set, sampler="neural_mp", tolerable_loss=0.05)
    tuned = autotune(net, options, measured, run_fn=lambda model: model(x))
    assert tuned is not None
    assert measured(tuned) >= 0.95


def test_an_error_as_the_metric_asks_for_its_direction(net):
    def perplexity(model: nn.Module) -> float:
        return 3.0

    options = TuningConfig(RTNConfig())
    with pytest.raises(ConfigurationError, match="higher_is_better .* in TuningConfig"):
        autotune(net, options, perplexity)
    options.higher_is_better = False
    assert autotune(net, options, perplexity) is not net
    with pytest.raises(MetricError, match="must return a number, got NoneType"):
        autotune(net, options, lambda model: None)


def test_further_arguments_reach_the_functions(net, agreement):
    measured, _, x = agreement
    calls: list[object] = []

    def run(model: nn.Module, data: torch.Tensor) -> None:
        calls.append("run")
        model(data)

    def evaluated(model: nn.Module, name: str) -> float:
        calls.append(name)
        return measured(model)

    autotune(
        net,
        TuningConfig(StaticQuantConfig(), tolerable_loss=0.1),
        evaluated,
        eval_args=("evaluation",),
        run_fn=run,
        run_args=(x,),
    )
    assert calls == ["evaluation", "run", "evaluation"]


def test_a_set_holds_the_expanded_configurations():
    configs = ConfigSet.from_fwk_configs([MixedPrecisionConfig(["bf16", "fp32"]), RTNConfig()])
    assert [config.name for config in configs] == ["mixed_precision", "mixed_precision", "rtn"]

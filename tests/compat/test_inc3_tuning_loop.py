"""Loops over configurations that scripts write themselves, and their own configuration classes."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import nn

from neural_mp.compat.inc.v3.base_config import ComposableConfig
from neural_mp.compat.inc.v3.base_tuning import (
    ConfigLoader,
    Evaluator,
    TuningConfig,
    init_tuning,
)
from neural_mp.compat.inc.v3.common_names import (
    BaseConfig,
    Logger,
    TuningParam,
    config_registry,
    get_all_config_set_from_config_registry,
    register_config,
)
from neural_mp.compat.inc.v3.torch_helpers import (
    CapturedDataloader,
    forward_wrapper,
    get_accelerator,
    get_example_input,
    model_forward,
)
from neural_mp.compat.inc.v3.torch_quantization import (
    GPTQConfig,
    RTNConfig,
    get_all_config_set,
    quantize,
)
from neural_mp.errors import ConfigurationError


class OwnConfig(BaseConfig):
    """A configuration class as scripts define them."""

    name = "own"
    params_list = ["bits", TuningParam("kinds", tunable_type=list[list[str]])]  # noqa: RUF012

    def __init__(self, bits=4, kinds=("Linear",), white_list="*"):
        super().__init__(white_list=white_list)
        self.bits = bits
        self.kinds = [*kinds]
        self._post_init()

    @classmethod
    def get_config_set_for_tuning(cls):
        return cls(bits=[4, 8])


def test_a_configuration_class_of_a_script_expands_maps_and_survives_a_dict():
    config = OwnConfig(bits=[4, 8], kinds=[["a", "b"], ["c"]])
    assert [(c.bits, c.kinds) for c in config.expand()] == [
        (4, ["a", "b"]),
        (4, ["c"]),
        (8, ["a", "b"]),
        (8, ["c"]),
    ]
    assert len(OwnConfig(kinds=["a", "b"]).expand()) == 1
    again = OwnConfig.from_dict(OwnConfig(bits=8).set_local("fc1", OwnConfig(bits=2)).to_dict())
    assert (again.bits, again.local_config["fc1"].bits) == (8, 2)


def test_the_mapping_names_the_configuration_that_each_layer_is_converted_by():
    net = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.Linear(64, 64)).eval()
    config = RTNConfig(white_list=["0"]) + GPTQConfig(bits=8, white_list=["[23]"])
    config = config + RTNConfig(bits=3, white_list=["3"])
    assert config.get_model_info(net) == [("0", "Linear"), ("2", "Linear"), ("3", "Linear")]
    mapping = config.to_config_mapping(model_info=config.get_model_info(net))
    requested = {name: f"int{chosen.bits}" for (name, _), chosen in mapping.items()}
    converted = quantize(net, config, run_fn=lambda model: model(torch.randn(16, 64)))
    plan = converted._neural_mp_result.plan
    assert {name: str(plan[name].precision) for name in requested} == requested


def test_types_come_after_names_and_before_all_others():
    info = [("fc1", "Linear"), ("fc2", "Linear"), ("conv", "Conv2d")]
    config = RTNConfig(bits=4).set_local(nn.Linear, RTNConfig(bits=8))
    config.set_local("fc1", RTNConfig(bits=2))
    mapping = config.to_config_mapping(model_info=info)
    assert [chosen.bits for chosen in mapping.values()] == [2, 8, 4]


def test_a_registered_class_is_listed_for_its_framework_alone():
    register_config("own framework", "own", priority=3)(OwnConfig)
    assert config_registry.get_all_config_cls_by_fwk_name("own framework") == [OwnConfig]
    (registered,) = get_all_config_set_from_config_registry("own framework")
    assert registered.bits == [4, 8]
    assert all(not isinstance(config, OwnConfig) for config in get_all_config_set())
    classes = config_registry.get_cls_configs()["torch"]
    assert ComposableConfig.from_dict({"rtn": {"bits": 8}}, config_registry=classes).bits == 8
    with pytest.raises(ConfigurationError, match="did you mean 'own framework'"):
        config_registry.get_all_config_cls_by_fwk_name("own framewrk")


@pytest.mark.parametrize(("accuracies", "best"), [((0.7, 0.95), 8), ((0.7, 0.6), 2)])
def test_the_parts_of_a_loop_stop_at_the_target_and_name_the_best(accuracies, best):
    options = TuningConfig(RTNConfig(bits=[2, 8, 8]), tolerable_loss=0.1, max_trials=2)
    loader, log, monitor = init_tuning(options)
    monitor.set_baseline(1.0)
    log.tuning_start()
    for index, (config, accuracy) in enumerate(zip(loader, accuracies, strict=True)):
        log.trial_start(trial_index=index)
        assert not monitor.need_stop()
        monitor.add_trial_result(index, accuracy, config)
        log.trial_end(index)
    assert monitor.need_stop()
    assert monitor.get_number_of_trials() == 2
    assert monitor.get_best_quant_config().bits == best
    with pytest.raises(AttributeError, match="'trial_start'"):
        log.begin()


def test_a_loader_yields_no_configuration_twice():
    assert [c.bits for c in ConfigLoader([RTNConfig(bits=[4, 8]), RTNConfig(bits=8)])] == [4, 8]
    with pytest.raises(ConfigurationError, match="add_trial_result first"):
        init_tuning(TuningConfig(RTNConfig()))[2].get_best_quant_config()


def test_an_evaluator_adds_weighted_values():
    evaluator = Evaluator()
    with pytest.raises(ConfigurationError, match="set_eval_fn_registry"):
        evaluator.self_check()
    evaluator.set_eval_fn_registry([{"eval_fn": len, "weight": 0.5}, {"eval_fn": max}])
    evaluator.self_check()
    assert evaluator.evaluate([1, 2, 3, 4]) == 6.0
    evaluator.set_eval_fn_registry(len)
    assert (evaluator.evaluate([1, 2]), evaluator.get_number_of_eval_functions()) == (2.0, 1)


def test_a_warning_is_logged_once(caplog):
    with caplog.at_level(logging.WARNING, logger="neural_compressor"):
        for _ in range(3):
            Logger.warning_once("said once")
    assert caplog.messages.count("said once") == 1


def test_batches_reach_a_module_as_its_parameters_take_them():
    def add(x, y):
        return x + y

    assert forward_wrapper(add, [1, 2]) == 3
    assert forward_wrapper(len, [1, 2]) == 2
    assert forward_wrapper(nn.Identity(), [1, 2]) == [1, 2]
    assert forward_wrapper(add, {"x": 1, "y": 3}) == 4
    inputs: list[int] = []
    model_forward(inputs.append, [(1, "label"), (2, "label"), (3, "label")], iters=2)
    model_forward(inputs.append, [4, 5], iters=-1)
    assert inputs == [1, 2, 4, 5]
    assert get_example_input([(1, "a"), (2, "b")], i=1) == 2
    assert get_example_input([], i=1) is None
    calls = CapturedDataloader([(), (1,), (1, 2), (1,)], [{"a": 1}, {}, {}, {"b": 2}])
    assert [*calls] == [{"a": 1}, 1, (1, 2), ((1,), {"b": 2})]
    assert get_accelerator().current_device() == "cpu"

"""Training scripts of Intel Neural Compressor 2.x and 3.x: `prepare_compression`, `prepare_qat`."""

import copy
import functools

import pytest
import torch
from sklearn.datasets import load_digits
from torch import nn

import neural_mp
from neural_mp.compat.inc import training
from neural_mp.compat.inc.config import PostTrainingQuantConfig, QuantizationAwareTrainingConfig
from neural_mp.compat.inc.import_aliases import NotHereError
from neural_mp.compat.inc.training import prepare_compression
from neural_mp.compat.inc.v3.torch_quantization import convert, prepare_qat
from neural_mp.errors import ConfigurationError, ConversionError, DataError

pytestmark = pytest.mark.slow
_IMAGES = torch.tensor(load_digits().images[:, None], dtype=torch.float32) / 16
_LABELS = torch.tensor(load_digits().target)
_TRAIN, _TEST = slice(0, 1297), slice(1297, None)


class _Net(nn.Module):
    """Convolutions with batch norms, one of them depthwise with channels of unlike ranges."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(1, 12, 3, bias=False), nn.BatchNorm2d(12), nn.ReLU())
        self.depth = nn.Conv2d(12, 12, 3, groups=12)
        self.norm = nn.BatchNorm2d(12)
        self.last = nn.Linear(12 * 16, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        features = self.norm(self.depth(self.first(images))).relu()
        return self.last(features.flatten(1))


def _train(model, optimizer, epochs, before_step=lambda: None):
    order = torch.Generator().manual_seed(0)
    model.train()
    for _ in range(epochs):
        for batch in torch.randperm(1297, generator=order).split(64):
            loss = nn.functional.cross_entropy(model(_IMAGES[batch]), _LABELS[batch])
            optimizer.zero_grad()
            loss.backward()
            before_step()
            optimizer.step()
    model.eval()


def _accuracy(model):
    with torch.no_grad():
        return float((model(_IMAGES[_TEST]).argmax(1) == _LABELS[_TEST]).float().mean())


@functools.cache
def _trained():
    torch.manual_seed(0)
    net = _Net()
    _train(net, torch.optim.Adam(net.parameters(), 3e-3), 8)
    return net


@pytest.fixture
def net():
    return copy.deepcopy(_trained())


def _sgd(model):
    return torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)


def _is_int8(result):
    return all(value == "int8" for value in result.plan.precisions.values())


def test_an_optimizer_made_before_trains_the_model_to_the_accuracy_of_fp32(net, tmp_path):
    """The script of INC's examples: optimizer, prepare_compression, training, save."""
    fp32, initial = _accuracy(net), copy.deepcopy(net.state_dict())
    optimizer = _sgd(net)
    manager = prepare_compression(net, QuantizationAwareTrainingConfig())
    calls = manager.callbacks
    calls.on_train_begin()
    model = manager.model
    assert {id(p) for p in model.parameters()} == {
        id(p) for group in optimizer.param_groups for p in group["params"]
    }
    calls.on_epoch_begin(0)
    assert calls.on_step_begin(0) == []
    assert calls.on_after_compute_loss(None, None, 3.0) == 3.0
    _train(model, optimizer, 2, calls.on_before_optimizer_step)
    assert calls.on_step_end() == []
    assert calls.on_epoch_end() == []
    for name, value in net.state_dict().items():  # weights, and statistics of both norms
        stays = "num_batches" in name or name == "depth.bias"  # a norm takes a bias away
        assert torch.equal(value, initial[name]) == stays, name
    simulated = _accuracy(model)
    calls.on_train_end()

    assert _is_int8(manager.model.optimized)
    assert _accuracy(manager.model.model) == pytest.approx(simulated, abs=0.002)
    assert _accuracy(manager.model.model) > fp32 - 0.01
    manager.save(tmp_path / "saved")
    assert _accuracy(neural_mp.load(tmp_path / "saved").model) == _accuracy(manager.model.model)


def test_training_continues_from_the_checkpoint_of_the_module(net):
    """A checkpoint holds the module's own names, so that FP32 scripts read it, too."""
    manager = prepare_compression(net, [QuantizationAwareTrainingConfig()])
    manager.callbacks.on_train_begin()
    optimizer = _sgd(manager.model)
    _train(manager.model, optimizer, 1)
    state = copy.deepcopy((manager.model.state_dict(), optimizer.state_dict()))

    restored = _Net()
    resumed = prepare_compression(restored, QuantizationAwareTrainingConfig())
    resumed.callbacks.on_train_begin()
    restored.load_state_dict(state[0])
    again = _sgd(restored)
    again.load_state_dict(state[1])
    assert _accuracy(restored) > _accuracy(net) - 0.01
    _train(restored, again, 1)
    assert _accuracy(resumed.result().model) > _accuracy(_trained()) - 0.01


def test_layers_named_by_the_script_stay_in_fp32(net):
    fp32 = {"weight": {"dtype": ["fp32"]}, "activation": {"dtype": ["fp32"]}}
    conf = QuantizationAwareTrainingConfig(
        op_name_dict={"first.0": fp32}, op_type_dict={"Linear": fp32}
    )
    manager = prepare_compression(net, conf)
    manager.callbacks.on_train_begin()
    net(_IMAGES[:64])
    plan = manager.result().optimized.plan.precisions
    assert {op: str(p) for op, p in plan.items() if p != "fp32"} == {"depth": "int8"}


def test_fit_trains_by_the_function_and_reports_a_missed_criterion(net, caplog):
    manager = prepare_compression(net, QuantizationAwareTrainingConfig())
    result = training.fit(manager, lambda model: _train(model, _sgd(model), 2), _accuracy)
    assert _is_int8(result.optimized)
    assert not caplog.records
    assert _accuracy(result.model) > _accuracy(_trained()) - 0.01

    diverged = prepare_compression(copy.deepcopy(_trained()), QuantizationAwareTrainingConfig())
    wreck = lambda model: _train(model, torch.optim.SGD(model.parameters(), 30.0), 1)  # noqa: E731
    training.fit(diverged, wreck, _accuracy)
    assert "misses the accuracy criterion" in caplog.text


@pytest.mark.parametrize("inplace", [True, False])
def test_prepare_qat_of_3x_trains_and_convert_returns_int8(net, inplace):
    prepared = prepare_qat(net, inplace=inplace)
    assert (prepared is net) == inplace
    _train(prepared, _sgd(prepared), 2)
    converted = convert(prepared)
    assert _accuracy(converted) > _accuracy(_trained()) - 0.01
    assert type(prepared).forward is _Net.forward
    assert "forward" not in vars(prepared)
    assert not torch.equal(prepared(_IMAGES[:64]), converted(_IMAGES[:64]))


def test_parameters_that_no_part_of_the_graph_reads_are_named(caplog):
    """A batch norm after a linear layer is folded, and its layer keeps its weights."""
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.BatchNorm1d(16), nn.Linear(16, 10))
    manager = prepare_compression(net, QuantizationAwareTrainingConfig())
    manager.callbacks.on_train_begin()
    initial = net[1].weight.clone()
    _train(net, _sgd(net), 1)
    assert "not trained" in caplog.text
    assert "1.weight, 1.bias, 2.weight, 2.bias" in caplog.text
    assert torch.equal(net[1].weight, initial)


def _ended_before_it_began(net):
    prepare_compression(net, QuantizationAwareTrainingConfig()).callbacks.on_train_end()


def _converted_without_a_call(net):
    convert(prepare_qat(net))


def _prepared_twice(net):
    prepare_qat(prepare_qat(net))


def _all_kept(net):
    manager = prepare_compression(
        net, QuantizationAwareTrainingConfig(excluded_precisions=["int8"])
    )
    manager.callbacks.on_train_begin()
    net(_IMAGES[:8])


def _two_configs(net):
    conf = QuantizationAwareTrainingConfig()
    prepare_compression(net, [conf, conf])


def _other_config(net):
    prepare_compression(net, PostTrainingQuantConfig())


def _evaluated_by_metric(net):
    manager = prepare_compression(net, QuantizationAwareTrainingConfig())
    training.fit(manager, print, eval_dataloader=[1], eval_metric={"topk": 1})


@pytest.mark.parametrize(
    ("use", "error", "message"),
    [
        (_ended_before_it_began, ConfigurationError, "call callbacks.on_train_begin"),
        (_converted_without_a_call, DataError, "called on a batch at least once"),
        (_prepared_twice, ConfigurationError, "prepare a model once"),
        (_all_kept, ConfigurationError, "at least one op in a lower precision"),
        (_two_configs, NotHereError, "one QuantizationAwareTrainingConfig, got Quant.*, Quant"),
        (_other_config, NotHereError, "got PostTrainingQuantConfig"),
        (_evaluated_by_metric, NotHereError, "set eval_func"),
    ],
)
def test_misuse_ends_in_one_error(net, use, error, message):
    with pytest.raises(error, match=message):
        use(net)


def test_onnx_models_are_refused(tmp_path):
    from onnx import TensorProto, helper, save

    value = functools.partial(helper.make_tensor_value_info, elem_type=TensorProto.FLOAT, shape=[1])
    node = helper.make_node("Relu", ["x"], ["y"])
    save(
        helper.make_model(helper.make_graph([node], "g", [value("x")], [value("y")])),
        tmp_path / "model.onnx",
    )
    with pytest.raises(ConversionError, match="training with a plan is for PyTorch and"):
        prepare_compression(str(tmp_path / "model.onnx"), QuantizationAwareTrainingConfig())

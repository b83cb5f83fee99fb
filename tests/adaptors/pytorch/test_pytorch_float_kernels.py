"""FP32 layers in packed kernels: plans name them, files keep them, outputs differ by rounding."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from integers import MACHINE
from torch import nn

import neural_mp
from neural_mp import MixedPrecision, PrecisionPlan
from neural_mp.adaptors.pytorch.adaptor import PyTorchAdaptor
from neural_mp.adaptors.pytorch.kernels import float_kernels
from neural_mp.core.observations import Observations
from neural_mp.core.precision import OpConfig, Precision
from neural_mp.errors import PlanError
from neural_mp.testing import signal_to_noise
from neural_mp.tuning.measurement.objectives import Measurement

FP32, INT8 = Precision.FP32, Precision.INT8
PACKED = OpConfig(FP32, kernel="onednn")
#: SQNR in dB above which outputs differ by FP32 rounding only.
ROUNDING = 110


class Net(nn.Module):
    """Convolutions, also depthwise and dilated, and dense layers, with and without a bias."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 16, 3, padding=1)
        self.depthwise = nn.Conv2d(16, 16, 3, stride=2, padding=1, groups=16, bias=False)
        self.dilated = nn.Conv2d(16, 16, (1, 3), padding=(0, 2), dilation=(1, 2))
        self.dense = nn.Linear(16, 24)
        self.last = nn.Linear(24, 5, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.depthwise(nn.functional.silu(self.first(x)))
        x = x + nn.functional.hardtanh(self.dilated(x), 0, 6)
        return self.last(nn.functional.gelu(self.dense(x.mean((2, 3)))))


LAYERS = ("first", "depthwise", "dilated", "dense", "last")


def images(batch: int, side: int = 12) -> np.ndarray:
    return np.random.default_rng(batch).normal(size=(batch, 3, side, side)).astype(np.float32)


@pytest.fixture(scope="module")
def net() -> nn.Module:
    torch.manual_seed(0)
    return Net().eval()


@pytest.fixture(scope="module")
def adaptor() -> PyTorchAdaptor:
    return PyTorchAdaptor()


@pytest.fixture(scope="module")
def fp32(adaptor, net):
    return adaptor.load(net, example=torch.from_numpy(images(2)))


@pytest.fixture(scope="module")
def space(adaptor, fp32):
    return adaptor.space(fp32, MACHINE)


@pytest.fixture(scope="module")
def packed_plan(space):
    ops = {op: PACKED for op, capability in space.capabilities.items() if capability.kernels}
    return space.resolve(PrecisionPlan(ops))


@pytest.fixture(scope="module")
def packed(adaptor, fp32, space, packed_plan):
    return adaptor.convert(fp32, packed_plan, Observations(), space)


def packed_calls(model) -> list[str]:
    targets = (str(node.target) for node in model.runnable_graph.graph.nodes)
    return [name for name in targets if name.startswith("mkldnn")]


def test_every_layer_and_the_activations_behind_them_have_the_kernel(space, packed_plan):
    types = [space.graph[op].type for op, config in packed_plan.plan.items() if config == PACKED]
    layers = ["conv2d", "silu", "conv2d", "conv2d", "hardtanh", "linear", "gelu", "linear"]
    assert sorted(types) == sorted(layers)
    assert packed_plan.changes_model
    assert not packed_plan.has_low_precision


@pytest.mark.parametrize("shape", [(1, 12), (2, 12), (7, 12)])
def test_outputs_differ_by_rounding_only_and_not_between_runs(adaptor, net, packed, shape):
    x = images(*shape)
    with torch.no_grad():
        expected = net(torch.from_numpy(x)).numpy()
    outputs = adaptor.predict(packed, x)
    assert signal_to_noise(expected, outputs) > ROUNDING
    assert np.array_equal(outputs, adaptor.predict(packed, x))
    assert len(packed_calls(packed)) == len(LAYERS)


def test_single_ops_may_have_the_kernel(adaptor, fp32, space, net):
    first = next(op.name for op in space.graph if op.type == "conv2d")
    plan = space.resolve(PrecisionPlan({first: PACKED}))
    model = adaptor.convert(fp32, plan, Observations(), space)
    assert len(packed_calls(model)) == 1
    assert any(node.target is torch.ops.aten.silu.default for node in model.runnable_graph.graph.nodes)
    x = images(3)
    with torch.no_grad():
        expected = net(torch.from_numpy(x)).numpy()
    assert signal_to_noise(expected, adaptor.predict(model, x)) > ROUNDING


def test_fp32_ops_of_a_mixed_plan_may_have_the_kernel(adaptor, fp32, space):
    dense = [op.name for op in space.graph if op.type == "linear"]
    convolved = [op.name for op in space.graph if op.type == "conv2d"]
    int8 = {op: space.capabilities[op].config(INT8) for op in convolved}
    x = images(4)
    observations = adaptor.observe(fp32, [x], space)
    outputs = []
    for kernel in ("", "onednn"):
        forms = dict.fromkeys(dense, OpConfig(FP32, kernel=kernel))
        plan = space.resolve(PrecisionPlan({**int8, **forms}))
        model = adaptor.convert(fp32, plan, observations, space)
        assert len(packed_calls(model)) == (len(dense) if kernel else 0)
        outputs.append(adaptor.predict(model, x))
    assert signal_to_noise(*outputs) > ROUNDING


def test_a_plan_file_keeps_the_kernel(packed_plan):
    plan = packed_plan.plan
    assert PrecisionPlan.from_yaml(plan.to_yaml()) == plan
    assert "kernel: onednn" in plan.to_yaml()


@pytest.mark.parametrize(
    ("entry", "error"),
    [
        ({"precision": "fp32", "kernel": "onednm"}, "'onednm' does not exist; .*onednn"),
        ({"precision": "bf16", "kernel": "onednn"}, "requires precision fp32, got bf16"),
    ],
)
def test_wrong_kernels_are_refused(entry, error):
    with pytest.raises(PlanError, match=error):
        PrecisionPlan.from_dict({"conv": entry})


def test_an_op_without_the_kernel_is_refused(space):
    mean = next(op.name for op in space.graph if op.type == "mean")
    with pytest.raises(PlanError, match=r"has no FP32 kernel 'onednn' here; remove the kernel"):
        space.resolve(PrecisionPlan({mean: PACKED}))


@pytest.fixture
def converter(net, monkeypatch):
    """A run in FP32 in which every offered kernel counts as faster; nothing is timed."""

    def faster(model, inputs, ops):
        return dict.fromkeys(ops, "onednn")

    def contest(measurement, models):
        return [[1.0 / 2**index] * 20 for index in range(len(models))]

    monkeypatch.setattr(PyTorchAdaptor, "faster_kernels", staticmethod(faster))
    monkeypatch.setattr(Measurement, "measure_until_decided", contest)
    tuner = MixedPrecision()
    tuner.model, tuner.precisions = net, "fp32"
    tuner.calib_dataloader = [torch.from_numpy(images(2))]
    tuner.cache = False
    return tuner


@pytest.mark.slow
def test_a_run_finds_the_kernels_and_a_saved_result_keeps_them(converter, net, tmp_path):
    result = converter()
    kernels = [config.kernel for config in result.plan.values() if config.kernel]
    assert len(kernels) == 8
    assert result.report.latency < result.report.baseline_latency
    x = torch.from_numpy(images(5))
    with torch.no_grad():
        assert signal_to_noise(net(x).numpy(), result(x).numpy()) > ROUNDING
    result.save(tmp_path / "net")
    again = neural_mp.load(tmp_path / "net")
    assert torch.equal(again(x), result(x))
    assert packed_calls(again.held) == packed_calls(result.loaded.held)


@pytest.mark.slow
def test_a_replayed_plan_gives_the_same_bits(converter, net, tmp_path):
    result = converter()
    result.save_plan(tmp_path / "plan.yaml")
    x = torch.from_numpy(images(3))
    replayed = neural_mp.convert_with_plan(net, tmp_path / "plan.yaml", inputs=x)
    assert replayed.plan == result.plan
    assert torch.equal(replayed(x), result(x))


@pytest.mark.slow
def test_kernels_that_gain_nothing_are_not_used(converter, monkeypatch):
    monkeypatch.setattr(
        Measurement, "measure_until_decided", lambda _, models: [[1.0] * 20 for _ in models]
    )
    result = converter()
    assert not any(config.kernel for config in result.plan.values())
    assert packed_calls(result.loaded.held) == []


def test_small_models_are_not_measured(adaptor, fp32, packed_plan, monkeypatch):
    monkeypatch.setattr(
        float_kernels, "time_fastest_runs", lambda variants: pytest.fail("measured")
    )
    assert float_kernels.find_faster_kernels(fp32, images(2), list(packed_plan.plan)) == {}


def test_every_variant_of_a_layer_is_measured(adaptor, fp32, packed_plan, monkeypatch):
    """The fused activation counts only if faster than the packed layer with the activation."""
    seconds = {2: [2.0, 1.0], 3: [2.0, 1.0, 1.5]}
    measured = []

    def fastest(variants):
        own, *alternatives = [run() for run in variants]
        measured.append(len(alternatives))
        assert all(
            signal_to_noise(own.numpy(), alternative.numpy()) > ROUNDING
            for alternative in alternatives
        )
        return seconds[len(variants)]

    monkeypatch.setattr(float_kernels, "time_fastest_runs", fastest)
    monkeypatch.setattr(float_kernels, "_LEAST_PRODUCTS", 0)
    kernels = float_kernels.find_faster_kernels(fp32, images(2), list(packed_plan.plan))
    layers = [op for op in kernels if packed_plan.plan[op] == PACKED]
    assert len(kernels) == len(LAYERS) == len(layers)
    assert sorted(measured) == [1, 1, 2, 2, 2]

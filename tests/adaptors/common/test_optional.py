"""Optional parts of an adaptor: runs do without an absent part, and callers name it."""

from dataclasses import replace

import numpy as np
import pytest

from neural_mp import MixedPrecision
from neural_mp.adaptors import registry
from neural_mp.adaptors.common.optional import SingleFile, Training, require_part
from neural_mp.adaptors.contract import Adaptor
from neural_mp.adaptors.pytorch.adaptor import PyTorchAdaptor
from neural_mp.core.hardware import Device
from neural_mp.core.plan import PrecisionPlan
from neural_mp.core.precision import Precision
from neural_mp.core.training_numerics import ModelTrace, ValueStats
from neural_mp.errors import ConversionError, PlanError, UnknownFrameworkError
from neural_mp.training import apply_plan, devices, first_nonfinite
from neural_mp.tuning.measurement.comparison import compare_models

PARTS = ("op_outputs", "corrections", "portability", "single_file", "compiler", "training")
METHODS = ("time_ops", "trace_kernels", "hessian_traces", "export_onnx", "dump_graph")


@pytest.fixture
def bare(monkeypatch):
    """PyTorch with nothing but what every framework gives."""
    for part in PARTS:
        monkeypatch.setattr(PyTorchAdaptor, part, None)
    for method in METHODS:
        monkeypatch.setattr(PyTorchAdaptor, method, getattr(Adaptor, method))


@pytest.fixture
def converter(bare, net, digits, accuracy):
    tuner = MixedPrecision()
    tuner.model, tuner.precisions, tuner.metric = net, "int8", accuracy
    tuner.objective = "modelsize"
    tuner.exit_policy = {"max_trials": 3}
    tuner.calib_dataloader = digits[0].loader()
    tuner.eval_dataloader = digits[1].loader()
    return tuner


def test_a_part_that_is_offered_is_given():
    part = SingleFile((".mine",), lambda model, path, metadata: None)
    assert require_part(part, "mine", "single file") is part
    with pytest.raises(ConversionError, match=r"adaptor of mine offers no single file"):
        require_part(None, "mine", "single file")


def test_a_method_that_is_not_overridden_is_not_offered(bare):
    adaptor = PyTorchAdaptor()
    assert not any(map(adaptor.offers, METHODS))
    assert adaptor.offers("record_calls")
    assert not adaptor.offers("with_streams")


@pytest.mark.slow
def test_a_run_does_without_what_is_not_offered(converter, digits, tmp_path):
    result = converter()
    assert result.met
    assert result.exact_on == "every CPU"
    result.save(tmp_path / "net")
    with pytest.raises(ConversionError, match="cannot be saved as a .onnx file; save to a folder"):
        result.save(tmp_path / "net.onnx")
    images, model = digits[1].images[:8], result.loaded
    np.testing.assert_allclose(model(images), result(images))
    assert model.first_non_finite(images) is None
    for use, feature in (
        (result.audit, "trace of executed kernels"),
        (result.compiled, "compiler"),
        (lambda: result.export_onnx(tmp_path / "other.onnx"), "way to ONNX"),
        (lambda: model.profile_ops(images), "times of single ops"),
        (lambda: compare_models(model, model, [images]), "results of single ops"),
    ):
        with pytest.raises(ConversionError, match=f"adaptor of pytorch offers no {feature}"):
            use()


def test_training_needs_the_part_of_the_adaptor(bare, net):
    with pytest.raises(UnknownFrameworkError, match="whose adaptor offers training"):
        first_nonfinite(net, np.zeros((1, 1, 8, 8), np.float32))


class Net:
    """A model of a framework without an adaptor in the package."""


class NetAdaptor(PyTorchAdaptor):
    framework = "nets"
    training = Training(
        open_trainable=lambda *given: pytest.fail("no advice was requested"),
        apply_plan=lambda model, plan: (model, plan),
        trace_numerics=lambda model, batch, loss, scale: ModelTrace(
            ValueStats.from_values([]), ValueStats(nan=True), [], scale
        ),
        devices=lambda: [Device("nets", "npu", "NPU 0")],
    )

    @classmethod
    def accepts(cls, source):
        return isinstance(source, Net)


def test_a_third_party_adaptor_can_offer_training(monkeypatch):
    monkeypatch.setattr(registry, "_third_party_adaptors", lambda: {"nets": NetAdaptor})
    net = Net()
    plan = PrecisionPlan.from_dict({"layer": "bf16"})
    assert apply_plan(net, plan) == (net, {"layer": Precision.BF16})
    assert first_nonfinite(net, None) is not None
    assert "nets: npu, NPU 0" in map(str, devices())


def test_corrections_of_a_plan_are_refused(bare, net, digits, plain_machine):
    adaptor = PyTorchAdaptor()
    images = digits[1].images[:8]
    model = adaptor.load(net, example=images)
    space = adaptor.space(model, plain_machine)
    observations = adaptor.observe(model, [images], space)
    plan = space.fastest_plan()
    op = next(op for op in plan if plan[op].activation is not None)
    requested = plan.replacing({op: replace(plan[op], corrections=("equalize",))})
    with pytest.raises(PlanError, match="requires an input from a layer"):
        adaptor.convert(model, space.resolve(requested), observations, space)

"""Where a converted model can go: a copy, torch's compiler, ONNX."""

from __future__ import annotations

import copy
import pickle
import shutil
import sys
from functools import cache

import numpy as np
import pytest
import torch
from architectures import ARCHITECTURES, build
from integers import MACHINE
from machine import CONVOLUTION, machine, weight_limit_here
from torch import nn
from torch.utils import _pytree as pytree

from neural_mp.adaptors.pytorch.adaptor import PyTorchAdaptor
from neural_mp.core.plan import PrecisionPlan
from neural_mp.core.precision import Precision
from neural_mp.errors import ConversionError, MissingFrameworkError
from neural_mp.testing import signal_to_noise, uniform

pytestmark = pytest.mark.slow

INT8, BF16 = Precision.INT8, Precision.BF16

onnxruntime = pytest.importorskip("onnxruntime")
needs_compiler = pytest.mark.skipif(
    not (shutil.which("g++") or shutil.which("clang++")), reason="no C++ compiler"
)


@cache
def all_int8(name):
    """The named architecture with every op that can in INT8, and what it is called with."""
    adaptor, inputs = PyTorchAdaptor(), ARCHITECTURES[name].inputs(4)
    model = adaptor.load(build(name), example=inputs)
    space = adaptor.space(model, MACHINE)
    observed = adaptor.observe(model, [inputs], space)
    return (
        adaptor,
        adaptor.convert(model, space.resolve(uniform(space, INT8)), observed, space),
        inputs,
    )


def test_the_result_is_a_module_for_inference(tuned, digits):
    images = torch.from_numpy(digits[1].images[:9])
    result = tuned.model(images)
    assert isinstance(tuned.model, nn.Module)
    assert not result.requires_grad
    assert not tuned.model.train().training
    assert torch.equal(copy.deepcopy(tuned.model)(images), result)
    with pytest.raises(pickle.PicklingError, match=r"neural_mp\.load"):
        pickle.dumps(tuned.model)


@needs_compiler
def test_torch_compile_of_the_result_runs(tuned, digits):
    images = torch.from_numpy(digits[1].images[:9])
    with torch.no_grad():
        assert torch.equal(torch.compile(tuned.model)(images), tuned.model(images))


@needs_compiler
def test_the_compiled_form_agrees_for_any_batch_size(tuned, digits):
    compiled = tuned.compiled()
    for size in (8, 3):
        images = torch.from_numpy(digits[1].images[:size])
        expected = tuned.model(images)
        assert signal_to_noise(expected.numpy(), compiled(images).numpy()) > 40


class Weighed(nn.Module):
    def __init__(self):
        super().__init__()
        self.dense, self.gate = nn.Linear(16, 8), nn.Linear(4, 8)

    def forward(self, signal, noise):
        return {"weighed": self.dense(signal).relu() * self.gate(noise).sigmoid()}


@needs_compiler
def test_dicts_of_inputs_are_compiled_too():
    torch.manual_seed(0)
    adaptor, inputs = PyTorchAdaptor(), {"noise": torch.randn(6, 4), "signal": torch.randn(6, 16)}
    model = adaptor.load(Weighed().eval(), example=inputs)
    space = adaptor.space(model, MACHINE)
    observed = adaptor.observe(model, [inputs], space)
    converted = adaptor.convert(model, space.resolve(uniform(space, INT8)), observed, space)
    got = adaptor.compiler.compile(converted)(**inputs)["weighed"]
    expected = adaptor.predict(converted, inputs)["weighed"]
    assert signal_to_noise(expected.numpy(), got.numpy()) > 40


def run_onnx(path, inputs):
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    values = list(inputs.values()) if isinstance(inputs, dict) else [inputs]
    names = [argument.name for argument in session.get_inputs()]
    fed = {name: np.asarray(value) for name, value in zip(names, values, strict=True)}
    outputs = [argument.name for argument in session.get_outputs()]
    return dict(zip(outputs, session.run(None, fed), strict=True))


@pytest.fixture(scope="module", params=["bert", "unet", "lstm_tagger"])
def exported(request, tmp_path_factory):
    """An architecture in INT8, and the file it was exported to."""
    adaptor, converted, _ = all_int8(request.param)
    path = tmp_path_factory.mktemp(request.param) / "model.onnx"
    adaptor.export_onnx(converted, path, {"neural_mp.plan": "ops: {}"})
    return request.param, path


def test_onnx_runtime_computes_the_same_from_the_exported_file(exported):
    import onnx

    name, path = exported
    adaptor, converted, _ = all_int8(name)
    model = onnx.load(path)
    onnx.checker.check_model(model)
    assert {item.key: item.value for item in model.metadata_props}["neural_mp.plan"] == "ops: {}"
    kinds = [node.op_type for node in model.graph.node]
    assert "QuantizeLinear" in kinds
    assert "DequantizeLinear" in kinds
    for size in (4, 2):
        inputs = ARCHITECTURES[name].inputs(size)
        expected = pytree.tree_leaves(adaptor.predict(converted, inputs))
        got = list(run_onnx(path, inputs).values())
        for reference, result in zip(expected, got, strict=True):
            assert signal_to_noise(reference.numpy(), result) > 25


@pytest.mark.parametrize("exported", ["bert"], indirect=True)
def test_outputs_bear_the_names_that_the_model_gives_them(exported):
    name, path = exported
    outputs = run_onnx(path, ARCHITECTURES[name].inputs(4))
    assert set(outputs) == {"last_hidden_state", "pooler_output"}


@pytest.mark.parametrize("approach", ["dynamic", "weight_only"])
def test_dynamic_and_weight_only_layers_are_exported(approach, tmp_path):
    torch.manual_seed(0)
    module, x = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 8)).eval(), None
    x = torch.randn(6, 64)
    adaptor = PyTorchAdaptor()
    model = adaptor.load(module, example=x)
    space = adaptor.space(model, MACHINE).with_int8([approach])
    converted = adaptor.convert(
        model, space.resolve(uniform(space, INT8)), adaptor.observe(model, [], space), space
    )
    adaptor.export_onnx(converted, tmp_path / "model.onnx", {})
    (result,) = run_onnx(tmp_path / "model.onnx", x).values()
    with torch.no_grad():
        assert signal_to_noise(module(x).numpy(), result) > 30


def test_a_result_is_exported_with_its_plan(tuned, tmp_path, digits):
    import onnx

    tuned.export_onnx(tmp_path / "deep" / "net.onnx")
    properties = onnx.load(tmp_path / "deep" / "net.onnx").metadata_props
    plan = next(item.value for item in properties if item.key == "neural_mp.plan")
    assert PrecisionPlan.from_yaml(plan) == tuned.plan
    images = digits[1].images[:20]
    (result,) = run_onnx(tmp_path / "deep" / "net.onnx", images).values()
    assert signal_to_noise(tuned(images), result) > 25


def test_a_model_in_modules_has_no_way_to_onnx(tmp_path):
    adaptor, inputs = PyTorchAdaptor(), ARCHITECTURES["early_exit"].inputs(4)
    model = adaptor.load(build("early_exit"), example=inputs, capture="modules")
    with pytest.raises(ConversionError, match="requires a single graph"):
        adaptor.export_onnx(model, tmp_path / "model.onnx", {})


def test_what_is_missing_to_export_is_named(tuned, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    with pytest.raises(MissingFrameworkError, match=r"onnxscript.*pip install .*\[onnx\]"):
        tuned.export_onnx(tmp_path / "model.onnx")


@pytest.mark.parametrize("name", ["bert", "resnet", "lstm_tagger"])
def test_a_model_in_bfloat16_is_converted_like_any_other(name):
    module, inputs = build(name), ARCHITECTURES[name].inputs(4)
    with torch.no_grad():
        result = module(**inputs) if isinstance(inputs, dict) else module(inputs)
    exact = [x for x in pytree.tree_leaves(result) if isinstance(x, torch.Tensor)]
    batch = pytree.tree_map(
        lambda leaf: leaf.bfloat16() if leaf.is_floating_point() else leaf, inputs
    )
    adaptor, half = PyTorchAdaptor(), build(name).bfloat16()
    model = adaptor.load(half, example=batch)
    space = adaptor.space(model, machine(BF16))
    observed = adaptor.observe(model, [batch], space)
    assert space.int8_ops
    decibels = 25 if weight_limit_here("pytorch", CONVOLUTION) == 127 else 22
    for precision, casts in ((INT8, None), (BF16, 0)):
        converted = adaptor.convert(
            model, space.resolve(uniform(space, precision)), observed, space
        )
        got = pytree.tree_leaves(adaptor.predict(converted, batch))
        for reference, value in zip(exact, got, strict=True):
            assert value.dtype is torch.bfloat16
            assert signal_to_noise(reference.numpy(), value.float().numpy()) > decibels
        if casts is not None:
            assert converted.counts.casts == casts
    assert adaptor.convert(model, space.resolve(space.fp32_plan()), observed, space) is model
    # Beside an op in INT8, those that the plan has in FP32 are made float32.
    lowered = min(space.int8_ops)
    plan = space.fp32_plan().replacing({lowered: space.capabilities[lowered].config(INT8)})
    wide = adaptor.convert(model, space.resolve(plan), observed, space)
    weights = [p.dtype for p in wide.portable_graph.parameters() if p.is_floating_point()]
    buffers = [b.dtype for b in wide.portable_graph.buffers() if b.is_floating_point()]
    assert torch.bfloat16 not in {*weights, *buffers}

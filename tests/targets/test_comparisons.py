"""Comparisons of integers with constants, as of one-hot codes, are right on targets."""

from dataclasses import replace

import numpy as np
import onnx
import pytest
from onnx_nets import graph, op, run
from qdq_models import emulated

from neural_mp.adaptors.onnxrt.targets.adaptor import TargetAdaptor
from neural_mp.adaptors.onnxrt.targets.audit.qnn_audit import audit_by_qnn
from neural_mp.core.hardware import Hardware
from neural_mp.targets import load_profile

QNN = load_profile("qnn")
IDS, CLASSES, WIDTH = 256, 64, 64
COMPARISONS = ["Equal", "Greater", "Less", "GreaterOrEqual", "LessOrEqual"]
SWAPPED = ["Equal", "Greater"]


def coded_net(comparison):
    """Ids compared with all classes, as numbers through a product, doubled."""
    draw = np.random.default_rng(0)
    nodes = [
        op("Unsqueeze", "ids last", "column"),
        op(comparison, "column classes", "codes"),
        op("Cast", "codes", "numbers", to=onnx.TensorProto.FLOAT),
        op("MatMul", "numbers w", "product"),
        op("Add", "product product", "y"),
    ]
    constants = {
        "last": np.array([-1], np.int64),
        "classes": np.arange(CLASSES, dtype=np.int32).reshape(1, 1, CLASSES),
        "w": draw.normal(size=(CLASSES, WIDTH)).astype(np.float32),
    }
    net = graph(nodes, {"ids": [1, IDS]}, ["y"], constants, opset=21)
    net.graph.input[0].type.tensor_type.elem_type = onnx.TensorProto.INT32
    return net


def draw_ids():
    return np.random.default_rng(1).integers(0, CLASSES, (1, IDS)).astype(np.int32)


@pytest.mark.parametrize("comparison", SWAPPED)
def test_constants_come_first_without_another_result(comparison):
    net, adaptor = coded_net(comparison), TargetAdaptor(QNN)
    model = adaptor.load(net, example=(draw_ids(),))
    (node,) = (node for node in model.program.graph if node.op_type in COMPARISONS)
    assert node.inputs[0].const_value is not None
    assert node.inputs[1].const_value is None
    actual = adaptor.predict(replace(model, given=None, _runners={}), draw_ids())
    np.testing.assert_allclose(actual, run(net, ids=draw_ids())[0], atol=1e-5)


@emulated
@pytest.mark.parametrize("comparison", COMPARISONS)
def test_the_emulated_npu_compares_as_simulated(comparison, tmp_path):
    adaptor, data = TargetAdaptor(QNN), [draw_ids()]
    loaded = adaptor.load(coded_net(comparison), example=(data[0],))
    space = adaptor.space(loaded, Hardware())
    plan = space.resolve(space.fastest_plan())
    written = adaptor.convert(loaded, plan, adaptor.observe(loaded, data, space), space)
    adaptor.single_file.save_file(written, tmp_path / "codes.onnx", {})
    file = onnx.load(tmp_path / "codes.onnx")
    simulated = [{file.graph.output[0].name: adaptor.predict(written, data[0])}]
    audit = audit_by_qnn(file, QNN, [{"ids": data[0]}], simulated)
    assert audit.holds, audit.findings
    assert audit.sqnr_db > 30

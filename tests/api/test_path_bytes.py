"""Models and results may lie in folders whose names are not UTF-8, as Linux permits."""

import os

import numpy as np
import pytest

import neural_mp
from neural_mp import MixedPrecision

BATCH = np.random.default_rng(0).normal(size=(4, 8)).astype(np.float32)


@pytest.fixture
def home(tmp_path):
    folder = tmp_path / os.fsdecode(b"a\xff\xfeb")
    folder.mkdir()
    return folder


@pytest.fixture
def weights():
    return np.random.default_rng(1).normal(size=(8, 3)).astype(np.float32)


def convert(source, workspace="workspace"):
    return MixedPrecision(
        model=source,
        calib_dataloader=[(BATCH, None)],
        precisions="int8",
        objective="modelsize",
        workspace=workspace,
    )()


def convert_torch(weights):
    import torch

    net = torch.nn.Sequential(torch.nn.Linear(8, 3, bias=False)).eval()
    net[0].weight.data = torch.from_numpy(weights.T.copy())
    return convert(net)


def test_pytorch_saves_there_and_loads_from_there(home, weights):
    """PyTorch itself ends the process at such a name."""
    result = convert_torch(weights)
    result.save(home / "saved")
    loaded = neural_mp.load(home / "saved")
    np.testing.assert_allclose(np.asarray(loaded(BATCH)), BATCH @ weights, atol=0.2)
    np.testing.assert_array_equal(np.asarray(loaded(BATCH)), np.asarray(result(BATCH)))


def test_pytorch_saves_a_program_there(home, weights):
    import torch

    result = convert_torch(weights)
    result.save(home / "net.pt2")
    with (home / "net.pt2").open("rb") as file:
        program = torch.export.load(file)
    outputs = program.module()(torch.from_numpy(BATCH)).numpy()
    np.testing.assert_allclose(outputs, np.asarray(result(BATCH)), atol=1e-5)


@pytest.mark.parametrize("external", [False, True])
def test_onnx_models_lie_there(home, weights, external):
    """ONNX Runtime refuses such a name as a place of external data."""
    import onnx
    from onnx import TensorProto, helper, numpy_helper

    value = helper.make_tensor_value_info
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "w"], ["y"], "product")],
        "graph",
        [value("x", TensorProto.FLOAT, ["n", 8])],
        [value("y", TensorProto.FLOAT, ["n", 3])],
        [numpy_helper.from_array(weights, "w")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    original = home.with_name("original")
    original.mkdir()
    onnx.save(
        model,
        original / "net.onnx",
        save_as_external_data=external,
        location="net.data",
        size_threshold=0,
    )
    for file in original.iterdir():  # ONNX cannot write to such a name
        file.rename(home / file.name)
    original.rmdir()
    assert (home / "net.data").exists() is external
    result = convert(home / "net.onnx", workspace=home / "workspace")
    result.save(home / "saved")
    loaded = neural_mp.load(home / "saved")
    np.testing.assert_allclose(np.asarray(loaded(BATCH)), BATCH @ weights, atol=0.2)
    assert not [path for path in home.parent.iterdir() if path != home]

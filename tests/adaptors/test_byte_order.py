"""Arrays of the other byte order, as files of other machines hold, in every runtime."""

from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest
import torch
from onnx_nets import dense_net
from torch import nn

from neural_mp import MixedPrecision
from neural_mp.errors import DataError
from neural_mp.metrics.function_metric import to_torch_tensors

INPUTS = np.random.default_rng(0).normal(size=(40, 6)).astype(np.float32)


def swapped(array: np.ndarray) -> np.ndarray:
    return array.astype(array.dtype.newbyteorder())


def torch_net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 64), nn.ReLU(), nn.Linear(64, 10)).eval()


def keras_net():
    keras = pytest.importorskip("keras")
    keras.utils.set_random_seed(0)
    return keras.Sequential([keras.Input((6,)), keras.layers.Dense(10, name="dense")], name="net")


#: Runtime → the model for it.
NETS = {
    "pytorch": torch_net,
    "onnxrt": lambda: dense_net(10),
    "openvino": lambda: dense_net(10),
    "tensorflow": keras_net,
}


@pytest.fixture
def tuned(tmp_path):
    """Function: runtime, batches → the INT8 result of the net of this runtime."""

    def tune(runtime, batches):
        tuner = MixedPrecision(precisions="int8", objective="modelsize")
        tuner.model, tuner.workspace = NETS[runtime](), tmp_path / "workspace"
        tuner.runtime = runtime if runtime == "openvino" else "source"
        tuner.calib_dataloader = batches
        return tuner()

    return tune


@pytest.mark.slow
@pytest.mark.parametrize("runtime", NETS)
def test_results_are_those_of_native_arrays(tuned, runtime):
    if runtime == "openvino":
        pytest.importorskip("openvino")
    native, result = tuned(runtime, [INPUTS]), tuned(runtime, [swapped(INPUTS)])
    assert result.plan == native.plan
    expected = np.asarray(native(INPUTS))
    for dtype in (np.float32, np.float64):
        outputs = np.asarray(result(swapped(INPUTS.astype(dtype))))
        assert np.array_equal(outputs, expected)


def test_labels_become_tensors():
    labels = swapped(np.arange(5))
    assert to_torch_tensors({"labels": labels})["labels"].tolist() == [0, 1, 2, 3, 4]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("inputs", "fault"),
    [
        (1.0, "input 0 must be a tensor, as at capture, got 1.0"),
        (3, "input 0 must be a tensor, as at capture, got 3"),
        (np.float32(1), "input 0 must have 2 axes"),
        ({"x": INPUTS}, r"forward has no parameter 'x', which a batch holds; known are input"),
        ({"input": {"x": INPUTS}}, "input 0 must be a tensor, as at capture, got a dict"),
        ({"input": 1.0}, "input 0 must be a tensor, as at capture, got 1.0"),
    ],
)
def test_numbers_and_dicts_for_a_result_of_pytorch_are_one_error(tuned, inputs, fault):
    result = tuned("pytorch", [INPUTS])
    with pytest.raises(DataError, match=fault):
        result(inputs)
    named = np.asarray(result({"input": INPUTS}))
    assert np.array_equal(named, np.asarray(result(INPUTS)))
    with pytest.raises(DataError, match="must be a tensor, as at capture"):
        result.model({"input": torch.from_numpy(INPUTS)})


@pytest.mark.slow
@pytest.mark.parametrize("runtime", ["pytorch", "tensorflow"])
def test_pickling_names_the_functions_for_it(tuned, runtime):
    """Copies need none of them."""
    result = tuned(runtime, [INPUTS])
    fault = r"use result\.save\(folder\), and neural_mp\.load\(folder\)"
    for subject in (result, result.model):
        with pytest.raises(pickle.PicklingError, match=fault):
            pickle.dumps(subject)
    inputs = torch.from_numpy(INPUTS) if runtime == "pytorch" else INPUTS
    copied = np.asarray(copy.deepcopy(result.model)(inputs))
    assert np.array_equal(copied, np.asarray(result.model(inputs)))
    assert np.array_equal(np.asarray(copy.deepcopy(result)(INPUTS)), np.asarray(result(INPUTS)))

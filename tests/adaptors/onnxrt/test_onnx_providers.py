"""The execution provider as an option, in Python, tuning files and on the command line."""

import json

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from command_here import run_main
from onnx import TensorProto, helper, numpy_helper

from neural_mp import MixedPrecision, load
from neural_mp.adaptors.onnxrt.adaptor import PROVIDER_VARIABLE
from neural_mp.adaptors.onnxrt.files.storage import restore_model
from neural_mp.errors import ConfigurationError, HistoryError

#: A provider without kernels, which every build of ONNX Runtime for Linux has beside the CPU's.
OTHER = "AzureExecutionProvider"
MISSING = "CoreMLExecutionProvider"
pytestmark = pytest.mark.skipif(
    OTHER not in ort.get_available_providers(),
    reason=f"this build of ONNX Runtime has no {OTHER}",
)
X = np.random.default_rng(0).normal(size=(8, 16)).astype(np.float32)
WEIGHT = np.random.default_rng(1).normal(size=(16, 4)).astype(np.float32)


@pytest.fixture
def product() -> onnx.ModelProto:
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "w"], ["y"], name="product")],
        "net",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 16])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", 4])],
        [numpy_helper.from_array(WEIGHT, "w")],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def tune(model: onnx.ModelProto, tmp_path, **options):
    converter = MixedPrecision(model=model, workspace=tmp_path / "workspace", **options)
    converter.calib_dataloader = [(X, None)]
    converter.eval_func = lambda run: 1.0
    return converter()


def test_a_result_runs_on_the_provider_and_is_loaded_for_it(product, tmp_path):
    result = tune(product, tmp_path, provider=OTHER, runtime="auto")
    result.save(tmp_path / "tuned")
    restored = load(tmp_path / "tuned")
    assert result.loaded.held.provider == restored.loaded.held.provider == OTHER
    np.testing.assert_allclose(restored(X), X @ WEIGHT, rtol=1e-4, atol=1e-5)
    assert f"{OTHER} has no integer kernel for MatMul" in str(result.report.ineligible)


def test_the_variable_replaces_the_provider_of_a_saved_result(product, tmp_path, monkeypatch):
    tune(product, tmp_path, provider=OTHER).save(tmp_path / "tuned")
    monkeypatch.setenv(PROVIDER_VARIABLE, "CPUExecutionProvider")
    assert load(tmp_path / "tuned").loaded.held.provider == "CPUExecutionProvider"


@pytest.mark.parametrize("by_variable", [False, True])
def test_a_missing_provider_names_those_that_are_available(
    product, tmp_path, monkeypatch, by_variable
):
    monkeypatch.setenv(PROVIDER_VARIABLE, MISSING if by_variable else "")
    options = {} if by_variable else {"provider": MISSING}
    available = ", ".join(ort.get_available_providers())
    with pytest.raises(ConfigurationError, match=rf"\({available}\), got '{MISSING}'"):
        tune(product, tmp_path, **options)


def test_a_saved_result_names_its_missing_provider(product, tmp_path):
    tune(product, tmp_path, provider=OTHER).save(tmp_path / "tuned")
    file = tmp_path / "tuned" / "neural_mp_onnx.json"
    details = {**json.loads(file.read_text()), "provider": MISSING}
    file.write_text(json.dumps(details))
    with pytest.raises(ConfigurationError, match=f"got '{MISSING}'"):
        restore_model(tmp_path / "tuned", "")


def test_a_run_on_another_provider_is_not_resumed(product, tmp_path):
    tune(product, tmp_path)
    tune(product, tmp_path, resume=True)
    with pytest.raises(HistoryError, match="provider"):
        tune(product, tmp_path, provider=OTHER, resume=True)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"runtime": "openvino"}, "runtime must be 'source' or 'auto' with a provider"),
        ({"target": "qnn"}, "provider must be unset for an accelerator"),
    ],
)
def test_what_contradicts_a_provider_is_an_error(product, tmp_path, options, words):
    with pytest.raises(ConfigurationError, match=words):
        tune(product, tmp_path, provider=OTHER, **options)


def test_files_and_flags_choose_the_provider(product, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    onnx.save(product, "net.onnx")
    np.savez("data.npz", x=X, label=X @ WEIGHT)
    (tmp_path / "conf.yaml").write_text(
        "model: {name: net.onnx, framework: onnxrt, provider: " + MISSING + "}\n"
    )
    from_file, by_flag = (
        run_main("tune", "conf.yaml"),
        run_main(
            "tune", "net.onnx", "--data", "data.npz", "--metric", "mse", "--provider", MISSING
        ),
    )
    for code, _, errors in (from_file, by_flag):
        assert code == 2, errors
        assert f"got '{MISSING}'" in " ".join(errors.split())

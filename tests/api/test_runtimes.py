"""The runtime as a part of the search."""

from __future__ import annotations

import importlib.util
import json
from collections import OrderedDict

import numpy as np
import pytest
import torch
from nets import Branch
from torch import nn

from neural_mp import MixedPrecision, load
from neural_mp.adaptors.loaded_model import LoadedModel
from neural_mp.adaptors.registry import get_adaptor_named
from neural_mp.adaptors.transfer import transfer_file, transfer_model
from neural_mp.api import runtimes
from neural_mp.api.runtime_comparison import compare_outputs
from neural_mp.config import settings_from
from neural_mp.errors import ConfigurationError, ConversionError, MissingFrameworkError
from neural_mp.runs.report import RuntimeFigures

RUNTIMES = ("onnxrt", "openvino")
QUICK = {
    "exit_policy": {"max_trials": 1},
    "precisions": "int8",
    "strategy": "basic",
    "objective": "modelsize",
}


#: Source and runtime → the source, which must live as long as its ID, and what came of it.
_transferred: dict = {}


@pytest.fixture
def transferred_once(quick_runs, monkeypatch):
    """A net is captured and exported once for all tests that ask for this."""

    def once(source, runtime, *rest):
        key = id(source.held), runtime
        if key not in _transferred:
            _transferred[key] = source.held, transfer_model(source, runtime, *rest)
        return _transferred[key][1]

    monkeypatch.setattr(runtimes, "transfer_model", once)


@pytest.fixture(scope="module")
def batches(digits):
    images, labels = digits[1].images, digits[1].labels
    return [(torch.from_numpy(images[i : i + 50]), labels[i : i + 50]) for i in (0, 50, 100)]


def torch_model(module: nn.Module, example) -> LoadedModel:
    adaptor = get_adaptor_named("pytorch")
    return LoadedModel(adaptor, adaptor.load(module.eval(), example=example))


class Named(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)  # one net, which is exported once
        self.dense = nn.Linear(4, 3)

    def forward(self, a, b, scale=None):
        logits = self.dense(a - b)
        return OrderedDict(logits=logits, more=(logits.argmax(-1), [a * 2]))


@pytest.mark.slow
@pytest.mark.usefixtures("transferred_once")
@pytest.mark.parametrize("runtime", RUNTIMES)
def test_a_torch_net_in_another_runtime_is_called_as_before(runtime, net, batches, tmp_path):
    result = MixedPrecision(
        model=net, runtime=runtime, metric="accuracy", eval_dataloader=batches, **QUICK
    )()
    assert result.framework == runtime
    assert result.met is True
    images = batches[0][0]
    with torch.no_grad():
        expected = net(images)
    for size in (len(images), 3):
        outputs = result(images[:size])
        assert type(outputs) is torch.Tensor
        assert outputs.dtype == expected.dtype
        assert (outputs - expected[:size]).norm() < 0.1 * expected[:size].norm()
    result.save(tmp_path / "saved")
    again = load(tmp_path / "saved")
    assert type(again(images)) is torch.Tensor
    torch.testing.assert_close(again(images), result(images))
    arrays = again(images.numpy())
    assert type(arrays) is np.ndarray
    np.testing.assert_allclose(arrays, result(images).numpy(), rtol=1e-5)
    assert again.audit().holds
    assert runtime[:4] in "".join(again.needs)


@pytest.mark.slow
@pytest.mark.parametrize("runtime", RUNTIMES)
def test_inputs_and_outputs_keep_names_and_containers(runtime):
    example = {"b": torch.rand(2, 4), "a": torch.rand(2, 4)}
    source = torch_model(Named(), example)
    converted = transfer_model(source, runtime)
    for inputs in (example, (example["a"], example["b"])):
        expected, outputs = source(inputs), converted(inputs)
        assert list(outputs) == list(expected)
        assert type(outputs["more"]) is tuple
        assert type(outputs["more"][1]) is list
        torch.testing.assert_close(outputs["logits"], expected["logits"])
        assert torch.equal(outputs["more"][0], expected["more"][0])
    assert converted({name: value[:1] for name, value in example.items()})["logits"].shape == (1, 3)


@pytest.mark.slow
@pytest.mark.usefixtures("transferred_once")
def test_auto_lists_all_candidates_with_reasons(net, batches):
    result = MixedPrecision(
        model=net, runtime="auto", metric="accuracy", eval_dataloader=batches, **QUICK
    )()
    candidates = {figures.framework: figures for figures in result.report.runtimes}
    assert "compil" in candidates.pop("torch.compile").reason
    assert set(candidates) == {"pytorch", *RUNTIMES}
    assert [f.framework for f in candidates.values() if f.chosen] == [result.framework]
    assert all(figures.reason and figures.latency for figures in candidates.values())
    assert all(candidates[name].sqnr_db > 90 for name in RUNTIMES)
    assert type(result(batches[0][0])) is torch.Tensor
    again = type(result.report).from_dict(
        {k: v for k, v in result.report.to_dict().items() if k != "speedup"}
    )
    assert again.runtimes == result.report.runtimes


@pytest.mark.slow
@pytest.mark.usefixtures("transferred_once")
def test_an_evaluation_function_receives_a_callable(net, batches):
    def accuracy(model) -> float:
        model.eval()
        images, labels = batches[0]
        return float((model(images).argmax(-1).numpy() == labels).mean())

    result = MixedPrecision(
        model=net, runtime="openvino", eval_func=accuracy, calib_dataloader=batches, **QUICK
    )()
    assert result.met is True


@pytest.mark.slow
def test_data_dependent_control_flow_stays_in_the_source(net, batches):
    result = MixedPrecision(
        model=Branch(net).eval(),
        runtime="auto",
        capture="modules",
        metric="accuracy",
        eval_dataloader=batches,
        **QUICK,
    )()
    assert result.framework == "pytorch"
    rejected = [figures for figures in result.report.runtimes if not figures.chosen]
    assert {figures.framework for figures in rejected} == {*RUNTIMES, "torch.compile"}
    rejected = [figures for figures in rejected if figures.framework in RUNTIMES]
    assert all("single graph" in figures.reason for figures in rejected)
    (warning,) = [w for w in result.report.warnings if "may be slower than FP32" in w]
    assert all(word in warning for word in (*RUNTIMES, "single graph"))


@pytest.mark.slow
def test_a_traced_branch_is_found_by_its_sqnr(batches):
    images = [inputs for inputs, _ in batches]
    linear = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    source = torch_model(linear, images[0])
    converted = transfer_model(
        torch_model(nn.Sequential(linear, nn.Softsign()), images[0]), "onnxrt"
    )
    reference = [(inputs, source(inputs)) for inputs in images]
    sqnr_db, reason = compare_outputs(reference, converted)
    assert sqnr_db < 90
    assert f"{sqnr_db:.1f} dB" in reason
    same = transfer_model(source, "onnxrt")
    assert compare_outputs(reference, same)[1] == ""


def _hooked(net: nn.Module) -> nn.Module:
    module = nn.Sequential(net).eval()
    module.register_forward_hook(lambda *_: None)
    return module


class Counts(nn.Module):
    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.inner, self.calls = net, 0

    def forward(self, x):
        self.calls += 1
        return self.inner(x)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (_hooked, "hooks"),
        (lambda net: Counts(net).eval(), "state"),
        (lambda net: nn.Sequential(net).train(), "training mode"),
    ],
)
def test_models_with_state_or_hooks_stay(make, reason, batches):
    adaptor = get_adaptor_named("pytorch")
    module = make(nn.Sequential(nn.Flatten(), nn.Linear(64, 10)))
    source = LoadedModel(adaptor, adaptor.load(module, example=batches[0][0]))
    with pytest.raises(ConversionError, match=reason):
        transfer_model(source, "onnxrt")


def test_unknown_names_are_refused_with_a_suggestion(net, batches):
    with pytest.raises(ConfigurationError, match="openvino"):
        MixedPrecision(model=net, runtime="openvin", eval_dataloader=batches)()
    with pytest.raises(ConfigurationError, match=r"model\.runtime"):
        settings_from({"model": {"name": "m", "runtime": "openvin"}})
    assert settings_from({"model": {"name": "m", "runtime": "auto"}}).options.runtime == "auto"


@pytest.mark.usefixtures("quick_runs")
def test_a_named_runtime_that_cannot_run_the_model_is_an_error(net, batches):
    with pytest.raises(ConfigurationError, match="tensorflow"):
        MixedPrecision(
            model=net, runtime="tensorflow", metric="accuracy", eval_dataloader=batches
        )()


def _not_installed(monkeypatch, package: str) -> None:
    original = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == package else original(name)
    )


@pytest.mark.slow
@pytest.mark.usefixtures("quick_runs")
def test_a_runtime_that_is_not_installed(net, batches, monkeypatch):
    _not_installed(monkeypatch, "openvino")
    options = {"model": net, "metric": "accuracy", "eval_dataloader": batches, **QUICK}
    with pytest.raises(MissingFrameworkError, match="pip install"):
        MixedPrecision(runtime="openvino", **options)()
    result = MixedPrecision(runtime="auto", **options)()
    (missing,) = (f for f in result.report.runtimes if f.framework == "openvino")
    assert "pip install" in missing.reason
    assert not missing.chosen


@pytest.mark.slow
def test_an_onnx_file_in_openvino(net, digits):
    example = torch.from_numpy(digits[1].images[:2])
    source = torch_model(net, example)
    written = transfer_file(source)
    images = digits[1].images[:100]
    result = MixedPrecision(
        model=written.path,
        runtime="openvino",
        metric="accuracy",
        eval_dataloader=[(images, digits[1].labels[:100])],
        **QUICK,
    )()
    assert result.framework == "openvino"
    assert result.met is True
    expected = source(images)
    assert type(result(images)) is np.ndarray
    assert np.linalg.norm(result(images) - expected) < 0.1 * np.linalg.norm(expected)


@pytest.mark.slow
def test_the_command_line_lists_the_runtimes(run, workplace):
    conf = workplace / "conf.yaml"
    conf.write_text(conf.read_text().replace(", runtime: source", ""))
    with conf.open("a") as file:
        file.write("tuning: {objective: modelsize, exit_policy: {max_trials: 1}}\n")
    code, out, err = run("tune", "conf.yaml", "--json", "-o", "tuned")
    assert code == 0, err
    document = json.loads(out)
    runtimes = {figures["framework"]: figures for figures in document["report"]["runtimes"]}
    assert set(runtimes) == {"pytorch", *RUNTIMES, "torch.compile"}
    assert runtimes[document["framework"]]["chosen"]
    assert load("tuned").report.runtimes == tuple(RuntimeFigures(**r) for r in runtimes.values())


@pytest.mark.slow
@pytest.mark.parametrize("runtime", RUNTIMES)
def test_commands_work_on_a_result_in_another_runtime(runtime, run, workplace, digits):
    np.save("x.npy", digits[1].images[:20])
    # INT8 gains little on this net, and nothing at all on a busy machine.
    size = ("--objective", "modelsize")
    code, _, err = run("tune", "conf.yaml", "--runtime", runtime, *size, "-o", "tuned")
    assert code == 0, err
    for command, expected in (
        (("inspect", "tuned"), "block1.conv1"),
        (("audit", "tuned"), "the plan holds"),
        (("compare", "net.pt2", "tuned", "--data", "x.npy"), "block1.conv2"),
        (("benchmark", "net.pt2", "tuned"), "samples/s"),
        (("report", "neural_mp_workspace"), "page saved"),
    ):
        code, out, err = run(*command)
        # ONNX Runtime may run further ops between INT8 layers in INT8, with equal numbers.
        runs_more = command[0] == "audit" and runtime == "onnxrt" and code == 1
        assert code == 0 or runs_more, err
        assert expected in out + err or runs_more
    page = (workplace / "report.html").read_text("utf-8")
    assert runtime in page


@pytest.mark.slow
@pytest.mark.parametrize(("runtime", "suffix"), [("onnxrt", ".onnx"), ("openvino", ".xml")])
def test_a_single_file_warns_of_the_calls_that_it_loses(runtime, suffix, tmp_path, caplog):
    example = {"b": torch.rand(2, 4), "a": torch.rand(2, 4)}
    result = MixedPrecision(
        model=Named().eval(), runtime=runtime, calib_dataloader=[example], precisions="int8"
    )()
    result.save(tmp_path / f"net{suffix}")
    assert "inputs 'a', 'b'; 3 outputs, in the order of pytorch" in caplog.text


@pytest.mark.slow
def test_a_keras_model_in_openvino(tmp_path):
    import tensorflow as tf

    tf.keras.utils.set_random_seed(0)
    first, second = tf.keras.Input((4,), name="first"), tf.keras.Input((4,), name="second")
    hidden = tf.keras.layers.Dense(16, activation="relu")(first - second)
    logits = tf.keras.layers.Dense(3)(hidden)
    model = tf.keras.Model([first, second], {"logits": logits, "hidden": hidden})
    rng = np.random.default_rng(0)
    batches = [
        tuple(rng.normal(size=(8, 4)).astype(np.float32) for _ in range(2)) for _ in range(3)
    ]
    tuned = MixedPrecision(
        model=model, runtime="openvino", calib_dataloader=batches, precisions="int8"
    )()
    assert tuned.framework == "openvino"
    expected = model(list(batches[0]))
    tuned.save(tmp_path / "saved")
    for result in (tuned, load(tmp_path / "saved")):
        tensors = result(tuple(map(tf.constant, batches[0])))
        assert tf.is_tensor(tensors["logits"])
        assert set(tensors) == {"logits", "hidden"}
        off = np.linalg.norm(tensors["logits"] - expected["logits"])
        assert off < 0.1 * np.linalg.norm(expected["logits"])
        assert type(result(batches[0])["hidden"]) is np.ndarray

"""Mistakes in Python: one error of this package that names the thing, the rule and the fix.

`tests/api/test_user_errors.py` has further mistakes, in options and in tuning files.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import dense_runs
import numpy as np
import onnxruntime as ort
import pytest
import torch
from torch import nn

import neural_mp
from neural_mp import AccuracyCriterion, ExitPolicy, MixedPrecision, NeuralMPError, common

pytestmark = pytest.mark.usefixtures("quick_runs")


@dataclass(frozen=True)
class Mistake:
    """An action, its error, and the words that the message must contain."""

    name: str
    act: Callable[[Any], object]
    error: str
    words: tuple[str, ...]


class Right:
    """A right metric; the subclasses are not."""

    higher_is_better: bool | None = True

    def __init__(self, value: object = None) -> None:
        self.value = value

    def reset(self) -> None:
        self.right = self.all = 0

    def update(self, preds, labels) -> None:
        self.right += int((preds.argmax(1) == labels).sum())
        self.all += len(labels)

    def result(self):
        return self.right / self.all if self.value is None else self.value


class Remembers(Right):
    right = all = 0

    def reset(self) -> None:
        pass


class TakesPredictions(Right):
    def update(self, preds) -> None:
        pass


class MyLoss(Right):
    higher_is_better = None


class Samples:
    def __init__(self, count: int = 200) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index):
        return np.ones(dense_runs.FEATURES, np.float32), 0


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.only = nn.Linear(dense_runs.FEATURES, dense_runs.CLASSES)

    def forward(self, x):
        return self.only(x)


def _tune(name: str, error: str, *fragments: str, **options: Any) -> Mistake:
    """A run with wrong options; a function in `data` changes each right batch."""

    def act(right: Any) -> object:
        arguments = {
            "model": "net.onnx",
            "precisions": "int8",
            "metric": "accuracy",
            "eval_dataloader": right.batches,
            "workspace": tempfile.mkdtemp(),
            **options,
        }
        if "data" in arguments:
            change = arguments.pop("data")
            arguments["eval_dataloader"] = [change(x, y) for x, y in right.batches]
        return MixedPrecision(**arguments)()

    return Mistake(name, act, error, fragments)


def _act(name: str, act: Callable[[Any], object], error: str, *fragments: str) -> Mistake:
    return Mistake(name, act, error, fragments)


def _eval_func(function: Any) -> dict[str, Any]:
    data = [np.ones((4, dense_runs.FEATURES), np.float32)]
    return {"metric": None, "eval_dataloader": None, "calib_dataloader": data,
            "eval_func": function}  # fmt: skip


def _wide(*_: object) -> Any:
    return np.ones((5, 17), np.float32), np.zeros(5, int)


MISTAKES = [
    # models
    _tune("class", "UnknownFrameworkError", "class", "create an instance", model=Net),
    _tune("weights", "UnknownFrameworkError", "OrderedDict", "model object", model=Net().state_dict()),
    _tune("session", "UnknownFrameworkError", "InferenceSession", model=ort.InferenceSession(dense_runs.dense_net().SerializeToString())),
    _tune("optimizer", "UnknownFrameworkError", "SGD", model=torch.optim.SGD(Net().parameters(), 0.1)),
    _tune("tuning file", "UnknownFrameworkError", "MixedPrecision('conf.yaml')", model="conf.yaml"),
    _tune("saved result", "ConfigurationError", "already converted", "neural_mp.load", model="saved"),
    _tune("other framework", "ModelLoadError", "not a file of PyTorch", model="net.onnx", framework="pytorch"),
    _tune("name of a package", "UnknownFrameworkError", "'onnx'", "'onnxrt'", framework="onnx"),
    # data
    _tune("swapped", "DataError", "[50]", "x: float32[?, 16]", data=lambda x, y: (y, x)),
    _tune("dataset for a loader", "DataError", "[16]", "[?, 16]", eval_dataloader=Samples()),
    _tune("no labels", "DataError", "(inputs, labels)", "alone", data=lambda x, y: x),
    _tune("labels that are None", "MetricError", "does the dataset have labels?", data=lambda x, y: (x, None)),
    _tune("labels from 1", "MetricError", "from 0 to 3", "subtract 1", data=lambda x, y: (x, y + 1)),
    _tune("labels shifted", "MetricError", "at least 0.01", "count classes from 0", data=lambda x, y: (x, (y + 1) % 4)),
    _tune("names as labels", "MetricError", "number the classes", data=lambda x, y: (x, np.array(["cat"] * len(y)))),
    _tune("labels missing", "MetricError", "(50, 4)", "(49,)", data=lambda x, y: (x, y[:-1])),
    _tune("empty dataset", "DataError", "at least one batch", eval_dataloader=common.DataLoader(Samples(0))),
    _tune("path for a loader", "DataError", "eval_dataloader must be a dataloader", "str", eval_dataloader="test.npz"),
    _tune("NaN", "MetricError", "all NaN", "preprocessing", data=lambda x, y: (x * np.nan, y)),
    _tune("too wide", "DataError", "batch 1 of eval_dataloader", "[5, 17]", data=_wide),
    _tune("key of no input", "DataError", "'image'", "known are x", data=lambda x, y: {"image": x, "labels": y}),
    _tune("key of labels", "DataError", "label_key", "x, target", data=lambda x, y: {"x": x, "target": y}),
    _tune("label_key of none", "DataError", "'target'", "labels", data=lambda x, y: {"x": x, "labels": y}, label_key="target"),
    _tune("objects", "DataError", "array of object", data=lambda x, y: (np.array([{}] * 5), y[:5])),
    _tune("words", "DataError", "batch 1", "x: float32[?, 16]", data=lambda x, y: ("hello", y)),
    _tune("calibration too wide", "DataError", "batch 1 of calib_dataloader", "[5, 17]", calib_dataloader=[_wide()[0]]),
    _tune("no calibration", "DataError", "calibration data", "dynamic", metric=None, eval_dataloader=None),
    _act("batch size", lambda _: common.DataLoader(Samples(), batch_size=0), "DataError", "from 1", "got 0"),
    _act("batch size as text", lambda _: common.DataLoader(Samples(), batch_size="32"), "DataError", "'32'"),
    _act("last batch", lambda _: common.DataLoader(Samples(), last_batch="drop"), "DataError", "'discard'", "'drop'"),
    _act("dataset", lambda _: common.DataLoader(3), "DataError", "__getitem__", "int"),
    _act("ragged samples", lambda _: list(common.DataLoader([(np.ones(3), 1), (np.ones(4), 2)], 2)), "DataError", "(3,), (4,)", "collate_fn"),
    # metrics
    _tune("class of a metric", "MetricError", "create an instance", metric=Right),
    _tune("name of a metric", "ConfigurationError", "'acuracy'", "'accuracy'", metric="acuracy"),
    _tune("option of a metric", "ConfigurationError", "no option 'n'", "k", metric=("topk", {"n": 3})),
    _tune("too many classes", "MetricError", "k=5", "(50, 4)", metric=("topk", 5)),
    _tune("metric of regressions", "MetricError", "(50, 4)", "(50,)", metric="rmse"),
    _tune("metric that remembers", "MetricError", "reset() must clear", "initial values", metric=Remembers()),
    _tune("percent sign", "MetricError", "must return a number", "'98 %'", metric=Right("98 %")),
    _tune("list as a value", "MetricError", "must return a number", "[] (list)", metric=Right([])),
    _tune("infinity", "MetricError", "FP32 model is inf", metric=Right(float("inf"))),
    _tune("update of one", "MetricError", "update(predictions, labels)", "(p", metric=TakesPredictions()),
    _tune("function of none", "MetricError", "(predictions, labels)", metric=lambda: 1.0),
    _tune("two directions", "ConfigurationError", "one direction", "Loss: lower", metric=["accuracy", "loss"]),
    _tune("unknown direction", "ConfigurationError", "direction of MyLoss", "higher_is_better", metric=MyLoss()),
    _tune("no metric in a list", "ConfigurationError", "at least one metric", metric=[]),
    _tune("eval_func of two", "MetricError", "eval_func(model)", "'d'", **_eval_func(lambda m, d: 1.0)),
    _tune("eval_func as text", "MetricError", "eval_func must return a number", "'0.9'", **_eval_func(lambda m: "0.9")),
    _tune("postprocess", "ConfigurationError", "postprocess must be a function", "got 3", postprocess=3),
    _tune("postprocess of two", "DataError", "postprocess((predictions, labels))", postprocess=lambda p, labels: None),
    # criterion and limits
    _tune("tolerance in words", "ConfigurationError", "e.g. 0.01", "'1%'", accuracy_criterion="little"),
    _tune("percent of a number", "ConfigurationError", "500 %", "0.05 (5 %)", accuracy_criterion=5),
    _tune("absolute of a fraction", "ConfigurationError", "half the baseline", "target of 0.1", accuracy_criterion=AccuracyCriterion(0.9, relative=False)),
    _tune("absolute in percent", "ConfigurationError", "unit of the metric", "relative: 1%", accuracy_criterion={"absolute": "1%"}),
    _tune("negative", "ConfigurationError", "negative", "-0.01", accuracy_criterion=-0.01),
    _tune("wrong direction", "ConfigurationError", "higher is better", "remove", accuracy_criterion=AccuracyCriterion(0.01, higher_is_better=False)),
    _tune("minutes", "ConfigurationError", "number of seconds", "'10m'", exit_policy={"timeout": "10m"}),
    _act("half a trial", lambda _: ExitPolicy(max_trials=1.5), "ConfigurationError", "max_trials", "1.5"),
    # options
    _tune("spaces", "UnknownPrecisionError", "commas", "'int8,bf16'", precisions="int8 bf16"),
    _tune("dtype of torch", "UnknownPrecisionError", "'int8,bf16'", "torch.int8", precisions=torch.int8),
    _tune("bits", "UnknownPrecisionError", "must be a string", "got 8", precisions=8),
    _tune("name of a dtype", "UnknownPrecisionError", "'bfloat16'", "did you mean 'bf16'?", precisions="int8,bfloat16"),
    _tune("approach", "ConfigurationError", "'dynamc'", "'dynamic'", approach="dynamc"),
    _tune("target", "ConfigurationError", "'arm'", "'arm-dotprod'", target="arm"),
    _tune("runtime", "ConfigurationError", "'onnx'", "'onnxrt'", runtime="onnx"),
    _tune("capture", "ConfigurationError", "'module'", "'modules'", capture="module"),
    _tune("input", "ConfigurationError", "'image'", "known are x", inputs="image"),
    _tune("output", "ConfigurationError", "'logits'", "known are y", outputs="logits"),
    _tune("seed", "ConfigurationError", "random_seed", "-1", random_seed=-1),
    _tune("samples", "ConfigurationError", "sampling_size", "'all'", sampling_size="all"),
    _tune("batches", "ConfigurationError", "max_batches", "from 1", max_batches=0),
    _tune("standard library", "ConfigurationError", "'json'", "function of your own", trust=("json",)),
    _tune("resume as text", "ConfigurationError", "resume must be true or false", resume="yes"),
    _tune("workspace that is a file", "HistoryError", "'conf.yaml'", "cannot be created", workspace="conf.yaml"),
    _tune("storage", "HistoryError", "'sqlite:///team.db'", storage="team.db"),
    _tune("folder of a storage", "HistoryError", "gone/team.db", "unable to open", storage="sqlite:///gone/team.db"),
    _tune("option of elsewhere", "ConfigurationError", "no option 'device'", device="cuda"),
    _act("misspelt loader", lambda _: setattr(MixedPrecision(), "eval_loader", []), "ConfigurationError", "'eval_dataloader'"),
    _act("model in place of a file", lambda _: MixedPrecision("net.onnx"), "ConfigurationError", "MixedPrecision(model='net.onnx')"),
    _act("no tuning file", lambda _: MixedPrecision("gone.yaml"), "ConfigurationError", "gone.yaml"),
    # results, plans, files
    _act("result on wide data", lambda r: r.result(_wide()[0]), "DataError", "[5, 17]", "[?, 16]"),
    _act("result on nothing", lambda r: r.result(), "DataError", "inputs of one batch", "none"),
    _act("result on two", lambda r: r.result(*[r.batches[0][0]] * 2), "DataError", "1 input", "got 2"),
    _act("result by a wrong name", lambda r: r.result(image=r.batches[0][0]), "DataError", "'image'", "x"),
    _act("save to a file", lambda r: r.result.save("conf.yaml"), "NeuralMPError", "'conf.yaml' is a file"),
    _act("save as Keras", lambda r: r.result.save("x.keras"), "ConversionError", "ends in .onnx, or"),
    _act("load nothing", lambda _: neural_mp.load("gone"), "ModelLoadError", "'gone'", "OptimizedModel.save"),
    _act("load a model", lambda _: neural_mp.load("net.onnx"), "ModelLoadError", "not a saved model"),
    _act("plan as a dict", lambda _: neural_mp.convert_with_plan("net.onnx", {"first": "int8"}), "PlanError", "path of a plan file", "dict"),
    _act("plan of another model", lambda r: neural_mp.convert_with_plan(Net(), r.plan, inputs=r.batches[0][0]), "UnknownOperatorError", "'first'", "only"),
    _act("no plan file", lambda _: neural_mp.convert_with_plan("net.onnx", "gone.yaml"), "PlanError", "'gone.yaml'"),
    _act("compare with another", lambda r: neural_mp.compare("net.onnx", nn.Linear(3, 3), [r.batches[0][0]]), "DataError", "Linear", "[50, 16]"),
    _act("compare on a number", lambda r: neural_mp.compare("net.onnx", r.result, 3), "DataError", "batches must be a dataloader"),
    _act("no jobs", lambda _: neural_mp.tune_many("gone*.yaml"), "ConfigurationError", "'gone*.yaml'"),
]  # fmt: skip


@dataclass(frozen=True)
class RightThings:
    batches: list[Any]
    result: Any
    plan: Path


@pytest.fixture(scope="module")
def right(tmp_path_factory):
    """Right batches, a result and its plan, in a folder with a right tuning file."""
    folder = dense_runs.write_workplace(tmp_path_factory.mktemp("workplace"))
    data = dict(np.load(folder / "test.npz"))
    pairs = [(data["inputs"][i : i + 50], data["labels"][i : i + 50]) for i in range(0, 200, 50)]
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        result = MixedPrecision("conf.yaml")()
        result.save("saved")
        result.save_plan("plan.yaml")
    return folder, RightThings(pairs, result, folder / "plan.yaml")


def test_with_nothing_wrong_it_works(right, monkeypatch):
    monkeypatch.chdir(right[0])
    assert _tune("nothing", "", objective="modelsize", accuracy_criterion=0.05).act(right[1]).met


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.name)
def test_a_mistake_is_one_error_with_the_thing_and_the_fix(right, monkeypatch, mistake):
    folder, things = right
    monkeypatch.chdir(folder)
    with pytest.raises(NeuralMPError) as caught:
        mistake.act(things)
    assert type(caught.value).__name__ == mistake.error, caught.value
    message = str(caught.value)
    assert not re.search(r"\n|Traceback", message)
    for fragment in mistake.words:
        assert fragment in message


@pytest.mark.parametrize(
    ("name", "words"),
    [("speedup", "use result.report.speedup"), ("accuracy", "use result.report.accuracy"),
     ("plann", "did you mean 'plan'")],
)  # fmt: skip
def test_an_attribute_that_a_result_lacks_is_an_attribute_error(right, name, words):
    with pytest.raises(AttributeError, match=words):
        getattr(right[1].result, name)


@pytest.mark.parametrize("wrap", [nn.Module.train, nn.DataParallel], ids=["training", "parallel"])
def test_a_model_in_training_mode_is_no_mistake(right, monkeypatch, wrap):
    """Dropout is inactive in the result, and the given model stays in its mode."""
    folder, things = right
    monkeypatch.chdir(folder)
    net = wrap(nn.Sequential(Net(), nn.Dropout(0.9)))
    arguments = {"precisions": "int8", "workspace": tempfile.mkdtemp()}
    result = MixedPrecision(model=net, calib_dataloader=[things.batches[0][0]], **arguments)()
    first, second = (result(things.batches[0][0]) for _ in range(2))
    np.testing.assert_array_equal(first, second)
    assert net.training

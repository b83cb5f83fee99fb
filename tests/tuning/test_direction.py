"""A worse model never meets the target, whichever way its metric gets better and who says so."""

from __future__ import annotations

import itertools
import shutil
import sys
from functools import partial

import numpy as np
import pytest
import torch
from sklearn.datasets import load_diabetes
from sklearn.metrics import mean_absolute_error, root_mean_squared_error
from torch import nn
from torch.nn import functional as F

import neural_mp
from neural_mp import AccuracyCriterion, ExitPolicy, MixedPrecision
from neural_mp.adaptors.pytorch.adaptor import PyTorchAdaptor
from neural_mp.cli import app
from neural_mp.metrics import build_metric

pytestmark = pytest.mark.slow

#: Registered metric → the data it is for, and whether its larger value is better.
REGISTERED = {
    "RMSE": ("numbers", False),
    "MSE": ("numbers", False),
    "MAE": ("numbers", False),
    "R2": ("numbers", True),
    "accuracy": ("classes", True),
    "topk": ("classes", True),
    "loss": ("classes", False),
}
TOLERANCES = {"relative": 0.05, "absolute": 0.02}


def fit(outputs, inputs, targets, loss):
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Flatten(), nn.Linear(inputs[0].size, 32), nn.ReLU(), nn.Linear(32, outputs)
    )
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    inputs, targets = torch.from_numpy(inputs), torch.from_numpy(targets)
    for _ in range(150):
        optimizer.zero_grad()
        loss(model(inputs), targets).backward()
        optimizer.step()
    return model.eval()


@pytest.fixture(scope="module")
def tasks(digits):
    """Kind of data → a trained model, inputs and labels to evaluate it on."""
    data = load_diabetes()
    features = (data.data / data.data.std(0)).astype(np.float32)
    targets = (data.target / data.target.std()).astype(np.float32)[:, None]
    train, test = digits
    return {
        "numbers": (fit(1, features[:300], targets[:300], F.mse_loss), features, targets),
        "classes": (fit(10, train.images, train.labels, F.cross_entropy), test.images, test.labels),
    }


@pytest.fixture
def damage(monkeypatch):
    """Call it, and what converted models compute has the wrong sign from then on."""

    def apply():
        convert = PyTorchAdaptor.convert

        def damaged(self, *arguments, **options):
            converted = convert(self, *arguments, **options)
            buffers = [
                b for n, b in converted.runnable_graph.named_buffers() if "weight_scales" in n
            ]
            assert buffers
            for scales in buffers:
                scales.neg_()
            return converted

        monkeypatch.setattr(PyTorchAdaptor, "convert", damaged)

    return apply


def set_up(task, conf=None):
    model, inputs, labels = task
    converter = MixedPrecision(conf)
    converter.model = model
    converter.precisions = "int8"
    converter.strategy = "basic"
    converter.objective = "modelsize"  # models this small need not be faster
    converter.exit_policy = ExitPolicy(max_trials=1)
    converter.calib_dataloader = [inputs[:100]]
    converter.eval_dataloader = [(inputs, labels)]
    return converter


def from_python(task, metric, kind):
    converter = set_up(task)
    converter.metric = build_metric(metric)
    converter.accuracy_criterion = AccuracyCriterion(TOLERANCES[kind], relative=kind == "relative")
    return converter


def from_yaml(task, metric, kind):
    return set_up(
        task,
        neural_mp.config.parse_settings(
            f"evaluation: {{accuracy: {{metric: {metric}}}}}\n"
            f"tuning: {{accuracy_criterion: {{{kind}: {TOLERANCES[kind]}}}}}\n"
        ),
    )


@pytest.mark.parametrize(("made", "kind"), [(from_python, "relative"), (from_yaml, "absolute")])
@pytest.mark.parametrize("metric", REGISTERED)
def test_a_registered_metric_keeps_its_direction(tasks, damage, metric, made, kind):
    data, higher = REGISTERED[metric]
    good = made(tasks[data], metric, kind)()
    assert good.met, good.report.warnings
    assert good.report.higher_is_better is higher
    assert good.report.metric == type(build_metric(metric)).__name__
    damage()
    worse = made(tasks[data], metric, kind)()
    assert worse.met is False
    assert set(worse.plan.counts()) == {"fp32"}
    rejected = worse.report.best_rejected.accuracy
    assert (rejected < worse.report.target) is higher


class RootMeanSquaredError:
    """As a user writes it: it does not say which way is better."""

    def reset(self):
        self.pairs = []

    def update(self, preds, labels):
        self.pairs.append((preds, labels))

    def result(self):
        preds, labels = map(np.concatenate, zip(*self.pairs, strict=True))
        return root_mean_squared_error(labels, preds)


class SayingError(RootMeanSquaredError):
    higher_is_better = False


def error_of(module, inputs, labels):
    with torch.no_grad():
        return mean_absolute_error(labels, module(torch.from_numpy(inputs)).numpy())


def own_class(converter, kind, task):
    converter.metric = SayingError()
    converter.accuracy_criterion = AccuracyCriterion(TOLERANCES[kind], kind == "relative")


def own_class_and_criterion(converter, kind, task):
    converter.metric = RootMeanSquaredError()
    converter.accuracy_criterion = AccuracyCriterion(TOLERANCES[kind], kind == "relative", False)


def own_function(converter, kind, task):
    def evaluate(module):
        return error_of(module, *task[1:])

    evaluate.higher_is_better = False
    converter.eval_func = evaluate
    converter.accuracy_criterion = AccuracyCriterion(TOLERANCES[kind], kind == "relative")


def own_function_and_criterion(converter, kind, task):
    converter.eval_func = partial(error_of, inputs=task[1], labels=task[2])
    converter.accuracy_criterion = AccuracyCriterion(TOLERANCES[kind], kind == "relative", False)


@pytest.mark.parametrize("kind", TOLERANCES)
@pytest.mark.parametrize(
    "own", [own_class, own_class_and_criterion, own_function, own_function_and_criterion]
)
def test_an_error_of_the_users_own_is_judged_as_one(tasks, damage, own, kind):
    def run():
        converter = set_up(tasks["numbers"])
        own(converter, kind, tasks["numbers"])
        return converter()

    assert run().met
    damage()
    worse = run()
    assert worse.met is False
    assert worse.report.best_rejected.accuracy > worse.report.target


OWN_CODE = """
import numpy as np


class Plain:
    def reset(self):
        self.squares = []

    def update(self, preds, labels):
        self.squares.append(np.square(preds - labels))

    def result(self):
        return float(np.sqrt(np.concatenate(self.squares).mean()))


def validation_loss():
    return Plain()
"""


@pytest.fixture(scope="module")
def files(tmp_path_factory, tasks):
    """A folder with the data, the models and a metric of one's own."""
    folder = tmp_path_factory.mktemp("files")
    for name, (model, inputs, labels) in tasks.items():
        np.savez(folder / f"{name}.npz", inputs=inputs, labels=labels)
        batch = {0: torch.export.Dim.AUTO}
        program = torch.export.export(
            model, (torch.from_numpy(inputs[:2]),), dynamic_shapes=(batch,)
        )
        torch.export.save(program, folder / f"{name}.pt2")
    (folder / "own_measures.py").write_text(OWN_CODE)
    return folder


@pytest.fixture
def workplace(tmp_path, files):
    """The current folder, with copies of these files."""
    shutil.copytree(files, tmp_path, dirs_exist_ok=True)
    yield tmp_path
    sys.modules.pop("own_measures", None)


@pytest.fixture
def tune(workplace, monkeypatch, capsys):
    """Run `neural-mp tune`; its exit code and everything it says."""

    def call(data, metric, criterion):
        (workplace / "conf.yaml").write_text(
            f"""
model: {{name: {data}.pt2, runtime: source}}
mixed_precision: {{precisions: int8}}
quantization:
  calibration: {{dataloader: {{batch_size: 50, dataset: {{numpy: {{path: {data}.npz}}}}}}}}
evaluation:
  accuracy:
    metric: {metric}
    dataloader: {{batch_size: 200, dataset: {{numpy: {{path: {data}.npz}}}}}}
tuning:
  strategy: basic
  objective: modelsize
  exit_policy: {{max_trials: 1}}
  accuracy_criterion: {criterion}
"""
        )
        monkeypatch.setattr(sys, "argv", ["neural-mp", "tune", "conf.yaml"])
        with pytest.raises(SystemExit) as ended:
            app.main()
        captured = capsys.readouterr()
        return int(ended.value.code or 0), captured.out + captured.err

    return call


@pytest.mark.parametrize(
    ("metric", "criterion", "row"),
    [
        ("RMSE", "{absolute: 0.02}", "RMSE (target 0."),
        ("MAE", "{relative: 5%}", "MAE (target 0."),
        ("loss", "{absolute: 0.02}", "Loss (target 0."),
        ("accuracy", "{absolute: 0.02}", "Accuracy (target 0."),
        ("'own_measures:validation_loss'", "{absolute: 0.02, higher_is_better: false}", "Plain ("),
    ],
)
def test_on_the_command_line(tune, damage, metric, criterion, row):
    data, higher = REGISTERED.get(metric, ("numbers", False))
    code, output = tune(data, metric, criterion)
    assert (code, "The accuracy target is met" in output) == (0, True)
    (shown,) = [line for line in output.splitlines() if row in line]
    assert ("lower is better" in shown) is not higher
    damage()
    code, output = tune(data, metric, criterion)
    assert (code, "The accuracy target is NOT met" in output) == (1, True)


@pytest.mark.parametrize(
    ("metric", "criterion", "message"),
    [
        ("RMSE", "{higher_is_better: true}", "RMSE: lower is better"),
        ("accuracy", "{higher_is_better: false}", "Accuracy: higher is better"),
        (
            "'own_measures:validation_loss'",
            "{absolute: 0.02}",
            "validation_loss may be an error",
        ),
        ("RMSE", "{relative: 1}", "did you mean 0.01 (1 %)?"),
    ],
)
def test_what_cannot_be_judged_is_an_error_on_the_command_line(tune, metric, criterion, message):
    code, output = tune("numbers", metric, criterion)
    assert code == 2
    assert message in output
    assert "Traceback" not in output


class Scripted:
    """Gives one value after the other: FP32's first."""

    def __init__(self, values, higher):
        self.values, self.higher_is_better = iter(values), higher

    def reset(self):
        pass

    def update(self, preds, labels):
        pass

    def result(self):
        return next(self.values)


#: Where the direction comes from, the kind of tolerance, and by how much the value differs.
SCRIPTED = [
    *itertools.product(["class"], TOLERANCES, [0.3, 0.0, -0.019, -0.06, -0.3]),
    *itertools.product(["function", "criterion"], ["relative"], [-0.019, -0.06]),
]


@pytest.mark.parametrize(("where", "kind", "change"), SCRIPTED)
@pytest.mark.parametrize("higher", [True, False])
def test_what_is_better_is_met_and_what_is_worse_is_not(tasks, where, kind, higher, change):
    """The values differ by `change`, for better or worse; FP32's is 1."""
    values = (1.0, 1.0 + change if higher else 1.0 - change)
    declared, requested = (None, higher) if where == "criterion" else (higher, None)
    converter = set_up(tasks["numbers"])
    converter.accuracy_criterion = AccuracyCriterion(
        TOLERANCES[kind], kind == "relative", requested
    )
    metric = Scripted(values, declared)
    if where == "function":

        def scripted(model):
            return metric.result()

        scripted.higher_is_better = declared
        converter.eval_func = scripted
    else:
        converter.metric = metric
    assert converter().met is (change >= -0.02)

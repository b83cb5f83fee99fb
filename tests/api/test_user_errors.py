"""What a user gets wrong is answered with one clear error that names the culprit."""

import shutil

import numpy as np
import pytest
import torch
from torch import nn

import neural_mp
from neural_mp import MixedPrecision, NeuralMPError
from neural_mp.errors import (
    CaptureError,
    ConfigurationError,
    DataError,
    HistoryError,
    MetricError,
    ModelLoadError,
    UnknownFrameworkError,
    UnknownOperatorError,
    UnknownPrecisionError,
)
from neural_mp.tuning.listener import Listener

pytestmark = pytest.mark.usefixtures("quick_runs")

GOOD_YAML = """\
model: {name: net}
mixed_precision:
  precisions: int8
tuning:
  accuracy_criterion:
    relative: 0.01
  exit_policy:
    max_trials: 5
"""

YAML_MISTAKES = {
    "unknown key": (
        "max_trials: 5",
        "max_trails: 5",
        r"line 8.*tuning\.exit_policy\.max_trails.*'max_trials'",
    ),
    "unknown section": ("tuning:", "tunning:", r"line 4.*tunning.*'tuning'"),
    "wrong type": ("max_trials: 5", "max_trials: many", r"line 8.*max_trials.*many"),
    "out of range": ("max_trials: 5", "max_trials: 0", r"line 8.*max_trials"),
    "both criteria": (
        "relative: 0.01",
        "relative: 0.01\n    absolute: 1",
        r"relative.*absolute|absolute.*relative",
    ),
    "negative tolerance": ("relative: 0.01", "relative: -0.01", r"line 6.*relative"),
    "no such precision": ("precisions: int8", "precisions: int9", r"line 3.*'int9'.*'int8'"),
    "not a mapping": (GOOD_YAML, "- a list", r"mapping"),
    "not YAML": ("model: {name: net}", "model: {name: net", r"line"),
    "key twice": (
        "  exit_policy:",
        "  accuracy_criterion: {absolute: 1}\n  exit_policy:",
        r"accuracy_criterion.*twice|duplicate",
    ),
}


@pytest.mark.parametrize("mistake", YAML_MISTAKES)
def test_a_mistake_in_yaml_is_named_with_its_line(tmp_path, mistake):
    original, replacement, message = YAML_MISTAKES[mistake]
    assert original in GOOD_YAML
    (tmp_path / "conf.yaml").write_text(GOOD_YAML.replace(original, replacement))
    with pytest.raises(ConfigurationError, match=rf"conf\.yaml.*({message})"):
        MixedPrecision("conf.yaml")


def test_a_missing_file_is_named():
    with pytest.raises(ConfigurationError, match=r"missing\.yaml"):
        MixedPrecision("missing.yaml")


class Accuracy:
    higher_is_better = True

    def __init__(self, value=None):
        self.value = value

    def reset(self):
        self.right, self.all = 0, 0

    def update(self, preds, labels):
        self.right += int((preds.argmax(1) == labels).sum())
        self.all += len(labels)

    def result(self):
        return self.value if self.value is not None else self.right / self.all


@pytest.fixture
def converter(net, digits):
    """Everything set rightly; each test below sets one thing wrongly."""
    tuner = MixedPrecision()
    tuner.model = net
    tuner.precisions = "int8"
    tuner.metric = Accuracy()
    tuner.eval_dataloader = digits[1].loader()
    return tuner


def test_with_nothing_wrong_it_works(converter):
    assert converter().met


class Branching(nn.Module):
    def forward(self, x):
        return x * 2 if x.sum() > 0 else x


class HalfAMetric:
    def reset(self):
        pass


def set_up(**options):
    def apply(converter):
        for name, value in options.items():
            setattr(converter, name, value)

    return apply


CALLS = {
    "precision that does not exist": (set_up(precisions="int9"), UnknownPrecisionError, "'int9'.*'int8'"),
    "misspelt option": (set_up(precision="int8"), ConfigurationError, "no option 'precision'.*'precisions'"),
    "no model": (set_up(model=None), ConfigurationError, "converter.model"),
    "model of no framework": (set_up(model=object()), UnknownFrameworkError, "builtins.object"),
    "model that is a misspelt path": (set_up(model="nett.pt2"), ModelLoadError, "'nett.pt2'"),
    "model that is a pickle": (set_up(model="net.pth"), ModelLoadError, "net.pth"),
    "no such module": (set_up(model="nowhere:build"), ConfigurationError, "'nowhere'"),
    "no such attribute": (set_up(model="nets:smal_net"), ConfigurationError, "'smal_net'.*'small_net'"),
    "no such framework": (set_up(framework="pytorhc"), UnknownFrameworkError, "'pytorhc'.*'pytorch'"),
    "no such strategy": (set_up(strategy="basics"), ConfigurationError, "'basics'.*'basic'"),
    "no such objective": (set_up(objective="speed"), ConfigurationError, "'speed'"),
    "no such objective among several": (set_up(objective={"perfomance": 1}), ConfigurationError, "'perfomance'.*'performance'"),
    "a weight that weighs nothing": (set_up(objective={"modelsize": 0}), ConfigurationError, "weight of 'modelsize'.*got 0"),
    "seed that is no number": (set_up(random_seed=True), ConfigurationError, "random_seed must be a whole number from 0 to 4294967295, got True"),
    "listener that is a class": (set_up(listener=Listener), ConfigurationError, "listener must be a Listener, got <class"),
    "tolerance that no float holds": (set_up(accuracy_criterion=10**400), ConfigurationError, "tolerance must be a number"),
    "trust in what is no name": (set_up(trust=3), ConfigurationError, "trust must be a module name.*got 3"),
    "no workers": (set_up(workers=0), ConfigurationError, "workers must be a whole number from 1 to 2147483647, got 0"),
    "workers of another type": (set_up(workers=2.5), ConfigurationError, "workers must be a whole number from 1 to 2147483647, got 2.5"),
    "workers of no engine": (set_up(workers="two"), ConfigurationError, "no engine 'two' for workers; known are local, ray"),
    "early stopping of another type": (set_up(early_stopping="no"), ConfigurationError, "early_stopping must be true or false"),
    "a minimum gain as a share": (set_up(min_speedup=0.03), ConfigurationError, "min_speedup must be a ratio from 1"),
    "a minimum gain of another type": (set_up(min_speedup="3 %"), ConfigurationError, "min_speedup must be a ratio from 1"),
    "input the model does not take": (set_up(inputs="y"), ConfigurationError, "forward \\(x\\), got 'y'"),
    "metric without data": (set_up(eval_dataloader=None), DataError, "set eval_dataloader"),
    "half a metric": (set_up(metric=HalfAMetric()), MetricError, r"HalfAMetric has no update\(\)"),
    "NaN metric": (set_up(metric=Accuracy(float("nan"))), MetricError, "FP32 model is nan"),
    "metric that returns no number": (set_up(metric=Accuracy("high")), MetricError, "'high'"),
    "metric that returns many numbers": (set_up(metric=Accuracy(np.ones(3))), MetricError, "one number"),
    "eval_func that is none": (set_up(eval_func=0.9), ConfigurationError, "eval_func.*float"),
    "eval_func that returns nothing": (set_up(eval_func=lambda model: None), MetricError, "eval_func.*None"),
    "calibration loader that yields None": (set_up(calib_dataloader=[None]), DataError, "batch 1 of calib_dataloader must contain inputs, got None"),
    "loader that yields nothing": (set_up(eval_dataloader=[]), DataError, "eval_dataloader must yield at least one batch"),
    "generator that yields nothing": (set_up(eval_dataloader=lambda: iter(())), DataError, "must yield at least one batch"),
    "loader that is none": (set_up(eval_dataloader=3), DataError, "eval_dataloader.*int"),
    "batches that are no pairs": (set_up(eval_dataloader=[np.zeros((2, 1, 8, 8), np.float32)]), DataError, r"\(inputs, labels\), got an ndarray alone, float32\[2, 1, 8, 8\]"),
    "criterion that is a word": (set_up(accuracy_criterion="little"), ConfigurationError, "accuracy_criterion must be.*'little'"),
    "criterion that tolerates all": (set_up(accuracy_criterion=1), ConfigurationError, "100 % of the baseline"),
    "criterion with a misspelt key": (set_up(accuracy_criterion={"relativ": 0.01}), ConfigurationError, "tuning.accuracy_criterion.relativ.*'relative'"),
    "exit policy that is a number": (set_up(exit_policy=3), ConfigurationError, "exit_policy must be.*'timeout'"),
    "exit policy with a misspelt key": (set_up(exit_policy={"time": 3}), ConfigurationError, "tuning.exit_policy.time.*'timeout'"),
    "op_wise that is a list": (set_up(op_wise=["fc"]), ConfigurationError, "op_wise must be a dict"),
    "op_wise with a misspelt key": (set_up(op_wise={".*": {"weigth": {}}}), ConfigurationError, "op_wise.*weigth.*'weight'"),
    "op_wise with a misspelt precision": (set_up(op_wise={".*": "int9"}), UnknownPrecisionError, "'int9'.*'int8'"),
    "op_wise for no op": (set_up(op_wise={"layer9": "fp32"}), UnknownOperatorError, "op_wise names 'layer9'"),
    "optype_wise for no type": (set_up(optype_wise={"conv9d": "fp32"}), UnknownOperatorError, "'conv9d'.*'conv2d'"),
    "exclude for no op": (set_up(exclude=["layer9"]), UnknownOperatorError, "exclude names 'layer9'"),
    "exclude that is a number": (set_up(exclude=9), ConfigurationError, "exclude must be names"),
    "model that cannot be captured": (set_up(model=Branching()), CaptureError, "Branching"),
    "nothing to resume": (set_up(resume=True), HistoryError, "no run to resume"),
    "storage that is none": (set_up(storage="nosuchdb://x"), HistoryError, "nosuchdb"),
}  # fmt: skip


@pytest.mark.parametrize("mistake", CALLS)
def test_a_mistaken_call_is_answered_by_name(converter, tmp_path, mistake):
    (tmp_path / "net.pth").write_bytes(b"a pickle")
    apply, kind, message = CALLS[mistake]
    with pytest.raises(kind, match=message) as caught:  # noqa: PT012 (setting may raise, too)
        apply(converter)
        converter()
    assert isinstance(caught.value, NeuralMPError)


def test_an_op_that_is_not_in_the_model_is_named(net, digits, tmp_path):
    (tmp_path / "conf.yaml").write_text(
        GOOD_YAML + "quantization:\n  op_wise:\n    block1.conv9: {activation: {dtype: [fp32]}}\n"
    )
    converter = MixedPrecision("conf.yaml")
    converter.model = net
    converter.calib_dataloader = digits[0].loader()
    with pytest.raises(UnknownOperatorError, match=r"'block1\.conv9'.*did you mean 'block1\.conv"):
        converter()


class UsersOwnError(Exception):
    pass


@pytest.mark.parametrize("where", ["metric", "eval_func", "data"])
def test_an_error_of_the_users_own_code_comes_through_unchanged(converter, digits, where):
    class Broken(Accuracy):
        def update(self, preds, labels):
            raise UsersOwnError("mine")

    def raising(*_):
        raise UsersOwnError("mine")
        yield

    def evaluate(model):
        raise UsersOwnError("mine")

    if where == "metric":
        converter.metric = Broken()
    elif where == "eval_func":
        converter.eval_func = evaluate
    else:
        converter.calib_dataloader = digits[0].loader()
        converter.eval_dataloader = raising
    with pytest.raises(UsersOwnError, match="^mine$"):
        converter()


def test_an_error_in_a_trial_comes_through_and_the_trial_is_recorded(converter, tmp_path):
    class BreaksLater(Accuracy):
        calls = 0

        def result(self):
            BreaksLater.calls += 1
            if BreaksLater.calls > 1:
                raise UsersOwnError("second evaluation")
            return super().result()

    converter.metric = BreaksLater()
    with pytest.raises(UsersOwnError):
        converter()
    import optuna

    url = f"sqlite:///{tmp_path / 'neural_mp_workspace' / 'history.db'}"
    (study,) = (
        optuna.load_study(study_name=n, storage=url) for n in optuna.get_all_study_names(url)
    )
    assert study.trials[0].user_attrs["error"] == "UsersOwnError: second evaluation"


@pytest.fixture(scope="module")
def saved(net, tmp_path_factory):
    """The folder of a saved FP32 model."""
    folder = tmp_path_factory.mktemp("saved")
    MixedPrecision(model=net, precisions="fp32", workspace=folder / "runs")().save(folder / "model")
    return folder / "model"


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda folder: (folder / "model.pt2").unlink(), "lacks its file 'model.pt2'"),
        (
            lambda folder: (folder / "model.pt2").write_bytes(b"PK junk"),
            "'model.pt2'.*changed or damaged",
        ),
        (lambda folder: (folder / "neural_mp.json").unlink(), "not a saved model"),
        (lambda folder: (folder / "neural_mp.json").write_text("{"), "damaged"),
        (
            lambda folder: (folder / "neural_mp.json").write_text('{"neural_mp": 99}'),
            "format must be 2, got 99",
        ),
    ],
)
def test_a_damaged_saved_model_is_refused(saved, tmp_path, damage, message):
    shutil.copytree(saved, tmp_path / "saved")
    damage(tmp_path / "saved")
    with pytest.raises(ModelLoadError, match=message):
        neural_mp.load(tmp_path / "saved")


def test_a_model_file_that_would_run_code_is_refused(tmp_path):
    """An archive of torch.export's form in which a tensor is replaced by a pickle that acts."""
    import pickle
    import zipfile

    class Acts:
        def __reduce__(self):
            return (open, (str(tmp_path / "was_run"), "w"))

    program = torch.export.export(nn.Linear(3, 3), (torch.zeros(2, 3),))
    torch.export.save(program, tmp_path / "good.pt2")
    with (
        zipfile.ZipFile(tmp_path / "good.pt2") as good,
        zipfile.ZipFile(tmp_path / "evil.pt2", "w") as evil,
    ):
        for name in good.namelist():
            data = good.read(name)
            if "sample_inputs" in name:
                data = pickle.dumps(Acts())
            evil.writestr(name, data)
    converter = MixedPrecision()
    converter.model = str(tmp_path / "evil.pt2")
    converter.precisions = "fp32"
    with pytest.raises(ModelLoadError, match=r"evil\.pt2.*could run code"):
        converter()
    assert not (tmp_path / "was_run").exists()

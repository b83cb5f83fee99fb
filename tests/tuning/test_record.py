"""What a run keeps of itself reads back later, without the model."""

import json
import math

import pytest
import torch
from optuna.storages import RDBStorage
from quick_runs import make_quick
from torch.nn import functional

from neural_mp import ExitPolicy, MixedPrecision, load
from neural_mp.core.op_timings import FULL_PROFILE, SHOWN_PROFILE
from neural_mp.core.precision import Precision
from neural_mp.errors import HistoryError, NeuralMPError
from neural_mp.runs.history import get_storage_url, read_record
from neural_mp.runs.record_schema import record_from_dict, record_to_dict
from neural_mp.runs.report import Report
from neural_mp.testing import Accuracy
from neural_mp.tuning import recording


def converter_in(workspace, net, digits):
    return MixedPrecision(
        model=net,
        precisions="int8",
        metric=Accuracy(),
        eval_dataloader=digits[1].loader(64),
        calib_dataloader=digits[0].loader(100),
        accuracy_criterion=0.02,
        random_seed=3,
        workspace=workspace,
    )


@pytest.fixture(scope="module")
def finished(net, digits, tmp_path_factory):
    """A workspace, and the result of the run in it; nothing changes them."""
    workspace = tmp_path_factory.mktemp("finished")
    with pytest.MonkeyPatch.context() as patch:
        make_quick(patch)
        return workspace, converter_in(workspace, net, digits)()


@pytest.fixture
def result(finished):
    return finished[1]


@pytest.fixture
def converter(net, digits, tmp_path):
    return converter_in(tmp_path / "workspace", net, digits)


@pytest.fixture
def stored(converter):
    """What the workspace alone says."""
    return lambda number=None: read_record(get_storage_url(converter.workspace), number)


def test_the_record_of_a_workspace_is_that_of_the_result(finished):
    workspace, result = finished
    for number in (None, 1):
        record = read_record(get_storage_url(workspace), number)
        assert record_to_dict(record) == record_to_dict(result.record)


@pytest.mark.slow
def test_a_record_survives_json_and_a_saved_folder(result, tmp_path):
    document = record_to_dict(result.record)
    assert record_to_dict(record_from_dict(json.loads(json.dumps(document)))) == document
    result.save(tmp_path / "saved")
    assert record_to_dict(load(tmp_path / "saved").record) == document


@pytest.mark.slow
def test_a_saved_result_has_the_page_of_its_run_and_can_draw_it_again(result, net, tmp_path):
    result.save(tmp_path / "saved")
    page = (tmp_path / "saved" / "report.html").read_text("utf-8")
    assert page.startswith("<!doctype html>")
    assert type(net).__name__ in page
    load(tmp_path / "saved").report.save_html(tmp_path / "again" / "page.html")
    assert (tmp_path / "again" / "page.html").read_text("utf-8") == page
    with pytest.raises(NeuralMPError, match="no run record"):
        Report().save_html(tmp_path / "none.html")


def test_it_says_what_the_run_was(result, net):
    setup = result.record.setup
    assert setup.model == type(net).__name__
    assert setup.framework == "pytorch"
    # Metadata may lack the build (`+cpu`).
    assert torch.__version__.startswith(setup.versions["torch"])
    assert (setup.settings["random_seed"].value, setup.settings["random_seed"].origin) == (
        "3",
        "Python",
    )
    assert setup.settings["strategy"].origin == "default"
    assert {"stem", "head"} <= set(setup.tunable_ops)
    assert "no integer kernel" in setup.capabilities["mean"].reasons[Precision.INT8]
    assert setup.machine.supports["fp32"] == ("natively", "always")


@pytest.mark.slow
def test_options_of_a_file_are_told_from_those_of_python(net, digits, accuracy, tmp_path):
    converter = MixedPrecision(
        {"tuning": {"random_seed": 5, "strategy": {"name": "basic"}}},
        model=net,
        precisions="int8",
        metric=accuracy,
        eval_dataloader=digits[1].loader(64),
        workspace=tmp_path,
    )
    settings = converter().record.setup.settings
    assert settings["random_seed"].origin == settings["strategy"].origin == "the file"
    assert settings["precisions"].origin == "Python"


def test_multiply_adds_are_those_of_the_arithmetic(result, net):
    """Counted independently, by the shapes that torch's own hooks see."""
    reported = result.record.multiply_adds
    counted = {}

    def count(name):
        def hook(module, inputs, output):
            counted[name] = output.numel() * math.prod(module.weight.shape[1:])

        return hook

    handles = [
        module.register_forward_hook(count(name))
        for name, module in net.named_modules()
        if isinstance(module, torch.nn.Conv2d | torch.nn.Linear)
    ]
    net(torch.zeros(64, 1, 8, 8))
    for handle in handles:
        handle.remove()
    assert reported == counted


def test_it_says_where_the_result_converts_and_how_long_its_ops_take(result):
    ending = result.record.ending
    counts = result.report.conversions
    kinds = [conversion.kind for conversion in ending.conversions]
    assert kinds.count("quantize") == counts.quantize
    assert kinds.count("dequantize") == counts.dequantize
    assert all(conversion.readers for conversion in ending.conversions)
    assert {"stem", "head"} <= ending.baseline_times.keys() & ending.result_times.keys()
    assert ending.chosen in {trial.number for trial in ending.finalists}
    best = next(trial for trial in ending.finalists if trial.number == ending.chosen)
    assert best.objectives["performance"] == result.report.latency
    assert ending.predicted.keys() == {trial.number for trial in result.trials}


@pytest.mark.slow
def test_a_run_that_did_not_end_has_its_trials_and_no_ending(converter, stored, monkeypatch):
    from neural_mp.tuning import tuner

    def killed(*arguments):
        raise SystemExit

    monkeypatch.setattr(tuner, "select_plan", killed)
    with pytest.raises(SystemExit):
        converter()
    record = stored()
    assert record.ending is None
    assert record.trials  # their number depends on measured times
    baseline = record.baseline["accuracy"]
    assert baseline > 0.9
    assert record.baseline["target"] == pytest.approx(0.98 * baseline)
    assert record.observations.nsr


def test_a_run_whose_accuracy_nobody_checks_has_a_record_too(converter):
    converter.exit_policy = ExitPolicy(performance_only=True)
    record = converter().record
    assert record.ending.met is None
    assert record.trials == ()
    assert record.multiply_adds["stem"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("since", ["the end", "the first trial", "the baseline"])
def test_a_disk_that_is_full_does_not_cost_the_result(converter, stored, monkeypatch, since):
    converter.objective = "modelsize"  # figures of another run are others
    expected, writing, full = converter(), RDBStorage.set_study_user_attr, []

    def write(storage, run, name, value):
        full.append(name == {"the end": "ending", "the baseline": "baseline"}.get(since) and value)
        if any(full):
            raise OSError("No space left on device")
        writing(storage, run, name, value)

    def create(*_):
        raise OSError("No space left on device")

    monkeypatch.setattr(RDBStorage, "set_study_user_attr", write)
    if since == "the first trial":
        monkeypatch.setattr(RDBStorage, "create_new_trial", create)
    result = converter()
    assert result.met
    assert result.plan == expected.plan
    assert result.record.ending.met
    assert [trial.plan for trial in result.trials] == [trial.plan for trial in expected.trials]
    assert len(result.record.trials) == len(result.trials)
    assert result.observations.nsr
    warnings = [warning for warning in result.report.warnings if "cannot be written to" in warning]
    assert bool(warnings) == (since != "the end")
    monkeypatch.undo()
    assert len(stored().trials) == (len(result.trials) if since == "the end" else 0)


def test_there_is_no_record_of_a_run_that_is_not_there(finished, tmp_path):
    with pytest.raises(HistoryError, match="there is no run in"):
        read_record(get_storage_url(tmp_path / "elsewhere"))
    with pytest.raises(HistoryError, match="there is no run 7 in .*; the latest are 1"):
        read_record(get_storage_url(finished[0]), 7)


def test_a_damaged_record_is_one_clear_error(result):
    document = record_to_dict(result.record)
    document["setup"]["ops"][0]["runs in"] = ["int7"]
    message = (
        r"the record of a run: setup\.ops\.0\.runs in\.0: expected one of int2, int3, int4, int8"
    )
    with pytest.raises(HistoryError, match=message):
        record_from_dict(document)


@pytest.mark.slow
def test_barred_products_are_counted_by_reason(net, digits, tmp_path):
    class Oddly(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.net = net

        def forward(self, x):
            scores = self.net(x)
            return functional.relu(scores @ scores.T)

    result = MixedPrecision(
        model=Oddly().eval(),
        precisions="int8",
        exclude=["net.head"],
        calib_dataloader=digits[0].loader(100),
        exit_policy=ExitPolicy(performance_only=True),
        workspace=tmp_path,
    )()
    barred = {reason.reason: dict(reason.types) for reason in result.report.ineligible}
    assert barred["excluded by your constraints"] == {"linear": 1}
    assert {"matmul": 1} in barred.values() or {"mm": 1} in barred.values()


@pytest.mark.parametrize(
    ("seconds", "batch_size", "expected"),
    [
        (0.1, 32, (FULL_PROFILE, None)),
        (0.2, 32, (SHOWN_PROFILE, None)),
        (1.0, 32, (SHOWN_PROFILE, 1)),
        (1.0, 1, (SHOWN_PROFILE, None)),
    ],
)
def test_ops_that_take_long_are_timed_in_few_runs_or_on_one_sample(seconds, batch_size, expected):
    assert recording._choose_sampling(seconds, 1.0, batch_size) == expected


@pytest.mark.slow
def test_without_time_for_a_batch_the_ops_of_both_models_are_timed_on_one_sample(
    net, digits, tmp_path, monkeypatch, quick_runs
):
    monkeypatch.setattr(
        recording, "_choose_sampling", lambda seconds, allowed, batch_size: (SHOWN_PROFILE, 1)
    )
    ending = converter_in(tmp_path, net, digits)().record.ending
    assert ending.timed_samples == 1
    assert ending.baseline_times
    assert set(ending.result_times) >= set(ending.plan)

"""Nothing that was computed is lost, however a run ends."""

import json
import signal

import optuna
import pytest
import torch
from onnx_nets import convolutions
from tuning_script import killed_and_resumed, write_inputs

from neural_mp import AccuracyCriterion, MixedPrecision, PrecisionPlan
from neural_mp.core.precision import FP32
from neural_mp.core.trial import Outcome, Trial
from neural_mp.errors import HistoryError
from neural_mp.metrics import build_metric
from neural_mp.runs.history import History
from neural_mp.runs.registry import in_detail, list_differences

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def onnx_net(hostile_net):
    return convolutions(hostile_net)


@pytest.mark.parametrize(("strategy", "workers"), [("basic", "1"), ("exhaustive", "2")])
def test_after_kill_9_a_resumed_run_repeats_no_finished_trial(
    onnx_net, digits, tmp_path, strategy, workers
):
    write_inputs(tmp_path, onnx_net, digits[1])
    # The baseline and three trials have ended, and the next ones go on.
    resumed = killed_and_resumed(tmp_path, strategy, workers)
    if strategy == "basic":
        assert resumed.outcome["met"]
        assert resumed.outcome["int8"] >= 7
    assert resumed.outcome["plans"] == resumed.outcome["trials"]
    assert resumed.repeated == 0
    assert not resumed.left


@pytest.fixture
def converter(net, digits, accuracy):
    tuner = MixedPrecision()
    tuner.model = net
    tuner.precisions = "int8"
    tuner.objective = "modelsize"  # latencies this short are the machine's mood
    tuner.metric = accuracy
    tuner.eval_dataloader = digits[1].loader()
    return tuner


@pytest.mark.parametrize("end", ["abandoned", "killed"])
def test_what_is_known_of_a_trial_that_did_not_end_is_kept(tmp_path, end):
    about, url = {"model": "net"}, f"sqlite:///{tmp_path / 'history.db'}"
    history = History(url, about, higher_is_better=True)
    plans = [PrecisionPlan({"a": FP32}), PrecisionPlan({"b": FP32})]
    numbers = [history.begin_trial(), history.begin_trial()]
    history.keep_trial(Trial(plans[0], Outcome.MET, 0.9, number=numbers[0]))
    if end == "abandoned":
        for number, plan in zip(numbers, plans, strict=True):
            history.abandon_trial(number, plan, "Ctrl-C")
    history.close()
    (trial,) = History(url, about, higher_is_better=True, resume=True).read_trials()
    assert (trial.plan, trial.accuracy) == (plans[0], 0.9)
    (study,) = optuna.get_all_study_summaries(url)
    loaded = optuna.load_study(study_name=study.study_name, storage=url)
    assert [entry.state.name for entry in loaded.trials] == ["COMPLETE", "FAIL"]


def test_resuming_a_finished_run_evaluates_nothing(converter, accuracy):
    first = converter()
    spent = accuracy.evaluations
    converter.resume = True
    again = converter()
    assert accuracy.evaluations == spent
    assert again.plan == first.plan
    assert again.report.accuracy == first.report.accuracy
    assert [trial.plan for trial in again.trials] == [trial.plan for trial in first.trials]


def test_without_resume_a_new_run_begins(converter, accuracy):
    converter()
    spent = accuracy.evaluations
    converter()
    assert accuracy.evaluations == 2 * spent


@pytest.mark.parametrize("changed", ["model", "data", "criterion"])
def test_resume_refuses_if_something_changed(converter, deep, digits, changed):
    converter()
    if changed == "model":
        converter.model = deep
    elif changed == "data":
        converter.eval_dataloader = digits[0].loader()
    else:
        converter.accuracy_criterion = AccuracyCriterion(0.02)
    converter.resume = True
    with pytest.raises(HistoryError, match=f"cannot resume: the {changed} of this run differ"):
        converter()


def test_resume_names_trials_that_were_deleted(tmp_path):
    url, about = f"sqlite:///{tmp_path / 'history.db'}", {"model": "net"}
    History(url, about, higher_is_better=True).close()
    (study,) = optuna.get_all_study_summaries(url)
    optuna.delete_study(study_name=study.study_name, storage=url)
    with pytest.raises(HistoryError, match="cannot resume: the trials of .* were deleted"):
        History(url, about, higher_is_better=True, resume=True)


def test_a_resumed_run_leaves_the_trials_that_are_out_of_bounds_now(converter, bf16_machine):
    converter.hardware = bf16_machine
    first = converter()
    assert any("int8" in trial.plan.counts() for trial in first.trials)
    converter.precisions, converter.resume = "bf16", True
    resumed = converter()
    assert resumed.met
    assert resumed.trials
    assert not any("int8" in trial.plan.counts() for trial in resumed.trials)
    assert set(resumed.plan.counts()) <= {"bf16", "fp32"}


def test_a_shuffled_loader_can_be_resumed(converter, digits):
    from torch.utils.data import DataLoader, TensorDataset

    data = TensorDataset(torch.from_numpy(digits[1].images), torch.from_numpy(digits[1].labels))
    converter.eval_dataloader = DataLoader(data, batch_size=100, shuffle=True)
    converter()
    converter.resume = True
    assert converter().met


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_returns_the_best_so_far_and_keeps_the_trials(
    converter, hostile_net, accuracy, number
):
    """SIGTERM does so in a program that handles it as Python handles Ctrl-C."""
    previous = signal.signal(number, signal.default_int_handler)
    converter.model = hostile_net
    converter.strategy = "basic"
    stop_at = 3
    update = accuracy.update

    def interrupted(preds, labels):
        if accuracy.evaluations == stop_at:
            signal.raise_signal(number)
        update(preds, labels)

    accuracy.update = interrupted
    result = converter()
    signal.signal(number, previous)
    assert result.met is False
    assert len(result.trials) == stop_at - 1
    assert any("interrupted" in warning for warning in result.report.warnings)

    accuracy.update = update
    converter.resume = True
    resumed = converter()
    assert resumed.met
    assert accuracy.evaluations == 1 + len(resumed.trials)  # the baseline, and each trial once


def test_any_optuna_storage_can_keep_the_trials(converter, tmp_path):
    converter.storage = f"sqlite:///{tmp_path / 'elsewhere.db'}"
    result = converter()
    (study,) = optuna.get_all_study_summaries(converter.storage)
    assert study.n_trials == len(result.trials)
    assert not (tmp_path / "neural_mp_workspace").exists()


def fixed(value):
    return lambda model: value


@pytest.mark.parametrize(
    ("before", "now", "words"),
    [
        ({"metric": ("topk", 1)}, {"metric": ("topk", 5)}, r"metric \(k = 5, before 1\)"),
        ({"eval_func": lambda m: 0.5}, {"eval_func": lambda m: 0.7}, "code of the metric"),
        (
            {"eval_func": fixed(0.5)},
            {"eval_func": fixed(0.7)},
            r"metric \(value = 0.7, before 0.5\)",
        ),
        (
            {"metric": "accuracy", "postprocess": lambda pair: pair},
            {"metric": "accuracy", "postprocess": lambda pair: (pair[0] + 1, pair[1])},
            "code of the postprocess",
        ),
    ],
)
def test_resume_refuses_what_measures_something_else(converter, before, now, words):
    for name, value in {"metric": None, **before}.items():
        setattr(converter, name, value)
    converter()
    converter.resume = True
    assert converter().trials
    for name, value in now.items():
        setattr(converter, name, value)
    with pytest.raises(HistoryError, match=f"cannot resume: the {words} of this run differ"):
        converter()


def test_runs_of_versions_that_did_not_tell_what_a_metric_does_are_resumed(tmp_path):
    url, about = f"sqlite:///{tmp_path / 'history.db'}", {"model": "net", "metric": "topk"}
    History(url, about, higher_is_better=True).close()
    now = {**about, **in_detail(metric=lambda model: 0.5)}
    History(url, now, higher_is_better=True, resume=True).close()
    with pytest.raises(HistoryError, match="the metric of this run"):
        History(url, {**now, "metric": "accuracy"}, higher_is_better=True, resume=True)


def test_under_another_python_bytecode_is_not_compared():
    def told(value, python):
        return {
            key: json.dumps({**json.loads(text), "python": python})
            for key, text in in_detail(metric=value).items()
        }

    half, changed = lambda model: 0.5, lambda model: 0.7
    assert list_differences(told(half, "3.11"), told(changed, "3.11"))
    assert not list_differences(told(half, "3.11"), told(changed, "3.12"))
    top1, five = build_metric("topk", 1), build_metric("topk", 5)
    assert list_differences(told(top1, "3.11"), told(five, "3.12")) == ["metric (k = 5, before 1)"]


def test_fingerprints_computed_in_another_way_are_not_compared(monkeypatch):
    previous = in_detail(metric=lambda model: 0.5), in_detail(metric=build_metric("topk", 1))
    monkeypatch.setattr("neural_mp.runs.registry.FINGERPRINT_VERSION", 3)
    assert not list_differences(previous[0], in_detail(metric=lambda model: 0.7))
    assert list_differences(previous[1], in_detail(metric=build_metric("topk", 5)))

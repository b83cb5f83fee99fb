"""The loop's own promises: limits, failures, repeats."""

import numpy as np
import pytest
from still_clock import StillClock

from neural_mp import AccuracyCriterion, ExitPolicy, MixedPrecision
from neural_mp.adaptors.pytorch.adaptor import PyTorchAdaptor
from neural_mp.core import criterion
from neural_mp.core.criterion import Deadline
from neural_mp.core.trial import Outcome
from neural_mp.errors import MetricError, TuningError
from neural_mp.metrics import build_metric
from neural_mp.tuning import trial_runner
from neural_mp.tuning.evaluation.batches import Batches
from neural_mp.tuning.evaluation.evaluator import Evaluator
from neural_mp.tuning.measurement import probe
from neural_mp.tuning.measurement.objectives import Measurement


@pytest.fixture
def converter(hostile_net, digits, accuracy):
    tuner = MixedPrecision()
    tuner.model = hostile_net
    tuner.precisions = "int8"
    tuner.strategy = "basic"  # whose trials on this net are many
    tuner.objective = "modelsize"  # latencies this short are the machine's mood
    tuner.metric = accuracy
    tuner.eval_dataloader = digits[1].loader()
    return tuner


def test_max_trials_is_kept_and_the_best_so_far_returned(converter, accuracy):
    converter.exit_policy = ExitPolicy(max_trials=2)
    result = converter()
    assert len(result.trials) == 2
    assert accuracy.evaluations == 3
    assert result.met is False
    assert any("max_trials = 2" in warning for warning in result.report.warnings)


@pytest.mark.slow
def test_the_timeout_is_kept_to_within_one_batch(converter, digits, monkeypatch):
    clock = StillClock()
    clock.keep_time_of(monkeypatch, criterion, probe, trial_runner)

    class Slow(type(converter.metric)):
        begun = ()

        def update(self, preds, labels):
            self.begun = (*self.begun, clock.now)
            clock.sleep(0.05)
            super().update(preds, labels)

    converter.metric = Slow()
    converter.eval_dataloader = digits[1].loader(50)
    converter.exit_policy = ExitPolicy(timeout=3)  # an evaluation takes 0.6 s
    result = converter()
    first, *later = converter.metric.begun
    assert sum(begun > first + 3 for begun in later) <= 1
    assert len(later) > 12
    assert any("time limit" in warning for warning in result.report.warnings)
    assert result(digits[1].images[:2]).shape == (2, 10)


def test_a_timeout_before_the_search_still_returns_a_model(converter, digits):
    converter.exit_policy = ExitPolicy(timeout=1e-6)
    result = converter()
    assert result.met is False
    assert set(result.plan.counts()) == {"fp32"}
    assert result(digits[1].images[:2]).shape == (2, 10)


def test_performance_only_evaluates_nothing(converter, accuracy):
    converter.exit_policy = ExitPolicy(performance_only=True)
    result = converter()
    assert accuracy.evaluations == 0
    assert set(result.plan.counts()) == {"int8"}
    assert result.met is None


@pytest.mark.slow
def test_a_plan_that_fails_is_recorded_and_the_search_goes_on(converter, monkeypatch):
    convert = PyTorchAdaptor.convert
    calls = []

    def failing_first(self, *arguments):
        calls.append(arguments)
        if len(calls) == 1:
            raise RuntimeError("the kernel refuses")
        return convert(self, *arguments)

    monkeypatch.setattr(PyTorchAdaptor, "convert", failing_first)
    result = converter()
    assert result.trials[0].outcome is Outcome.FAILED
    assert result.trials[0].error == "RuntimeError: the kernel refuses"
    assert result.met


def test_three_plans_failing_alike_end_the_run_with_their_error(converter, monkeypatch):
    def failing(self, *arguments):
        raise RuntimeError("the kernel refuses")

    monkeypatch.setattr(PyTorchAdaptor, "convert", failing)
    with pytest.raises(TuningError, match="3 different plans.*the kernel refuses"):
        converter()


@pytest.mark.slow
def test_three_failures_alike_do_not_lose_what_was_met_before(converter, deep, monkeypatch):
    """All-INT8 and the fallback by type succeed; what would refine them fails."""
    convert = PyTorchAdaptor.convert

    def failing_with_many_int8_ops(self, model, plan, *arguments):
        int8 = plan.plan.counts().get("int8", 0)
        if 1 < int8 < 8:
            raise RuntimeError("the kernel refuses")
        return convert(self, model, plan, *arguments)

    monkeypatch.setattr(PyTorchAdaptor, "convert", failing_with_many_int8_ops)
    result = converter()
    assert result.met
    assert any("3 different plans failed" in warning for warning in result.report.warnings)


@pytest.mark.slow
def test_nan_from_a_converted_model_is_a_miss_that_says_where_it_began(converter, monkeypatch):
    convert = PyTorchAdaptor.convert

    def poisoned(self, *arguments):
        converted = convert(self, *arguments)
        for name, buffer in converted.runnable_graph.named_buffers():
            if name.startswith("linear_weight_scales"):
                buffer[:] = np.nan
        return converted

    monkeypatch.setattr(PyTorchAdaptor, "convert", poisoned)
    converter.exit_policy = ExitPolicy(max_trials=1)
    result = converter()
    (trial,) = result.trials
    assert trial.outcome is Outcome.MISSED
    assert "first occurs at op '18'" in trial.error


@pytest.mark.slow
def test_a_baseline_of_zero_is_handled_and_said(converter):
    class Zero(type(converter.metric)):
        def result(self):
            super().result()
            return 0.0

    converter.metric = Zero()
    with pytest.raises(MetricError, match=r"must be at least 0\.01, got 0"):
        converter()
    converter.accuracy_criterion = AccuracyCriterion(any_baseline=True)
    result = converter()
    assert result.met
    assert any("FP32 accuracy is 0" in warning for warning in result.report.warnings)


@pytest.mark.slow
def test_trials_are_told_to_the_listener(converter):
    from neural_mp.tuning.listener import Listener

    class Notes(Listener):
        def __init__(self):
            self.phases, self.trials, self.steps, self.closed = [], [], 0, False

        def phase(self, name, total=None):
            self.phases.append(name)

        def step(self):
            self.steps += 1

        def trial(self, trial, speedup):
            self.trials.append((trial, speedup))

        def close(self):
            self.closed = True

    notes = Notes()
    converter.listener = notes
    result = converter()
    assert [trial for trial, _ in notes.trials] == list(result.trials)
    assert all((speedup is not None) == trial.met for trial, speedup in notes.trials)
    assert {"Evaluating FP32", "Calibrating", "Trial 1"} <= set(notes.phases)
    assert notes.steps > len(result.trials)
    assert notes.closed


@pytest.mark.slow
@pytest.mark.parametrize("steps", [0, 25])
def test_what_a_listener_raises_at_a_batch_comes_through(converter, steps):
    from neural_mp.tuning.listener import Listener

    class Fails(Listener):
        left = steps

        def step(self):
            self.left -= 1
            if self.left < 0:
                raise ZeroDivisionError("mine")

    converter.listener = Fails()
    with pytest.raises(ZeroDivisionError, match="^mine$"):
        converter()


def at_speed(monkeypatch, share, at_most=None):
    """As if every converted model took this share of FP32's time, or at most that one."""

    def measured(self, baseline, candidate):
        spread = {} if at_most is None else {"relative_latency_high": at_most}
        return {"relative_latency": share, "performance": share, "modelsize": 1.0, **spread}

    monkeypatch.setattr(Measurement, "__call__", measured)


def test_what_meets_the_target_and_is_slower_than_fp32_is_no_success(converter, net, monkeypatch):
    at_speed(monkeypatch, 1.25)
    converter.model, converter.objective = net, "performance"
    result = converter()
    assert {trial.outcome for trial in result.trials} == {Outcome.SLOW}
    assert result.met is False
    assert set(result.plan.counts()) == {"fp32"}
    (warning,) = [w for w in result.report.warnings if "as fast as FP32" in w]
    assert "at 0.80× (0.80 to 0.80) the speed of FP32" in warning


@pytest.mark.parametrize("checked", [True, False])
def test_a_slow_result_whose_accuracy_nobody_checked_is_not_said_as_one_that_was_checked(
    converter, net, monkeypatch, checked
):
    monkeypatch.setattr(
        Measurement,
        "measure_rounds",
        lambda self, models, **_: [[1.4 if i else 1.0] * 9 for i, _ in enumerate(models)],
    )
    converter.model = net
    if not checked:
        converter.metric = None
    (warning,) = [w for w in converter().report.warnings if "runs at 0.71×" in w]
    assert ("its accuracy was not checked" in warning) is not checked
    assert ("Set a metric and evaluation data" in warning) is not checked


@pytest.mark.slow
def test_a_resumed_run_judges_speed_by_what_is_wanted_now(converter, net, accuracy, monkeypatch):
    at_speed(monkeypatch, 1.25)
    converter.model, converter.objective = net, "performance"
    slow = converter()
    evaluated = accuracy.evaluations
    converter.objective, converter.resume = "modelsize", True
    resumed = converter()
    assert slow.met is False
    assert resumed.met
    assert accuracy.evaluations == evaluated


@pytest.mark.slow
def test_a_precision_that_is_forced_may_be_slow(converter, net, monkeypatch, bf16_machine):
    at_speed(monkeypatch, 1.25)
    converter.model, converter.precisions = net, "bf16"
    converter.objective = "performance"
    converter.hardware = bf16_machine
    result = converter()
    assert result.met
    assert "bf16" in result.plan.counts()


def test_where_size_is_wanted_speed_does_not_matter(converter, net, monkeypatch):
    seconds = {True: [1.0] * 3, False: [1.25] * 3}
    monkeypatch.setattr(
        Measurement,
        "measure_rounds",
        lambda self, models, **_: [seconds[model is models[0]] for model in models],
    )
    converter.model = net
    result = converter()
    assert result.met
    assert result.report.speedup == pytest.approx(0.8)


@pytest.mark.parametrize(
    ("at_most", "last", "met", "reported"),
    [
        (1.1, 0.8, True, 1.25),  # in doubt, then proven by the last measurement
        (1.1, 1.2, False, 1.0),
        (0.6, 0.8, True, 2.0),  # beyond doubt, and not measured again
    ],
)
def test_a_plan_whose_gain_is_in_doubt_wins_only_by_a_further_measurement(
    converter, net, monkeypatch, at_most, last, met, reported
):
    at_speed(monkeypatch, 0.5, at_most)
    monkeypatch.setattr(
        Measurement,
        "measure_rounds",
        lambda self, models, **_: [[last if i else 1.0] * 9 for i, _ in enumerate(models)],
    )
    converter.model, converter.objective = net, "performance"
    result = converter()
    assert result.met is met
    assert result.report.speedup == pytest.approx(reported)


@pytest.mark.slow
def test_what_a_plan_must_gain_is_what_the_user_says(converter, net, monkeypatch):
    at_speed(monkeypatch, 0.8)
    converter.model, converter.objective = net, "performance"
    assert converter().met
    converter.min_speedup = 1.3
    assert not converter().met


@pytest.mark.slow
def test_a_lost_evaluation_is_stopped_and_never_counts_as_one(converter, digits):
    converter.metric = build_metric("accuracy")
    converter.eval_dataloader = digits[1].loader(20)
    stopped = converter()
    pruned = [t for t in stopped.trials if t.outcome is Outcome.PRUNED]
    assert pruned
    assert all(trial.loss > 0.01 for trial in pruned)
    assert stopped.report.evaluations == 1 + len(stopped.trials) - len(pruned)

    converter.early_stopping = False
    whole = converter()
    assert whole.report.evaluations == 1 + len(whole.trials)
    lost = {trial.plan: trial.accuracy for trial in whole.trials}
    target = whole.report.target
    assert all(lost[trial.plan] < target for trial in pruned if trial.plan in lost)
    assert stopped.met
    assert whole.met


@pytest.mark.slow
def test_the_users_own_metric_is_asked_once_a_pass_unless_it_says_otherwise(converter, accuracy):
    converter.exit_policy = ExitPolicy(max_trials=2)
    converter()
    assert accuracy.evaluations == 3
    accuracy.running = True
    converter()
    assert accuracy.evaluations > 6


@pytest.mark.parametrize("counted", [True, False])
def test_looks_on_the_way_end_with_the_accuracy_on_all_of_the_data(counted):
    """75 batches, of which every second is looked at; or any number, as a generator function."""

    def echo(inputs):
        return inputs

    scores = np.eye(3, dtype=np.float32)[np.arange(150) % 3]
    labels = np.arange(150) % 2
    batches = [(scores[i : i + 2], labels[i : i + 2]) for i in range(0, 150, 2)]
    data = Batches(batches if counted else (lambda: iter(batches)), "eval_dataloader")
    evaluator = Evaluator(data, [(build_metric("accuracy"), 1.0)])
    accuracy = evaluator(echo, Deadline())
    assert accuracy == pytest.approx((scores.argmax(1) == labels).mean())
    assert evaluator.running.values[-1] == accuracy
    assert evaluator.running.samples[-1] == 150
    assert len(evaluator.running.values) <= 39

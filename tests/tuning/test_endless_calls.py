"""Runs whose model, data, metric or evaluation function never returns end by their time limit."""

from __future__ import annotations

import _thread
import subprocess
import sys
import time

import numpy as np
import onnx
import pytest
from endless_nets import WEIGHTS, endless_onnx, run_in_thread
from onnx_nets import graph, op
from still_clock import StillClock

from neural_mp import ExitPolicy, MixedPrecision
from neural_mp.core import criterion
from neural_mp.core.criterion import UnreturnedCallError
from neural_mp.core.trial import Outcome
from neural_mp.tuning import call_limit, trial_runner, tuner
from neural_mp.tuning.listener import Listener
from neural_mp.tuning.measurement import probe
from neural_mp.util.system.watched_thread import count_lost_threads
from neural_mp.util.user_calls import call_user

#: Far more than the limits here: a run that waited for what hangs would not end as it should.
HANGS_SECONDS = 600
LOADING, FP32, CALIBRATION, TRIAL = "Loading", "Evaluating", "Calibrating", "Trial"


class Clock(StillClock):
    """A clock on which seconds pass while something hangs: half of one from look to look.

    Attributes:
        is_real: whether seconds pass as they do, for a model that hangs by itself.
    """

    hangs = is_real = False

    def monotonic(self):
        self.now += 0.5 * self.hangs
        return time.monotonic() if self.is_real else super().monotonic()

    perf_counter = monotonic

    def hang(self):
        self.hangs = True
        time.sleep(HANGS_SECONDS)


class Phases(Listener):
    """The phase of a run, and code of the user that hangs in one of them."""

    def __init__(self, clock):
        self.current = self.hanging = ""
        self.clock = clock

    def phase(self, name, total=None):
        self.current = name

    def hang_in_phase(self):
        if self.hanging and self.current.startswith(self.hanging):
            self.clock.hang()


class Loader:
    def __init__(self, data, phases):
        self.data, self.phases = data, phases

    def __iter__(self):
        for batch in self.data:
            self.phases.hang_in_phase()
            yield batch


@pytest.fixture
def data():
    draw = np.random.default_rng(1)
    return [
        (draw.normal(size=(16, 8)).astype(np.float32), draw.integers(0, 4, 16)) for _ in range(3)
    ]


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    clock.keep_time_of(monkeypatch, criterion, call_limit, trial_runner, probe)
    return clock


@pytest.fixture
def phases(clock):
    return Phases(clock)


@pytest.fixture
def converter(data, phases, monkeypatch):
    monkeypatch.setattr(call_limit, "MIN_GRACE_SECONDS", 0.5)
    monkeypatch.setattr(call_limit, "_LOOK_SECONDS", 0.1)
    monkeypatch.setattr(call_limit, "_UNWIND_SECONDS", 0.5)
    nodes = [op("MatMul", "x one", "a"), op("Relu", "a", "b"), op("MatMul", "b two", "y")]
    tuning = MixedPrecision(precisions="int8", objective="modelsize", strategy="exhaustive")
    tuning.model = graph(nodes, {"x": ["batch", 8]}, ["y"], WEIGHTS)
    tuning.eval_dataloader, tuning.metric, tuning.listener = data, "accuracy", phases
    tuning.exit_policy = ExitPolicy(timeout=1.5)
    return tuning


def score_alike(model):
    """Every model has the same accuracy: each plan meets the target."""
    return 0.9


def run(converter, by_main=True):
    """The result, or the error, of a run in the main thread or another one."""
    ended = []
    converter.listener.clock.hangs = False

    def run_once():
        try:
            ended.append(converter())
        except UnreturnedCallError as error:
            ended.append(error)

    run_in_thread(run_once, by_main)
    return ended[0]


def warnings_of(result):
    return " ".join(result.report.warnings)


@pytest.mark.parametrize("by_main", [True, False])
@pytest.mark.parametrize("phase", [LOADING, FP32])
def test_a_loader_that_hangs_before_fp32_is_evaluated_is_one_error(
    converter, data, phases, phase, by_main
):
    converter.eval_dataloader, phases.hanging = Loader(data, phases), phase
    error = run(converter, by_main)
    assert isinstance(error, UnreturnedCallError)
    assert str(error).startswith("eval_dataloader (at test_endless_calls.py, line ")
    assert "within the time limit of 1.5 s (exit_policy.timeout) and 0.5 s more" in str(error)


@pytest.mark.parametrize("phase", [CALIBRATION, TRIAL])
def test_a_loader_that_hangs_after_that_leaves_fp32(converter, data, phases, phase):
    converter.eval_dataloader, phases.hanging = Loader(data, phases), phase
    result = run(converter)
    assert not result.met
    assert result.report.baseline_accuracy is not None
    assert "eval_dataloader (at test_endless_calls.py, line " in warnings_of(result)
    assert result(data[0][0]).shape == (16, 4)


@pytest.mark.parametrize("phase", [FP32, TRIAL])
def test_a_metric_that_hangs_ends_like_a_loader(converter, phases, phase):
    def metric(preds, labels):
        phases.hang_in_phase()
        return np.mean(preds.argmax(1) == labels)

    converter.metric, phases.hanging = metric, phase
    result = run(converter)
    text = str(result) if phase == FP32 else warnings_of(result)
    assert "(at test_endless_calls.py, line " in text
    assert "did not return within the time limit of 1.5 s" in text
    assert isinstance(result, UnreturnedCallError) is (phase == FP32)


@pytest.mark.parametrize("by_main", [True, False])
def test_the_trials_before_a_call_that_hangs_are_kept(converter, phases, by_main):
    def score(model):
        phases.hang_in_phase()
        return 0.9

    converter.metric, converter.eval_func, phases.hanging = None, score, "Trial 2"
    result = run(converter, by_main)
    assert result.met
    assert [trial.outcome for trial in result.trials] == [Outcome.MET]
    assert "eval_func(model) (at test_endless_calls.py, line" in warnings_of(result)
    assert "the search stopped at the time limit of 1.5 s" in warnings_of(result)

    converter.resume, phases.hanging = True, ""
    resumed = run(converter)
    assert resumed.trials[0].plan == result.trials[0].plan
    assert len(resumed.trials) > 1


@pytest.mark.usefixtures("heeds_ctrl_c")
def test_ctrl_c_keeps_the_trials_before_at_once(converter, phases):
    def score(model):
        if phases.current == "Trial 2":
            _thread.interrupt_main()
            time.sleep(HANGS_SECONDS)
        return 0.9

    converter.metric, converter.eval_func = None, score
    converter.exit_policy = ExitPolicy(timeout=HANGS_SECONDS)
    result = run(converter)
    assert result.met
    assert len(result.trials) == 1
    assert "the search was interrupted; its trials are kept" in warnings_of(result)


def test_an_evaluation_that_ends_within_the_grace_period_counts(converter, phases, monkeypatch):
    monkeypatch.setattr(call_limit, "MIN_GRACE_SECONDS", 20.0)

    def score(model):
        if phases.current.startswith(TRIAL):
            phases.clock.sleep(2)  # longer than the time limit
        return 0.9

    converter.metric, converter.eval_func = None, score
    result = run(converter)
    assert result.met
    assert len(result.trials) == 1
    assert "the search stopped at the time limit of 1.5 s" in warnings_of(result)


def test_without_an_accuracy_check_the_run_ends_too(converter, data, phases):
    converter.metric = converter.eval_dataloader = None
    converter.objective = "latency"
    converter.calib_dataloader, phases.hanging = Loader(data, phases), CALIBRATION
    result = run(converter)
    assert result.met is None
    assert "calib_dataloader (at test_endless_calls.py, line " in warnings_of(result)


def test_a_final_measurement_that_hangs_leaves_the_figures_of_the_trials(
    converter, phases, monkeypatch
):
    monkeypatch.setattr(tuner, "select_plan", lambda *arguments: call_user(phases.clock.hang))
    converter.metric, converter.eval_func = None, score_alike
    result = run(converter)
    assert result.met
    assert "latencies are those of the trials" in warnings_of(result)


def test_the_result_is_that_without_a_time_limit(converter, data):
    limited = converter()
    converter.exit_policy = ExitPolicy()
    free = converter()
    assert limited.plan == free.plan
    assert [trial.accuracy for trial in limited.trials] == [t.accuracy for t in free.trials]
    np.testing.assert_array_equal(limited(data[0][0]), free(data[0][0]))


def test_what_the_users_code_raises_comes_through_unchanged(converter):
    raised = ZeroDivisionError("theirs")

    def score(model):
        raise raised

    converter.metric, converter.eval_func = None, score
    with pytest.raises(ZeroDivisionError) as error:
        converter()
    assert error.value is raised


@pytest.mark.parametrize("above", [-100.0, 50.0], ids=["every batch", "one batch"])
def test_an_endless_loop_of_onnx_runtime_is_one_error(converter, clock, data, above):
    clock.is_real = True
    converter.model = endless_onnx(above)
    data[-1][0][0, 0] = 100
    error = run(converter)
    assert isinstance(error, UnreturnedCallError)
    assert str(error).startswith("the model did not return within the time limit")


def test_an_endless_loop_of_tensorflow_is_one_error_and_ends(converter, clock, data, monkeypatch):
    clock.is_real = True
    monkeypatch.setattr(call_limit, "_UNWIND_SECONDS", HANGS_SECONDS)
    tf = pytest.importorskip("tensorflow")
    weight = tf.constant(WEIGHTS["one"][:, :4])

    @tf.function(input_signature=[tf.TensorSpec([None, 8], tf.float32)])
    def run_graph(x):
        is_endless = tf.reduce_max(x) > 50
        return tf.while_loop(lambda y: is_endless, lambda y: (y + 1,), (x @ weight,))[0]

    converter.model = run_graph.get_concrete_function()
    data[-1][0][0, 0] = 100
    lost = count_lost_threads()
    error = run(converter)
    assert isinstance(error, UnreturnedCallError)
    assert str(error).startswith("the model did not return within the time limit")
    assert count_lost_threads() == lost


@pytest.mark.parametrize("sleeps", [True, False])
def test_a_module_of_pytorch_that_hangs_is_one_error(converter, clock, sleeps):
    torch = pytest.importorskip("torch")

    class Endless(torch.nn.Linear):
        def forward(self, x):
            if sleeps:
                clock.hang()
            clock.hangs = True
            while clock.hangs:
                pass
            return super().forward(x)

    converter.model = Endless(8, 4)
    error = run(converter)
    assert isinstance(error, UnreturnedCallError)
    assert str(error).startswith("the model (at test_endless_calls.py, line ")
    # What the module holds while it hangs keeps no later run waiting.
    converter.model, converter.exit_policy = torch.nn.Linear(8, 4), ExitPolicy(max_trials=1)
    assert run(converter).report.baseline_accuracy is not None


#: Nothing ends a loop of OpenVINO, which would take a core from all later tests of the process.
_OPENVINO = """
import sys
import numpy as np, openvino as ov
from neural_mp import ExitPolicy, MixedPrecision
from neural_mp.errors import TuningError
from neural_mp.tuning import call_limit

call_limit.MIN_GRACE_SECONDS = 0.5
draw = np.random.default_rng(1)
data = [(draw.normal(size=(16, 8)).astype(np.float32), draw.integers(0, 4, 16)) for _ in range(3)]
data[-1][0][0, 0] = 100
tuning = MixedPrecision(precisions="int8", objective="modelsize", metric="accuracy")
tuning.model, tuning.eval_dataloader = ov.Core().read_model(sys.argv[1]), data
tuning.exit_policy = ExitPolicy(timeout=1.5)
try:
    tuning()
except TuningError as error:
    print(error)
    sys.exit(3)
"""


def test_an_endless_loop_of_openvino_is_one_error_and_the_process_exits(tmp_path):
    pytest.importorskip("openvino")
    onnx.save(endless_onnx(above=50.0), tmp_path / "endless.onnx")
    (tmp_path / "program.py").write_text(_OPENVINO)
    ended = subprocess.run(
        [sys.executable, "-W", "ignore", "program.py", "endless.onnx"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=HANGS_SECONDS,
        check=False,
    )
    assert ended.returncode == 3, ended.stderr
    assert ended.stdout.startswith("the model did not return within the time limit")


_MODULE = """
import time

def score(preds, labels):
    time.sleep(600)
"""
_COMMAND = """
from neural_mp.cli.entry_point import main
from neural_mp.tuning import call_limit

call_limit.MIN_GRACE_SECONDS = 0.5
main()
"""


def test_the_command_exits_with_one_line(tmp_path):
    nodes = [op("MatMul", "x one", "a"), op("Relu", "a", "b"), op("MatMul", "b two", "y")]
    onnx.save(graph(nodes, {"x": ["batch", 8]}, ["y"], WEIGHTS), tmp_path / "net.onnx")
    draw = np.random.default_rng(1)
    inputs = draw.normal(size=(32, 8)).astype(np.float32)
    np.savez(tmp_path / "data.npz", inputs=inputs, labels=draw.integers(0, 4, 32))
    (tmp_path / "theirs.py").write_text(_MODULE)
    options = "net.onnx --data data.npz --metric theirs:score --timeout 1 --output out"
    ended = subprocess.run(
        [sys.executable, "-c", _COMMAND, "tune", *options.split()],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=HANGS_SECONDS,
        check=False,
    )
    assert ended.returncode == 2, ended.stderr
    assert "did not return within the time limit of 1 s" in ended.stderr
    assert "Traceback" not in ended.stderr

"""Nothing that was computed is lost, however a run ends."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from neural_mp import AccuracyCriterion, MixedPrecision
from neural_mp.errors import HistoryError

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).parent.parent / "tuning_script.py"


def lines(folder: Path) -> list[str]:
    file = folder / "evaluations.txt"
    return file.read_text().split() if file.exists() else []


@pytest.fixture
def command(hostile_net, digits, tmp_path):
    torch.save(hostile_net.state_dict(), tmp_path / "weights.pt")
    np.savez(tmp_path / "data.npz", images=digits[1].images, labels=digits[1].labels)

    def make(pause: float, mode: str, strategy: str) -> list[str]:
        given = ("weights.pt", "data.npz", str(pause), mode, strategy)
        return [sys.executable, str(SCRIPT), *given]

    return make


@pytest.mark.parametrize("strategy", ["basic", "tpe"])
def test_after_kill_9_a_resumed_run_repeats_no_finished_trial(command, tmp_path, strategy):
    begun = command(0.1, "new", strategy)
    process = subprocess.Popen(begun, cwd=tmp_path, stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + 120
    # The baseline and three trials have ended, and the fourth is half done.
    while lines(tmp_path).count("end") < 4 or lines(tmp_path)[-1] != "begin":
        assert process.poll() is None, "the run ended before it could be killed"
        assert time.monotonic() < deadline
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.wait()
    ended_before = lines(tmp_path).count("end")

    resumed = subprocess.run(
        command(0, "resume", strategy), cwd=tmp_path, check=True, capture_output=True, text=True
    )
    outcome = json.loads(resumed.stdout)
    if strategy == "basic":
        assert outcome["met"]
        assert outcome["int8"] >= 7
    # One evaluation for the baseline and one for each different plan, over both processes.
    assert outcome["plans"] == outcome["trials"]
    assert lines(tmp_path).count("end") == 1 + outcome["trials"]
    # Only what the kill cut off was begun twice.
    assert lines(tmp_path).count("begin") == lines(tmp_path).count("end") + 1
    assert ended_before >= 4


@pytest.fixture
def converter(net, digits, accuracy):
    made = MixedPrecision()
    made.model = net
    made.precisions = "int8"
    made.objective = "modelsize"  # latencies this short are the machine's mood
    made.metric = accuracy
    made.eval_dataloader = digits[1].loader()
    return made


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


def test_ctrl_c_returns_the_best_so_far_and_keeps_the_trials(converter, hostile_net, accuracy):
    converter.model = hostile_net
    converter.strategy = "basic"
    stop_at = 3
    update = accuracy.update

    def interrupted(preds, labels):
        if accuracy.evaluations == stop_at:
            raise KeyboardInterrupt
        update(preds, labels)

    accuracy.update = interrupted
    result = converter()
    assert result.met is False
    assert len(result.trials) == stop_at - 1
    assert any("interrupted" in warning for warning in result.report.warnings)

    accuracy.update = update
    converter.resume = True
    resumed = converter()
    assert resumed.met
    assert accuracy.evaluations == 1 + len(resumed.trials)  # the baseline, and each trial once


def test_any_optuna_storage_can_keep_the_trials(converter, tmp_path):
    import optuna

    converter.storage = f"sqlite:///{tmp_path / 'elsewhere.db'}"
    result = converter()
    (study,) = optuna.get_all_study_summaries(converter.storage)
    assert study.n_trials == len(result.trials)
    assert not (tmp_path / "neural_mp_workspace").exists()

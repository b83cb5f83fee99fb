"""A second run takes over what the first one measured, where nothing that matters has changed."""

import copy
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch
from quick_runs import make_quick

from neural_mp import ExitPolicy, MixedPrecision
from neural_mp.core import hardware
from neural_mp.util.system import environment

BASELINE, CALIBRATION, OPS = (
    "FP32 accuracy",
    "calibration",
    "op times and output noise",
)


class Right:
    """The share of right answers."""

    def __init__(self, share=1.0):
        self.share = share
        self.answers = []

    def reset(self):
        self.answers = []

    def update(self, preds, labels):
        self.answers += list(np.asarray(preds).argmax(1) == np.asarray(labels))

    def result(self):
        return self.share * float(np.mean(self.answers))


class Counted(list):
    """Batches that are counted as they are read."""

    read = 0

    def __iter__(self):
        for batch in super().__iter__():
            self.read += 1
            yield batch


@pytest.fixture(scope="module")
def batches(digits):
    return list(digits[1].loader(batch_size=10))


def options_of(net, batches, **options):
    defaults = {
        "model": net,
        "metric": Right(),
        "eval_dataloader": batches,
        "precisions": "int8",
        "accuracy_criterion": 0.05,
        "objective": {"performance": 0.5, "modelsize": 0.5},  # ops are timed, and none is too slow
        "exit_policy": ExitPolicy(max_trials=1),
    }
    return defaults | options


@pytest.fixture
def tuned(net, batches):
    return lambda **options: MixedPrecision(**options_of(net, batches, **options))()


@pytest.fixture(scope="module")
def first_run(net, batches, tmp_path_factory):
    """A workspace, and the result of the run in it."""
    workspace = tmp_path_factory.mktemp("first") / "workspace"
    with pytest.MonkeyPatch.context() as patch:
        make_quick(patch)
        return workspace, MixedPrecision(**options_of(net, batches, workspace=workspace))()


@pytest.fixture
def first(first_run):
    """The result of a first run, of which the workspace here knows."""
    shutil.copytree(first_run[0], "neural_mp_workspace")
    return first_run[1]


@pytest.mark.slow
def test_with_another_tolerance_only_plans_are_tried(tuned, first):
    second = tuned(accuracy_criterion=0.02)
    assert first.report.cache_hits == ()
    assert second.report.cache_hits == (BASELINE, CALIBRATION, OPS)
    assert second.report.evaluations == first.report.evaluations - 1
    assert second.report.baseline_accuracy == first.report.baseline_accuracy
    assert second.observations == first.observations
    assert second.report.target == pytest.approx(0.98 * first.report.baseline_accuracy)
    assert second.met


@pytest.mark.slow
@pytest.mark.usefixtures("first")
def test_what_is_taken_over_is_what_would_be_measured(tuned):
    again = tuned()
    assert again.report.cache_hits == (BASELINE, CALIBRATION, OPS)
    anew = tuned(cache=False)
    assert anew.report.cache_hits == ()
    assert again.report.baseline_accuracy == anew.report.baseline_accuracy
    assert again.observations == anew.observations


@pytest.mark.slow
def test_with_the_cache_off_nothing_is_kept(tuned, tmp_path):
    tuned(cache=False)
    assert not list(tmp_path.rglob("cache"))
    assert tuned().report.cache_hits == ()


@pytest.mark.slow
@pytest.mark.usefixtures("first")
def test_data_that_changed_in_their_last_batch_are_evaluated_again(tuned, batches):
    images, labels = batches[-1]
    changed = [*batches[:-1], (images, (np.asarray(labels) + 1) % 10)]
    again = tuned(eval_dataloader=changed)
    assert BASELINE not in again.report.cache_hits
    assert CALIBRATION in again.report.cache_hits  # these samples are the first ones
    assert again.report.baseline_accuracy < 1


@pytest.mark.slow
def test_calibration_data_that_changed_are_looked_at_again(tuned, batches):
    tuned(calib_dataloader=batches[:5])
    changed = [(images * 2, labels) for images, labels in batches[:5]]
    again = tuned(calib_dataloader=changed)
    assert again.report.cache_hits == (BASELINE,)


@pytest.mark.slow
@pytest.mark.usefixtures("first")
def test_data_that_come_in_another_order_are_evaluated_again(tuned, batches):
    assert BASELINE not in tuned(eval_dataloader=batches[::-1]).report.cache_hits


@pytest.mark.usefixtures("first")
def test_a_metric_that_counts_otherwise_is_evaluated_again(tuned):
    again = tuned(metric=Right(share=0.5))
    assert again.report.cache_hits == (CALIBRATION, OPS)


@pytest.mark.slow
def test_the_data_of_an_eval_func_are_not_known(tuned, batches):
    def share_right(model):
        with torch.no_grad():
            right = [
                model(torch.from_numpy(images)).argmax(1).numpy() == labels
                for images, labels in batches
            ]
        return float(np.concatenate(right).mean())

    options = {"metric": None, "eval_func": share_right, "calib_dataloader": batches}
    tuned(**options)
    assert BASELINE not in tuned(**options).report.cache_hits


@pytest.mark.slow
@pytest.mark.usefixtures("first")
@pytest.mark.parametrize("changed", ["cpu", "version", "variable", "weight"])
def test_nothing_is_taken_from_elsewhere(tuned, net, monkeypatch, changed):
    options = {}
    if changed == "cpu":
        machine = hardware.detect()
        variant = replace(machine, name="another one", flags=machine.flags | {"new"})
        monkeypatch.setattr(hardware, "detect", lambda *_: variant)
    elif changed == "version":
        version = environment._read_installed_version
        monkeypatch.setattr(
            environment, "_read_installed_version", lambda name: f"{version(name)}1"
        )
    elif changed == "variable":
        monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "SSE41")
    else:
        options["model"] = copy.deepcopy(net)
        with torch.no_grad():
            next(options["model"].parameters()).view(-1)[0] += 1e-3
    assert tuned(**options).report.cache_hits == ()


@pytest.mark.slow
def test_all_data_are_read_once_more_only_where_something_is_known(tuned, batches):
    first = Counted(batches)
    tuned(eval_dataloader=first)
    second = Counted(batches)
    tuned(eval_dataloader=second)
    # Read instead of evaluated: whether the data are the same cannot be told from their beginning.
    assert second.read <= first.read + len(batches) // 5

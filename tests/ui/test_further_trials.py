"""Plans that are edited after a run: predicted from its record, and tried with its options."""

from __future__ import annotations

import numpy as np
import onnxruntime
import pytest
from served_runs import LAYERS, find_untried_edits

from neural_mp import convert_with_plan
from neural_mp.core.precision import FP32, Precision
from neural_mp.errors import HistoryError, NeuralMPError, PlanError, UnknownOperatorError
from neural_mp.runs.record_schema import setup_to_dict
from neural_mp.tuning.further_trial import edit_plan, list_plans, predict_plan, restore_space
from neural_mp.tuning.listener import Listener
from neural_mp.ui.replay_main import try_edited_plan
from neural_mp.ui.workspace import Workspace
from neural_mp.util.noise import compute_mean_nsr

pytestmark = pytest.mark.slow


@pytest.fixture
def workspace(served_folder, monkeypatch) -> Workspace:
    """The workspace, opened in its folder."""
    monkeypatch.chdir(served_folder)
    return Workspace(served_folder / "neural_mp_workspace")


@pytest.fixture
def run(workspace):
    """The run of the tuning file, which is the oldest."""
    return workspace.list_runs()[-1]


def plan_in_int8(record):
    """Return the plan with all layers in INT8."""
    edits = dict.fromkeys(LAYERS, Precision.INT8)
    return edit_plan(restore_space(record), record.trials[0].plan, edits, list_plans(record))


def test_the_record_alone_predicts_the_times_that_the_search_predicted(run):
    """The space of the record has the same ops and tensors, and so the same cost model."""
    record = run.require_record()
    assert record.ending.predicted
    space = restore_space(record)
    assert space.tunable_ops == record.setup.tunable_ops
    assert set(space.tensors) == set(record.setup.tensors)
    for trial in record.trials:
        if trial.number in record.ending.predicted:
            expected = record.ending.predicted[trial.number]
            assert predict_plan(record, trial.plan, {}).time == pytest.approx(expected, rel=1e-4)


def test_predicted_noise_changes_as_that_of_the_converted_models(run):
    """Less noise is predicted where the outputs have less, and the other way round."""
    record, inputs = run.require_record(), dict(np.load("train.npz"))["inputs"][:100]
    reference = onnxruntime.InferenceSession("digits.onnx").run(None, {"x": inputs})
    plan = plan_in_int8(record)

    def measure_nsr(edits):
        edited = edit_plan(restore_space(record), plan, edits, list_plans(record))
        model = convert_with_plan("digits.onnx", edited, observations=record.observations)
        return compute_mean_nsr(reference, [np.asarray(model(inputs))])

    edits = [dict.fromkeys(LAYERS[:count], Precision.FP32) for count in range(len(LAYERS))]
    predicted = [predict_plan(record, plan, edit).nsr for edit in edits]
    measured = [measure_nsr(edit) for edit in edits]
    assert np.argsort(predicted).tolist() == np.argsort(measured).tolist()
    assert predict_plan(record, plan, dict.fromkeys(LAYERS, Precision.FP32)).nsr == 0


@pytest.mark.parametrize("edited", LAYERS)
def test_ops_that_follow_an_edit_are_those_of_the_conversion(run, edited):
    record, plan = run.require_record(), plan_in_int8(run.require_record())
    edits = {edited: Precision.FP32}
    plans = plan, edit_plan(restore_space(record), plan, edits)
    before, after = (
        convert_with_plan("digits.onnx", each, observations=record.observations).planned
        for each in plans
    )
    expected = {
        op: (before[op].precision, after[op].precision)
        for op in before
        if op != edited and before[op].precision is not after[op].precision
    }
    assert predict_plan(record, plan, edits).followers == expected


def test_an_edit_takes_the_configuration_that_the_run_has_tried(run):
    record = run.require_record()
    plan, space = record.trials[0].plan, restore_space(record)
    op = next(op for op in LAYERS if plan[op].precision is Precision.INT8)
    without = plan.replacing({op: FP32})
    assert edit_plan(space, without, {op: Precision.INT8}, [plan]) == plan
    assert edit_plan(space, without, {op: Precision.INT8})[op].weight is None


@pytest.mark.parametrize(
    ("edits", "kind", "message"),
    [
        ({"hiden": Precision.FP32}, UnknownOperatorError, "did you mean 'hidden'"),
        ({"hidden": Precision.FP16}, PlanError, "must run in int8, fp32, got fp16"),
    ],
)
def test_an_impossible_edit_is_one_error(run, edits, kind, message):
    record = run.require_record()
    with pytest.raises(kind, match=message):
        edit_plan(restore_space(record), record.trials[0].plan, edits)


def test_a_further_trial_has_the_target_and_leaves_the_result_as_it_is(workspace, run):
    record = run.require_record()
    plan, edits = record.trials[0].plan, find_untried_edits(record)
    folder, before = workspace.folder, len(record.trials)
    number, nsr = try_edited_plan(folder, run.name, plan, edits, Listener())
    later = workspace.get_run(run.name).require_record()
    trial = later.trials[-1]
    assert (len(later.trials), trial.number) == (before + 1, number)
    assert {op: trial.plan[op].precision for op in LAYERS} == edits
    assert trial.accuracy is not None
    assert 0 < nsr < 0.1
    assert later.ending == record.ending
    assert setup_to_dict(later.setup) == setup_to_dict(record.setup)
    # The same plan again is the same trial.
    assert try_edited_plan(folder, run.name, plan, edits, Listener())[0] == number
    assert len(workspace.get_run(run.name).require_record().trials) == before + 1


def test_a_run_of_data_files_without_a_tuning_file_can_be_continued(workspace):
    """Model, data, metric and tolerance of the command line are stored with the run."""
    run = workspace.list_runs()[-2]
    record = run.require_record()
    edits, plan = find_untried_edits(record), record.trials[0].plan
    number, _ = try_edited_plan(workspace.folder, run.name, plan, edits, Listener())
    record = workspace.get_run(run.name).require_record()
    assert record.trials[-1].number == number
    assert record.baseline["target"] == pytest.approx(0.95 * record.baseline["accuracy"])


def test_a_run_of_objects_cannot_be_continued(workspace):
    run = workspace.list_runs()[-3]
    with pytest.raises(HistoryError, match="started with objects in Python"):
        try_edited_plan(workspace.folder, run.name, run.get_plan("0"), {}, Listener())


def test_changed_data_are_noticed(workspace, run, tmp_path, monkeypatch):
    """The point of other data must not appear among those of the run."""
    for name in ("digits.onnx", "train.npz", "test.npz"):
        (tmp_path / name).write_bytes((workspace.folder.parent / name).read_bytes())
    arrays = dict(np.load("test.npz"))
    np.savez(tmp_path / "test.npz", inputs=arrays["inputs"][::-1], labels=arrays["labels"][::-1])
    monkeypatch.chdir(tmp_path)
    plan = run.require_record().trials[0].plan
    with pytest.raises(NeuralMPError, match="cannot resume: the data of this run differ"):
        try_edited_plan(workspace.folder, run.name, plan, {}, Listener())

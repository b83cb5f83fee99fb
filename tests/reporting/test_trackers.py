"""Tunings stored by the trackers themselves, read back by their own readers."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from neural_mp import MixedPrecision
from neural_mp.errors import ConfigurationError, MissingFrameworkError
from neural_mp.reporting.trackers import TrackedRun, TrackingListener
from neural_mp.tuning.listener import Listener, ListenerGroup


def make_run(tmp_path, track=None, **options):
    torch.manual_seed(0)
    inputs = np.random.default_rng(0).normal(size=(64, 32)).astype(np.float32)
    net = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 4)).eval()
    labels = net(torch.tensor(inputs)).argmax(1).numpy()
    return MixedPrecision(
        model=net,
        metric="accuracy",
        eval_dataloader=[(inputs, labels)],
        precisions="int8",
        accuracy_criterion=0.2,
        workspace=tmp_path / "workspace",
        track=track,
        **options,
    )


def test_mlflow_has_a_run_with_trials_as_steps_and_artefacts(tmp_path, monkeypatch):
    mlflow = pytest.importorskip("mlflow", reason="the extra mlflow is not installed")
    monkeypatch.chdir(tmp_path)
    place = f"sqlite:///{tmp_path / 'mlflow.db'}"
    place = str(tmp_path / "mlruns") if not _has_database() else place
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    result = make_run(tmp_path, f"mlflow:{place}")()
    client = mlflow.MlflowClient(place)
    (run,) = client.search_runs([client.get_experiment_by_name("neural-mp").experiment_id])
    assert run.info.status == "FINISHED"
    history = client.get_metric_history(run.info.run_id, "accuracy")
    expected = {trial.number + 1: trial.accuracy for trial in result.trials}
    assert {point.step: point.value for point in history} == expected
    assert run.data.params["metric"] == "accuracy"
    names = {file.path for file in client.list_artifacts(run.info.run_id)}
    assert names == {"plan.yaml", "report.html", "report.json"}


def _has_database() -> bool:
    try:
        from mlflow.store.tracking import sqlalchemy_store  # noqa: F401
    except ImportError:
        return False
    return True


def test_tensorboard_reads_trials_as_steps(tmp_path):
    pytest.importorskip("tensorboard", reason="the extra tensorboard is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    result = make_run(tmp_path, f"tensorboard:{tmp_path / 'runs'}")()
    (folder,) = (tmp_path / "runs").iterdir()
    events = EventAccumulator(str(folder))
    events.Reload()
    read = {event.step: event.tensor_proto.float_val[0] for event in events.Tensors("accuracy")}
    expected = {trial.number + 1: trial.accuracy for trial in result.trials}
    assert read == pytest.approx(expected)
    report = json.loads((folder / "report.json").read_text())
    assert report["accuracy"] == result.report.accuracy
    assert "plan" in events.Tags()["tensors"]


def test_wandb_stores_a_run_offline(tmp_path, monkeypatch):
    pytest.importorskip("wandb", reason="the extra wandb is not installed")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    make_run(tmp_path, "wandb:my-project")()
    (file,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
    content = file.read_bytes()
    assert b"my-project" in content
    assert b"plan.yaml" in content


class _Recorded(TrackedRun):
    def __init__(self, fails=False):
        self.fails, self.steps, self.files, self.ends = fails, [], {}, []

    def log_values(self, values, step):
        if self.fails:
            raise OSError("no network")
        self.steps.append((step, values))

    def log_files(self, folder):
        self.files = {file.name: file.read_text() for file in Path(folder).iterdir()}

    def end(self, succeeded):
        self.ends.append(succeeded)


def test_a_run_that_fails_ends_as_failed(tmp_path):
    def fail(preds, labels):
        raise RuntimeError("broken metric")

    run = _Recorded()
    converter = make_run(tmp_path, listener=TrackingListener(run))
    converter.metric = fail
    with pytest.raises(RuntimeError, match="broken metric"):
        converter()
    assert run.ends == [False]


def test_a_tracker_without_network_does_not_end_the_tuning(tmp_path, caplog):
    run = _Recorded(fails=True)
    with caplog.at_level(logging.ERROR):
        result = make_run(tmp_path, listener=TrackingListener(run))()
    assert result.report.accuracy is not None
    assert sum("the tracker failed" in record.message for record in caplog.records) == 1


def test_a_group_passes_every_event_on():
    class Counted(Listener):
        wants_hints = False

        def __init__(self):
            self.seen = []

        def phase(self, name, total=None):
            self.seen.append((name, total))

        def step(self):
            self.seen.append("step")

    members = Counted(), Counted()
    group = ListenerGroup(*members)
    group.phase("Trial 1", total=3)
    group.step()
    group.close()
    assert members[0].seen == members[1].seen == [("Trial 1", 3), "step"]
    assert not group.wants_hints


@pytest.mark.parametrize("track", ["neptune", "mlflows:x", 3])
def test_an_unknown_tracker_is_named(tmp_path, track):
    with pytest.raises(ConfigurationError, match="track must be mlflow, wandb or tensorboard"):
        make_run(tmp_path, track)()


def test_a_missing_package_is_named_before_the_run(tmp_path, monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(MissingFrameworkError, match="track='wandb' needs wandb"):
        make_run(tmp_path, "wandb")()

"""Histories and saved results are shared: they do not contain the name of the host."""

from __future__ import annotations

import gzip
import platform
from pathlib import Path

import numpy as np
import pytest
from onnx_nets import dense_net

from neural_mp import ExitPolicy, MixedPrecision
from neural_mp.core.plan import PrecisionPlan
from neural_mp.core.trial import Outcome, Trial
from neural_mp.io.staged_folder import scratch_folder
from neural_mp.metrics import build_metric
from neural_mp.runs.history import HISTORY_FILE, History, get_storage_url
from neural_mp.util.system import processes

HOST = "a-host-of-a-private-name"


@pytest.fixture(autouse=True)
def host(monkeypatch):
    monkeypatch.setattr(platform, "node", lambda: HOST)


def list_files_with_host(folder: Path) -> list[str]:
    """Return the files that contain the name, also within compressed contents."""
    contents = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    assert contents
    return [
        path.name
        for path, content in contents.items()
        if HOST.encode() in (gzip.decompress(content) if path.suffix == ".gz" else content)
    ]


def test_neither_workspaces_nor_results_contain_it(tmp_path):
    inputs = np.random.default_rng(0).normal(size=(60, 6)).astype(np.float32)
    tuner = MixedPrecision(precisions="int8", metric=build_metric("accuracy"))
    tuner.model, tuner.eval_dataloader = dense_net(10), [(inputs, np.arange(60) % 10)]
    tuner.workspace, tuner.objective = tmp_path / "workspace", "modelsize"
    tuner.accuracy_criterion = {"absolute": 1.0, "any_tolerance": True, "any_baseline": True}
    tuner.exit_policy, tuner.runtime = ExitPolicy(max_trials=2), "source"
    result = tuner()
    result.save(tmp_path / "tuned")
    assert (tmp_path / "workspace" / HISTORY_FILE).is_file()
    assert list_files_with_host(tmp_path) == []


@pytest.mark.parametrize("boot", ["/proc/sys/kernel/random/boot_id", "/no/such/file"])
def test_neither_leases_nor_scratch_folders_contain_it(tmp_path, monkeypatch, boot):
    """A killed process leaves both, also on systems without ids of boots."""
    monkeypatch.setattr(processes, "_BOOT", Path(boot))
    with (
        scratch_folder(tmp_path),
        History(get_storage_url(tmp_path), {"model": "1" * 16}, True, False),
    ):
        assert list_files_with_host(tmp_path) == []


def test_files_of_earlier_versions_with_the_name_are_read(tmp_path):
    """Trials keep the name that they were stored with."""
    with History(get_storage_url(tmp_path), {"model": "1" * 16}, True, False) as history:
        number = history.begin_trial()
        trial = Trial(PrecisionPlan(), Outcome.MET, 0.9, number=number, node=HOST)
        history.finish_trial(trial)
    assert list_files_with_host(tmp_path) == [HISTORY_FILE]
    with History(get_storage_url(tmp_path), {"model": "1" * 16}, True, True) as resumed:
        assert [trial.node for trial in resumed.read_trials()] == [HOST]

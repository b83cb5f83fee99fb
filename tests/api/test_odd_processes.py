"""Commands in a process whose working directory or environment is out of order."""

from __future__ import annotations

import os
import subprocess
import sys

import onnx
import pytest
from onnx_nets import dense_net

pytestmark = pytest.mark.slow

COMMAND = [sys.executable, "-m", "neural_mp.cli.entry_point"]


@pytest.fixture
def model(tmp_path):
    onnx.save(dense_net(10), tmp_path / "net.onnx")
    return tmp_path / "net.onnx"


def run_in_deleted_folder(tmp_path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the command in a working directory that does not exist any more."""
    folder = tmp_path / "deleted"
    folder.mkdir()
    return subprocess.run(
        ["sh", "-c", 'rmdir "$PWD"; exec "$@"', "sh", *COMMAND, *arguments],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )


def test_files_with_absolute_paths_are_read_in_a_deleted_working_directory(tmp_path, model):
    done = run_in_deleted_folder(tmp_path, "inspect", str(model))
    assert done.returncode == 0, done.stderr
    assert "MatMul" in done.stdout


def test_each_mistake_in_a_deleted_working_directory_is_one_line(tmp_path, model):
    (tmp_path / "conf.yaml").write_text(
        f"model: {{name: {model}}}\n"
        "evaluation: {accuracy: {metric: {'own:Metric': {}}, dataloader: "
        "{batch_size: 2, dataset: {numpy: {path: data.npz}}}}}\n"
    )
    for arguments in (
        ("tune", str(tmp_path / "conf.yaml")),
        ("tune", "net.onnx", "--data", "data.npz", "--metric", "accuracy"),
        ("inspect", "own:model"),
        ("inspect", "net.onnx"),
        ("report",),
    ):
        done = run_in_deleted_folder(tmp_path, *arguments)
        assert done.returncode == 2, done.stderr
        assert len(done.stderr.splitlines()) == 1, done.stderr


@pytest.mark.parametrize("value", ["9" * 30, "9" * 5000, "two", "-1", "²"])
def test_a_number_of_threads_that_is_none_counts_as_not_set(model, value):
    """As for OpenMP itself, which warns."""
    done = subprocess.run(
        [*COMMAND, "benchmark", str(model), "--iterations", "2"],
        env={**os.environ, "OMP_NUM_THREADS": value},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr

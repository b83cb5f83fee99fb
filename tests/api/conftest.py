"""The command line in this process, and a folder to use it in."""

from __future__ import annotations

import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from command_here import run_main
from quick_runs import export_once, give_nominal_times

from neural_mp.cli import app

CONF = """
model: {name: net.pt2, runtime: source}
mixed_precision: {precisions: int8}
quantization:
  calibration: {dataloader: {batch_size: 50, dataset: {numpy: {path: train.npz}}}}
evaluation:
  accuracy:
    metric: accuracy
    dataloader: {batch_size: 100, dataset: {numpy: {path: test.npz}}}
"""


@pytest.fixture(scope="session", autouse=True)
def _exported_once():
    """Several tests ask for one net in another runtime."""
    with pytest.MonkeyPatch.context() as patch:
        export_once(patch)
        yield


@pytest.fixture
def run(monkeypatch, capsys):
    """Run the command, piped; its exit code, output and errors."""

    def call(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["neural-mp", *arguments])
        with pytest.raises(SystemExit) as ended:
            app.main()
        captured = capsys.readouterr()
        return int(ended.value.code or 0), captured.out, captured.err

    return call


@pytest.fixture(scope="session")
def exported(net, write_once) -> bytes:
    """The net as a program of torch.export."""

    def export(file: Path) -> None:
        example, shapes = (torch.zeros(2, 1, 8, 8),), ({0: torch.export.Dim.AUTO},)
        torch.export.save(torch.export.export(net, example, dynamic_shapes=shapes), file)

    return write_once("digits.pt2", export).read_bytes()


@pytest.fixture
def workplace(tmp_path, exported, digits):
    """A folder with data, a model file and a tuning file."""
    _fill(tmp_path, exported, digits)
    return tmp_path


def _fill(folder: Path, exported: bytes, digits) -> None:
    for name, split in zip(("train", "test"), digits, strict=True):
        np.savez(folder / f"{name}.npz", inputs=split.images, labels=split.labels)
    (folder / "net.pt2").write_bytes(exported)
    (folder / "conf.yaml").write_text(CONF)


@dataclass(frozen=True)
class CommandRun:
    """A finished command, and the folder in which the command ran."""

    folder: Path
    code: int
    out: str
    err: str


@pytest.fixture(scope="session")
def tune_run(tmp_path_factory, exported, digits) -> CommandRun:
    """`neural-mp tune conf.yaml --output tuned` in a workplace, run once for all tests."""
    folder = tmp_path_factory.mktemp("tune_run")
    _fill(folder, exported, digits)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        give_nominal_times(patch)
        return CommandRun(folder, *run_main("tune", "conf.yaml", "--output", "tuned"))


@pytest.fixture
def tuned_workplace(workplace, tune_run) -> Path:
    """The workplace with a copy of the tuned model in the folder `tuned`."""
    assert tune_run.code == 0, tune_run.err
    shutil.copytree(tune_run.folder / "tuned", workplace / "tuned")
    return workplace

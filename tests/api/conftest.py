"""The command line in this process, and a folder to use it in."""

from __future__ import annotations

import io
import signal
import sys

import numpy as np
import pytest
import torch

from neural_mp.cli import app


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
def exported(net) -> bytes:
    """The net as a program of torch.export."""
    written = io.BytesIO()
    example = (torch.zeros(2, 1, 8, 8),)
    torch.export.save(
        torch.export.export(net, example, dynamic_shapes=({0: torch.export.Dim.AUTO},)), written
    )
    return written.getvalue()


@pytest.fixture
def workplace(tmp_path, exported, digits):
    """A folder with data, a model file and a tuning file."""
    train, test = digits
    np.savez(tmp_path / "train.npz", inputs=train.images, labels=train.labels)
    np.savez(tmp_path / "test.npz", inputs=test.images, labels=test.labels)
    (tmp_path / "net.pt2").write_bytes(exported)
    (tmp_path / "conf.yaml").write_text(
        """
model: {name: net.pt2}
mixed_precision: {precisions: int8}
quantization:
  calibration: {dataloader: {batch_size: 50, dataset: {numpy: {path: train.npz}}}}
evaluation:
  accuracy:
    metric: accuracy
    dataloader: {batch_size: 100, dataset: {numpy: {path: test.npz}}}
"""
    )
    return tmp_path


@pytest.fixture
def heeds_ctrl_c():
    """As in a terminal: what a shell starts in the background ignores the signal."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)

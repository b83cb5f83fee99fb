"""Intel Neural Compressor's strategies on the nets of the search benchmark, in its own Python."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from benchmarks.measurement.children import ChildError, run_child
from benchmarks.measurement.search_data import BATCH, Digits
from benchmarks.measurement.search_run import Case, Row


def peer_rows(case: Case, python: str, strategies: list[str], max_trials: int) -> list[Row]:
    """A row for each of its strategies; none for TensorFlow, whose releases it does not know."""
    if case.framework == "tensorflow":
        return []
    folder = _given(case)
    rows = []
    for strategy in strategies:
        row = Row(case.framework, case.model, f"INC {strategy}")
        rows.append(row)
        arguments = (case.framework, case.model, folder, strategy, max_trials)
        try:
            figures = run_child("peers.inc_search", *arguments, python=python, folder=folder)
        except ChildError as error:
            row.error = str(error).splitlines()[-1]
            continue
        for name, value in figures.items():
            setattr(row, name, value)
    return rows


def _given(case: Case) -> Path:
    """A folder with the model and the data, in forms that any release reads."""
    folder = case.workspace / f"peer-{case.framework}-{case.model}"
    folder.mkdir(exist_ok=True)
    splits = {split: Digits(split) for split in ("train", "test")}
    np.savez(
        folder / "data.npz",
        calibration=splits["train"].images[:BATCH],
        images=splits["test"].images,
        labels=splits["test"].labels,
    )
    if case.framework == "onnx":
        _old_onnx(Path(case.source), folder / "model.onnx")
    else:
        from benchmarks.nets.search_nets import save_weights

        save_weights(case.source, folder / "weights.npz")
    return folder


def _old_onnx(source: Path, target: Path) -> None:
    """The file with a version that old releases take, and without the shapes of what is computed.

    It turns the matrices of dense layers around, and stumbles over the shapes they had.
    """
    import onnx

    model = onnx.load(source)
    model.ir_version = min(model.ir_version, 9)
    del model.graph.value_info[:]
    onnx.save(model, target)

"""A workspace of small runs, and a server of it as a user starts it."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from neural_mp.core.precision import Precision
from neural_mp.runs.report import RunRecord

COMMAND = (sys.executable, "-m", "neural_mp.cli.entry_point")
#: Matrix products of the classifier, in order.
LAYERS = ("features", "hidden", "wide", "scores")
CONF = """
model: {name: digits.onnx, runtime: source}
mixed_precision: {precisions: int8}
quantization:
  calibration: {dataloader: {batch_size: 50, dataset: {numpy: {path: train.npz}}}}
evaluation:
  accuracy:
    metric: accuracy
    dataloader: {batch_size: 100, dataset: {numpy: {path: test.npz}}}
tuning: {accuracy_criterion: {relative: 0.05}}
"""


def write_classifier(folder: Path, digits) -> None:
    """Write data, a tuning file and a classifier: random features, then least squares."""
    random, (train, test) = np.random.default_rng(0), digits
    for name, split in (("train", train), ("test", test)):
        np.savez(folder / f"{name}.npz", inputs=split.images.reshape(-1, 64), labels=split.labels)
    x = train.images.reshape(-1, 64)
    arrays, hidden = [], x
    for inputs in (64, 512, 512):
        arrays.append(random.normal(size=(inputs, 512)).astype(np.float32) / 16)
        hidden = np.maximum(hidden @ arrays[-1], 0)
    last = np.linalg.lstsq(hidden, np.eye(10)[train.labels], rcond=1e-3)[0].astype(np.float32)
    nodes, source = [], "x"
    for name in LAYERS:
        result = name if name == LAYERS[-1] else f"{name}_product"
        nodes.append(helper.make_node("MatMul", [source, f"{name}_w"], [result], name=name))
        if name != LAYERS[-1]:
            nodes.append(helper.make_node("Relu", [result], [f"{name}_relu"], name=f"{name}_relu"))
            source = f"{name}_relu"
    weights = zip(LAYERS, (*arrays, last), strict=True)
    value = helper.make_tensor_value_info
    graph = helper.make_graph(
        nodes,
        "classifier",
        [value("x", TensorProto.FLOAT, ["n", 64])],
        [value("scores", TensorProto.FLOAT, ["n", 10])],
        [numpy_helper.from_array(array, f"{name}_w") for name, array in weights],
    )
    opset = [helper.make_opsetid("", 17)]
    onnx.save(helper.make_model(graph, opset_imports=opset, ir_version=8), folder / "digits.onnx")
    (folder / "conf.yaml").write_text(CONF)


def find_untried_edits(record: RunRecord) -> dict[str, Precision]:
    """Return precisions of all layers that no trial has, some of them INT8."""
    tried = [{op: trial.plan[op].precision for op in LAYERS} for trial in record.trials]
    choices = product((Precision.INT8, Precision.FP32), repeat=len(LAYERS))
    edits = (dict(zip(LAYERS, choice, strict=True)) for choice in choices)
    return next(edit for edit in edits if edit not in tried and Precision.INT8 in edit.values())


@contextmanager
def serve_workspace(folder: Path, *options: str) -> Iterator[str]:
    """Start `neural-mp ui` in a folder; yield the address that it prints."""
    command = [*COMMAND, "ui", "neural_mp_workspace", "--port", "0", *options]
    with subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            match = re.search(r"http\S+", server.stdout.readline())
            assert match is not None
            yield match[0]
        finally:
            server.terminate()
            server.wait(600)

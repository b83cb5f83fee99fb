"""Small jobs for `tune-many`: linear classifiers of digits, with metrics that leave traces."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

METRICS = """
import os, signal, time
import psutil

class Right:
    def __init__(self):
        self.reset()

    def reset(self):
        self.right = self.all = 0

    def update(self, preds, labels):
        if not self.all:
            note("begin")
            time.sleep(float(os.environ.get("PAUSE", "0")))
        self.right += int((preds.argmax(1) == labels).sum())
        self.all += len(labels)

    def result(self):
        note("end")
        return self.right / self.all

class Crashes(Right):
    def update(self, preds, labels):
        os.kill(os.getpid(), signal.SIGSEGV)

class Pausing(Right):
    def update(self, preds, labels):
        if not self.all:
            open(f"at-{psutil.Process(os.getppid()).ppid()}", "w").close()
            time.sleep(2)
        super().update(preds, labels)

class Raises(Right):
    def update(self, preds, labels):
        raise ZeroDivisionError("nothing to divide by")

def note(word):
    with open("evaluations.txt", "a") as file:
        print(word, file=file)
"""
JOB = """
model: {name: %s}
mixed_precision: {precisions: int8}
evaluation:
  accuracy:
    metric: {metrics_of_mine:%s: {}}
    dataloader: {batch_size: 100, dataset: {numpy: {path: test.npz}}}
tuning: {objective: modelsize, accuracy_criterion: {relative: 0.05}}
"""


def write_jobs_into(folder, digits):
    """Data and metrics in a folder, and a function that writes a job into its folder `jobs`."""
    train, test = digits
    np.savez(folder / "test.npz", inputs=test.images.reshape(-1, 64), labels=test.labels)
    (folder / "metrics_of_mine.py").write_text(METRICS)
    (folder / "jobs").mkdir()
    inputs, targets = train.images.reshape(-1, 64), np.eye(10)[train.labels]
    weights = np.linalg.lstsq(inputs, targets, rcond=None)[0].astype(np.float32)
    return lambda name, metric="Right": _write_job(name, metric, weights)


def _write_job(name, metric, weights):
    """A linear classifier, a little different for every name, and its tuning file."""
    size = np.float32(1 + sum(map(ord, name)) / 1000)
    value = helper.make_tensor_value_info
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "w"], ["scores"], name="dense")],
        "classifier",
        [value("x", TensorProto.FLOAT, ["n", 64])],
        [value("scores", TensorProto.FLOAT, ["n", 10])],
        [numpy_helper.from_array(weights * size, "w")],
    )
    opset = [helper.make_opsetid("", 17)]
    onnx.save(helper.make_model(graph, opset_imports=opset, ir_version=8), f"{name}.onnx")
    file = Path("jobs") / f"{name}.yaml"
    file.write_text(JOB % (f"{name}.onnx", metric))
    return file


def evaluations(event):
    """How many evaluations of all jobs have begun, or ended."""
    file = Path("evaluations.txt")
    return file.read_text().split().count(event) if file.exists() else 0

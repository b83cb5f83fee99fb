"""Ours in PyTorch, torch.compile, ONNX Runtime and TensorFlow: the fastest plan, no metric."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.nets.case import Arrays
from benchmarks.nets.runtime_nets import CALIBRATED, CALIBRATION, JUDGED, case_of, noise
from benchmarks.peers.runtime_lite import as_keras_takes, keras_net
from neural_mp import MixedPrecision, load

Call = Callable[[Arrays], np.ndarray]
EAGER, COMPILED = "ours, PyTorch", "ours, torch.compile"
ONNX, KERAS = "ours, ONNX Runtime", "ours, TensorFlow"
KERAS_FP32 = "TensorFlow FP32 of the Keras model"
#: Runtime → the way in the tables.
_RUNTIMES = {"pytorch": EAGER, "onnxruntime": ONNX, "tensorflow": KERAS}


def own(name: str, folder: Path, size: str, runtime: str, *settings: str) -> dict[str, Any]:
    """Convert a model for a runtime without a metric, and save the result.

    `settings` are further ones, such as `precisions=bf16`.
    """
    case, keras = case_of(name), runtime == "tensorflow"
    batches = [_taken(inputs, keras) for inputs in case.cut(CALIBRATION, CALIBRATED, int(size))]
    result = MixedPrecision(
        model=_source(name, folder, runtime),
        runtime="source",
        calib_dataloader=batches,
        sampling_size=CALIBRATION,
        workspace=folder / f"workspace-{runtime}{size}",
        cache=False,
        **dict(setting.split("=") for setting in settings),
    )()
    target = _place(folder, runtime, int(size))
    shutil.rmtree(target, ignore_errors=True)
    result.save(target)
    return {"plan": {str(precision): count for precision, count in result.plan.counts().items()}}


def own_calls(folder: Path, size: int) -> dict[str, Call]:
    """Return way → the call of a result, for those that were saved."""
    calls: dict[str, Call] = {}
    for runtime, label in _RUNTIMES.items():
        path = _place(folder, runtime, size)
        if not path.exists():
            continue
        result = load(path)
        calls[label] = _called(result, keras=runtime == "tensorflow")
        if runtime == "pytorch" and shutil.which("g++"):
            calls[COMPILED] = module_call(result.compiled())
    if KERAS in calls and (folder / "keras").exists():
        calls[KERAS_FP32] = _keras_fp32(folder / "keras")
    return calls


def own_noise(
    name: str, calls: dict[str, Call], expected: np.ndarray, size: int
) -> dict[str, float]:
    """Return way → noise; that of Keras models, with weights of their own, beside their FP32."""
    case = case_of(name)
    results = {
        label: np.concatenate([call(inputs) for inputs in case.cut(case.judged, JUDGED, size)])
        for label, call in calls.items()
    }
    keras = results.get(KERAS_FP32, expected)
    return {
        label: noise(keras if label in (KERAS, KERAS_FP32) else expected, outputs)
        for label, outputs in results.items()
    }


def _source(name: str, folder: Path, runtime: str) -> Any:
    if runtime == "pytorch":
        return case_of(name).build()
    if runtime == "onnxruntime":
        return folder / "fp32.onnx"
    net = keras_net(name)
    net.export(folder / "keras", verbose=False)  # the FP32 to compare with
    return net


def _place(folder: Path, runtime: str, size: int) -> Path:
    return folder / f"own-{runtime}{size}"


def _taken(inputs: Arrays, keras: bool) -> Any:
    if keras:
        return as_keras_takes(inputs)
    return inputs[0] if len(inputs) == 1 else inputs


def _called(result: Any, *, keras: bool) -> Call:
    if keras:
        return lambda inputs: np.asarray(result(as_keras_takes(inputs)))
    return lambda inputs: np.asarray(result(*inputs))


def module_call(module: Any) -> Call:
    """Return the call of a torch module, for its first result."""

    def call(inputs: Arrays) -> np.ndarray:
        with torch.inference_mode():
            outputs = module(*map(torch.from_numpy, inputs))
        return np.asarray(outputs[0] if isinstance(outputs, tuple | list) else outputs)

    return call


def _keras_fp32(path: Path) -> Call:
    import tensorflow as tf

    loaded = tf.saved_model.load(str(path))
    return lambda inputs: np.asarray(loaded.serve(as_keras_takes(inputs)))

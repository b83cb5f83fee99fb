"""TFLite's INT8 of the Keras models that are built as those of `runtimes.py`, weights aside."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import numpy as np

from benchmarks.nets.case import Arrays
from benchmarks.nets.runtime_nets import CALIBRATED, CALIBRATION, CASES, JUDGED, noise


def as_keras_takes(inputs: Arrays) -> np.ndarray:
    """Images with channels last; tokens without their mask, which hides none."""
    first = inputs[0]
    if first.ndim == 4:
        return np.ascontiguousarray(first.transpose(0, 2, 3, 1))
    return first.astype(np.int32)


def keras_net(name: str) -> Any:
    """Return the Keras model of the same build."""
    from benchmarks.nets import keras_models, vision_nets

    return keras_models.build("bert") if name == "bert" else vision_nets.keras_net(name)


def write_lite(name: str, folder: Path) -> None:
    """Write the INT8 file, and the noise of its outputs beside those of the Keras model."""
    import tensorflow as tf

    net, case = keras_net(name), CASES[name]

    def samples() -> Iterator[list[np.ndarray]]:
        for inputs in case.cut(CALIBRATION, CALIBRATED, 1):
            yield [as_keras_takes(inputs)]

    net.export(folder / "keras", verbose=False)
    converter = tf.lite.TFLiteConverter.from_saved_model(str(folder / "keras"))
    converter.optimizations = [tf.lite.Optimize.DEFAULT]
    converter.representative_dataset = samples
    (folder / "lite.tflite").write_bytes(converter.convert())
    call = lite_call(folder, name, 1)
    judged = list(case.cut(case.judged, JUDGED, 1))
    expected = np.concatenate([np.asarray(net(as_keras_takes(inputs))) for inputs in judged])
    actual = np.concatenate([call(inputs) for inputs in judged])
    (folder / "lite.noise").write_text(str(noise(expected, actual)))


def lite_call(folder: Path, name: str, size: int) -> Callable[[Arrays], np.ndarray]:
    """Return the call of the file at a batch size, by XNNPACK's kernels."""
    import tensorflow as tf

    threads = int(os.environ["OMP_NUM_THREADS"])
    running = tf.lite.Interpreter(str(folder / "lite.tflite"), num_threads=threads)
    (entry,), (result,) = running.get_input_details(), running.get_output_details()
    example = as_keras_takes(CASES[name].draw(size, JUDGED))
    running.resize_tensor_input(entry["index"], example.shape)
    running.allocate_tensors()

    def call(inputs: Arrays) -> np.ndarray:
        running.set_tensor(entry["index"], as_keras_takes(inputs))
        running.invoke()
        return np.asarray(running.get_tensor(result["index"]))

    return call

"""Tools that quantize `.tflite` files without asking for accuracy."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import keras
import numpy as np

from benchmarks.real.case import Batches


def _iterate_samples(batches: Batches) -> Iterator[np.ndarray]:
    for inputs, _ in batches:
        yield from (inputs[i : i + 1] for i in range(len(inputs)))


def convert_by_tensorflow(net: keras.Model, content: bytes, calibration: Batches) -> bytes:
    """Return full INT8 by `TFLiteConverter`, with inputs and outputs in float."""
    import tensorflow as tf

    converter = tf.lite.TFLiteConverter.from_keras_model(net)
    converter.optimizations = [tf.lite.Optimize.DEFAULT]
    converter.representative_dataset = lambda: ([x] for x in _iterate_samples(calibration))
    converter.target_spec.supported_ops = [tf.lite.OpsSet.TFLITE_BUILTINS_INT8]
    return bytes(converter.convert())


def convert_by_quantizer(net: keras.Model, content: bytes, calibration: Batches) -> bytes:
    """Return the default static recipe of AI Edge Quantizer, with its own calibration."""
    from ai_edge_litert.interpreter import Interpreter
    from ai_edge_quantizer import quantizer, recipe

    ((key, ports),) = Interpreter(model_content=content).get_signature_list().items()
    samples = [{ports["inputs"][0]: x} for x in _iterate_samples(calibration)]
    tool = quantizer.Quantizer(content)
    tool.load_quantization_recipe(recipe.static_wi8_ai8())
    ranges: Any = tool.calibrate({key: samples}, num_threads=1)
    return bytes(tool.quantize(ranges, enable_progress_report=False).quantized_model)


PEERS: Mapping[str, Callable[[keras.Model, bytes, Batches], bytes]] = {
    "TFLiteConverter": convert_by_tensorflow,
    "AI Edge Quantizer": convert_by_quantizer,
}

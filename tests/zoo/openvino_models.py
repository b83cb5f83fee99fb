"""Construction of small OpenVINO models: data, weights and single layers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from zoo.harness import Built

from neural_mp.adaptors.openvino.runtime import Runner, ops, ov
from neural_mp.core.graph import Op
from neural_mp.core.precision import OpConfig
from neural_mp.space import TuningSpace

F32 = np.float32
DRAWN = np.random.default_rng(0)
PICTURES = DRAWN.normal(size=(2, 16, 8, 8)).astype(F32)
SIGNALS = DRAWN.normal(size=(2, 16, 12)).astype(F32)
VOLUMES = DRAWN.normal(size=(2, 16, 4, 4, 4)).astype(F32)
ROWS = DRAWN.normal(size=(4, 32)).astype(F32)
STEPS = DRAWN.normal(size=(2, 6, 32)).astype(F32)
TOKENS = DRAWN.integers(0, 20, size=(2, 6))
Body = Callable[..., Any]


def weight(*shape: int, seed: int = 1) -> np.ndarray:
    """Return a weight whose results have about the size of their inputs."""
    drawn = np.random.default_rng(seed).normal(size=shape)
    return (drawn / np.sqrt(np.prod(shape[1:]))).astype(F32)


def built(body: Body, *inputs: np.ndarray, sizes: Any = None, options: Any = None) -> Built:
    """Return a model of one body.

    Args:
        body: nodes of the inputs → node, or list of nodes, of the outputs.
        inputs: an example of every input.
        sizes: shape of every input; by default, the first axis is dynamic.
        options: further options of `MixedPrecision`.
    """
    parameters = []
    for index, array in enumerate(inputs):
        shape = sizes[index] if sizes else [-1, *array.shape[1:]]
        parameters.append(ops.parameter(shape, array.dtype, name=f"x{index}"))
        parameters[-1].output(0).get_tensor().set_names({f"x{index}"})
    outputs = body(*parameters)
    results = [
        ops.result(node, name=f"y{index}")
        for index, node in enumerate(outputs if isinstance(outputs, list) else [outputs])
    ]
    return with_outputs(ov.Model(results, parameters, "zoo"), inputs, options)


def with_outputs(model: Any, inputs: Sequence[np.ndarray], options: Any = None) -> Built:
    """Return a model with two batches and OpenVINO's own outputs."""
    scaled = [a * F32(0.7) if a.dtype == F32 else a for a in inputs]
    batches = [list(inputs), scaled]
    expected = [Runner(model.clone())(batch) for batch in batches]
    single = len(inputs) == 1
    feeds = [batch[0] if single else tuple(batch) for batch in batches]
    return Built(model, feeds, expected, options)


def convolved(
    x: Any, outputs: int = 16, *, axes: int = 2, size: int = 3, dilation: int = 1, seed: int = 1
) -> Any:
    """Return a convolution with padding that keeps sizes."""
    kernel = weight(outputs, 16, *[size] * axes, seed=seed)
    pads, ones = [dilation * (size // 2)] * axes, [1] * axes
    return ops.convolution(x, kernel, ones, pads, pads, [dilation] * axes)


def biased(x: Any, channels: int = 16, axes: int = 2) -> Any:
    return ops.add(x, weight(1, channels, *[1] * axes, seed=5))


def grouped(x: Any, groups: int, axes: int = 2) -> Any:
    kernel = weight(groups, 16 // groups, 16 // groups, *[3] * axes)
    ones = [1] * axes
    return ops.group_convolution(x, kernel, ones, ones, ones, ones)


def transposed(x: Any, groups: int = 0) -> Any:
    if groups:
        kernel = weight(groups, 16 // groups, 16 // groups, 2, 2)
        return ops.group_convolution_backprop_data(x, kernel, [2, 2])
    return ops.convolution_backprop_data(x, weight(16, 16, 2, 2), [2, 2])


def product(x: Any, kernel: np.ndarray | None = None, *, across: bool = True) -> Any:
    kernel = weight(32, 32) if kernel is None else kernel
    return ops.matmul(x, kernel, False, across)


def halved(x: Any, kind: Any = np.float16) -> Any:
    """A product whose weight is stored in 16 bits and decompressed."""
    kernel = ops.constant(weight(32, 32).astype(kind))
    return product(ops.relu(product(x, ops.convert(kernel, "f32"))))


def drawable(space: TuningSpace, op: Op) -> list[OpConfig]:
    """Return the configurations of an op that need no calibration data at conversion."""
    return [c for c in space.capabilities[op.name].configs if not c.needs_data]

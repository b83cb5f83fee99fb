"""Child process that runs every integer kernel variant once against the float op."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import tensorflow as tf

from neural_mp.adaptors.common.kernels.runtime_probe import try_each
from neural_mp.adaptors.common.signatures.signature import TensorSpec
from neural_mp.adaptors.tensorflow.graph.ops import LAYERS, SUMMAND
from neural_mp.adaptors.tensorflow.graph.runtime import Runner, compile_runner, import_runnable
from neural_mp.adaptors.tensorflow.graph.tensor_graph import Array, TensorGraph
from neural_mp.adaptors.tensorflow.int8_accumulation import BF16_CASES, EXACT, FORMS, WORKS
from neural_mp.adaptors.tensorflow.kernels.convert import convert_frozen_graph
from neural_mp.adaptors.tensorflow.model import ServedSignature, TensorFlowModel, build_graph
from neural_mp.core.enums import WeightRange
from neural_mp.core.int8_accumulation import (
    FULL_RANGE,
    REDUCED_RANGE,
    REDUCED_WEIGHT,
    WEIGHT_LIMITS,
)
from neural_mp.core.plan import PrecisionPlan
from neural_mp.core.precision import OpConfig, Precision
from neural_mp.core.quantization_flow import propagate_quantization
from neural_mp.errors import ConversionError
from neural_mp.space import ResolvedPlan

_CHANNELS = 16
_F32 = tf.float32
#: Scales of inputs and weights, chosen such that results are of the order of 1, where activations
#: are nonlinear.
_INPUT_STEP, _WEIGHT_STEP = 1 / 255, 1 / 127
_ACTIVATIONS = {
    **{"Relu": tf.nn.relu, "Relu6": tf.nn.relu6, "Elu": tf.nn.elu},
    **{"Tanh": tf.tanh, "Sigmoid": tf.sigmoid, "GeluExact": tf.nn.gelu},
    "GeluApproximate": lambda x: tf.nn.gelu(x, approximate=True),
}
#: Error from float32 and approximate activations, in addition to one step.
_STEP_TOLERANCE = 0.05


def _probe_form(form: str) -> Iterator[str]:
    """Yield whether a variant is correct with weights of ±63, and with ±127."""
    if _is_within_one_step(form, REDUCED_RANGE):
        yield f"{WORKS}{form}"
        if _is_within_one_step(form, FULL_RANGE):
            yield f"{EXACT}{form}"


def _run_in_bf16(case: str) -> Iterator[str]:
    op = case.split()[1]
    with tf.Graph().as_default() as graph:
        x = tf.compat.v1.placeholder(tf.bfloat16, (2, 9, 9, _CHANNELS), name="x")
        weight = tf.ones((3, 3, _CHANNELS, _CHANNELS), tf.bfloat16)
        if op == "Conv2D":
            y = tf.nn.relu(tf.nn.conv2d(x, weight, 1, "SAME"))
        elif op == "MaxPool":
            y = tf.nn.max_pool2d(x, 2, 2, "VALID")
        else:
            y = tf.matmul(tf.reshape(x, (-1, _CHANNELS)), weight[0, 0])
        tf.cast(y, _F32, name="y")
    runner = compile_runner(TensorGraph.from_graph_def(graph.as_graph_def()), {}, ["x"], ["y"])
    runner({"x": np.ones((2, 9, 9, _CHANNELS), tf.bfloat16.as_numpy_dtype)}, ["y"])
    yield f"{WORKS}{case}"


def _is_within_one_step(form: str, weight_range: WeightRange) -> bool:
    """Whether a variant is within one step of the float op, for signed and unsigned inputs."""
    return all(
        _max_error_steps(form, weight_range, signed) <= 1 + _STEP_TOLERANCE
        for signed in (True, False)
    )


def _max_error_steps(form: str, weight_range: WeightRange, signed: bool) -> float:
    limit = WEIGHT_LIMITS[weight_range]
    model, feeds = _build_small_model(form, limit, signed)
    ops = build_graph(model)
    layers = [op.name for op in ops if op.fusion_group is None and op.type == form.split()[0]]
    flow = propagate_quantization(ops, dict.fromkeys(layers, Precision.INT8))
    names = list(flow.scale_owner)
    runner = Runner(import_runnable(model.graph.to_graph_def()))
    values = dict(zip(names, runner(feeds, names), strict=True))
    ranges = {root: (float(values[root].min()), float(values[root].max())) for root in names}
    weight = replace(REDUCED_WEIGHT, range=weight_range)
    plan = PrecisionPlan(dict.fromkeys(layers, OpConfig(Precision.INT8, weight)))
    (reference,) = model.run(feeds)
    (output,) = convert_frozen_graph(model, ResolvedPlan(plan, flow), ranges).run(feeds)
    step = (max(reference.max(), 0.0) - min(reference.min(), 0.0)) / 255
    return float(np.abs(output - reference).max() / step)


def _build_small_model(
    form: str, limit: int, signed: bool
) -> tuple[TensorFlowModel, dict[str, Array]]:
    op, _, kind = form.partition(" ")
    draw = np.random.default_rng(0)
    shape = (6, _CHANNELS) if LAYERS[op].is_dense else (2, 9, 9, _CHANNELS)
    feeds = {"x": _draw_extreme_input(draw, shape, signed)}
    weight = _draw_extreme_weight(draw, op, limit)
    if kind == SUMMAND:
        feeds["z"] = _draw_extreme_input(draw, shape, signed)
    with tf.Graph().as_default() as graph:
        fed = [tf.compat.v1.placeholder(_F32, (None, *shape[1:]), name) for name in feeds]
        y = _apply_layer(op, fed[0], kind, weight)
        if kind == SUMMAND:
            y = tf.raw_ops.AddV2(x=y, y=fed[1])
            y = tf.nn.relu(y) if signed else y
        if kind in _ACTIVATIONS:
            y = _ACTIVATIONS[kind](y)
        if LAYERS[op].is_dense:  # also covers an INT8 result
            y = _apply_layer(op, y, "plain", np.eye(_CHANNELS, dtype=np.float32))
        tf.identity(y, "y")
    nodes = TensorGraph.from_graph_def(graph.as_graph_def())
    ports = tuple(
        TensorSpec(name, name, np.dtype(np.float32), value.shape) for name, value in feeds.items()
    )
    signature = ServedSignature(ports, (TensorSpec("y", "y", np.dtype(np.float32), None),))
    return TensorFlowModel(nodes.prune_unused(["y"], feeds), signature, feeds, {}), feeds


def _apply_layer(op: str, source: tf.Tensor, kind: str, weight: Array) -> tf.Tensor:
    explicit, dilation = kind == "explicit", 2 if kind == "dilated" else 1
    geometry = {
        "strides": [1, 1, 1, 1],
        "dilations": [1, dilation, dilation, 1],
        "padding": "EXPLICIT" if explicit else "SAME",
        "explicit_paddings": [0, 0, 1, 1, 0, 2, 0, 0] if explicit else [],
    }
    if LAYERS[op].is_dense:
        y = tf.raw_ops.MatMul(a=source, b=weight)
    else:
        y = getattr(tf.raw_ops, op)(input=source, filter=weight, **geometry)
    return tf.raw_ops.BiasAdd(value=y, bias=np.zeros(_CHANNELS, np.float32))


def _draw_extreme_input(draw: np.random.Generator, shape: tuple[int, ...], signed: bool) -> Array:
    """Return values without rounding error, most of them, and their neighbours, extreme."""
    stored = draw.choice([0, 255, 255, 255, 255, 128], shape)
    stored[0] = 255
    stored.reshape(-1)[0] = 0  # the range of a tensor always includes its zero point
    zero_point = 100 if signed else 0
    return ((stored - zero_point) * _INPUT_STEP).astype(np.float32)


def _draw_extreme_weight(draw: np.random.Generator, op: str, limit: int) -> Array:
    """Return an exact weight of extreme integers, in channels that cancel and that do not."""
    window = () if LAYERS[op].is_dense else (3, 3)
    outputs = 1 if LAYERS[op].is_depthwise else _CHANNELS
    signs = draw.choice([-1, 1, 1, 1], (*window, _CHANNELS, outputs))
    signs[..., : _CHANNELS // 2, :] = 1
    return (signs * limit * _WEIGHT_STEP / _CHANNELS).astype(np.float32)


if __name__ == "__main__":
    try_each(FORMS, _probe_form, ConversionError)
    try_each(BF16_CASES, _run_in_bf16, ConversionError)

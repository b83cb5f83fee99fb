"""Run in a child process by `probe`: every form of integer kernel once, against the float op."""

from __future__ import annotations

import logging
import sys

import numpy as np
import tensorflow as tf

from neural_mp.adaptors.signature import Port
from neural_mp.adaptors.tensorflow.convert import convert
from neural_mp.adaptors.tensorflow.graph import build_graph
from neural_mp.adaptors.tensorflow.model import TensorFlowModel
from neural_mp.adaptors.tensorflow.nodes import Array, TensorGraph, make_constant, make_node
from neural_mp.adaptors.tensorflow.probe import STARTS, WORKS
from neural_mp.adaptors.tensorflow.signature import ServedSignature
from neural_mp.flow import trace
from neural_mp.precision import Precision

logger = logging.getLogger(__name__)

_CONVOLUTION = ("plain", "Relu", "Relu6")
FORMS = (
    *(f"Conv2D {kind}" for kind in (*_CONVOLUTION, "explicit", "dilated", "Sum")),
    *(f"DepthwiseConv2dNative {kind}" for kind in _CONVOLUTION),
    *(f"MatMul {kind}" for kind in ("plain", "Relu", "Relu6", "Tanh", "Sigmoid", "Elu")),
    *("MatMul GeluExact", "MatMul GeluApproximate"),
)
#: What quantizing to 8 bits once or twice leaves, by a wide margin.
_LEAST_DECIBELS = 25.0
_CHANNELS = 16
_F32 = tf.float32


def main() -> None:
    """Try the forms that were not named on the command line, saying before and after each."""
    for form in FORMS:
        if form in sys.argv[1:]:
            continue
        print(f"{STARTS}{form}", flush=True)
        try:
            if all(_decibels(form, signed) > _LEAST_DECIBELS for signed in (True, False)):
                print(f"{WORKS}{form}", flush=True)
        except tf.errors.OpError as error:
            logger.info("%s: %s", form, error)


def _decibels(form: str, signed: bool) -> float:
    """Signal to noise of a form, on inputs with or without negative numbers."""
    model, feeds = _small_model(form, signed)
    ops = build_graph(model)
    layers = [op.name for op in ops if op.cluster is None and op.type == form.split()[0]]
    flow = trace(ops, dict.fromkeys(layers, Precision.INT8))
    names = list(flow.root)
    values = dict(zip(names, model.runner(feeds, names), strict=True))
    ranges = {root: (float(values[root].min()), float(values[root].max())) for root in names}
    converted = convert(model, flow, ranges)
    (reference,) = model.run(feeds)
    (given,) = TensorFlowModel(converted.graph, model.signature, feeds, {}).run(feeds)
    noise = float(np.linalg.norm(given - reference))
    return float(20 * np.log10(np.linalg.norm(reference) / max(noise, 1e-12)))


def _small_model(form: str, signed: bool) -> tuple[TensorFlowModel, dict[str, Array]]:
    op, _, kind = form.partition(" ")
    draw = np.random.default_rng(0)
    spatial = op != "MatMul"
    shape = (2, 9, 9, _CHANNELS) if spatial else (6, _CHANNELS)
    feeds = {"x": draw.standard_normal(shape).astype(np.float32)}
    if not signed:
        feeds["x"] = np.abs(feeds["x"])
    graph = TensorGraph({})
    graph.add(_placeholder("x", shape))
    last = _layer(graph, op, "x", kind, draw)
    if kind == "Sum":
        feeds["z"] = draw.standard_normal(shape).astype(np.float32)
        graph.add(_placeholder("z", shape))
        last = graph.add(make_node("AddV2", "sum", [last, "z"], T=_F32))
        last = graph.add(make_node("Relu", "after", [last], T=_F32)) if signed else last
    elif kind.startswith("Gelu"):
        last = _gelu(graph, last, kind)
    elif kind in ("Relu", "Relu6", "Tanh", "Sigmoid", "Elu"):
        last = graph.add(make_node(kind, "after", [last], T=_F32))
    if not spatial:  # so that it is run with an INT8 result, too
        last = _layer(graph, op, last, "plain", draw, "again")
    graph.add(make_node("Identity", "y", [last], T=_F32))
    ports = tuple(
        Port(name, name, np.dtype(np.float32), value.shape) for name, value in feeds.items()
    )
    signature = ServedSignature(ports, (Port("y", "y", np.dtype(np.float32), None),))
    return TensorFlowModel(graph.pruned(["y"], feeds), signature, feeds, {}), feeds


def _placeholder(name: str, shape: tuple[int, ...]) -> tf.compat.v1.NodeDef:
    node = make_node("Placeholder", name, dtype=_F32)
    node.attr["shape"].shape.CopyFrom(tf.TensorShape([None, *shape[1:]]).as_proto())
    return node


def _layer(
    graph: TensorGraph,
    op: str,
    source: str,
    kind: str,
    draw: np.random.Generator,
    name: str = "layer",
) -> str:
    window = () if op == "MatMul" else (3, 3)
    outputs = 1 if op == "DepthwiseConv2dNative" else _CHANNELS
    weight = draw.standard_normal((*window, _CHANNELS, outputs)).astype(np.float32) / 8
    graph.add(make_constant(f"{name}/w", weight))
    graph.add(make_constant(f"{name}/b", draw.standard_normal(_CHANNELS).astype(np.float32)))
    if op == "MatMul":
        node = make_node(op, f"MatMul/{name}", [source, f"{name}/w"], T=_F32)
    else:
        dilation = 2 if kind == "dilated" else 1
        node = make_node(
            op,
            name,
            [source, f"{name}/w"],
            T=_F32,
            strides=[1, 1, 1, 1],
            data_format="NHWC",
            dilations=[1, dilation, dilation, 1],
            padding="EXPLICIT" if kind == "explicit" else "SAME",
            explicit_paddings=[0, 0, 1, 1, 0, 2, 0, 0] if kind == "explicit" else [],
        )
    graph.add(node)
    return graph.add(make_node("BiasAdd", f"{name}/add", [node.name, f"{name}/b"], T=_F32))


def _gelu(graph: TensorGraph, x: str, kind: str) -> str:
    """0.5 x erfc(-x/√2), or 0.5 x (1 + tanh(√(2/π) (x + 0.044715 x³)))."""

    def number(value: float, name: str) -> str:
        return graph.add(make_constant(name, np.float32(value)))

    def multiplied(name: str, one: str, other: str) -> str:
        return graph.add(make_node("Mul", name, [one, other], T=_F32))

    half = multiplied("half", x, number(0.5, "g/half"))
    if kind == "GeluExact":
        scaled = multiplied("scaled", x, number(-(0.5**0.5), "g/root"))
        factor = graph.add(make_node("Erfc", "factor", [scaled], T=_F32))
    else:
        cube = multiplied("cube", multiplied("square", x, x), x)
        small = multiplied("small", cube, number(0.044715, "g/small"))
        inner = graph.add(make_node("AddV2", "inner", [x, small], T=_F32))
        scaled = multiplied("scaled", inner, number((2 / np.pi) ** 0.5, "g/root"))
        tanh = graph.add(make_node("Tanh", "tanh", [scaled], T=_F32))
        factor = graph.add(make_node("AddV2", "factor", [tanh, number(1.0, "g/one")], T=_F32))
    return multiplied("after", half, factor)


if __name__ == "__main__":
    main()

"""Check of a drawn ONNX graph in INT8: as the runtime fuses it, unfused, and in FP32."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from neural_mp.adaptors.common.fusion_check import exceeds_rounding
from neural_mp.adaptors.contract import Adaptor
from neural_mp.adaptors.onnxrt.adaptor import OnnxRuntimeAdaptor
from neural_mp.adaptors.onnxrt.kernel_check import compare_ahead
from neural_mp.core.hardware import Hardware
from neural_mp.core.precision import Precision
from neural_mp.errors import NeuralMPError, one_line
from neural_mp.testing.graph_check import MAX_INT8_NSR, Outcome, Verdict, nsr, outcome_of
from neural_mp.testing.onnx_graphs import OnnxGraph
from neural_mp.util.pytree import Array, float_arrays


def compare_ops_of(graphs: Iterable[OnnxGraph]) -> None:
    """Compare the ops of several graphs in one child process, which takes time to start."""
    adaptor = OnnxRuntimeAdaptor()
    checks = (adaptor.load(graph.model).kernel_check for graph in graphs)
    compare_ahead(check for check in checks if check is not None)


def checked(
    graph: OnnxGraph,
    machine: Hardware | None = None,
    adaptor: Adaptor[Any] | None = None,
    source: object = None,
) -> Outcome:
    """Convert every eligible op of a graph to INT8 and compare the outputs.

    Args:
        graph: the graph.
        machine: the target; this machine by default.
        adaptor: the adaptor of a runtime that also runs unoptimized; ONNX Runtime's by default.
        source: the graph as the adaptor loads it; an ONNX model by default.
    """
    runtime = adaptor or OnnxRuntimeAdaptor()
    loaded = graph.model if source is None else source

    def check_drawn(drawn: OnnxGraph, target: Hardware) -> Outcome:
        return _check_conversion(drawn, target, runtime, loaded)

    return outcome_of(graph, check_drawn, machine)


def _check_conversion(
    graph: OnnxGraph, machine: Hardware, adaptor: Adaptor[Any], source: object
) -> Outcome:
    unoptimized = adaptor.unoptimized_run
    if unoptimized is None:
        raise TypeError(f"{adaptor.framework} does not run unoptimized")
    with adaptor.threads(1):
        model = adaptor.load(source, example=graph.feeds)
        space = adaptor.space(model, machine).restricted_to([Precision.INT8])
        observed = adaptor.observe(model, [graph.feeds], space)
        plan = space.resolve(space.fastest_plan())
        converted = adaptor.convert(model, plan, observed, space)
        if converted is model:
            return Outcome(Verdict.UNCHANGED)
        reference = unoptimized.outputs(model, graph.feeds)
        try:
            fused = float_arrays(adaptor.predict(converted, graph.feeds))
        except NeuralMPError as error:
            return Outcome(Verdict.NOT_LOADED, one_line(error))
        try:
            unfused = unoptimized.outputs(converted, graph.feeds)
        except NeuralMPError:
            # Some graphs run with optimizations only.
            unfused = fused
    if exceeds_rounding(reference, unfused, fused):
        details = (
            f"NSR {_greatest_nsr(unfused, fused):.2g} fused, "
            f"{_greatest_nsr(reference, unfused):.2g} unfused"
        )
        return Outcome(Verdict.WRONG_FUSION, details)
    if _greatest_nsr(reference, fused) > MAX_INT8_NSR:
        return Outcome(Verdict.WRONG_NUMBERS, f"NSR {_greatest_nsr(reference, fused):.2g}")
    return Outcome(Verdict.RIGHT)


def _greatest_nsr(expected: list[Array], outputs: list[Array]) -> float:
    return max(map(nsr, expected, outputs))

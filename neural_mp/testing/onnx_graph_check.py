"""Check of a drawn ONNX graph in INT8: as ONNX Runtime fuses it, unfused, and in FP32."""

from __future__ import annotations

from collections.abc import Iterable

from neural_mp.adaptors.common.fusion_check import exceeds_rounding
from neural_mp.adaptors.onnxrt.adaptor import OnnxRuntimeAdaptor
from neural_mp.adaptors.onnxrt.kernel_check import compare_ahead
from neural_mp.adaptors.onnxrt.sessions import PLAIN
from neural_mp.core.hardware import Hardware
from neural_mp.core.precision import Precision
from neural_mp.errors import NeuralMPError, one_line
from neural_mp.testing.graph_check import MAX_INT8_NSR, Outcome, Verdict, nsr, outcome_of
from neural_mp.testing.onnx_graphs import OnnxGraph
from neural_mp.util.pytree import Array


def compare_ops_of(graphs: Iterable[OnnxGraph]) -> None:
    """Compare the ops of several graphs in one child process, which takes time to start."""
    adaptor = OnnxRuntimeAdaptor()
    checks = (adaptor.load(graph.model).kernel_check for graph in graphs)
    compare_ahead(check for check in checks if check is not None)


def checked(graph: OnnxGraph, machine: Hardware | None = None) -> Outcome:
    """Convert every eligible op of a graph to INT8 and compare the outputs."""
    return outcome_of(graph, _converted, machine)


def _converted(graph: OnnxGraph, machine: Hardware) -> Outcome:
    adaptor = OnnxRuntimeAdaptor()
    with adaptor.threads(1):
        model = adaptor.load(graph.model)
        space = adaptor.space(model, machine).restricted_to([Precision.INT8])
        observed = adaptor.observe(model, [graph.feeds], space)
        plan = space.resolve(space.fastest_plan())
        converted = adaptor.convert(model, plan, observed, space)
        if converted is model:
            return Outcome(Verdict.UNCHANGED)
        names = model.signature.output_tensors
        reference = model.session(model.runs, level=PLAIN)(graph.feeds, names)
        unfused = model.session(converted.program, level=PLAIN)(graph.feeds, names)
        try:
            fused = converted.run(graph.feeds)
        except NeuralMPError as error:
            return Outcome(Verdict.NOT_LOADED, one_line(error))
    if exceeds_rounding(reference, unfused, fused):
        details = f"NSR {_nsr(unfused, fused):.2g} fused, {_nsr(reference, unfused):.2g} unfused"
        return Outcome(Verdict.WRONG_FUSION, details)
    if _nsr(reference, fused) > MAX_INT8_NSR:
        return Outcome(Verdict.WRONG_NUMBERS, f"NSR {_nsr(reference, fused):.2g}")
    return Outcome(Verdict.RIGHT)


def _nsr(expected: list[Array], outputs: list[Array]) -> float:
    """Return the greatest NSR of an output."""
    return max(map(nsr, expected, outputs))

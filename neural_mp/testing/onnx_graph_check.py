"""Check of a drawn ONNX graph in INT8: as the runtime fuses it, unfused, and in FP32."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from typing import Any

import numpy as np

from neural_mp.adaptors.common.fusion_check import exceeds_rounding
from neural_mp.adaptors.contract import Adaptor
from neural_mp.adaptors.onnxrt.adaptor import OnnxRuntimeAdaptor
from neural_mp.adaptors.onnxrt.kernel_check import compare_ahead
from neural_mp.core.hardware import Hardware, detect
from neural_mp.core.precision import Precision
from neural_mp.errors import NeuralMPError, one_line
from neural_mp.testing.onnx_graphs import OnnxGraph
from neural_mp.util.pytree import Array, float_arrays

#: NSR relative to FP32 up to which noise is that of INT8.
_MAX_NSR = 10**-1.5


class Verdict(Enum):
    """The end of the conversion of a graph."""

    RIGHT = "right"
    UNCHANGED = "no op in INT8"
    NOT_LOADED = "does not load"
    WRONG_FUSION = "fused wrongly"
    WRONG_NUMBERS = "wrong numbers"
    REFUSED = "refused"
    TRACEBACK = "traceback"


@dataclass(frozen=True)
class Finding:
    """The end of a conversion.

    Attributes:
        graph: the graph.
        verdict: the end.
        words: details.
    """

    graph: OnnxGraph
    verdict: Verdict
    words: str = ""

    @property
    def is_failure(self) -> bool:
        """Whether the conversion should have ended otherwise."""
        return self.verdict not in (Verdict.RIGHT, Verdict.UNCHANGED)


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
) -> Finding:
    """Convert every eligible op of a graph to INT8 and compare the outputs.

    Args:
        graph: the graph.
        machine: the target; this machine by default.
        adaptor: the adaptor of a runtime that also runs unoptimized; ONNX Runtime's by default.
        source: the graph as the adaptor loads it; an ONNX model by default.
    """
    loaded = graph.model if source is None else source
    try:
        return _checked(graph, machine or detect(), adaptor or OnnxRuntimeAdaptor(), loaded)
    except NeuralMPError as error:
        return Finding(graph, Verdict.REFUSED, one_line(error))
    except Exception as error:  # noqa: BLE001 (any other error is the finding)
        return Finding(graph, Verdict.TRACEBACK, f"{type(error).__name__}: {one_line(error)}")


def _checked(graph: OnnxGraph, machine: Hardware, adaptor: Adaptor[Any], source: object) -> Finding:
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
            return Finding(graph, Verdict.UNCHANGED)
        reference = unoptimized.outputs(model, graph.feeds)
        try:
            fused = float_arrays(adaptor.predict(converted, graph.feeds))
        except NeuralMPError as error:
            return Finding(graph, Verdict.NOT_LOADED, one_line(error))
        try:
            unfused = unoptimized.outputs(converted, graph.feeds)
        except NeuralMPError:
            # Some graphs run with optimizations only.
            unfused = fused
    if exceeds_rounding(reference, unfused, fused):
        words = f"NSR {_nsr(unfused, fused):.2g} fused, {_nsr(reference, unfused):.2g} unfused"
        return Finding(graph, Verdict.WRONG_FUSION, words)
    if _nsr(reference, fused) > _MAX_NSR:
        return Finding(graph, Verdict.WRONG_NUMBERS, f"NSR {_nsr(reference, fused):.2g}")
    return Finding(graph, Verdict.RIGHT)


def _nsr(expected: list[Array], found: list[Array]) -> float:
    """Return the greatest NSR of an output."""
    return max(
        float(np.square(one - other).sum() / np.square(one).sum())
        if one.shape == other.shape
        else np.inf
        for one, other in zip(expected, found, strict=True)
    )

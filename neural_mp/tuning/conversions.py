"""Conversions of tensors between data types under a plan."""

from __future__ import annotations

from collections.abc import Mapping

from neural_mp.core.graph import OpGraph
from neural_mp.core.precision import Precision
from neural_mp.core.quantization_flow import QuantizationFlow
from neural_mp.runs.report import Conversion


def converted_tensors(graph: OpGraph, flow: QuantizationFlow) -> list[str]:
    """Return the tensors that a plan converts, once per conversion."""
    return [conversion.source for conversion in conversions_of(graph, flow, {})]


def conversions_of(
    graph: OpGraph, flow: QuantizationFlow, seconds: Mapping[str, float]
) -> tuple[Conversion, ...]:
    """Return the conversions of tensors under a plan.

    The key of a conversion in `seconds` is the name of its tensor, a slash and a word.
    """
    conversions = []
    for name in (*graph.inputs, *(op.name for op in graph)):
        for kind, readers in _converted_for(graph, flow, name).items():
            durations = [
                value
                for key, value in seconds.items()
                if key.startswith(f"{name}/") and key not in graph
            ]
            conversions.append(
                Conversion(name, tuple(readers), kind, sum(durations) if durations else None)
            )
    return tuple(conversions)


def _converted_for(graph: OpGraph, flow: QuantizationFlow, name: str) -> dict[str, list[str]]:
    """Return kind of conversion → the consumers of a tensor converted so."""
    consumers: dict[str, list[str]] = {}
    written = flow.effective.get(name, Precision.FP32)
    for reader in graph.consumer_names(name):
        quantized = name in flow.int8_reads.get(reader, ())
        if quantized != (name in flow.int8_outputs):
            consumers.setdefault("quantize" if quantized else "dequantize", []).append(reader)
        elif not quantized:
            runs = flow.effective[reader]
            low = {p for p in (written, runs) if p.is_16_bit}
            if low and written is not runs and Precision.INT8 not in (written, runs):
                consumers.setdefault("cast", []).append(reader)
    return consumers

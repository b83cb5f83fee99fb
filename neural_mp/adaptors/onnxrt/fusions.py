"""Runs of a model without the optimizations of ONNX Runtime."""

from __future__ import annotations

from typing import Any

from neural_mp.adaptors.common.fusion_check import first_different
from neural_mp.adaptors.onnxrt.model import OnnxModel
from neural_mp.adaptors.onnxrt.observe import op_outputs
from neural_mp.adaptors.onnxrt.sessions import ALL, PLAIN


def outputs(model: OnnxModel, inputs: Any) -> list[Any]:
    """Return the outputs of a run without optimizations."""
    feeds = model.signature.bind(inputs)
    return model.session(model.runs, level=PLAIN)(feeds, model.signature.output_tensors)


def first_deviating(model: OnnxModel, inputs: Any) -> str | None:
    """Return the first op whose result depends on the optimizations.

    A kernel that runs several ops has one result, that of the last.
    """
    ops = list(model.results)
    unfused, fused = (op_outputs(model, ops, level)(inputs) for level in (PLAIN, ALL))
    return first_different(ops, unfused, fused)

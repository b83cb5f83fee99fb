"""Runs of a model without the low-precision transformations of OpenVINO."""

from __future__ import annotations

from typing import Any

from neural_mp.adaptors.common.fusion_check import first_different
from neural_mp.adaptors.openvino.model import OpenVinoModel
from neural_mp.adaptors.openvino.observe import op_outputs
from neural_mp.adaptors.openvino.runtime import Runner


def outputs(model: OpenVinoModel, inputs: Any) -> list[Any]:
    """Return the outputs of a run without integer kernels."""
    feeds = model.feeds(model.signature.bind(inputs))
    return model.in_order(Runner(model.runs, low_precision=False)(feeds))


def first_deviating(model: OpenVinoModel, inputs: Any) -> str | None:
    """Return the first op whose result depends on the transformations."""
    ops = list(model.results)
    unfused, fused = (
        op_outputs(model, ops, low_precision=low_precision)(inputs)
        for low_precision in (False, True)
    )
    return first_different(ops, unfused, fused)

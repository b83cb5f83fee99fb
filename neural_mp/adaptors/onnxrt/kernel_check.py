"""Ops of a model that ONNX Runtime miscompiles between integer ops.

ONNX Runtime fuses float ops between DequantizeLinear and QuantizeLinear into integer kernels, and
moves the transpositions around integer convolutions past other ops. For some ops, the results
differ, or the model does not load. No table of such ops would be complete, so a probe compares
every combination of op, attributes and reduced shapes once per machine and version.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

import onnx_ir as ir

from neural_mp.adaptors.common.runtime_probe import deviations, version_of
from neural_mp.adaptors.onnxrt.fusion import structure
from neural_mp.adaptors.onnxrt.kernel_check_cases import case_of
from neural_mp.adaptors.onnxrt.kernel_check_probe import JOINER, LAYER, MOVER
from neural_mp.adaptors.onnxrt.ops import has_weight, is_product
from neural_mp.adaptors.onnxrt.opset import opset_of

#: Must change with the cases or the probe.
_VERSION = 1
_PROBE = "neural_mp.adaptors.onnxrt.kernel_check_probe"


@dataclass(frozen=True, eq=False)
class KernelCheck:
    """The check of the ops of a model, run when needed.

    Attributes:
        program: the canonicalized graph.
    """

    program: ir.Model

    @cached_property
    def rejected(self) -> Mapping[str, str]:
        """Op → the reason why it cannot run between integer ops."""
        return {
            op: f"between integer ops, ONNX Runtime {reason}"
            for op, reason in _deviations(self.cases()).items()
        }

    def cases(self) -> dict[str, bytes]:
        """Return op → its case, for the ops that may be fused with integer ops."""
        graph, opset = structure(self.program), opset_of(self.program)
        cases = {}
        for name, node in graph.nodes.items():
            if name in graph.agnostic_ops:
                role = MOVER
            elif name in graph.fusion_groups and has_weight(node):
                role = LAYER
            else:
                role = JOINER
            # Products are written as their kernel.
            if role == LAYER and is_product(node):
                continue
            case = case_of(node, role, opset)
            if case is not None:
                cases[name] = case
        return cases


def compare_ahead(checks: Iterable[KernelCheck]) -> None:
    """Compare the ops of several models in one child process."""
    cases = (case for check in checks for case in check.cases().values())
    _deviations({str(index): case for index, case in enumerate(cases)})


def _deviations(cases: Mapping[str, bytes]) -> dict[str, str]:
    version = version_of("onnxruntime", "onnxruntime-gpu", "onnxruntime-openvino")
    return deviations(_PROBE, f"{_VERSION} {version}", cases)

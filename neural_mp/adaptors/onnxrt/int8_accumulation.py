"""INT8 accumulation of the installed ONNX Runtime's integer kernels."""

from __future__ import annotations

from collections.abc import Mapping

from neural_mp.adaptors.common.kernels import int8_accumulation as common
from neural_mp.adaptors.common.kernels.runtime_probe import find_installed_version
from neural_mp.core.hardware import Hardware
from neural_mp.core.int8_accumulation import KernelKind

#: Must change with the cases or the probe.
_VERSION = 2
#: Kind of kernel and label → case.
CASES: Mapping[str, common.Case] = {
    **common.COMMON_CASES,
    f"{KernelKind.DEPTHWISE} wide": common.Convolution(64, 64, groups=64, window=5),
}


def int8_accumulation(hardware: Hardware) -> common.KernelAccumulation:
    """Return the accumulation of each kind of kernel on the target machine."""
    module = "neural_mp.adaptors.onnxrt.int8_accumulation_probe"
    version = find_installed_version("onnxruntime", "onnxruntime-gpu", "onnxruntime-openvino")
    return common.probe_int8_accumulation(
        hardware, module, f"{_VERSION} {version}", CASES, obeys_onednn_limit=False
    )

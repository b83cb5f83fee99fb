"""INT8 accumulation of the installed OpenVINO's integer kernels."""

from __future__ import annotations

from neural_mp.adaptors.common.int8_accumulation import (
    COMMON_CASES,
    KernelAccumulation,
    probed_accumulation,
)
from neural_mp.adaptors.common.runtime_probe import version_of
from neural_mp.core.hardware import Hardware

#: Must change with the cases or the probe.
_VERSION = 1
CASES = COMMON_CASES


def int8_accumulation(hardware: Hardware) -> KernelAccumulation:
    """Return the accumulation of each kind of kernel on the target machine."""
    module = "neural_mp.adaptors.openvino.int8_accumulation_probe"
    return probed_accumulation(hardware, module, f"{_VERSION} {version_of('openvino')}", CASES)

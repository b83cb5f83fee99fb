"""INT8 accumulation of the installed OpenVINO's integer kernels."""

from __future__ import annotations

from neural_mp.adaptors.common.kernels import int8_accumulation as common
from neural_mp.adaptors.common.kernels.runtime_probe import find_installed_version
from neural_mp.core.hardware import Hardware

#: Must change with the cases or the probe.
_VERSION = 1


def int8_accumulation(hardware: Hardware) -> common.KernelAccumulation:
    """Return the accumulation of each kind of kernel on the target machine."""
    module, version = (
        "neural_mp.adaptors.openvino.int8_accumulation_probe",
        find_installed_version("openvino"),
    )
    return common.probe_int8_accumulation(
        hardware, module, f"{_VERSION} {version}", common.COMMON_CASES
    )

"""INT8 accumulation of oneDNN's integer kernels in the installed PyTorch."""

from __future__ import annotations

from collections.abc import Mapping

from neural_mp.adaptors.common.kernels import int8_accumulation as common
from neural_mp.adaptors.common.kernels.runtime_probe import find_installed_version
from neural_mp.core.hardware import Hardware
from neural_mp.core.int8_accumulation import KernelKind

#: Increment when cases or method change.
_VERSION = 2
#: Kind and variant of a kernel → case to try.
CASES: Mapping[str, common.Case] = {
    **common.COMMON_CASES,
    f"{KernelKind.CONVOLUTION} of one channel": common.Convolution(1, 16, window=5),
    f"{KernelKind.CONVOLUTION} in small groups": common.Convolution(6, 6, groups=2),
    f"{KernelKind.CONVOLUTION} of lines": common.Convolution(16, 16, axes=1),
    f"{KernelKind.CONVOLUTION} of volumes": common.Convolution(16, 16, axes=3),
    f"{KernelKind.DEPTHWISE} strided": common.Convolution(64, 64, groups=64, window=5, stride=2),
    f"{KernelKind.DEPTHWISE} dilated": common.Convolution(32, 32, groups=32, dilation=2),
    f"{KernelKind.DEPTHWISE} of lines": common.Convolution(16, 16, groups=16, axes=1),
}


def int8_accumulation(hardware: Hardware) -> common.KernelAccumulation:
    """Return the accumulation of each kind of kernel on the target machine."""
    module, version = (
        "neural_mp.adaptors.pytorch.int8_accumulation_probe",
        find_installed_version("torch"),
    )
    return common.probe_int8_accumulation(hardware, module, f"{_VERSION} {version}", CASES)

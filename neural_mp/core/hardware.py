"""Native precisions of this machine, as detected and as forced by the user."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

from neural_mp.core.int8_accumulation import Int8Accumulation
from neural_mp.core.precision import Precision
from neural_mp.errors import ConfigurationError, UnsupportedPrecisionError, did_you_mean
from neural_mp.util.text import Displayed

#: CPU flags (Linux kernel spelling), any of which makes a precision native. INT8 has kernels on
#: every CPU; with any of these flags, accumulation is exact.
NATIVE_FLAGS: Mapping[Precision, tuple[str, ...]] = {
    Precision.INT8: ("avx512_vnni", "avx_vnni", "amx_int8", "asimddp", "asimd"),
    Precision.BF16: ("avx512_bf16", "amx_bf16", "bf16"),
    Precision.FP16: ("avx512_fp16", "amx_fp16", "asimdhp"),
}
#: Environment variables that enable a precision without native support.
FORCE_VARIABLES: Mapping[Precision, str] = {
    Precision.BF16: "FORCE_BF16",
    Precision.FP16: "FORCE_FP16",
}
#: The lowest CUDA compute capability with native arithmetic
#: (CUDA C++ Programming Guide, "Arithmetic Instructions" and "Compute Capabilities").
NATIVE_COMPUTE_CAPABILITY: Mapping[Precision, tuple[int, int]] = {
    Precision.INT8: (6, 1),
    Precision.BF16: (8, 0),
    Precision.FP16: (5, 3),
}
#: Target: the current machine.
HOST_TARGET = "this"
#: Target: exact INT8 results on every machine.
PORTABLE = "portable"
#: CPU flag as `cpuinfo` spells it on Windows → as the Linux kernel does.
_LINUX_FLAGS: Mapping[str, str] = {
    "avx512bf16": "avx512_bf16",
    "avx512vnni": "avx512_vnni",
}
#: ARM feature on macOS → CPU flag of Linux.
_MACOS_FEATURES: Mapping[str, str] = {
    "AdvSIMD": "asimd",
    "FEAT_BF16": "bf16",
    "FEAT_DotProd": "asimddp",
    "FEAT_FP16": "asimdhp",
    "FEAT_I8MM": "i8mm",
}
#: Conversion target → the CPU flags guaranteed on the target.
TARGETS: Mapping[str, frozenset[str]] = {
    HOST_TARGET: frozenset(),
    PORTABLE: frozenset(),
    "avx2": frozenset({"avx2"}),
    "avx512": frozenset({"avx2", "avx512f"}),
    "vnni": frozenset({"avx2", "avx512f", "avx512_vnni"}),
    "amx": frozenset({"avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_int8", "amx_bf16"}),
    "arm-dotprod": frozenset({"asimd", "asimddp"}),
}


@dataclass(frozen=True)
class Gpu:
    """A CUDA device: its name and compute capability (major, minor)."""

    name: str
    compute_capability: tuple[int, int]


#: Reason why no CPU runs INT16.
ONLY_ACCELERATORS = "only accelerators compute in integers of 16 bits"


@dataclass(frozen=True)
class Support:
    """Availability and speed of a precision on a device, with the reason.

    Attributes:
        native: the device computes in the precision.
        weights_only: weights are stored in the precision; no device computes in it.
    """

    available: bool
    native: bool
    reason: str
    weights_only: bool = False

    @property
    def is_emulated(self) -> bool:
        """Whether other arithmetic takes the place of that of the precision."""
        return self.available and not (self.native or self.weights_only)

    @property
    def execution_mode(self) -> str:
        """Execution mode: `natively`, `weights`, `emulated` or `no`."""
        if self.weights_only:
            return "weights"
        return "natively" if self.native else "emulated" if self.available else "no"


@dataclass(frozen=True)
class Hardware(Displayed):
    """A machine.

    Attributes:
        name: CPU name, for display only.
        flags: CPU feature flags in the Linux kernel's spelling.
        cores: logical cores available to the process.
        gpus: CUDA devices.
        forced: precisions the user forces on (`FORCE_BF16=1`, `FORCE_FP16=1`).
        target: conversion target, a name in `TARGETS`; `this` for the current machine, whose
            runtimes can be probed.
        stored: 16-bit precisions in which a framework only stores weights, on any CPU.
    """

    name: str = "unknown CPU"
    flags: frozenset[str] = frozenset()
    cores: int = 1
    gpus: tuple[Gpu, ...] = ()
    forced: frozenset[Precision] = frozenset()
    target: str = HOST_TARGET
    stored: frozenset[Precision] = frozenset()

    @property
    def int8_accumulation(self) -> Int8Accumulation:
        """INT8 accumulation of the CPU, by its flags; saturating if unknown."""
        exact = any(flag in self.flags for flag in NATIVE_FLAGS[Precision.INT8])
        return Int8Accumulation.EXACT if exact else Int8Accumulation.SATURATING

    def support(self, precision: Precision, device: str = "cpu") -> Support:
        """Return the support of `precision` on `device` (`"cpu"` or `"gpu"`)."""
        if precision is Precision.FP32:
            return Support(True, True, "always")
        if precision is Precision.INT16:
            return Support(False, False, ONLY_ACCELERATORS)
        if precision.is_low_bit:
            reason = f"{precision.bits}-bit weights are expanded to floats"
            return Support(True, False, reason, weights_only=True)
        if precision in self.stored:
            reason = "weights are stored in it, and restored to floats"
            return Support(True, False, reason, weights_only=True)
        native, reason = self._native_support(precision, device)
        if precision is Precision.INT8 and device == "cpu":
            return Support(True, True, f"{reason}: {self.int8_accumulation.in_words}")
        if native:
            return Support(True, True, reason)
        if precision in self.forced:
            return Support(True, False, f"forced by {FORCE_VARIABLES[precision]}=1; {reason}")
        return Support(precision is Precision.INT8, False, reason)

    def for_target(self, target: str) -> Hardware:
        """Return the machine to convert for: the current one, or a generic one of a target.

        Raises:
            ConfigurationError: the target does not exist.
        """
        if target not in TARGETS:
            raise ConfigurationError(
                f"target must be one of {', '.join(TARGETS)}, got {target!r}"
                f"{did_you_mean(target, TARGETS)}"
            )
        if target == HOST_TARGET:
            return self
        return replace(self, name=f"target {target}", flags=TARGETS[target], target=target)

    def _native_support(self, precision: Precision, device: str) -> tuple[bool, str]:
        if device == "gpu":
            return self._native_on_gpu(precision)
        flags = NATIVE_FLAGS[precision]
        supported = [flag for flag in flags if flag in self.flags]
        if supported:
            return True, f"CPU has {', '.join(supported)}"
        return False, f"CPU has none of {', '.join(flags)}"

    def _native_on_gpu(self, precision: Precision) -> tuple[bool, str]:
        if not self.gpus:
            return False, "no CUDA device"
        needed = NATIVE_COMPUTE_CAPABILITY[precision]
        best = max(self.gpus, key=lambda gpu: gpu.compute_capability)
        capability = (
            f"{best.name} has compute capability {_format_version(best.compute_capability)}"
        )
        if best.compute_capability >= needed:
            return True, capability
        return False, f"{capability}, {precision} requires {_format_version(needed)}"


def require_any(
    hardware: Hardware, precisions: tuple[Precision, ...]
) -> tuple[tuple[Precision, ...], list[str]]:
    """Return the precisions that the CPU supports, and one warning for each of the others.

    Raises:
        UnsupportedPrecisionError: some are unsupported, and none below FP32 is usable.
    """
    usable = tuple(p for p in precisions if hardware.support(p).available)
    problems = {
        p: f"{p} is not supported on this cpu: {hardware.support(p).reason}"
        for p in precisions
        if p not in usable
    }
    if problems and set(usable) <= {Precision.FP32}:
        precision, problem = next(iter(problems.items()))
        raise UnsupportedPrecisionError(
            f"{problem}; set {FORCE_VARIABLES[precision]}=1 to emulate {precision}"
        )
    return usable, [f"{problem}; {p} is not used" for p, problem in problems.items()]


def detect(environment: Mapping[str, str] | None = None) -> Hardware:
    """Detect this machine, including precisions forced by the environment.

    Args:
        environment: variables with `FORCE_BF16` and `FORCE_FP16`; default: those of the process.
    """
    variables = os.environ if environment is None else environment
    forced = {p for p, name in FORCE_VARIABLES.items() if variables.get(name, "0") not in ("", "0")}
    return replace(_detect_machine(), forced=frozenset(forced))


@lru_cache(maxsize=1)
def _detect_machine() -> Hardware:
    name, flags = _cpu_from_kernel() or _cpu_from_library()
    flags |= _arm_flags_of_macos() if sys.platform == "darwin" else frozenset()
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return Hardware(name, flags, cores or 1, _detect_gpus())


def _cpu_from_kernel() -> tuple[str, frozenset[str]] | None:
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    fields: dict[str, str] = {}
    for line in text.split("\n\n")[0].splitlines():
        key, _, value = line.partition(":")
        fields[key.strip()] = value.strip()
    flags = fields.get("flags") or fields.get("Features")
    if not flags:
        return None
    return fields.get("model name", platform.machine()), frozenset(flags.split())


def _cpu_from_library() -> tuple[str, frozenset[str]]:
    import cpuinfo

    info = cpuinfo.get_cpu_info()
    flags = {_LINUX_FLAGS.get(flag, flag) for flag in info.get("flags", ())}
    return info.get("brand_raw", platform.machine()), frozenset(flags)


def _arm_flags_of_macos() -> frozenset[str]:
    """Return the flags of an ARM CPU, which `cpuinfo` does not list; none on x86.

    Source of the names: Apple, "Determining instruction set characteristics".
    """
    try:
        listing = subprocess.run(
            ["sysctl", "hw.optional"], capture_output=True, text=True, timeout=20, check=True
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return frozenset()
    return parse_macos_features(listing)


def parse_macos_features(listing: str) -> frozenset[str]:
    """Return the Linux flags of the ARM features that `sysctl hw.optional` lists as present."""
    lines = (line.partition(":") for line in listing.splitlines())
    present = {name.rpartition(".")[2] for name, _, value in lines if value.strip() == "1"}
    return frozenset(flag for feature, flag in _MACOS_FEATURES.items() if feature in present)


def _detect_gpus() -> tuple[Gpu, ...]:
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return ()
    try:
        answer = subprocess.run(
            [tool, "--query-gpu=name,compute_cap", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            timeout=20,
            check=True,
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return ()
    gpus = []
    for line in answer.splitlines():
        name, _, capability = line.rpartition(",")
        major, _, minor = capability.strip().partition(".")
        if major.isdigit() and minor.isdigit():
            gpus.append(Gpu(name.strip(), (int(major), int(minor))))
    return tuple(gpus)


def _format_version(version: tuple[int, int]) -> str:
    return f"{version[0]}.{version[1]}"


@dataclass(frozen=True)
class Device:
    """A device available to a framework.

    Attributes:
        framework: such as `pytorch`.
        kind: the framework's device type, lower case: `cpu`, `gpu`, `cuda`, `xpu`.
        name: the framework's device name, such as `NVIDIA H100`.
    """

    framework: str
    kind: str
    name: str

    @property
    def is_accelerator(self) -> bool:
        """Whether the device is not a CPU."""
        return self.kind != "cpu"

    def __str__(self) -> str:
        return f"{self.framework}: {self.kind}, {self.name}"

"""Devices and kinds of processors, as scripts of INC 3.x ask for them: models run on the CPU."""

from __future__ import annotations

from enum import Enum
from functools import cached_property
from pathlib import Path

from neural_mp.compat.inc.utils import CpuInfo
from neural_mp.core.hardware import detect
from neural_mp.errors import ConfigurationError


class ProcessorType(Enum):
    """Kinds of processors, which configurations do not distinguish."""

    Client = "Client"
    Server = "Server"


def is_client(processor_type: object) -> bool:
    """Whether a kind of processor, by enumeration or name, is that of a client.

    Raises:
        ConfigurationError: the kind does not exist.
    """
    name = str(getattr(processor_type, "value", processor_type or "server")).lower()
    if name not in ("client", "server"):
        raise ConfigurationError(f"processor_type must be client or server, got {name!r}")
    return name == "client"


def get_processor_type_from_user_config(user_processor_type: object = None) -> ProcessorType:
    """Return the kind of a server, unless the user names that of a client."""
    return ProcessorType.Client if is_client(user_processor_type) else ProcessorType.Server


detect_processor_type_based_on_hw = get_processor_type_from_user_config


class HostCpu(CpuInfo):
    """The CPU of this machine."""

    @cached_property
    def sockets(self) -> int:
        """Number of processors on the board; 1 if the system does not name them."""
        listing = Path("/proc/cpuinfo")
        lines = listing.read_text(encoding="utf-8").splitlines() if listing.is_file() else []
        return max(len({line for line in lines if line.startswith("physical id")}), 1)

    @cached_property
    def brand_raw(self) -> str:
        """Name of the processor."""
        return detect().name


cpu_info = HostCpu()


class Accelerator:
    """A device that models run on."""

    #: Name of the device.
    kind = "cpu"

    @staticmethod
    def is_available() -> bool:
        """Whether models run on the device."""
        return False

    def name(self) -> str:
        """Return the name of the device."""
        return self.kind

    def device_name(self, index: int | None = None) -> str:
        """Return the name of a device."""
        return self.name()

    current_device = current_device_name = name

    def device(self, index: int | None = None) -> None:
        """Return None: there is no context to enter."""

    def set_device(self, index: int) -> None:
        """Do nothing: there is one device."""

    def synchronize(self) -> None:
        """Do nothing: a call returns when it is finished."""

    empty_cache = mark_step = synchronize


class CPU_Accelerator(Accelerator):  # noqa: N801
    """The CPU."""

    @staticmethod
    def is_available() -> bool:
        """Return True."""
        return True


class CUDA_Accelerator(Accelerator):  # noqa: N801
    """NVIDIA GPUs, where no kernel of this package runs."""

    kind = "cuda"


class XPU_Accelerator(Accelerator):  # noqa: N801
    """Intel GPUs, where no kernel of this package runs."""

    kind = "xpu"


class HPU_Accelerator(Accelerator):  # noqa: N801
    """Gaudi, where no kernel of this package runs."""

    kind = "hpu"


class AcceleratorRegistry:
    """The devices."""

    def get_sorted_accelerators(self) -> list[type[Accelerator]]:
        """Return the classes of the devices that models run on, best first."""
        kinds = (HPU_Accelerator, XPU_Accelerator, CUDA_Accelerator, CPU_Accelerator)
        return [kind for kind in kinds if kind.is_available()]


accelerator_registry = AcceleratorRegistry()
accelerator = CPU_Accelerator()


def get_accelerator(device_name: str = "auto") -> Accelerator:
    """Return the CPU."""
    return accelerator


auto_detect_accelerator = get_accelerator


def detect_device() -> str:
    """Return the name of the device."""
    return accelerator.name()

"""What a framework computes on."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Device:
    """A device that a framework reaches.

    Attributes:
        framework: the framework that reaches it, such as `pytorch`.
        kind: what the framework calls its kind, in small letters: `cpu`, `gpu`, `cuda`, `xpu`.
        name: what it is called there, such as `NVIDIA H100`.
    """

    framework: str
    kind: str
    name: str

    @property
    def is_accelerator(self) -> bool:
        """Whether it is something else than a CPU."""
        return self.kind != "cpu"

    def __str__(self) -> str:
        return f"{self.framework}: {self.kind}, {self.name}"

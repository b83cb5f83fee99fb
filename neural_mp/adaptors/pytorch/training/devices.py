"""The devices that torch reaches."""

from __future__ import annotations

import torch

from neural_mp.core.hardware import Device


def devices() -> list[Device]:
    """The CPU, and the devices of the accelerator that torch was built for, if there is one."""
    found = [Device("pytorch", "cpu", "CPU")]
    if not torch.accelerator.is_available():
        return found
    accelerator = torch.accelerator.current_accelerator()
    kind = accelerator.type if accelerator is not None else "cuda"
    named = getattr(getattr(torch, kind, None), "get_device_name", None)
    for index in range(torch.accelerator.device_count()):
        found.append(Device("pytorch", kind, named(index) if named else f"{kind}:{index}"))
    return found

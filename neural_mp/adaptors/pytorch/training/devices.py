"""Devices available to torch."""

from __future__ import annotations

import torch

from neural_mp.core.hardware import Device


def devices() -> list[Device]:
    """Return the CPU and the devices of torch's accelerator, if any."""
    result = [Device("pytorch", "cpu", "CPU")]
    if not torch.accelerator.is_available():
        return result
    accelerator = torch.accelerator.current_accelerator()
    kind = accelerator.type if accelerator is not None else "cuda"
    named = getattr(getattr(torch, kind, None), "get_device_name", None)
    for index in range(torch.accelerator.device_count()):
        result.append(Device("pytorch", kind, named(index) if named else f"{kind}:{index}"))
    return result

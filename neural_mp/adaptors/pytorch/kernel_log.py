"""Switches oneDNN's log on in this process, as only PyTorch can."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from neural_mp.errors import KernelLogError


@contextmanager
def verbose() -> Iterator[None]:
    """Let oneDNN write a line to standard output for every kernel that runs meanwhile.

    Raises:
        KernelLogError: PyTorch is built without oneDNN, or it is switched off.
    """
    backend = torch.backends.mkldnn
    if not backend.is_available():
        raise KernelLogError("this PyTorch is built without oneDNN, so that there is no log of it")
    if not backend.enabled:
        raise KernelLogError("oneDNN is off; set torch.backends.mkldnn.enabled = True")
    with backend.verbose(backend.VERBOSE_ON):
        yield

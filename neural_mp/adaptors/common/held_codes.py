"""Codes of rounded weights between calibration and conversion: packed, in a file without a name.

A search holds the codes of every layer in several numbers of bits, which would take more memory
than the blocks that they are made from.
"""

from __future__ import annotations

import logging
import os
import tempfile
import weakref
from dataclasses import dataclass, field, replace
from pathlib import Path
from threading import Lock
from typing import IO

import numpy as np
from numpy.typing import NDArray

from neural_mp.adaptors.common.code_packing import BitOrder, packed, unpacked
from neural_mp.adaptors.common.grouped_weight import Codes, GroupedWeight
from neural_mp.util.memory import FREED

logger = logging.getLogger(__name__)

_ORDER = BitOrder.UPPER_FIRST


@dataclass(frozen=True, eq=False)
class _PackedCodes:
    """Packed codes in memory; see `HeldCodes`."""

    stored: NDArray[np.uint8]
    shape: tuple[int, int]
    bits: int

    def read(self) -> Codes:
        return unpacked(self.stored, self.bits, self.shape[1], _ORDER)


@dataclass(frozen=True, eq=False)
class _CodesInFile:
    """Packed codes in a file; see `HeldCodes`."""

    holder: CodeHolder
    offset: int
    stored_shape: tuple[int, ...]
    shape: tuple[int, int]
    bits: int

    def read(self) -> Codes:
        stored = self.holder.read(self.offset, self.stored_shape)
        return unpacked(stored, self.bits, self.shape[1], _ORDER)


@dataclass(frozen=True, eq=False)
class CodeHolder:
    """Holder of the codes of weights.

    The file has no name, so that nothing else writes to it, and it ends with the last weight.

    Attributes:
        folder: the folder of the file; None to hold packed codes in memory.
    """

    folder: Path | None = None
    _files: list[IO[bytes]] = field(default_factory=list, repr=False)
    _lock: Lock = field(default_factory=Lock, repr=False)

    def hold(self, weight: GroupedWeight) -> GroupedWeight:
        """Return a weight whose codes are read back, and unpacked, whenever they are asked for."""
        if not isinstance(weight.held, np.ndarray) or not weight.held.size:
            return weight
        stored = packed(weight.held, weight.bits, _ORDER)
        FREED.after(np.dtype(np.float32).itemsize * weight.held.size)
        outputs, inputs = weight.held.shape
        shape = int(outputs), int(inputs)
        offset = self._written(stored)
        if offset is None:
            return replace(weight, held=_PackedCodes(stored, shape, weight.bits))
        return replace(weight, held=_CodesInFile(self, offset, stored.shape, shape, weight.bits))

    def read(self, offset: int, shape: tuple[int, ...]) -> NDArray[np.uint8]:
        """Return bytes of the file."""
        return np.memmap(self._files[0], np.uint8, "r", offset, shape)

    def _written(self, stored: NDArray[np.uint8]) -> int | None:
        """Return the place in the file; None if nothing can be written."""
        if self.folder is None:
            return None
        try:
            with self._lock:
                if not self._files:
                    self.folder.mkdir(parents=True, exist_ok=True)
                    opened = tempfile.TemporaryFile(dir=self.folder)  # noqa: SIM115 - kept open
                    self._files.append(opened)
                    weakref.finalize(self, opened.close)
                file = self._files[0]
                offset = file.seek(0, os.SEEK_END)
                file.write(stored.data)
                file.flush()
        except OSError as error:
            logger.debug("codes of weights are held in memory: %s", error)
            return None
        return int(offset)

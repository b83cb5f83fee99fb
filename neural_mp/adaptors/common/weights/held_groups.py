"""Groups of rounded weights between calibration and conversion: in a file without a name.

A search holds every layer in several numbers of bits, which would take more memory than the blocks
that the weights are made from.
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

from neural_mp.adaptors.common.weights.code_packing import BitOrder, packed, unpacked
from neural_mp.adaptors.common.weights.grouped_weight import (
    CodedGroups,
    Codes,
    Floats,
    GroupedWeight,
)
from neural_mp.util.memory import FREED

logger = logging.getLogger(__name__)

_ORDER = BitOrder.UPPER_FIRST
_FLOAT_BYTES = np.dtype(np.float32).itemsize


@dataclass(frozen=True, eq=False)
class _PackedGroups:
    """Groups in memory with packed codes; see `Groups`."""

    packed_codes: NDArray[np.uint8]
    scales: Floats
    offsets: Floats
    shape: tuple[int, int]
    bits: int

    @property
    def codes(self) -> Codes:
        return unpacked(self.packed_codes, self.bits, self.shape[1], _ORDER)


@dataclass(frozen=True, eq=False)
class _GroupsInFile:
    """Groups in a file, from `place` on: scales, offsets, packed codes; see `Groups`."""

    holder: GroupHolder
    place: int
    shape: tuple[int, int]
    groups: int
    packed_bytes: int
    bits: int

    @property
    def scales(self) -> Floats:
        return self._parameters(0)

    @property
    def offsets(self) -> Floats:
        return self._parameters(1)

    @property
    def codes(self) -> Codes:
        outputs, inputs = self.shape
        position = self.place + 2 * _FLOAT_BYTES * outputs * self.groups
        stored = self.holder.read(position, outputs * self.packed_bytes)
        return unpacked(stored.reshape(outputs, self.packed_bytes), self.bits, inputs, _ORDER)

    def _parameters(self, index: int) -> Floats:
        size = _FLOAT_BYTES * self.shape[0] * self.groups
        # A copy, since a mapped page would keep a file descriptor.
        buffer = self.holder.read(self.place + index * size, size).copy()
        return buffer.view(np.float32).reshape(self.shape[0], self.groups)


@dataclass(frozen=True, eq=False)
class GroupHolder:
    """Holder of the groups of weights.

    The file has no name, so that nothing else writes to it, and it ends with the last weight.

    Attributes:
        folder: the folder of the file; None to hold packed codes in memory.
    """

    folder: Path | None = None
    _files: list[IO[bytes]] = field(default_factory=list, repr=False)
    _lock: Lock = field(default_factory=Lock, repr=False)

    def hold(self, weight: GroupedWeight) -> GroupedWeight:
        """Return a weight whose codes are read back, and unpacked, whenever they are asked for.

        Scales and offsets are read likewise if there is a file.
        """
        groups = weight.groups
        if not isinstance(groups, CodedGroups) or not groups.codes.size:
            return weight
        stored = packed(groups.codes, weight.bits, _ORDER)
        FREED.after(_FLOAT_BYTES * groups.codes.size)
        scales = np.asarray(groups.scales, np.float32)
        offsets = np.asarray(groups.offsets, np.float32)
        position = self._written([scales, offsets, stored])
        if position is None:
            stored_groups = _PackedGroups(stored, scales, offsets, groups.shape, weight.bits)
            return replace(weight, groups=stored_groups)
        counts = int(scales.shape[1]), int(stored.shape[1])
        return replace(
            weight, groups=_GroupsInFile(self, position, groups.shape, *counts, weight.bits)
        )

    def read(self, position: int, size: int) -> NDArray[np.uint8]:
        """Return bytes of the file."""
        return np.memmap(self._files[0], np.uint8, "r", position, (size,))

    def _written(self, parts: list[NDArray[np.generic]]) -> int | None:
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
                position = file.seek(0, os.SEEK_END)
                for part in parts:
                    file.write(np.ascontiguousarray(part).data)
                file.flush()
        except OSError as error:
            logger.debug("rounded weights are held in memory: %s", error)
            return None
        return int(position)

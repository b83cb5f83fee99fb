"""Rounded weights in files: those of finished blocks, and those held for a search.

An interrupted run continues at the next block. A search holds every layer in several numbers of
bits, which would take more memory than the blocks that the weights are made from.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import tempfile
import weakref
import zipfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from threading import Lock
from typing import IO

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from neural_mp.adaptors.common.weights.grouped_weight import (
    BitOrder,
    CodedGroups,
    Codes,
    Floats,
    GroupedWeight,
    max_code,
    pack_codes,
    unpack_codes,
)
from neural_mp.core.quant_spec import QuantSpec
from neural_mp.io.archives import UNREADABLE, load_arrays
from neural_mp.io.files import open_atomic_file
from neural_mp.util.pytree import Array
from neural_mp.util.system.memory import FREED

logger = logging.getLogger(__name__)

#: Maximum number of files in a folder; the oldest are removed.
_MAX_FILES = 1000
_SUFFIX = ".weights.npz"
_PARTS = ("codes", "scales", "offsets", "input_factors")
#: Bytes of a file besides its arrays, per array.
_HEADERS = 1 << 12


@dataclass(frozen=True)
class WeightStore:
    """Rounded weights of one model and one set of data, a file per group of ops.

    Attributes:
        scope: digest of all that the weights depend on besides ops and quantizations.
    """

    folder: Path
    scope: str

    def load_weights(
        self, weights: Mapping[str, Array], specs: Mapping[str, QuantSpec], context: str = ""
    ) -> dict[str, GroupedWeight] | None:
        """Return op → its rounded weight; None if they are not kept, or the file is damaged.

        `weights` are the float weights of the ops, `context` further conditions of the result.
        """
        path = self._weights_path(specs, context)
        try:
            if path.stat().st_size > sum(w.nbytes + 5 * _HEADERS for w in weights.values()):
                raise ValueError("the file is too large")
            content = load_arrays(path)
            if isinstance(content, np.ndarray):
                raise ValueError("the file holds a single array")
            with content as arrays:
                return {
                    op: _validate_stored_weight(arrays, str(index), weights[op], spec)
                    for index, (op, spec) in enumerate(specs.items())
                }
        except FileNotFoundError:
            return None
        except (KeyError, *UNREADABLE) as error:
            logger.debug("%s cannot be read: %s", path, error)
            return None

    def store_weights(
        self,
        weights: Mapping[str, GroupedWeight],
        specs: Mapping[str, QuantSpec],
        context: str = "",
    ) -> None:
        """Keep op → its rounded weight; a folder that cannot be written to costs time only."""
        try:
            with open_atomic_file(self._weights_path(specs, context)) as file:
                _write_weights(file, [weights[op] for op in specs])
            files = sorted(self.folder.glob(f"*{_SUFFIX}"), key=lambda path: path.stat().st_mtime)
            for path in files[:-_MAX_FILES]:
                path.unlink(missing_ok=True)
        except OSError as error:
            logger.warning("Rounded weights cannot be kept for a resumed run: %s", error)

    def _weights_path(self, specs: Mapping[str, QuantSpec], context: str) -> Path:
        entries = [[op, str(spec)] for op, spec in specs.items()]
        key = json.dumps([self.scope, context, entries])
        return self.folder / f"{hashlib.sha256(key.encode()).hexdigest()[:32]}{_SUFFIX}"


def _write_weights(file: IO[bytes], weights: Iterable[GroupedWeight]) -> None:
    """Write weights like `numpy.savez`, one array at a time: codes take a byte each."""
    with zipfile.ZipFile(file, "w") as archive:
        for index, weight in enumerate(weights):
            for name in _PARTS:
                value = getattr(weight, name)
                if value is not None:
                    with archive.open(f"{index}/{name}.npy", "w", force_zip64=True) as member:
                        npy.write_array(member, value, allow_pickle=False)


def _validate_stored_weight(
    arrays: Mapping[str, Array], index: str, weight: Array, spec: QuantSpec
) -> GroupedWeight:
    """Return one weight of a file; `ValueError` if a part is unlike it, `KeyError` if missing."""
    outputs, inputs = weight.shape
    size = spec.group_size or 1
    groups = outputs, -(-inputs // size)
    codes, scales, offsets = (arrays[f"{index}/{name}"] for name in _PARTS[:3])
    factors = arrays.get(f"{index}/{_PARTS[3]}")
    shapes = [(codes, weight.shape, np.uint8), (scales, groups, np.float32)]
    shapes += [(offsets, groups, np.float32)]
    shapes += [] if factors is None else [(factors, (inputs,), np.float32)]
    if any(part.shape != shape or part.dtype != dtype for part, shape, dtype in shapes):
        raise ValueError("the file belongs to another weight")
    if codes.size and codes.max() > max_code(spec.dtype.bits):
        raise ValueError("a code is too large")
    return GroupedWeight(CodedGroups(codes, scales, offsets), size, spec.dtype.bits, factors)


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
        return unpack_codes(self.packed_codes, self.bits, self.shape[1], _ORDER)


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
        return self._read_parameters(0)

    @property
    def offsets(self) -> Floats:
        return self._read_parameters(1)

    @property
    def codes(self) -> Codes:
        outputs, inputs = self.shape
        position = self.place + 2 * _FLOAT_BYTES * outputs * self.groups
        stored = self.holder.read_bytes(position, outputs * self.packed_bytes)
        return unpack_codes(stored.reshape(outputs, self.packed_bytes), self.bits, inputs, _ORDER)

    def _read_parameters(self, index: int) -> Floats:
        size = _FLOAT_BYTES * self.shape[0] * self.groups
        # A copy, since a mapped page would keep a file descriptor.
        buffer = self.holder.read_bytes(self.place + index * size, size).copy()
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

    def hold_weight(self, weight: GroupedWeight) -> GroupedWeight:
        """Return a weight whose codes are read back, and unpacked, whenever they are asked for.

        Scales and offsets are read likewise if there is a file.
        """
        groups = weight.groups
        if not isinstance(groups, CodedGroups) or not groups.codes.size:
            return weight
        stored = pack_codes(groups.codes, weight.bits, _ORDER)
        FREED.note_freed_bytes(_FLOAT_BYTES * groups.codes.size)
        scales = np.asarray(groups.scales, np.float32)
        offsets = np.asarray(groups.offsets, np.float32)
        position = self._append_parts([scales, offsets, stored])
        if position is None:
            stored_groups = _PackedGroups(stored, scales, offsets, groups.shape, weight.bits)
            return replace(weight, groups=stored_groups)
        counts = int(scales.shape[1]), int(stored.shape[1])
        return replace(
            weight, groups=_GroupsInFile(self, position, groups.shape, *counts, weight.bits)
        )

    def read_bytes(self, position: int, size: int) -> NDArray[np.uint8]:
        """Return bytes of the file."""
        return np.memmap(self._files[0], np.uint8, "r", position, (size,))

    def _append_parts(self, parts: list[NDArray[np.generic]]) -> int | None:
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

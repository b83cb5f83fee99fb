"""Rounded weights in files, so that an interrupted run continues at the next block."""

from __future__ import annotations

import hashlib
import json
import logging
import zipfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import numpy as np
from numpy.lib import format as npy

from neural_mp.adaptors.common.weights.grouped_weight import CodedGroups, GroupedWeight, max_code
from neural_mp.core.quant_spec import QuantSpec
from neural_mp.io.array_files import UNREADABLE, load_arrays
from neural_mp.io.files import atomic_file
from neural_mp.util.pytree import Array

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
        folder: the folder of the files.
        scope: digest of all that the weights depend on besides ops and quantizations.
    """

    folder: Path
    scope: str

    def get(
        self, weights: Mapping[str, Array], specs: Mapping[str, QuantSpec], context: str = ""
    ) -> dict[str, GroupedWeight] | None:
        """Return op → its rounded weight; None if they are not kept, or the file is damaged.

        Args:
            weights: op → its weight, float.
            specs: op → its quantization.
            context: further conditions of the result.
        """
        path = self._path(specs, context)
        try:
            if path.stat().st_size > sum(w.nbytes + 5 * _HEADERS for w in weights.values()):
                raise ValueError("the file is too large")
            content = load_arrays(path)
            if isinstance(content, np.ndarray):
                raise ValueError("the file holds a single array")
            with content as arrays:
                return {
                    op: _checked(arrays, str(index), weights[op], spec)
                    for index, (op, spec) in enumerate(specs.items())
                }
        except FileNotFoundError:
            return None
        except (KeyError, *UNREADABLE) as error:
            logger.debug("%s cannot be read: %s", path, error)
            return None

    def put(
        self,
        weights: Mapping[str, GroupedWeight],
        specs: Mapping[str, QuantSpec],
        context: str = "",
    ) -> None:
        """Keep op → its rounded weight; a folder that cannot be written to costs time only."""
        try:
            with atomic_file(self._path(specs, context)) as file:
                _write(file, [weights[op] for op in specs])
            files = sorted(self.folder.glob(f"*{_SUFFIX}"), key=lambda path: path.stat().st_mtime)
            for path in files[:-_MAX_FILES]:
                path.unlink(missing_ok=True)
        except OSError as error:
            logger.warning("Rounded weights cannot be kept for a resumed run: %s", error)

    def _path(self, specs: Mapping[str, QuantSpec], context: str) -> Path:
        entries = [[op, str(spec)] for op, spec in specs.items()]
        key = json.dumps([self.scope, context, entries])
        return self.folder / f"{hashlib.sha256(key.encode()).hexdigest()[:32]}{_SUFFIX}"


def _write(file: IO[bytes], weights: Iterable[GroupedWeight]) -> None:
    """Write weights like `numpy.savez`, one array at a time: codes take a byte each."""
    with zipfile.ZipFile(file, "w") as archive:
        for index, weight in enumerate(weights):
            for name in _PARTS:
                value = getattr(weight, name)
                if value is not None:
                    with archive.open(f"{index}/{name}.npy", "w", force_zip64=True) as member:
                        npy.write_array(member, value, allow_pickle=False)


def _checked(
    arrays: Mapping[str, Array], index: str, weight: Array, spec: QuantSpec
) -> GroupedWeight:
    """Return one weight of a file.

    Raises:
        ValueError: a part has other sizes or types than the weight.
        KeyError: a part is missing.
    """
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

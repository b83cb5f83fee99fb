"""Contents of a pass over evaluation data: sample count, digest and histogram of its labels."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from neural_mp.errors import DataError
from neural_mp.util.fingerprint import compute_data_digest
from neural_mp.util.json_fields import NOT_STORED, JsonFields
from neural_mp.util.pytree import batch_size_of, convert_to_numpy

Hashes = NDArray[np.uint64]

#: Digests are below this bound, which is that of integers in files.
_DIGEST_RANGE = 1 << 63
#: Counts of a histogram of labels: a hash belongs to the count of its highest bits.
_BINS, _BIN_SHIFT = 256, np.uint64(56)
#: Largest fraction of samples that a loader may have exchanged if it does not say that it drops.
_MAX_EXCHANGED = 0.05
#: Kinds of dtypes of numbers.
_NUMBERS = "biufc"
#: Odd multiplier that combines the hashes of several parts of a sample.
_PART_FACTOR = np.uint64(0x9E3779B97F4A7C15)


@dataclass(frozen=True)
class PassContents(JsonFields):
    """Samples seen in a pass, or in a part of a pass.

    Attributes:
        samples: number of samples.
        labels: sum of the hashes of all samples' labels, which depends neither on the order nor on
            the batches; None if unavailable: labels of other types than numbers and strings, or
            padded to the longest of each batch.
        shapes: shapes of a sample's labels, once known.
        histogram: number of samples by the highest bits of the hash; empty without labels.
        largest_batch: number of samples of the largest batch.
    """

    samples: int = 0
    labels: int | None = 0
    shapes: tuple[tuple[int, ...], ...] | None = field(default=None, metadata=NOT_STORED)
    histogram: tuple[int, ...] = ()
    largest_batch: int = field(default=0, compare=False)

    def with_batch(self, inputs: object, labels: object) -> PassContents:
        """Return the contents with a further batch."""
        size = batch_size_of(inputs)
        if labels is None:
            return self + PassContents(size, largest_batch=size)
        hashed = _hash_samples(labels)
        if hashed is None:
            return self + PassContents(size, None, largest_batch=size)
        hashes, shapes = hashed
        digest = int(hashes.sum(dtype=np.uint64)) % _DIGEST_RANGE
        counts = np.bincount((hashes >> _BIN_SHIFT).astype(np.int64), minlength=_BINS)
        return self + PassContents(len(hashes), digest, shapes, tuple(counts.tolist()), len(hashes))

    def __add__(self, other: PassContents) -> PassContents:
        shapes = {contents.shapes for contents in (self, other) if contents.shapes is not None}
        labels = None
        if self.labels is not None and other.labels is not None and len(shapes) < 2:
            labels = (self.labels + other.labels) % _DIGEST_RANGE
        counts = self.histogram or other.histogram
        if self.histogram and other.histogram:
            counts = tuple(map(sum, zip(self.histogram, other.histogram, strict=True)))
        return PassContents(
            self.samples + other.samples,
            labels,
            self.shapes or other.shapes,
            counts,
            max(self.largest_batch, other.largest_batch),
        )

    def check_count(self, name: str, baseline: PassContents | None) -> None:
        """Check the number of samples so far against that of the baseline's whole pass, if any.

        Raises:
            DataError: there are more already.
        """
        if baseline is not None and self.samples > baseline.samples:
            raise _changed_data_error(
                name, f"more than the {baseline.samples} samples of the baseline"
            )

    def check_equal(self, name: str, baseline: PassContents, drops_last: bool = False) -> str:
        """Check the contents of a complete pass over the data `name` against the baseline's.

        A shuffled loader that drops its incomplete last batch leaves out other samples in every
        pass, fewer than a batch. Returns a warning in this case, else an empty string.

        Args:
            name: name of the data.
            baseline: contents of the baseline's pass.
            drops_last: whether the loader declares that it drops its last batch.

        Raises:
            DataError: the number of samples or the labels differ.
        """
        if self.samples != baseline.samples:
            raise _changed_data_error(
                name, f"{self.samples} samples, {baseline.samples} in the baseline"
            )
        if None in (self.labels, baseline.labels) or self.labels == baseline.labels:
            return ""
        dropped = max(self.largest_batch, baseline.largest_batch) - 1
        if not drops_last:
            dropped = min(dropped, int(self.samples * _MAX_EXCHANGED))
        changed = math.inf  # the least number of samples with other labels
        if self.histogram and len(self.histogram) == len(baseline.histogram):
            pairs = zip(self.histogram, baseline.histogram, strict=True)
            changed = sum(abs(a - b) for a, b in pairs) / 2
        if changed > dropped:
            raise _changed_data_error(
                name, f"{self.samples} samples with labels other than the baseline's"
            )

        return (
            f"{name} yields {self.samples} samples in every pass, but not the same ones, as a "
            f"shuffled loader that drops its incomplete last batch does; accuracies contain this "
            f"difference: keep the last batch (drop_last=False, last_batch='rollover') or do not "
            f"shuffle evaluation data"
        )


def _changed_data_error(name: str, change: str) -> DataError:
    return DataError(
        f"{name} must yield the same samples in every pass, in any order, got {change}; accuracies "
        f"on different data cannot be compared: return every sample in each pass, without random "
        f"labels or random subsets (e.g. shuffle with drop_last or max_batches)"
    )


def _hash_samples(labels: object) -> tuple[Hashes, tuple[tuple[int, ...], ...]] | None:
    """Return a hash per sample, and the shapes of a sample's labels; None if unavailable."""
    if isinstance(labels, Mapping | tuple):
        return _hash_parts(list(labels.values()) if isinstance(labels, Mapping) else labels)
    if isinstance(labels, list) and not all(isinstance(label, int | float) for label in labels):
        return _hash_objects(labels)
    try:
        array = convert_to_numpy(labels)
    except (TypeError, ValueError, RuntimeError, AttributeError):
        return None  # e.g. ragged or sparse tensors
    rows = array.reshape(1) if array.ndim == 0 else array
    if rows.dtype.kind not in _NUMBERS:
        return _hash_objects(rows.tolist())
    return _hash_rows(rows), (rows.shape[1:],)


def _hash_parts(parts: Sequence[Any]) -> tuple[Hashes, tuple[tuple[int, ...], ...]] | None:
    """Return the hashes of samples whose labels have several parts, e.g. of several outputs."""
    hashed = [_hash_samples(part) for part in parts if part is not None]
    available = [pair for pair in hashed if pair is not None]
    if (
        not available
        or len(available) < len(hashed)
        or len({len(hashes) for hashes, _ in available}) > 1
    ):
        return None
    hashes, shapes = available[0]
    for part_hashes, more in available[1:]:
        hashes, shapes = _mix_bits(hashes * _PART_FACTOR + part_hashes), (*shapes, *more)
    return hashes, shapes


def _hash_objects(samples: Sequence[Any]) -> tuple[Hashes, tuple[tuple[int, ...], ...]] | None:
    """Return the hashes of samples whose labels form no array, e.g. boxes or texts."""
    digests = [compute_data_digest(sample) for sample in samples]
    if None in digests:
        return None
    return np.array([int(str(digest)[:16], 16) for digest in digests], np.uint64), ()


def _hash_rows(rows: np.ndarray) -> Hashes:
    """Return a hash of each row: a random projection of its 64-bit words, with their bits mixed."""
    if not rows.size:
        return np.zeros(len(rows), np.uint64)
    plain = np.ascontiguousarray(rows).reshape(len(rows), -1).view(np.uint8)
    width = -(-plain.shape[1] // 8)
    padded = np.zeros((len(rows), width * 8), np.uint8)
    padded[:, : plain.shape[1]] = plain
    return _mix_bits(padded.view(np.uint64) @ _draw_projection_factors(width))


@lru_cache(maxsize=4)
def _draw_projection_factors(width: int) -> Hashes:
    """Return odd factors, so that a change of one word always changes the hash."""
    drawn = np.random.default_rng(0).integers(0, 1 << 63, width, np.uint64)
    return drawn * np.uint64(2) + np.uint64(1)


def _mix_bits(values: Hashes) -> Hashes:
    """Return the values with their bits mixed by SplitMix64, so that sums of hashes differ."""
    values = values + _PART_FACTOR
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))

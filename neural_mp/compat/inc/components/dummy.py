"""Random samples: `dummy`, `dummy_v2` and `sparse_dummy_v2`.

Options of all: `low` and `high`, the bounds of the uniform values, and `dtype`, one of `DTYPES`.
Each is one value, or one per tensor, inputs first, then labels. A shape is `[…]`, or a list of
shapes, one per tensor; `label_shape` None stands for no labels.

The numbers equal those of Intel Neural Compressor: same generator, seed and order.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Any

import numpy as np

from neural_mp.compat.inc.components.registries import (
    dataset,
    parse_numbers,
    parse_sizes,
    split_words,
)
from neural_mp.data.option_checks import check_one_of, true_or_false
from neural_mp.errors import ConfigurationError

SEED = 9527
DTYPES = ("float32", "float16", "uint8", "int8", "int32", "int64", "bool")
#: Length of streams, which are infinite in INC, so that loops over all data terminate.
SAMPLES = 1000

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Tensor:
    """Distribution of one tensor: uniform from `low` to `high`, then cast to `dtype`."""

    shape: Shape
    low: float
    high: float
    dtype: str

    def draw_values(self, random: np.random.RandomState, shape: Shape | None = None) -> np.ndarray:
        """Draw the next values from `random`, in the tensor's shape or another."""
        values = np.asarray(random.uniform(self.low, self.high, shape or self.shape))
        if self.dtype.startswith(("int", "uint")):
            # The detour over int64 makes negative numbers wrap in uint8 on every machine.
            values = values.astype(np.int64)
        return values.astype(str if self.dtype == "string" else self.dtype)


def _parse_shapes(option: str, value: object) -> list[Shape]:
    """Parse one shape or a list of shapes; none for None."""
    if value is None:
        return []
    items = value if isinstance(value, Sequence) and not isinstance(value, str) else ()
    if any(isinstance(item, Sequence) for item in items):
        return [parse_sizes(option, item) for item in items]
    return [parse_sizes(option, value)]


def _build_tensors(
    name: str,
    shapes: Sequence[Shape],
    low: object,
    high: object,
    dtype: object,
    dtypes: Sequence[str],
) -> list[Tensor]:
    """Return one tensor per shape; a single `low`, `high` or `dtype` applies to all."""
    kinds = [
        check_one_of(f"{name}: dtype", item, dtypes)
        for item in split_words(f"{name}: dtype", dtype)
    ]
    lows, highs = parse_numbers(f"{name}: low", low), parse_numbers(f"{name}: high", high)
    options = [
        _for_each(f"{name}: {option}", values, len(shapes))
        for option, values in (("low", lows), ("high", highs), ("dtype", kinds))
    ]
    return [Tensor(*parts) for parts in zip(shapes, *options, strict=True)]


def _for_each(option: str, values: Sequence[Any], count: int) -> list[Any]:
    if len(values) not in (1, count):
        raise ConfigurationError(
            f"{option} must be one value or {count}, one for each tensor; got {len(values)}"
        )
    return list(values) * count if len(values) == 1 else list(values)


def _one_or_all(values: Sequence[Any]) -> Any:
    return values[0] if len(values) == 1 else tuple(values)


@dataclass(frozen=True, eq=False)
class DrawnSamples:
    """Samples drawn at construction.

    Attributes:
        inputs: one array `[N, ...]` per input.
        label: the label of all samples.
    """

    inputs: tuple[np.ndarray, ...]
    label: int | None

    def __len__(self) -> int:
        return len(self.inputs[0])

    def __getitem__(self, index: int) -> tuple[Any, int | None]:
        return _one_or_all([array[index] for array in self.inputs]), self.label


@dataset("dummy")
def dummy(
    shape: object,
    low: object = -128.0,
    high: object = 127.0,
    dtype: object = "float32",
    label: bool = True,
) -> DrawnSamples:
    """Return random samples; the first number of a shape is the number of samples.

    `shape` is `[N, …]`, or a list of such shapes with equal N, one per input. With `label`, samples
    have the label 0, else None. `dtype` may also be `string`.

    Returns:
        N samples: an array, or a tuple of arrays for several inputs, and the label.
    """
    shapes = _parse_shapes("dummy: shape", shape)
    if len({item[0] for item in shapes}) != 1:
        raise ConfigurationError(
            f"dummy: shape: the first number of every shape, the number of samples, must be the "
            f"same; got {', '.join(str(list(item)) for item in shapes)}"
        )
    tensors = _build_tensors("dummy", shapes, low, high, dtype, (*DTYPES, "string"))
    random = np.random.RandomState(SEED)
    samples = [replace(tensor, shape=tensor.shape[1:]) for tensor in tensors]
    # One sample at a time, since drawing all at once needs float64 memory.
    inputs = tuple(
        np.stack([sample.draw_values(random) for _ in range(shapes[0][0])]) for sample in samples
    )
    return DrawnSamples(inputs, 0 if true_or_false("dummy: label", label) else None)


@dataclass(frozen=True)
class EndedStream:
    """`SAMPLES` random samples, identical in every iteration.

    Attributes:
        inputs: one tensor per input; of a sparse input, with its dense shape.
        labels: one tensor per label; empty for samples without a label (None).
        counts: number of explicit values of each sparse input; None for dense inputs.
    """

    inputs: tuple[Tensor, ...]
    labels: tuple[Tensor, ...]
    counts: tuple[int, ...] | None = None

    def __iter__(self) -> Iterator[tuple[Any, Any]]:
        random = np.random.RandomState(SEED)
        for _ in range(SAMPLES):
            if self.counts is None:
                inputs = [tensor.draw_values(random) for tensor in self.inputs]
                labels = [tensor.draw_values(random) for tensor in self.labels]
            else:
                inputs, labels = self._draw_sparse(random)
            yield _one_or_all(inputs), _one_or_all(labels) if labels else None

    def _draw_sparse(self, random: np.random.RandomState) -> tuple[list[Any], list[np.ndarray]]:
        """Draw each input before its label."""
        inputs, labels = [], []
        for tensor, count, label in zip_longest(self.inputs, self.counts or (), self.labels):
            indices = np.unravel_index(np.arange(count), tensor.shape)
            inputs.append((np.stack(indices, axis=-1), tensor.draw_values(random, (count,))))
            labels += [label.draw_values(random)] if label else []
        return inputs, labels


@dataset("dummy_v2")
def dummy_v2(
    input_shape: object,
    label_shape: object = (1,),
    low: object = -128.0,
    high: object = 127.0,
    dtype: object = "float32",
) -> EndedStream:
    """Return random samples; a shape is that of one sample.

    Returns:
        `SAMPLES` samples: inputs and labels, each an array, or a tuple of arrays if there are
        several.
    """
    inputs = _parse_shapes("dummy_v2: input_shape", input_shape)
    labels = _parse_shapes("dummy_v2: label_shape", label_shape)
    tensors = _build_tensors("dummy_v2", [*inputs, *labels], low, high, dtype, DTYPES)
    return EndedStream(tuple(tensors[: len(inputs)]), tuple(tensors[len(inputs) :]))


@dataset("sparse_dummy_v2")
def sparse_dummy_v2(
    dense_shape: object,
    label_shape: object = (1,),
    sparse_ratio: object = 0.5,
    low: object = -128.0,
    high: object = 127.0,
    dtype: object = "float32",
) -> EndedStream:
    """Return random samples of sparse inputs; a shape is that of one sample.

    A single shape of labels is that of all inputs. `sparse_ratio` is the fraction of values that
    are omitted; one number, or one per input.

    Returns:
        `SAMPLES` samples. An input is a pair: indices int64 `[K, rank]` and values `[K]` at the
        first K positions of the dense tensor. Several inputs are a tuple of pairs, several
        labels a tuple.
    """
    name = "sparse_dummy_v2"
    inputs = _parse_shapes(f"{name}: dense_shape", dense_shape)
    labels: list[Any] = _parse_shapes(f"{name}: label_shape", label_shape)
    if labels:
        labels = _for_each(f"{name}: label_shape", labels, len(inputs))
    option = f"{name}: sparse_ratio"
    ratios = _for_each(option, parse_numbers(option, sparse_ratio), len(inputs))
    if any(not 0 <= ratio <= 1 for ratio in ratios):
        raise ConfigurationError(f"{option} must be from 0 to 1, got {sparse_ratio!r}")
    tensors = _build_tensors(name, [*inputs, *labels], low, high, dtype, DTYPES)
    counts = tuple(
        round(int(np.prod(shape)) * (1 - ratio))
        for shape, ratio in zip(inputs, ratios, strict=True)
    )
    return EndedStream(tuple(tensors[: len(inputs)]), tuple(tensors[len(inputs) :]), counts)

"""Random samples: `dummy`, `dummy_v2` and `sparse_dummy_v2`.

They are the numbers that Intel Neural Compressor draws: the same generator, seed and order.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from neural_mp.compat.inc.components.registries import (
    DATASETS,
    numbers,
    registered,
    say_ignored,
    sizes,
    words,
)
from neural_mp.data.option_checks import one_of, true_or_false
from neural_mp.errors import ConfigurationError

SEED = 9527
DTYPES = ("float32", "float16", "uint8", "int8", "int32", "int64", "bool")
#: Theirs never ends; ours does, so that whatever walks all of the data comes to an end.
SAMPLES = 1000

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Tensor:
    """How one tensor is drawn: evenly from `low` to `high`, then cast to `dtype`."""

    shape: Shape
    low: float
    high: float
    dtype: str

    def draw(self, random: np.random.RandomState, shape: Shape | None = None) -> np.ndarray:
        """The next values of `random`, of the tensor's shape or of another."""
        values = np.asarray(random.uniform(self.low, self.high, shape or self.shape))
        if self.dtype.startswith(("int", "uint")):
            # By way of int64, negative numbers wrap round in uint8 on every machine.
            values = values.astype(np.int64)
        return values.astype(str if self.dtype == "string" else self.dtype)


def _is_list_of_shapes(value: Any) -> bool:
    listed = isinstance(value, Sequence) and not isinstance(value, str)
    return listed and any(isinstance(item, Sequence) for item in value)


def _shapes(option: str, value: Any) -> list[Shape]:
    """One shape, or a list of shapes."""
    if _is_list_of_shapes(value):
        return [sizes(option, item) for item in value]
    return [sizes(option, value)]


def _tensors(
    name: str,
    shapes: Sequence[Shape],
    low: object,
    high: object,
    dtype: object,
    dtypes: Sequence[str],
) -> list[Tensor]:
    """One tensor for each shape; one `low`, `high` or `dtype` is that of all of them."""
    lows = _for_each(f"{name}: low", numbers(f"{name}: low", low), len(shapes))
    highs = _for_each(f"{name}: high", numbers(f"{name}: high", high), len(shapes))
    given = [one_of(f"{name}: dtype", item, dtypes) for item in words(f"{name}: dtype", dtype)]
    kinds = _for_each(f"{name}: dtype", given, len(shapes))
    return [Tensor(*parts) for parts in zip(shapes, lows, highs, kinds, strict=True)]


def _for_each(option: str, values: Sequence[Any], count: int) -> list[Any]:
    if len(values) == 1:
        return list(values) * count
    if len(values) != count:
        raise ConfigurationError(
            f"{option} must be one value or {count}, one for each tensor; got {len(values)}"
        )
    return list(values)


def _one_or_all(values: Sequence[Any]) -> Any:
    return values[0] if len(values) == 1 else tuple(values)


@dataclass(frozen=True, eq=False)
class DrawnSamples:
    """Samples that were drawn when the dataset was made.

    Attributes:
        inputs: one array `[N, ...]` for each input.
        label: the label of all samples.
    """

    inputs: tuple[np.ndarray, ...]
    label: int | None

    def __len__(self) -> int:
        return len(self.inputs[0])

    def __getitem__(self, index: int) -> tuple[Any, int | None]:
        return _one_or_all([array[index] for array in self.inputs]), self.label


@registered(DATASETS, "dummy")
def dummy(
    shape: object,
    low: object = -128.0,
    high: object = 127.0,
    dtype: object = "float32",
    label: bool = True,
    filter: object = None,
) -> DrawnSamples:
    """Random samples; the first number of a shape is how many there are.

    Args:
        shape: `[N, …]`, or a list of such shapes with the same N, one for each input.
        low: values are drawn evenly from here on; one number, or one for each input.
        high: values are drawn up to here; one number, or one for each input.
        dtype: one of `DTYPES` or `string`, or one for each input.
        label: whether all samples have the label 0, else none (None).
        filter: no effect.

    Returns:
        N samples: an array, or a tuple of arrays where there are several inputs, and the label.

    Raises:
        ConfigurationError: an option is wrong.
    """
    say_ignored("dummy", filter=filter)
    shapes = _shapes("dummy: shape", shape)
    if len({item[0] for item in shapes}) != 1:
        raise ConfigurationError(
            f"dummy: shape: the first number of every shape is how many samples there are, "
            f"so it must be the same; got {', '.join(str(list(item)) for item in shapes)}"
        )
    tensors = _tensors("dummy", shapes, low, high, dtype, (*DTYPES, "string"))
    random = np.random.RandomState(SEED)
    inputs = tuple(_drawn(tensor, random) for tensor in tensors)
    return DrawnSamples(inputs, 0 if true_or_false("dummy: label", label) else None)


def _drawn(tensor: Tensor, random: np.random.RandomState) -> np.ndarray:
    """All samples, one drawn after the other, as all at once would take the memory of float64."""
    count, *rest = tensor.shape
    part = Tensor(tuple(rest), tensor.low, tensor.high, tensor.dtype)
    return np.stack([part.draw(random) for _ in range(count)])


@dataclass(frozen=True)
class EndedStream:
    """`SAMPLES` random samples, the same at every walk.

    Attributes:
        inputs: one tensor for each input.
        labels: one tensor for each label; none for samples without a label (None).
    """

    inputs: tuple[Tensor, ...]
    labels: tuple[Tensor, ...]

    def __iter__(self) -> Iterator[tuple[Any, Any]]:
        random = np.random.RandomState(SEED)
        for _ in range(SAMPLES):
            inputs = [tensor.draw(random) for tensor in self.inputs]
            labels = [tensor.draw(random) for tensor in self.labels]
            yield _one_or_all(inputs), _one_or_all(labels) if labels else None


@registered(DATASETS, "dummy_v2")
def dummy_v2(
    input_shape: object,
    label_shape: object = (1,),
    low: object = -128.0,
    high: object = 127.0,
    dtype: object = "float32",
    filter: object = None,
) -> EndedStream:
    """Random samples; a shape is that of one sample.

    Args:
        input_shape: of the inputs, or a list of shapes, one for each input.
        label_shape: the same of the labels; None for no labels.
        low: values are drawn evenly from here on; one number, or one for each tensor, first the
            inputs, then the labels.
        high: values are drawn up to here; one number, or one for each tensor in that order.
        dtype: one of `DTYPES`, or one for each tensor in that order.
        filter: no effect.

    Returns:
        `SAMPLES` samples: inputs and labels, each an array, or a tuple of arrays where there are
        several.

    Raises:
        ConfigurationError: an option is wrong.
    """
    say_ignored("dummy_v2", filter=filter)
    inputs = _shapes("dummy_v2: input_shape", input_shape)
    labels = [] if label_shape is None else _shapes("dummy_v2: label_shape", label_shape)
    tensors = _tensors("dummy_v2", [*inputs, *labels], low, high, dtype, DTYPES)
    return EndedStream(tuple(tensors[: len(inputs)]), tuple(tensors[len(inputs) :]))


@dataclass(frozen=True)
class SparseStream:
    """`SAMPLES` random samples of sparse inputs, the same at every walk.

    Attributes:
        inputs: one tensor for each input, of its dense shape.
        counts: how many values each input has that are given.
        labels: one tensor for each input, or none.
    """

    inputs: tuple[Tensor, ...]
    counts: tuple[int, ...]
    labels: tuple[Tensor, ...]

    def __iter__(self) -> Iterator[tuple[Any, Any]]:
        random = np.random.RandomState(SEED)
        for _ in range(SAMPLES):
            inputs, labels = [], []
            for position, (tensor, count) in enumerate(zip(self.inputs, self.counts, strict=True)):
                places = np.unravel_index(np.arange(count), tensor.shape)
                inputs.append((np.stack(places, axis=-1), tensor.draw(random, (count,))))
                labels += [label.draw(random) for label in self.labels[position : position + 1]]
            yield _one_or_all(inputs), _one_or_all(labels) if labels else None


@registered(DATASETS, "sparse_dummy_v2")
def sparse_dummy_v2(
    dense_shape: object,
    label_shape: object = (1,),
    sparse_ratio: object = 0.5,
    low: object = -128.0,
    high: object = 127.0,
    dtype: object = "float32",
    filter: object = None,
) -> SparseStream:
    """Random samples of sparse inputs; a shape is that of one sample.

    Args:
        dense_shape: of the inputs, or a list of shapes, one for each input.
        label_shape: of the labels: one shape for all inputs, or one for each; None for no labels.
        sparse_ratio: which part of the values is not given; one number, or one for each input.
        low: values are drawn evenly from here on; one number, or one for each tensor, first the
            inputs, then the labels.
        high: values are drawn up to here; one number, or one for each tensor in that order.
        dtype: one of `DTYPES`, or one for each tensor in that order.
        filter: no effect.

    Returns:
        `SAMPLES` samples. An input is a pair: places int64 `[K, rank]` and values `[K]`, K of the
        dense tensor's values from its start on. Several inputs are a tuple of pairs, several
        labels a tuple.

    Raises:
        ConfigurationError: an option is wrong.
    """
    name = "sparse_dummy_v2"
    say_ignored(name, filter=filter)
    inputs = _shapes(f"{name}: dense_shape", dense_shape)
    labels: list[Any] = []
    if label_shape is not None:
        given = _shapes(f"{name}: label_shape", label_shape)
        labels = _for_each(f"{name}: label_shape", given, len(inputs))
    option = f"{name}: sparse_ratio"
    ratios = _for_each(option, numbers(option, sparse_ratio), len(inputs))
    if any(not 0 <= ratio <= 1 for ratio in ratios):
        raise ConfigurationError(f"{option} must be from 0 to 1, got {sparse_ratio!r}")
    tensors = _tensors(name, [*inputs, *labels], low, high, dtype, DTYPES)
    counts = (
        round(int(np.prod(shape)) * (1 - ratio))
        for shape, ratio in zip(inputs, ratios, strict=True)
    )
    drawn = tuple(tensors[: len(inputs)]), tuple(counts), tuple(tensors[len(inputs) :])
    return SparseStream(*drawn)

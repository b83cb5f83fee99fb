"""Builds a DataLoader from the YAML under `dataloader:`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from neural_mp.common import DataLoader
from neural_mp.data.datasets import DATASETS
from neural_mp.data.option_checks import check_whole_number, true_or_false
from neural_mp.data.registry import Registry
from neural_mp.data.transforms import TRANSFORMS, Transform
from neural_mp.errors import ConfigurationError, DataError, did_you_mean, error_path
from neural_mp.util.text import with_article

LOADER_KEYS = ("batch_size", "last_batch", "shuffle", "seed", "dataset", "transform")


@dataclass(frozen=True)
class Vocabulary:
    """The datasets, transforms and metrics that a file can name.

    Attributes:
        datasets, transforms: registries; our own by default.
        metrics: registry; None for ours in `neural_mp.metrics`.
    """

    datasets: Registry = field(default=DATASETS)
    transforms: Registry = field(default=TRANSFORMS)
    metrics: Registry | None = None


#: Names in files of our own dialect.
OWN = Vocabulary()


@dataclass(frozen=True)
class Pipeline:
    """A chain of transforms, applied to a sample in order."""

    transforms: tuple[Transform, ...]

    def __call__(self, sample: object) -> Any:
        """Transform one sample."""
        for transform in self.transforms:
            sample = transform(sample)
        return sample

    @property
    def reset(self) -> Callable[[], None] | None:
        """Function that resets the state of all transforms; None if no transform has state."""
        methods = [getattr(transform, "reset", None) for transform in self.transforms]
        resets = [reset for reset in methods if callable(reset)]
        if not resets:
            return None

        def reset_all() -> None:
            for reset in resets:
                reset()

        return reset_all


@dataclass(frozen=True, eq=False)
class TransformedDataset:
    """A dataset that transforms each sample when read."""

    dataset: Any
    transform: Transform

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        return self.transform(self.dataset[index])


@dataclass(frozen=True, eq=False)
class TransformedIterable:
    """An iterable dataset that transforms each sample when read."""

    dataset: Iterable[Any]
    transform: Transform

    def __iter__(self) -> Iterator[Any]:
        return map(self.transform, self.dataset)


class DescribedLoader(DataLoader):
    """A loader that keeps the mapping of its description, for another process to build it."""

    def __init__(self, spec: Mapping[str, Any], dataset: Any, **options: Any) -> None:
        super().__init__(dataset, **options)
        self.spec = spec


def build_dataset(spec: Mapping[str, Any], names: Vocabulary = OWN) -> Any:
    """Build the dataset in `{NAME: {option: value}}`.

    Args:
        spec: NAME is a registered dataset or a user-defined `module:attribute`, a class or
            function that is called with the options as keyword arguments.
        names: registries of the names.

    Returns:
        A dataset with `__getitem__` and `__len__`, or an iterable; items are `(inputs, label)`.
        If samples cannot simply be stacked, the dataset also has the method `collate_samples`:
        list of samples → batch.

    Raises:
        ConfigurationError: a name or option is unknown, missing or of the wrong type.
        DataError: the data is missing, empty or malformed.
    """
    if not isinstance(spec, Mapping) or len(spec) != 1:
        keys = ", ".join(map(str, spec)) if isinstance(spec, Mapping) else repr(spec)
        raise ConfigurationError(
            f"dataset must hold exactly one name with its options, such as "
            f"{{ImageFolder: {{root: images}}}}, got {keys or 'none'}"
        )
    ((name, options),) = spec.items()
    with error_path("dataset"):
        dataset = names.datasets.build(name, options)
    indexable = _is_indexable(dataset)
    if not indexable and not isinstance(dataset, Iterable):
        raise DataError(
            f"dataset {name!r} must have __getitem__ and __len__, or be iterable, got "
            f"{with_article(type(dataset).__name__)}"
        )
    if indexable and len(dataset) == 0:
        raise DataError(f"dataset {name!r} has no samples")
    return dataset


def build_transforms(spec: Mapping[str, Any] | None, names: Vocabulary = OWN) -> Transform | None:
    """Build one transform from `{NAME: {option: value}, …}`, applied in the order written.

    Args:
        spec: NAMEs are registered transforms or user-defined `module:attribute`, a class or
            function that is called with the options and returns a callable sample → sample.
        names: registries of the names.

    Returns:
        A callable `(inputs, label)` → `(inputs, label)`, or None for an empty `spec`.

    Raises:
        ConfigurationError: a name or option is unknown, missing or of the wrong type.
    """
    if not spec:
        return None
    if not isinstance(spec, Mapping):
        raise ConfigurationError(
            f"transform must hold names with their options, such as {{Rescale: {{}}}}, got {spec!r}"
        )
    with error_path("transform"):
        transforms = tuple(names.transforms.build(name, options) for name, options in spec.items())
    for name, transform in zip(spec, transforms, strict=True):
        if not callable(transform):
            raise ConfigurationError(
                f"transform {name!r} must return a callable sample → sample, got "
                f"{with_article(type(transform).__name__)}"
            )
    return transforms[0] if len(transforms) == 1 else Pipeline(transforms)


def build_dataloader(spec: Mapping[str, Any], names: Vocabulary = OWN) -> DataLoader:
    """Build the loader that YAML describes under `dataloader:`.

    Args:
        spec: `dataset` (see `build_dataset`) and, each optional, `transform` (see
            `build_transforms`), `batch_size` (1), `last_batch` (`rollover` or `discard`),
            `shuffle` (false) and `seed` (0).
        names: registries of the names.

    Raises:
        ConfigurationError: a key, name or option is unknown, missing or of the wrong type.
        DataError: the data is missing, empty or malformed, or does not fit the loader.
    """
    if not isinstance(spec, Mapping):
        raise ConfigurationError(f"dataloader must hold at least a dataset, got {spec!r}")
    for key in spec:
        if key not in LOADER_KEYS:
            raise ConfigurationError(f"dataloader has no {key!r}{did_you_mean(key, LOADER_KEYS)}")
    if "dataset" not in spec:
        raise ConfigurationError(
            "dataloader needs a dataset, such as dataset: {ImageFolder: {root: images}}"
        )
    shuffle = true_or_false("dataloader: shuffle", spec.get("shuffle", False))
    seed = check_whole_number("dataloader: seed", spec.get("seed", 0), minimum=0)
    transform = build_transforms(spec.get("transform"), names)
    dataset = build_dataset(spec["dataset"], names)
    collate = getattr(dataset, "collate_samples", None)
    if transform is not None and _is_indexable(dataset):
        dataset = TransformedDataset(dataset, transform)
    elif transform is not None:
        dataset = TransformedIterable(dataset, transform)
    return DescribedLoader(
        spec,
        dataset,
        batch_size=spec.get("batch_size", 1),
        collate_fn=collate,
        shuffle=shuffle,
        last_batch=spec.get("last_batch", "rollover"),
        seed=seed,
    )


def _is_indexable(dataset: object) -> bool:
    return hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")

"""What `Quantization`, `MixedPrecision` and `Benchmark` of their version 1 have in common."""

from __future__ import annotations

from typing import Any

from neural_mp.compat.inc.settings import settings_of
from neural_mp.compat.inc.user_objects import DataLoader, named_dataset


class Configured:
    """What is made from a configuration, and makes datasets for the framework it names.

    Args:
        conf_fname_or_obj: the path of a YAML file, settings by attribute, or None.

    Attributes:
        model: the framework's object, a path, or a `common.Model`.
        metric: an object with update, reset and result, or a `common.Metric`.
        postprocess: a `common.Postprocess`, or what takes `(predictions, labels)`.
    """

    def __init__(self, conf_fname_or_obj: Any = None) -> None:
        self.settings = settings_of(conf_fname_or_obj)
        self.model: Any = self.settings.model.name
        self.metric: Any = None
        self.postprocess: Any = None

    def dataset(self, name: str, *shape: Any, **options: Any) -> Any:
        """A dataset by its name.

        Args:
            name: such as `dummy`.
            *shape: the shape of a `dummy`.
            **options: its options.

        Raises:
            ConfigurationError: there is none of that name, or an option is not its own.
        """
        if shape:
            options["shape"] = shape[0]
        return named_dataset(name, options, self.settings.model.framework)

    def dataloader(self, dataset: Any, batch_size: int = 1, **options: Any) -> DataLoader:
        """Batches of a dataset."""
        return DataLoader(dataset, batch_size, **options)

    def __repr__(self) -> str:
        return type(self).__name__

"""Configurations of `transformers` models in saved results: plain values until asked for."""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from neural_mp.adaptors.pytorch.decoders.transformers_folder import entry_faults
from neural_mp.errors import MissingFrameworkError, ModelLoadError, one_line
from neural_mp.util.validators import preview

#: Entry with code outside of the package, which a configuration refers to.
_FOREIGN_CODE = "auto_map"


@dataclass(frozen=True)
class StoredConfig:
    """The values of a configuration, as a saved result has them."""

    values: Mapping[str, Any]

    def built(self) -> Any:
        """Return the configuration in the class of `transformers`.

        Raises:
            MissingFrameworkError: if the package is not installed.
            ModelLoadError: if the package has no such type of model, or refuses the values.
        """
        kind = self.values.get("model_type")
        try:
            classes: Any = importlib.import_module("transformers").CONFIG_MAPPING
        except ImportError:
            raise MissingFrameworkError(
                f"the configuration of a model of type {preview(kind)} requires the package "
                f"transformers; install it with: pip install transformers"
            ) from None
        if kind not in classes:
            raise ModelLoadError(
                f"transformers must have models of type {preview(kind)}, which the saved "
                f"configuration names; install the version that the model was saved with"
            )
        try:
            return classes[kind].from_dict(dict(self.values))
        except Exception as error:
            # The exception type depends on the entry.
            raise ModelLoadError(
                f"transformers refuses the saved configuration: {one_line(error)}"
            ) from error


def plain_config(config: Any) -> dict[str, Any]:
    """Return the values of a configuration for JSON."""
    if isinstance(config, StoredConfig):
        return dict(config.values)
    values: dict[str, Any] = json.loads(config.to_json_string())
    values.pop(_FOREIGN_CODE, None)
    return values


def stored_config(values: Mapping[str, Any], weights: int) -> StoredConfig:
    """Return the configuration of a saved model.

    Args:
        values: the values in the file.
        weights: number of weights of the model, which limits the layers that it names.

    Raises:
        ModelLoadError: if an entry refers to code, or counts more layers than the model can have.
    """
    entries = {key: value for key, value in values.items() if key != _FOREIGN_CODE}
    for fault in entry_faults(entries, weights):
        raise ModelLoadError(f"the configuration of the saved model is refused: {fault}")
    return StoredConfig(entries)

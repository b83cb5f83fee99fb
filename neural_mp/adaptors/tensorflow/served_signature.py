"""The signature of a SavedModel, with the names TensorFlow Serving knows it by."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from neural_mp.adaptors.common.signature import Signature

#: The signature that TensorFlow Serving calls unless told otherwise.
DEFAULT_KEY = "serving_default"


@dataclass(frozen=True)
class ServedSignature(Signature):
    """The inputs and outputs of a TensorFlow model.

    Attributes:
        keys: the names of the signature in a SavedModel.
    """

    keys: tuple[str, ...] = (DEFAULT_KEY,)

    def to_dict(self) -> dict[str, Any]:
        """Plain strings and numbers, as written to JSON."""
        return {**super().to_dict(), "keys": self.keys}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> ServedSignature:
        """Read back what `to_dict` wrote."""
        return replace(super().from_dict(data), keys=tuple(data["keys"]))

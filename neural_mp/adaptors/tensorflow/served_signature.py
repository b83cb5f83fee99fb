"""The signature of a SavedModel, with the names TensorFlow Serving knows it by."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from neural_mp.adaptors.common.signature import Signature
from neural_mp.util.validators import fields, list_of, text

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
    def from_dict(cls, data: Any) -> ServedSignature:
        """Read back what `to_dict` wrote.

        Raises:
            NeuralMPError: it was not written so.
        """
        return replace(super().from_dict(data), **_KEYS(data))


_KEYS = fields({"keys": list_of(text)})

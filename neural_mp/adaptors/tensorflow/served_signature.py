"""The signature of a SavedModel, with the names TensorFlow Serving knows it by."""

from __future__ import annotations

from dataclasses import dataclass

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

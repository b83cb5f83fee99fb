"""Decoding what TensorFlow's record files hold, for datasets that hand records on as they are.

The datasets ImageRecord and COCORecord decode by themselves; then these names change nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from neural_mp.compat.inc.components.registries import TRANSFORMS, registered
from neural_mp.compat.inc.components.transforms.image_transform import TensorImage, as_tensor_image
from neural_mp.errors import DataError, MissingFrameworkError, in_one_line

_CORNERS = ("ymin", "xmin", "ymax", "xmax")


def _tensorflow(needed_by: str) -> Any:
    try:
        import tensorflow as tf
    except ImportError as error:
        raise MissingFrameworkError(
            f"{needed_by} needs TensorFlow; install it with: pip install 'neural-mp[tensorflow]'"
        ) from error
    return tf


class Record:
    """What one record holds, by its keys.

    Args:
        example: a serialized `tf.train.Example`.
        read_by: the name to say in errors.

    Raises:
        DataError: it is none.
        MissingFrameworkError: TensorFlow is not installed.
    """

    def __init__(self, example: bytes, read_by: str) -> None:
        self._tensorflow = _tensorflow(f"transform {read_by!r}")
        self._read_by = read_by
        from google.protobuf.message import DecodeError

        try:
            parsed = self._tensorflow.train.Example.FromString(example)
        except DecodeError as error:
            raise DataError(f"{read_by} takes records that hold a tf.train.Example") from error
        self._features = parsed.features.feature

    def values(self, key: str) -> list[Any]:
        """All that lies under a key; nothing for a key that is not there."""
        if key not in self._features:
            return []
        feature = self._features[key]
        kind = feature.WhichOneof("kind")
        return [] if kind is None else list(getattr(feature, kind).value)

    def image(self, key: str, decode: Callable[[Any, bytes], Any]) -> TensorImage:
        """The image under a key, `[H, W, C]`.

        Raises:
            DataError: there is none, or it is broken.
        """
        encoded = self.values(key)
        tf = self._tensorflow
        if not encoded:
            raise DataError(f"{self._read_by}: a record has nothing under {key!r}")
        try:
            return as_tensor_image(decode(tf, encoded[0]).numpy())
        except tf.errors.OpError as error:
            raise DataError(
                f"{self._read_by}: what a record has under {key!r} cannot be read as an image: "
                f"{in_one_line(error)}"
            ) from error


def _as_bytes(sample: object) -> bytes | None:
    """A serialized record; None for a sample that is decoded already."""
    if isinstance(sample, bytes):
        return sample
    if type(sample).__module__.startswith("tensorflow.") and hasattr(sample, "numpy"):
        sample = sample.numpy()
    return sample if isinstance(sample, bytes) else None


class Decoder:
    """A record, or a sample `(image, label)` that was one → a sample."""

    def decode(self, record: Record) -> tuple[Any, Any]:
        """`(image, label)`."""
        raise NotImplementedError

    def __call__(self, sample: object) -> tuple[Any, Any]:
        """Decode one record.

        Raises:
            DataError: it is neither a record nor a pair, or it is broken.
            MissingFrameworkError: TensorFlow is not installed.
        """
        example = _as_bytes(sample)
        if example is not None:
            return self.decode(Record(example, type(self).__name__))
        if isinstance(sample, tuple | list) and len(sample) == 2:
            return sample[0], sample[1]
        raise DataError(
            f"{type(self).__name__} takes records, or samples (image, label), got "
            f"{type(sample).__name__}"
        )


@registered(TRANSFORMS, "ParseDecodeImagenet", "tensorflow")
@dataclass(frozen=True)
class ParseDecodeImagenet(Decoder):
    """An image `[H, W, 3]`, and its class `[1]`, int32."""

    def decode(self, record: Record) -> tuple[Any, Any]:
        """JPEG is decoded by the fast rules that TensorFlow has for it."""
        image = record.image(
            "image/encoded",
            lambda tf, encoded: tf.io.decode_jpeg(
                encoded, channels=3, fancy_upscaling=False, dct_method="INTEGER_FAST"
            ),
        )
        return image, np.array(record.values("image/class/label") or [-1], dtype=np.int32)


@registered(TRANSFORMS, "ParseDecodeCoco", "tensorflow")
@dataclass(frozen=True)
class ParseDecodeCoco(Decoder):
    """An image `[H, W, 3]`, and (boxes `[N, 4]`, names, classes, image id).

    Boxes are shares `[top, left, bottom, right]` of height and width; names and id are bytes.
    """

    def decode(self, record: Record) -> tuple[Any, Any]:
        """Any format that TensorFlow reads."""
        image = record.image(
            "image/encoded",
            lambda tf, encoded: tf.io.decode_image(encoded, channels=3, expand_animations=False),
        )
        corners = [record.values(f"image/object/bbox/{corner}") for corner in _CORNERS]
        if len({len(values) for values in corners}) > 1:
            raise DataError("ParseDecodeCoco: a record has boxes with corners that are missing")
        names = np.array(record.values("image/object/class/text"), dtype=object)
        classes = np.array(record.values("image/object/class/label"), dtype=np.int64)
        identity = np.array((record.values("image/source_id") or [b""])[0], dtype=object)
        return image, (np.array(corners, dtype=np.float32).T, names, classes, identity)


@registered(TRANSFORMS, "ParseDecodeVoc", "tensorflow")
@dataclass(frozen=True)
class ParseDecodeVoc(Decoder):
    """An image `[H, W, 3]`, and the class of each pixel `[H, W, 1]`, uint8."""

    def decode(self, record: Record) -> tuple[Any, Any]:
        """JPEG or PNG."""
        image = record.image("image/encoded", lambda tf, data: tf.io.decode_image(data, channels=3))
        classes = record.image(
            "image/segmentation/class/encoded",
            lambda tf, data: tf.io.decode_image(data, channels=1),
        )
        return image, np.asarray(classes)

"""Datasets in TFRecord files: `ImageRecord`, `COCORecord`, `VOCRecord` and `TFRecordDataset`.

TensorFlow reads and decodes the files, with the op settings of Intel Neural Compressor. The
transforms `ParseDecode…` are for datasets that return serialized records.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np

from neural_mp.common import stack
from neural_mp.compat.inc.components.registries import TRANSFORMS, dataset, register_for
from neural_mp.compat.inc.components.transforms.image_transform import (
    TensorImage,
    as_tensor_image,
    compute_tensor,
)
from neural_mp.data.option_checks import check_existing_file, check_existing_folder, import_package
from neural_mp.errors import ConfigurationError, DataError, one_line

#: Bytes before and after a record: length and checksums.
_HEAD, _TAIL = 12, 4
#: First bytes of a JPEG file.
_JPEG = b"\xff\xd8\xff"
BOX_EDGES = ("ymin", "xmin", "ymax", "xmax")


def import_tensorflow_for(needed_by: str = "dataset 'TFRecord'") -> Any:
    """Return the module `tensorflow`."""
    return import_package("tensorflow", needed_by, "tensorflow")


@dataclass(frozen=True)
class Record:
    """A `tf.train.Example`: features by name, each a list of values of one type."""

    example: Any

    @classmethod
    def parse_example(cls, serialized: bytes) -> Record:
        """Parse a serialized example.

        Raises:
            ValueError: the bytes are not a `tf.train.Example`.
        """
        from google.protobuf.message import DecodeError

        try:
            return cls(import_tensorflow_for().train.Example.FromString(serialized))
        except DecodeError as error:
            raise ValueError(f"expected a tf.train.Example: {error}") from error

    def _read_values(self, name: str, kind: str) -> Sequence[Any]:
        features = self.example.features.feature
        return getattr(features[name], kind).value if name in features else ()

    def read_text(self, name: str) -> bytes:
        """Return the single value of a bytes feature; empty if missing."""
        values = self.read_texts(name)
        return bytes(values[0]) if len(values) else b""

    def read_texts(self, name: str) -> np.ndarray:
        """Return all values of a bytes feature: objects `[N]`."""
        return np.array(list(self._read_values(name, "bytes_list")), dtype=object)

    def read_integers(self, name: str) -> np.ndarray:
        """Return all values of an integer feature: int64 `[N]`."""
        return np.array(self._read_values(name, "int64_list"), dtype=np.int64)

    def read_integer(self, name: str, default: int | None = None) -> Any:
        """Return the single value of an integer feature, int64; a default if missing.

        Raises:
            ValueError: there are several values, or none and no default.
        """
        values = self.read_integers(name)
        if not len(values) and default is not None:
            return np.int64(default)
        if len(values) != 1:
            raise ValueError(f"feature {name!r} must hold one value, got {len(values)}")
        return values[0]

    def read_floats(self, name: str) -> np.ndarray:
        """Return all values of a float feature: float32 `[N]`."""
        return np.array(self._read_values(name, "float_list"), dtype=np.float32)

    def read_image(self, name: str, decode: Callable[[bytes], Any]) -> TensorImage:
        """Return the image of a feature, `[H, W, C]`.

        Raises:
            ValueError: the image is missing or broken.
        """
        content = self.read_text(name)
        if not content:
            raise ValueError(f"feature {name!r} must hold an image, got no value")
        try:
            return as_tensor_image(compute_tensor(lambda tf: decode(content)))
        except ValueError as error:
            raise ValueError(f"feature {name!r} cannot be decoded as an image: {error}") from error


@cache
def _check_lengths(name: str, file: Path, size: int, _changed: int) -> None:
    """Raise DataError if a record is longer than its file, which would abort TensorFlow.

    Size and modification time are cache keys: a file is checked once, not in every pass.
    """
    offset = 0
    with file.open("rb") as stream:
        while offset + _HEAD <= size:
            stream.seek(offset)
            length = int.from_bytes(stream.read(8), "little")
            if length > size:
                raise DataError(
                    f"{name}: {file} is damaged: the length of a record exceeds that of the file, "
                    f"{length} bytes > {size} bytes"
                )
            offset += _HEAD + length + _TAIL


@dataclass(frozen=True)
class RecordDataset:
    """Records of several files, interleaved and decoded during iteration.

    Attributes:
        name: name of the dataset, for messages.
        files: paths, in interleaving order.
        decode: serialized record → sample.
    """

    name: str
    files: tuple[str, ...]
    decode: Callable[[bytes], Any]

    def __iter__(self) -> Iterator[Any]:
        tensorflow = import_tensorflow_for(f"dataset {self.name!r}")
        for file in self.files:
            stats = Path(file).stat()
            _check_lengths(self.name, Path(file), stats.st_size, stats.st_mtime_ns)
        count = 0
        try:
            for record in _read_records(self.files):
                yield self.decode(record)
                count += 1
        except (tensorflow.errors.OpError, ValueError) as error:
            more = f" and {len(self.files) - 1} more files" if len(self.files) > 1 else ""
            raise DataError(
                f"{self.name}: record {count + 1} of {self.files[0]}{more} cannot be read: "
                f"{one_line(error)}"
            ) from error


def _read_records(files: Sequence[str]) -> Iterator[bytes]:
    """Yield the records of interleaved files, in identical order on every call."""
    tf = import_tensorflow_for()

    def interleave_record_files() -> Any:
        paths = tf.data.Dataset.from_tensor_slices(list(files))
        return paths.interleave(tf.data.TFRecordDataset, cycle_length=len(files), block_length=1)

    with tf.init_scope():
        is_eager = tf.executing_eagerly()
    if is_eager:
        yield from interleave_record_files().as_numpy_iterator()
        return
    # Scripts for TensorFlow 1 disable eager execution.
    with tf.Graph().as_default() as graph:
        following = tf.compat.v1.data.make_one_shot_iterator(interleave_record_files()).get_next()
    with tf.compat.v1.Session(graph=graph) as session, suppress(tf.errors.OutOfRangeError):
        while True:
            yield session.run(following)


class BoxedImages:
    """Mixin of datasets of samples `(image, (boxes, names, classes, image id))`."""

    def collate_samples(self, samples: list[Any]) -> tuple[Any, Any]:
        """Return a batch: the stacked images, and the parts of the labels in order.

        A part is an array with the batch as first axis or, if the numbers of boxes differ, a list
        with one array per image.
        """
        images = stack([image for image, _ in samples])
        labels: list[Any] = []
        for part in zip(*(label for _, label in samples), strict=True):
            arrays = [np.asarray(item) for item in part]
            is_uniform = len({array.shape for array in arrays}) == 1
            labels.append(np.stack(arrays) if is_uniform else arrays)
        return images, tuple(labels)


@dataclass(frozen=True)
class BoxRecordDataset(BoxedImages, RecordDataset):
    """Records with a different number of boxes per image."""


def _records_of_folder(
    name: str, pattern: str, decode: Callable[[bytes], Any], root: object
) -> RecordDataset:
    folder = check_existing_folder(f"{name}: root", root)
    files = tuple(sorted(str(path) for path in folder.glob(pattern) if path.is_file()))
    if not files:
        raise DataError(f"{name}: root: {folder} has no files named {pattern}")
    return RecordDataset(name, files, decode)


def _decode_imagenet(serialized: bytes) -> tuple[np.ndarray, np.ndarray]:
    """Return a uint8 array `[height, width, 3]`, RGB, and the class, int32 `[1]`; -1 for none."""
    record = Record.parse_example(serialized)
    decode = import_tensorflow_for().io.decode_jpeg
    by_fast_rules = partial(decode, channels=3, fancy_upscaling=False, dct_method="INTEGER_FAST")
    image = record.read_image("image/encoded", by_fast_rules)
    return image, np.array([record.read_integer("image/class/label", -1)], dtype=np.int32)


@dataset("COCORecord", "tensorflow", ignored=("num_cores", "filter"), needs=import_tensorflow_for)
def coco_record(root: object) -> RecordDataset:
    """Return COCO in one TFRecord file, as written by the TensorFlow object detection tools.

    Args:
        root: the file.

    Returns:
        Samples of a uint8 array `[height, width, 3]`, RGB, and a label of four parts: the boxes,
        float32 `[N, 4]`, as ymin, xmin, ymax, xmax in fractions of the image's height and width;
        class names, bytes `[N]`; classes, int64 `[N]`; and the image's id, bytes `[]`.
        Batches are those of `BoxedImages`.
    """
    file = str(check_existing_file("COCORecord: root", root))
    first = next(iter(RecordDataset("COCORecord", (file,), Record.parse_example)), None)
    classes = () if first is None else first.read_integers("image/object/class/label")
    names = () if first is None else first.read_texts("image/object/class/text")
    if not len(classes) and not len(names):
        raise DataError(
            f"COCORecord: the first record of {file} has no classes of objects; expected the "
            f"features image/object/class/text or image/object/class/label of the TensorFlow "
            f"object detection tools"
        )
    return BoxRecordDataset("COCORecord", (file,), _decode_coco)


def _decode_coco(serialized: bytes) -> tuple[np.ndarray, tuple[np.ndarray, ...]]:
    record = Record.parse_example(serialized)
    decode = partial(import_tensorflow_for().io.decode_image, channels=3, expand_animations=False)
    edges = [record.read_floats(f"image/object/bbox/{edge}") for edge in BOX_EDGES]
    label = (
        np.stack(edges, axis=-1),
        record.read_texts("image/object/class/text"),
        record.read_integers("image/object/class/label"),
        np.array(record.read_text("image/source_id"), dtype=object),
    )
    return record.read_image("image/encoded", decode), label


def _decode_voc(serialized: bytes) -> tuple[np.ndarray, np.ndarray]:
    """Return uint8 arrays `[height, width, 3]`, RGB, and `[height, width, 1]`, pixel classes."""
    record = Record.parse_example(serialized)
    classes = record.read_image(
        "image/segmentation/class/encoded", partial(_decode_image, channels=1)
    )
    return record.read_image("image/encoded", partial(_decode_image, channels=3)), np.asarray(
        classes
    )


def _decode_image(content: bytes, channels: int) -> Any:
    ops = import_tensorflow_for().io
    decode = ops.decode_jpeg if content.startswith(_JPEG) else ops.decode_png
    return decode(content, channels=channels)


@dataset("TFRecordDataset", "tensorflow", needs=import_tensorflow_for)
def tf_record_dataset(root: object) -> RecordDataset:
    """Return the serialized records of TFRecord files, for a transform that parses them.

    Args:
        root: a file, or a file pattern, e.g. `folder/*.tfrecord`.

    Returns:
        Samples that are the bytes of a record. Records of the files are interleaved.
    """
    if not isinstance(root, str | Path):
        raise ConfigurationError(f"TFRecordDataset: root must be a path, got {root!r}")
    path = Path(root).expanduser().absolute()
    above = Path(path.anchor)
    matches = [path] if path.is_file() else above.glob(str(path.relative_to(above)))
    files = tuple(sorted(str(file) for file in matches if file.is_file()))
    if not files:
        raise DataError(f"TFRecordDataset: root: no file matches {path}")
    return RecordDataset("TFRecordDataset", files, bytes)


@dataclass(frozen=True)
class Decoder:
    """Decoder of a record to a sample; a pair `(image, label)` is returned unchanged.

    Attributes:
        name: name of the transform, for messages.
        decode: serialized record → sample.
    """

    name: str
    decode: Callable[[bytes], tuple[Any, Any]]

    def __call__(self, sample: Any) -> tuple[Any, Any]:
        """Decode one record."""
        if type(sample).__module__.startswith("tensorflow.") and hasattr(sample, "numpy"):
            sample = sample.numpy()
        if isinstance(sample, bytes):
            try:
                return self.decode(sample)
            except ValueError as error:
                raise DataError(f"{self.name}: damaged record: {error}") from error
        if isinstance(sample, tuple | list) and len(sample) == 2:
            return sample[0], sample[1]
        raise DataError(
            f"{self.name}: a sample must be a record or (image, label), got {type(sample).__name__}"
        )


for _name, _pattern, _decode_sample in (
    ("ImageRecord", "*-*-of-*", _decode_imagenet),
    ("VOCRecord", "val-*", _decode_voc),
):
    dataset(_name, "tensorflow", needs=import_tensorflow_for)(
        partial(_records_of_folder, _name, _pattern, _decode_sample)
    )
for _name, _decode in (
    ("ParseDecodeImagenet", _decode_imagenet),
    ("ParseDecodeCoco", _decode_coco),
    ("ParseDecodeVoc", _decode_voc),
):
    register_for(TRANSFORMS, _name, "tensorflow")(partial(Decoder, _name, _decode))

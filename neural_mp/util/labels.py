"""Labels inside batches that are dicts, found by reserved names.

Hugging Face collators return one dict per batch, labels included. Most models accept labels as an
optional input, and then return a different output.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from neural_mp.errors import DataError, did_you_mean

#: Names of sample labels, mutually exclusive.
_OF_SAMPLES = ("labels", "label", "label_ids")
#: Label names in datasets and models of `transformers` (5.23); the others may be combined, each a
#: separate label.
NAMES = (
    *_OF_SAMPLES,
    "start_positions",
    "end_positions",
    "next_sentence_label",
    "sentence_order_label",
    "mc_labels",
    "mask_labels",
    "pixel_labels",
)

#: Label of tokens and pixels that do not count, as in `torch.nn.CrossEntropyLoss`.
IGNORED_LABEL = -100


def split_at(key: str, batch: Any) -> Any:
    """Return a dict that has the key as inputs and labels; other batches unchanged."""
    if not _has_key(key, batch):
        return batch
    return {name: value for name, value in batch.items() if name != key}, batch[key]


def without_key(key: str | None, batch: object) -> Any:
    """Return a dict without a key; other batches, and any batch if the key is None, unchanged."""
    if key is None or not _has_key(key, batch):
        return batch
    return split_at(key, batch)[0]


def _has_key(key: str, batch: object) -> bool:
    return isinstance(batch, Mapping) and key in batch


def get_batch_labels(batch: Mapping[Any, Any], source: str, missing: str | None = None) -> Any:
    """Return the labels in a batch: the value if there is one, else a dict by name.

    Args:
        batch: the batch.
        source: name of the loader.
        missing: the label key that the user set and the batch lacks; None if unset.

    Raises:
        DataError: there are no labels, several names of sample labels, or no inputs; the message
            starts with `source`.
    """
    if missing is not None:
        raise DataError(
            f"{source} must yield dicts with the label_key {missing!r}, got the keys: "
            f"{', '.join(map(str, batch)) or 'none'}{did_you_mean(missing, map(str, batch))}"
        )
    labels = {name: batch[name] for name in NAMES if name in batch}
    keys = ", ".join(map(str, batch))
    if not labels:
        raise DataError(
            f"{source} must yield (inputs, labels), or a dict with a key for labels "
            f"({', '.join(NAMES)}; set label_key for another), got a dict with the keys: "
            f"{keys or 'none'}"
        )
    rivals = [name for name in _OF_SAMPLES if name in labels]
    if len(rivals) > 1:
        raise DataError(
            f"{source} must yield at most one of the keys {', '.join(_OF_SAMPLES)}, got "
            f"{' and '.join(map(repr, rivals))}; remove one of the keys, or yield (inputs, labels)"
        )
    if len(labels) == len(batch):
        raise DataError(f"{source} must yield inputs and labels, got labels only: {keys}")
    return next(iter(labels.values())) if len(labels) == 1 else labels


def without_labels(batch: Mapping[Any, Any], retained: Collection[str]) -> dict[Any, Any]:
    """Return a batch as a plain dict without labels; names in `retained` always stay."""
    return {key: batch[key] for key in batch if key not in NAMES or key in retained}

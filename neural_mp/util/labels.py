"""The labels that a batch holds beside its inputs, under names that are used for labels alone.

A collator of Hugging Face gives one dict for a batch, with the labels in it. Most models of theirs
take these as an input that may be left out, and return something else where they get them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from neural_mp.errors import DataError

#: Names for the labels of a whole sample, of which a batch has one.
_OF_SAMPLES = ("labels", "label", "label_ids")
#: What datasets and models of the package `transformers` (5.23) call labels; where several are
#: given, each is a label of its own kind.
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


def labels_of(batch: Mapping[Any, Any], source: str) -> Any:
    """The labels in a batch: the value itself where there is one, else a dict of them by name.

    Args:
        batch: inputs and labels by name.
        source: what gave the batch, for the message.

    Raises:
        DataError: there are none; or labels of samples stand under several names.
    """
    found = {name: batch[name] for name in NAMES if name in batch}
    given = ", ".join(map(str, batch))
    if not found:
        raise DataError(
            f"{source} must yield (inputs, labels), or a dict with the labels in it; the dict it "
            f"yields has the keys {given or 'none'}, of which none is a name for labels "
            f"({', '.join(NAMES)})"
        )
    rivals = [name for name in _OF_SAMPLES if name in found]
    if len(rivals) > 1:
        raise DataError(
            f"{source} yields a dict with {' and '.join(map(repr, rivals))}, and either may be the "
            f"labels; leave one of them out, or yield (inputs, labels)"
        )
    if len(found) == len(batch):
        raise DataError(f"{source} yields a dict of labels alone ({given}); it needs inputs, too")
    return next(iter(found.values())) if len(found) == 1 else found


def without_labels(batch: Mapping[Any, Any], kept: Collection[str]) -> dict[Any, Any]:
    """A batch as a plain dict, without its labels.

    Args:
        batch: inputs by name, labels perhaps among them.
        kept: names that the model cannot do without, whatever they are used for elsewhere.
    """
    return {key: batch[key] for key in batch if key not in NAMES or key in kept}

"""Tiny data in the forms that tuning files of Intel Neural Compressor name, made up.

Each kind is made once, when a file first asks for it. The paths in the options of a file are
replaced by those of the made-up data; all other options stay as the file has them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from inc_data import images, records, text

#: Dataset → what makes it in a folder, and gives the options that hold paths.
_DATASETS: Mapping[str, Callable[[Path], Mapping[str, Any]]] = {
    "ImageFolder": images.folders_of_classes,
    "ImagenetRaw": images.with_a_list,
    "COCORaw": images.with_boxes,
    "COCONpy": images.arrays_with_boxes,
    "MNIST": images.small_images_in_one_file,
    "FashionMNIST": images.small_images_packed,
    "style_transfer": images.contents_and_styles,
    "ImageRecord": records.of_classes,
    "COCORecord": records.of_boxes,
    "VOCRecord": records.of_segments,
    "bert": records.of_tokens,
    "mzbert": records.of_tokens,
    "GLUE": text.sentences,
}
#: Transforms and metrics with files.
_OTHERS: Mapping[str, Callable[[Path], Mapping[str, Any]]] = {
    "SquadV1": text.questions,
    "SquadV1ModelZoo": text.questions,
    "COCOmAP": text.label_map,
    "COCOmAPv2": text.label_map,
}


class MadeUp:
    """Made-up data in a folder.

    Args:
        folder: an empty folder.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._made: dict[str, Mapping[str, Any]] = {}

    def options(self, name: str, requested: Any) -> Any:
        """The options of a dataset, a transform or a metric, with paths to made-up data in them.

        Args:
            name: what a file calls it.
            requested: its options there.
        """
        makers = {kind.lower(): make for kind, make in {**_DATASETS, **_OTHERS}.items()}
        make = makers.get(name.lower())
        if make is None or not isinstance(requested, Mapping):
            return requested
        if name.lower() not in self._made:
            folder = self._folder / name.lower()
            folder.mkdir()
            self._made[name.lower()] = make(folder)
        paths = self._made[name.lower()]
        remaining = {option: value for option, value in requested.items() if option not in paths}
        chosen = {option: value for option, value in paths.items() if option in requested}
        for option, value in chosen.items():
            # What a tokenizer's files are like depends on its model.
            if isinstance(value, Mapping):
                chosen[option] = value[str(requested.get("model_type", "bert"))]
        return {**remaining, **{option: str(path) for option, path in chosen.items()}}

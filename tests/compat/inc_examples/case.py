"""Form of an example script with all that it needs."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

V1, V2, V3 = "v1.14", "v2.2", "v3.9"
#: Lines that a script's user expects, by mode; scripts of version 2 print the accuracy themselves.
ACCURACY = (r"Accuracy is [\d.]+", r"Batch size = \d+")
ACCURACY_V2 = (r"Accuracy: [\d.]+", r"Batch size = \d+")
PERFORMANCE = (r"Batch size = \d+", r"Latency: [\d.]+ ms", r"Throughput: [\d.]+ \w+/sec")
#: Keys of tuning files that hold a path → the path in the script's folder.
PATHS = {
    "data_path": "images",
    "image_list": "val_map.txt",
    "root": "records",
}


@dataclass(frozen=True)
class Step:
    """One call of a script.

    Attributes:
        arguments: of the script.
        lines: regular expressions of the lines that must be printed.
    """

    arguments: Sequence[str]
    lines: Sequence[str] = ()


@dataclass(frozen=True)
class Case:
    """A script with all that it needs.

    Attributes:
        folder: of the script, in the repository.
        script: file name.
        make: writes data and models into the script's folder.
        steps: calls in order: tuning, then both benchmark modes.
        paths: key of the tuning file → path.
        result: file or folder that tuning writes; None if the script saves nothing.
        tag: version of the repository.
    """

    folder: str
    make: Callable[[Path], None]
    steps: Mapping[str, Step]
    script: str = "main.py"
    paths: Mapping[str, str] = field(default_factory=lambda: PATHS)
    result: str | None = None
    tag: str = V1

    @property
    def name(self) -> str:
        """The version, and the folder without the parts that all have."""
        short = re.sub(
            r"^examples/|/quantization|/ptq$|/ptq_static$|image_recognition/", "", self.folder
        )
        return f"{self.tag[1:]} {short}"


def steps(
    common: Sequence[str], tune: Sequence[str], accuracy: Sequence[str] = ACCURACY
) -> dict[str, Step]:
    """Return the three calls that most scripts have.

    Args:
        common: arguments of every call.
        tune: further arguments of the tuning.
        accuracy: lines of the accuracy mode.
    """
    return {
        "tune": Step((*common, "--tune", *tune)),
        "accuracy": Step((*common, "--benchmark", "--mode=accuracy"), accuracy),
        "performance": Step((*common, "--benchmark", "--mode=performance"), PERFORMANCE),
    }

"""Files that want to run code, read other files, or take all memory when they are read."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from attacks.hostile import FAMILY, Attack
from attacks.hostile_data import DATA
from attacks.hostile_keras import KERAS
from attacks.hostile_onnx import ONNX
from attacks.hostile_settings import SETTINGS
from attacks.hostile_tensorflow import TENSORFLOW
from attacks.verdicts import Family, Finding

ATTACKS: tuple[Attack, ...] = (*SETTINGS, *TENSORFLOW, *KERAS, *ONNX, *DATA)


def findings(count: int, folder: Path, seed: int) -> Iterator[Finding]:
    """What came of so many attacks; of all of them in turn."""
    for number in range(count):
        attack = ATTACKS[(seed + number) % len(ATTACKS)]
        home = folder / str(number)
        home.mkdir()
        yield attack.play(home, folder / f"ran_{number}")


HOSTILE_FILES = Family(FAMILY, len(ATTACKS), findings)

"""Files that want to run code, read other files, or take all memory when they are read."""

from __future__ import annotations

from attacks.hostile import Attacks
from attacks.hostile_data import DATA
from attacks.hostile_keras import KERAS
from attacks.hostile_onnx import ONNX
from attacks.hostile_settings import SETTINGS
from attacks.hostile_tensorflow import TENSORFLOW

_ATTACKS = Attacks()
for _group in (SETTINGS, TENSORFLOW, KERAS, ONNX, DATA):
    _ATTACKS += _group

HOSTILE_FILES = _ATTACKS.as_family()

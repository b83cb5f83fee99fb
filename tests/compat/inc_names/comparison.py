"""Their code imported, and one value of it next to one of ours."""

from __future__ import annotations

import importlib
import logging
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from neural_mp.errors import one_line

#: What float32 can say of a value: the difference that is let through, relative to the largest.
FLOAT32 = 2e-5


class Repository:
    """Their code, imported file by file.

    Args:
        folder: with their repository.
    """

    def __init__(self, folder: Path) -> None:
        if not (folder / "neural_compressor").is_dir():
            raise SystemExit(f"{folder} holds no neural_compressor")
        for name in ("", ".utils", ".data", ".experimental", ".experimental.data"):
            package = types.ModuleType(f"neural_compressor{name}")
            package.__path__ = [str(folder.joinpath("neural_compressor", *name.split(".")))]
            sys.modules[package.__name__] = package
        utility = types.ModuleType("neural_compressor.utils.utility")
        utility.LazyImport = Lazy
        utility.singleton = lambda cls: cls
        sys.modules[utility.__name__] = utility
        sys.modules["neural_compressor.utils"].logger = logging.getLogger("theirs")
        logging.disable(logging.WARNING)
        # Their code is older than numpy 1.24, which took these names away.
        for kind in (str, bool):
            np.__dict__.setdefault(kind.__name__, kind)

    def module(self, name: str) -> types.ModuleType:
        """A module of theirs: `experimental.data.transforms`."""
        return importlib.import_module(f"neural_compressor.{name}")

    def transform(self, framework: str, name: str, process: str = "preprocess") -> Any:
        """The class, or maker, that a name stands for there."""
        self.module("data.transforms")
        transforms = self.module("experimental.data.transforms.transform")
        backend = {"onnxrt": "onnxrt_qlinearops"}.get(framework, framework)
        return transforms.TRANSFORMS(backend, process)[name]


class Lazy:
    """A module that is imported when something in it is asked for."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        try:
            return getattr(importlib.import_module(self._name), attribute)
        except ImportError:
            if self._name == "cv2" and attribute.startswith("INTER_"):
                return None  # asked for while modules are imported
            raise


@dataclass(frozen=True)
class Comparison:
    """One name, in one framework.

    Attributes:
        name: what the files say.
        framework: whose files say it.
        ours, theirs: what gives the values: numbers, texts, arrays, or tuples, lists and
            mappings of them.
        case: what is special about the input or the options.
        bound: the difference that is let through; None for what float32 can say.
    """

    name: str
    framework: str
    ours: Callable[[], Any]
    theirs: Callable[[Repository], Any]
    case: str = ""
    bound: float | None = None


@dataclass(frozen=True)
class Outcome:
    """What one comparison gave: the largest difference, what is let through, and why there is none.

    Attributes:
        difference: NaN where nothing could be compared.
        bound: what is let through.
        reason: why nothing could be compared, or what else differs.
    """

    difference: float
    bound: float = 0.0
    reason: str = ""

    @property
    def verdict(self) -> str:
        """In one word, or few."""
        if self.reason:
            return self.reason
        if self.difference == 0:
            return "equal"
        return "equal but for rounding" if self.difference <= self.bound else "DIFFERENT"


def difference(ours: Any, theirs: Any) -> tuple[float, float]:
    """The largest difference, and the largest value of theirs.

    Raises:
        ValueError: forms differ, so that there is none.
    """
    if isinstance(theirs, Mapping):
        if set(ours) != set(theirs):
            raise ValueError("other keys")
        return _largest([difference(ours[key], theirs[key]) for key in theirs])
    if isinstance(theirs, tuple | list):
        if len(ours) != len(theirs):
            raise ValueError(f"{len(ours)} values for {len(theirs)}")
        return _largest(
            [difference(actual, expected) for actual, expected in zip(ours, theirs, strict=True)]
        )
    if theirs is None or isinstance(theirs, str | bytes):
        return (0.0 if ours == theirs else float("inf")), 1.0
    actual, expected = np.asarray(ours), np.asarray(theirs)
    if actual.shape != expected.shape:
        raise ValueError(f"shape {list(actual.shape)} for {list(expected.shape)}")
    if expected.dtype.kind in "OSU":
        return (0.0 if (actual == expected).all() else float("inf")), 1.0
    if not expected.size:
        return 0.0, 0.0
    actual, expected = actual.astype(np.float64), expected.astype(np.float64)
    return float(np.abs(actual - expected).max()), float(np.abs(expected).max())


def _largest(pairs: Sequence[tuple[float, float]]) -> tuple[float, float]:
    return max((p[0] for p in pairs), default=0.0), max((p[1] for p in pairs), default=0.0)


def outcome(comparison: Comparison, repository: Repository) -> Outcome:
    """Run both sides."""
    try:
        theirs = comparison.theirs(repository)
    except ImportError as error:
        return Outcome(float("nan"), reason=f"not compared: {error.name} is not installed")
    except Exception as error:  # noqa: BLE001 - theirs may raise what it likes, and that is a result
        return Outcome(float("nan"), reason=f"not compared: theirs: {one_line(error)}")
    try:
        largest, scale = difference(comparison.ours(), theirs)
    except ValueError as error:
        return Outcome(float("inf"), reason=f"DIFFERENT: {error}")
    bound = FLOAT32 * max(1.0, scale) if comparison.bound is None else comparison.bound
    return Outcome(largest, bound)

"""Files that a framework made itself and runs, and the outcome of reading them."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

#: Makes a file or folder at a path; returns feeds of inputs that random numbers do not suit.
Make = Callable[[Path], Mapping[str, Any] | None]
#: Words of generated texts.
WORDS = ("red", "green", "blue", "black")


class Outcome(enum.Enum):
    """Outcome of reading a file."""

    TAKEN = "taken"
    REFUSED = "refused"
    WRONG = "wrong outputs"
    TRACEBACK = "traceback"
    #: The framework cannot read or run its own file, so that the file does not count.
    NOT_RUN = "not run by the framework"


@dataclass(frozen=True)
class Case:
    """A file that a framework makes.

    Attributes:
        name: name of the file, suffix included.
        make: makes the file.
        random: whether outputs differ from run to run, so that only shapes are compared.
    """

    name: str
    make: Make
    random: bool = False


@dataclass(frozen=True)
class Result:
    """Outcome of one case, with the reason for anything but `TAKEN`."""

    case: Case
    outcome: Outcome
    reason: str = ""


class Cases:
    """Collection of the cases of one kind of file."""

    def __init__(self) -> None:
        self.all: list[Case] = []

    def case(self, name: str = "", **options: Any) -> Callable[[Make], Make]:
        """Return a decorator that adds the case of a function."""

        def added(make: Make) -> Make:
            self.add(name or make.__name__, make, **options)
            return make

        return added

    def add(self, name: str, make: Make, **options: Any) -> None:
        """Add a case."""
        self.all.append(Case(name, make, **options))


def example(dtype: str, shape: Iterable[int | None], seed: int = 0) -> Any:
    """Return random numbers or words for an input, with 3 for open sizes."""
    sizes = [3 if size is None else size for size in shape]
    draw = np.random.default_rng(seed)
    if dtype in ("string", "object"):
        return draw.choice(np.array(WORDS, object), sizes)
    if "int" in dtype:
        return draw.integers(0, 4, sizes).astype(dtype)
    return draw.normal(size=sizes).astype(dtype if "float" in dtype else "float32")


def same(actual: list[Any], expected: list[Any], *, random: bool) -> str:
    """Return the first difference between outputs, or nothing."""
    if len(actual) != len(expected):
        return f"{len(actual)} outputs, expected {len(expected)}"
    for index, (ours, theirs) in enumerate(zip(actual, expected, strict=True)):
        ours, theirs = np.asarray(ours), np.asarray(theirs)
        if ours.shape != theirs.shape:
            return f"output {index} has shape {ours.shape}, expected {theirs.shape}"
        if random:
            continue
        if theirs.dtype.kind in "fc":
            scale = float(np.max(np.abs(theirs), initial=0, where=np.isfinite(theirs)))
            if not np.allclose(ours, theirs, rtol=1e-3, atol=1e-4 * scale + 1e-6, equal_nan=True):
                return f"output {index} differs by {float(np.max(np.abs(ours - theirs))):.3g}"
        elif not np.array_equal(ours, theirs):
            return f"output {index} differs"
    return ""


def outcomes(
    cases: Iterable[Case],
    folder: Path,
    expected: Callable[[Path, Any], tuple[Any, list[Any]]],
    actual: Callable[[Path, Any], list[Any]],
) -> Iterator[Result]:
    """Yield the outcome of every case.

    Args:
        cases: the files.
        folder: empty folder for the files.
        expected: returns the feeds of a file and the outputs of the framework itself.
        actual: returns the outputs of neural-mp for these feeds.
    """
    from neural_mp import NeuralMPError

    for case in cases:
        path = folder / case.name
        try:
            feeds, reference = expected(path, case.make(path))
        except Exception as error:  # noqa: BLE001 (a framework may raise anything)
            yield Result(case, Outcome.NOT_RUN, _line(error))
            continue
        try:
            difference = same(actual(path, feeds), reference, random=case.random)
        except NeuralMPError as error:
            yield Result(case, Outcome.REFUSED, _line(error))
        except Exception as error:  # noqa: BLE001 (counted as a traceback)
            yield Result(case, Outcome.TRACEBACK, f"{type(error).__name__}: {_line(error)}")
        else:
            yield Result(case, Outcome.WRONG if difference else Outcome.TAKEN, difference)


def _line(error: Exception) -> str:
    return " ".join(str(error).split())

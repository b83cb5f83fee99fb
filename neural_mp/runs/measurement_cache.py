"""What earlier runs measured, so that it is not measured again."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol, TypeVar

from neural_mp.core import hardware
from neural_mp.errors import HistoryError, NeuralMPError
from neural_mp.io.files import write_whole
from neural_mp.io.readers import read_json
from neural_mp.util.environment import numeric_variables, versions_of
from neural_mp.util.validators import (
    Validator,
    anything,
    list_of,
    mapping_of,
    number,
    record,
    string,
    tuple_of,
    validate_at,
)

T = TypeVar("T")

#: What a run remembers is also read for its record: under the names of the fields of `Measured`,
#: noise at the outputs with the repairs and the name of its tensor behind this.
TIMES, VALUES, ARRIVING = "times", "values", "arriving: "


class Notes(Protocol):
    """Keeps what was measured."""

    def recall(self, key: str, kind: Validator[T]) -> tuple[bool, T | None]:
        """Whether something was written down under a key, and what, of a kind."""

    def remember(self, key: str, value: Any) -> None:
        """Write down what was measured: numbers, words, lists and dicts."""


class Notebook:
    """Keeps what was measured as long as it lives, for what needs no history."""

    def __init__(self) -> None:
        self._notes: dict[str, Any] = {}

    def recall(self, key: str, kind: Validator[T]) -> tuple[bool, T | None]:
        """Whether something was written down under a key, and what, of a kind."""
        return (True, kind(self._notes[key])) if key in self._notes else (False, None)

    def remember(self, key: str, value: Any) -> None:
        """Write down what was measured."""
        self._notes[key] = value

    @property
    def arriving(self) -> dict[str, dict[str, float]]:
        """See `Measured.arriving`."""
        return arriving_in(self._notes)


def arriving_in(notes: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    """Tensor or op → repairs → noise at the outputs, of all that was measured."""
    found: dict[str, dict[str, float]] = {}
    for key, noise in notes.items():
        if key.startswith(ARRIVING):
            repairs, _, name = key.removeprefix(ARRIVING).partition(": ")
            found.setdefault(name, {})[repairs] = validate_at(key, number, noise)
    return found


logger = logging.getLogger(__name__)

KNOWN_FOLDER = "known"
#: Of how many different data a file keeps what was measured on them.
_DATA_A_FILE = 8
#: How many files a folder may hold; those used least recently go first.
_FILES = 1000

_KEPT = record({"about": mapping_of(string), "found": list_of(tuple_of(string, anything))})


@dataclass(frozen=True)
class Known:
    """What earlier runs measured, in files of a folder.

    Something is found again where all that it depends on is the same: the model, the data, the
    machine, the versions, and what else `about` says. Files that cannot be read or written cost
    time, and nothing else.

    Attributes:
        folder: where the files are; None to keep nothing.
        about: word → what everything here depends on.
    """

    folder: Path | None = None
    about: Mapping[str, str] = field(default_factory=dict)

    @property
    def keeps(self) -> bool:
        """Whether anything is kept here."""
        return self.folder is not None

    def of(self, **about: str | None) -> Known:
        """What depends on more: nothing is kept where one of these could not be told."""
        told = {word: value for word, value in about.items() if value is not None}
        if len(told) < len(about):
            return NOTHING_KNOWN
        return replace(self, about={**self.about, **told})

    def recall(self, what: str, kind: Validator[T], data: Callable[[], str | None]) -> T | None:
        """What was kept of something; None where that is nothing, or not of its kind.

        Args:
            what: its name.
            kind: what it must be.
            data: the digest of the data that it was measured on; only asked for where something
                is known, since reading all data may take long.
        """
        kept = self._read(what)
        if not kept:
            return None
        digest = data()
        for known, value in reversed(kept):
            if digest is not None and known == digest:
                self._touch(what)
                return self._of_kind(what, kind, value)
        return None

    def _of_kind(self, what: str, kind: Validator[T], value: Any) -> T | None:
        try:
            return kind(value)
        except NeuralMPError as error:
            logger.debug("%s: what is kept of %s: %s", self._path(what), what, error)
            return None

    def keep(self, what: str, data: str | None, value: Any) -> None:
        """Keep numbers, words, lists and dicts for later runs; of data that was not told nothing.

        Args:
            what: its name.
            data: the digest of the data that it was measured on.
            value: what was measured.
        """
        if self.folder is None or data is None:
            return
        others = [pair for pair in self._read(what) if pair[0] != data]
        found = [*others, (data, value)][-_DATA_A_FILE:]
        text = json.dumps({"about": self._words(what), "found": found})
        path = self._path(what)
        try:
            write_whole(path, zlib.compress(text.encode()))
            _forget_the_oldest(path.parent)
        except OSError as error:
            logger.warning("what was measured is not kept for later runs: %s", error)

    def _words(self, what: str) -> dict[str, str]:
        return {**self.about, "what": what}

    def _path(self, what: str) -> Path:
        assert self.folder is not None
        said = json.dumps(self._words(what), sort_keys=True)
        return self.folder / f"{hashlib.sha256(said.encode()).hexdigest()[:32]}.json.z"

    def _read(self, what: str) -> list[tuple[str, Any]]:
        """Pairs of a digest and what was measured, oldest first."""
        if self.folder is None:
            return []
        path = self._path(what)
        if not path.exists():
            return []
        try:
            kept = read_json(path, _KEPT, HistoryError)
        except HistoryError as error:
            logger.debug("%s", error)
            return []
        return list(kept["found"]) if kept["about"] == self._words(what) else []

    def _touch(self, what: str) -> None:
        try:
            os.utime(self._path(what))
        except OSError:
            logger.debug("a file cannot be marked as used", exc_info=True)


#: Nothing is found, and nothing kept.
NOTHING_KNOWN = Known()


def machine_words(packages: tuple[str, ...]) -> dict[str, str]:
    """What decides on numbers and times of a model, beside itself.

    Args:
        packages: the framework's packages.

    Returns:
        Word → the CPU, the versions, and the variables that tell libraries how to compute.
    """
    here = hardware.detect()
    return {
        "cpu": here.name,
        "flags": " ".join(sorted(here.flags)),
        "cores": str(here.cores),
        "forced": " ".join(sorted(here.forced)),
        **versions_of(("neural-mp", "numpy", *packages)),
        **numeric_variables(),
    }


def _forget_the_oldest(folder: Path) -> None:
    files = [path for path in folder.iterdir() if path.name.endswith(".json.z")]
    if len(files) <= _FILES:
        return
    for path in sorted(files, key=lambda path: path.stat().st_mtime)[: len(files) - _FILES]:
        path.unlink(missing_ok=True)

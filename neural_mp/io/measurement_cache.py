"""What was measured is not measured again: within a run, in a workspace, on a machine."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import zlib
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol, TypeVar

from neural_mp.errors import HistoryError, NeuralMPError
from neural_mp.io.files import write_atomic
from neural_mp.io.readers import file_context, read_json
from neural_mp.util.validators import (
    Validator,
    anything,
    list_of,
    mapping_of,
    record,
    string,
    tuple_of,
)

logger = logging.getLogger(__name__)
T = TypeVar("T")

#: The folder of a workspace that holds its cache.
CACHE_FOLDER = "cache"
#: Of how many different data a file keeps what was measured on them.
_MAX_ENTRIES_PER_FILE = 8
#: How many files a folder may hold; those used least recently go first.
_MAX_FILES = 1000

_FILE_SCHEMA = record({"scope": mapping_of(string), "entries": list_of(tuple_of(string, anything))})

#: A digest of data, or what tells it, since reading all data may take long; None if nothing can.
DataDigest = str | Callable[[], str | None] | None


class MeasurementCache(Protocol):
    """Keeps what was measured, for where all that it depends on is the same."""

    @property
    def enabled(self) -> bool:
        """Whether anything is kept here."""

    def scoped(self, *, data: DataDigest = "", **conditions: str | None) -> MeasurementCache:
        """The cache of what depends on more: disabled where one of these could not be told.

        Args:
            data: what it is measured on; the same as before if empty. A function is called only
                where something was kept under the other conditions.
            conditions: word → what else everything depends on.
        """

    def get(self, key: str, kind: Validator[T]) -> tuple[bool, T | None]:
        """Whether something was kept under a key, and what, of a kind."""

    def put(self, key: str, value: Any) -> None:
        """Keep numbers, words, lists and dicts."""


class RunCache:
    """Keeps what one run measured, in which nothing changes that it depends on.

    Args:
        entries: what was measured before the run was taken up again.
        store: takes what is kept beyond this process.
        origin: what messages call the run.
    """

    enabled = True

    def __init__(
        self,
        entries: Mapping[str, Any] | None = None,
        store: Callable[[str, Any], None] = lambda _key, _value: None,
        origin: str = "the run",
    ) -> None:
        self.entries = dict(entries or {})
        self._store, self._origin = store, origin

    def scoped(self, *, data: DataDigest = "", **conditions: str | None) -> RunCache:
        """The same cache: all is the same within a run."""
        return self

    def get(self, key: str, kind: Validator[T]) -> tuple[bool, T | None]:
        """See `MeasurementCache`.

        Raises:
            HistoryError: what was kept is not of that kind.
        """
        if key not in self.entries:
            return False, None
        with file_context(f"{self._origin}: {key}", HistoryError):
            return True, kind(self.entries[key])

    def put(self, key: str, value: Any) -> None:
        """See `MeasurementCache`."""
        self.entries[key] = value
        self._store(key, value)


@dataclass(frozen=True)
class FileCache:
    """Keeps what was measured in files of a folder: that of a workspace, or of this machine.

    Files that cannot be read or written cost time, and nothing else.

    Attributes:
        folder: where the files are; None to keep nothing.
        scope: word → what everything here depends on.
        data: what it is measured on; empty where no data matter.
        complaint: the level at which it is logged that nothing can be written.
    """

    folder: Path | None = None
    scope: Mapping[str, str] = field(default_factory=dict)
    data: DataDigest = ""
    complaint: int = logging.WARNING

    @property
    def enabled(self) -> bool:
        """Whether anything is kept here."""
        return self.folder is not None

    def scoped(self, *, data: DataDigest = "", **conditions: str | None) -> FileCache:
        """See `MeasurementCache`."""
        told = {word: value for word, value in conditions.items() if value is not None}
        if data is None or len(told) < len(conditions):
            return NO_CACHE
        return replace(self, data=data or self.data, scope={**self.scope, **told})

    def get(self, key: str, kind: Validator[T]) -> tuple[bool, T | None]:
        """See `MeasurementCache`; what is not of that kind is as nothing."""
        entries = self._read(key)
        digest = self._digest() if entries else None
        for known, value in reversed(entries):
            if known == digest:
                with suppress(OSError):
                    os.utime(self._path(key))
                try:
                    return True, kind(value)
                except NeuralMPError as error:
                    logger.debug("%s: what is kept of %s: %s", self._path(key), key, error)
                    break
        return False, None

    def put(self, key: str, value: Any) -> None:
        """See `MeasurementCache`; nothing is kept of data that cannot be told."""
        digest = self._digest() if self.enabled else None
        if digest is None:
            return
        others = [pair for pair in self._read(key) if pair[0] != digest]
        entries = [*others, (digest, value)][-_MAX_ENTRIES_PER_FILE:]
        content = json.dumps({"scope": self._scope_of(key), "entries": entries})
        path = self._path(key)
        try:
            write_atomic(path, zlib.compress(content.encode()))
            _evict_oldest(path.parent)
        except OSError as error:
            logger.log(self.complaint, "what was measured is not kept for later runs: %s", error)

    def _digest(self) -> str | None:
        return self.data() if callable(self.data) else self.data

    def _scope_of(self, key: str) -> dict[str, str]:
        return {**self.scope, "key": key}

    def _path(self, key: str) -> Path:
        assert self.folder is not None
        said = json.dumps(self._scope_of(key), sort_keys=True)
        return self.folder / f"{hashlib.sha256(said.encode()).hexdigest()[:32]}.json.z"

    def _read(self, key: str) -> list[tuple[str, Any]]:
        """Pairs of a digest and what was measured, oldest first."""
        if self.folder is None or not self._path(key).exists():
            return []
        try:
            kept = read_json(self._path(key), _FILE_SCHEMA, HistoryError)
        except HistoryError as error:
            logger.debug("%s", error)
            return []
        return list(kept["entries"]) if kept["scope"] == self._scope_of(key) else []


#: Nothing is found, and nothing kept.
NO_CACHE = FileCache()


def machine_cache(**conditions: str) -> FileCache:
    """The cache of this machine, for what holds in every workspace.

    Args:
        conditions: word → what everything depends on.
    """
    home = os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser()
    return FileCache(Path(home) / "neural_mp", conditions, complaint=logging.DEBUG)


def _evict_oldest(folder: Path) -> None:
    files = [path for path in folder.iterdir() if path.name.endswith(".json.z")]
    if len(files) <= _MAX_FILES:
        return
    for path in sorted(files, key=lambda path: path.stat().st_mtime)[: len(files) - _MAX_FILES]:
        path.unlink(missing_ok=True)

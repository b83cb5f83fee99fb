"""Measurement caches: within a run, in a workspace, on a machine."""

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
from neural_mp.io.readers import prefix_file_errors, read_json
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

#: Cache folder within a workspace.
CACHE_FOLDER = "cache"
#: Folder of rounded weights within a cache.
WEIGHTS_FOLDER = "weights"
#: Maximum entries per file, one per data digest.
_MAX_ENTRIES_PER_FILE = 8
#: Maximum files per folder; the least recently used are evicted.
_MAX_FILES = 1000

_FILE_SCHEMA = record({"scope": mapping_of(string), "entries": list_of(tuple_of(string, anything))})

#: A data digest, or a function that computes the digest (reading all data may be slow); None if the
#: data have none.
DataDigest = str | Callable[[], str | None] | None


class MeasurementCache(Protocol):
    """Cached measurements, valid under identical conditions."""

    @property
    def enabled(self) -> bool:
        """Whether measurements are kept."""

    def scope_to(self, *, data: DataDigest = "", **conditions: str | None) -> MeasurementCache:
        """Return the cache under further conditions; disabled if any condition is unknown.

        Args:
            data: digest of the data measured on; if empty, unchanged. A function is called only if
                the other conditions have entries.
            conditions: name → value of further conditions; None if unknown.
        """

    def get_entry(self, key: str, kind: Validator[T]) -> tuple[bool, T | None]:
        """Return whether a key has a valid entry, and the entry."""

    def put_entry(self, key: str, value: object) -> None:
        """Store numbers, strings, lists and dicts under a key."""


class RunCache:
    """Cache of a single run, whose conditions never change.

    Args:
        entries: measurements made before the run was resumed.
        store: function that persists a new entry.
        origin: name of the run in messages.
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

    def scope_to(self, *, data: DataDigest = "", **conditions: str | None) -> RunCache:
        """Return the cache itself: all conditions are constant within a run."""
        return self

    def get_entry(self, key: str, kind: Validator[T]) -> tuple[bool, T | None]:
        """See `MeasurementCache`.

        Raises:
            HistoryError: the entry is invalid.
        """
        if key not in self.entries:
            return False, None
        with prefix_file_errors(f"{self._origin}: {key}", HistoryError):
            return True, kind(self.entries[key])

    def put_entry(self, key: str, value: object) -> None:
        """See `MeasurementCache`."""
        self.entries[key] = value
        self._store(key, value)


@dataclass(frozen=True)
class FileCache:
    """Cache in files of a folder, of a workspace or of this machine.

    Unreadable or unwritable files cost time only: their entries are measured again.

    Attributes:
        folder: location of the files; None to disable the cache.
        scope: name → value of the conditions.
        data: digest of the data measured on; empty if independent of data.
        error_level: log level of write errors.
    """

    folder: Path | None = None
    scope: Mapping[str, str] = field(default_factory=dict)
    data: DataDigest = ""
    error_level: int = logging.WARNING

    @property
    def enabled(self) -> bool:
        """Whether measurements are kept."""
        return self.folder is not None

    def scope_to(self, *, data: DataDigest = "", **conditions: str | None) -> FileCache:
        """See `MeasurementCache`."""
        defined = {name: value for name, value in conditions.items() if value is not None}
        if data is None or len(defined) < len(conditions):
            return NO_CACHE
        return replace(self, data=data or self.data, scope={**self.scope, **defined})

    def get_entry(self, key: str, kind: Validator[T]) -> tuple[bool, T | None]:
        """See `MeasurementCache`; an invalid entry counts as missing."""
        entries = self._read_entries(key)
        digest = self._get_data_digest() if entries else None
        for stored, value in entries:
            if stored == digest:
                with suppress(OSError):
                    os.utime(self._cache_path(key))
                try:
                    return True, kind(value)
                except NeuralMPError as error:
                    logger.debug("%s: invalid entry %r: %s", self._cache_path(key), key, error)
        return False, None

    def put_entry(self, key: str, value: object) -> None:
        """See `MeasurementCache`; nothing is stored for data without a digest."""
        digest = self._get_data_digest() if self.enabled else None
        if digest is None:
            return
        remaining = [pair for pair in self._read_entries(key) if pair[0] != digest]
        entries = [*remaining, (digest, value)][-_MAX_ENTRIES_PER_FILE:]
        content = json.dumps({"scope": self._make_key_scope(key), "entries": entries})
        path = self._cache_path(key)
        try:
            write_atomic(path, zlib.compress(content.encode()))
            _evict_oldest_files(path.parent)
        except OSError as error:
            logger.log(self.error_level, "The measurement cache cannot be written to: %s", error)

    def _get_data_digest(self) -> str | None:
        return self.data() if callable(self.data) else self.data

    def _make_key_scope(self, key: str) -> dict[str, str]:
        return {**self.scope, "key": key}

    def _cache_path(self, key: str) -> Path:
        assert self.folder is not None
        scope = json.dumps(self._make_key_scope(key), sort_keys=True)
        return self.folder / f"{hashlib.sha256(scope.encode()).hexdigest()[:32]}.json.z"

    def _read_entries(self, key: str) -> list[tuple[str, Any]]:
        """Return pairs of data digest and measurement, oldest first."""
        if self.folder is None or not self._cache_path(key).exists():
            return []
        try:
            content = read_json(self._cache_path(key), _FILE_SCHEMA, HistoryError)
        except HistoryError as error:
            logger.debug("%s", error)
            return []
        return list(content["entries"]) if content["scope"] == self._make_key_scope(key) else []


#: A disabled cache.
NO_CACHE = FileCache()


def open_machine_cache(**conditions: str) -> FileCache:
    """Return this machine's cache under some conditions, valid in every workspace."""
    home = os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser()
    return FileCache(Path(home) / "neural_mp", conditions, error_level=logging.DEBUG)


def _evict_oldest_files(folder: Path) -> None:
    files = [path for path in folder.iterdir() if path.name.endswith(".json.z")]
    if len(files) <= _MAX_FILES:
        return
    for path in sorted(files, key=lambda path: path.stat().st_mtime)[: len(files) - _MAX_FILES]:
        path.unlink(missing_ok=True)

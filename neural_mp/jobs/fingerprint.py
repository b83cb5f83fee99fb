"""What a tuning job is about, as a digest, told without a framework."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from neural_mp.config.source import read_text
from neural_mp.data.user_imports import user_folders
from neural_mp.errors import ConfigurationError
from neural_mp.io.files import read_bounded
from neural_mp.io.limits import MAX_FILE_BYTES

#: Keys of `tuning` that say where and how a job runs, not what comes out.
_NO_MATTER = ("workspace", "storage", "workers", "cache")
_BLOCK = 1 << 20
#: Longer words name no file.
_LONGEST = 500


def job_digest(file: Path) -> str:
    """A digest of the settings in a tuning file and of the files that they name.

    Comments, order and layout do not matter; nor does where runs are kept. A file counts by what it
    holds, a folder by names, sizes and times of its files, `module:attribute` by the module's file.

    Args:
        file: the tuning file; one that cannot be read as YAML counts by its text.

    Raises:
        ConfigurationError: there is no such file.
    """
    try:
        text = read_bounded(file, MAX_FILE_BYTES).decode("utf-8-sig", errors="replace")
    except OSError as error:
        raise ConfigurationError(
            f"{file}: the tuning file cannot be read: {error.strerror or error}"
        ) from error
    try:
        settings: Any = read_text(text, str(file)).data
    except ConfigurationError:
        settings = text  # the job itself will say what is wrong with it
    if isinstance(settings, dict) and isinstance(settings.get("tuning"), dict):
        tuning = {k: v for k, v in settings["tuning"].items() if k not in _NO_MATTER}
        settings = {**settings, "tuning": tuning}
    named = {word: found for word in _words(settings) if (found := _named(word, file.parent))}
    said = json.dumps([settings, named], sort_keys=True, default=str)
    return hashlib.sha256(said.encode()).hexdigest()


def _words(value: Any) -> Iterator[str]:
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _words(key)
            yield from _words(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _words(item)
    elif isinstance(value, str) and len(value) < _LONGEST and value.isprintable():
        yield value


def _named(word: str, beside: Path) -> str | None:
    """The digest of the file, folder or module that a word names; None where it names none."""
    try:
        path = Path(word)
        if path.is_file():
            found = path.stat()
            return _of_file(path.resolve(), found.st_size, found.st_mtime_ns)
        if word and path.is_dir():
            return _of_folder(path)
        source = _source(word, beside)
    except OSError:  # such as a name that is too long
        return None
    return _named(str(source), beside) if source else None


@cache
def _of_file(path: Path, size: int, changed: int) -> str:
    """What a file holds; size and time of its change are there for the cache."""
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while block := stream.read(_BLOCK):
            digest.update(block)
    return digest.hexdigest()


def _of_folder(folder: Path) -> str:
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            found = path.stat()
            name = path.relative_to(folder).as_posix()
            digest.update(f"{name} {found.st_size} {found.st_mtime_ns}\n".encode())
    return digest.hexdigest()


def _source(word: str, beside: Path) -> Path | None:
    """The file of the module in `module:attribute`; nothing is imported."""
    module, colon, attribute = word.partition(":")
    parts = module.split(".")
    if not colon or not all(part.isidentifier() for part in (*parts, *attribute.split("."))):
        return None
    for place in (*user_folders(beside), *map(Path, sys.path)):
        base = place.joinpath(*parts)
        for file in (base.with_suffix(".py"), base / "__init__.py"):
            if file.is_file():
                return file
    return None

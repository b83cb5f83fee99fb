"""Histories that compute, lead elsewhere or are cut off: SQLite files and their journals."""

from __future__ import annotations

import functools
import os
import random
import shutil
import sqlite3
import struct
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from attacks.hostile import Attacks
from attacks.short_runs import Setting, outcome, started, write_nets

from neural_mp.core.plan import PrecisionPlan
from neural_mp.core.trial import Outcome, Trial
from neural_mp.reporting.page import page_of
from neural_mp.runs.history import HISTORY_FILE, History, get_storage_url, read_record

SQLITE = Attacks("SQLite")

Spoiler = Callable[[Path], None]
_SPOILERS: dict[str, Spoiler] = {}
#: First bytes of a journal, and last ones of a journal that names a super-journal.
_JOURNAL_MAGIC = bytes.fromhex("d9d505f920a163d7")
#: Page of SQLite that holds no data, at this byte.
_LOCK_BYTE = 0x40000000
_SECTOR, _PAGE = 512, 4096
_FINGERPRINT = {"model": "a" * 12, "data": "b", "metric": "c"}
#: A select that never ends.
_ENDLESS = "WITH RECURSIVE r(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM r) SELECT COUNT(*) FROM r"
_VICTIM = "victim.txt"


@functools.cache
def _history() -> bytes:
    """Return the file of a history of two runs: a real one, and one of three trials."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        url = get_storage_url(folder / "workspace")
        with History(url, _FINGERPRINT, higher_is_better=True) as history:
            for accuracy in (0.5, 0.6, 0.7):
                trial = Trial(PrecisionPlan({}), Outcome.MET, accuracy=accuracy)
                history.finish_trial(replace(trial, number=history.begin_trial()))
        write_nets(folder)
        process = started(folder, folder, Setting(trials=3), resume=False)
        process.join()
        assert (outcome(process, folder) or {}).get("end") == "right"
        return (folder / "workspace" / HISTORY_FILE).read_bytes()


def _spoiler(name: str) -> Callable[[Spoiler], Spoiler]:
    def add(spoil: Spoiler) -> Spoiler:
        _SPOILERS[name] = spoil
        return spoil

    return add


def _statements(name: str, *statements: str) -> None:
    """Add an attack that runs statements in the database, as its author can."""

    def spoil(file: Path) -> None:
        with sqlite3.connect(file) as connection:
            for statement in statements:
                connection.execute(statement)
        connection.close()

    _SPOILERS[name] = spoil


def _schema(name: str, change: str, values: Sequence[object] = ()) -> None:
    """Add an attack that writes into the schema itself."""

    def spoil(file: Path) -> None:
        connection = sqlite3.connect(file)
        connection.execute("PRAGMA writable_schema = ON")
        connection.execute(change, values)
        connection.commit()
        connection.close()

    _SPOILERS[name] = spoil


def _bytes(name: str, change: Callable[[bytearray], object]) -> None:
    def spoil(file: Path) -> None:
        data = bytearray(file.read_bytes())
        change(data)
        file.write_bytes(data)

    _SPOILERS[name] = spoil


# What computes.
_RENAMED = "ALTER TABLE trials RENAME TO old"
_statements("a view for a table", _RENAMED, "CREATE VIEW trials AS SELECT * FROM old")
_statements("a view without end", _RENAMED, f"CREATE VIEW trials AS {_ENDLESS}")
_statements("a view of itself", _RENAMED, "CREATE VIEW trials AS SELECT * FROM trials")
_statements(
    "a view of 40 joins",
    _RENAMED,
    "CREATE VIEW v0 AS SELECT 1 AS x UNION SELECT 2",
    *(f"CREATE VIEW v{n} AS SELECT a.x FROM v{n - 1} a, v{n - 1} b" for n in range(1, 40)),
    "CREATE VIEW trials AS SELECT * FROM v39",
)
for _event in ("INSERT", "UPDATE", "DELETE"):
    for _table in ("studies", "trials", "neural_mp_runs"):
        _statements(
            f"a trigger of {_event} on {_table}",
            f"CREATE TRIGGER t AFTER {_event} ON {_table} BEGIN {_ENDLESS}; END",
        )
_statements(
    "triggers that call each other",
    "PRAGMA recursive_triggers = ON",
    "CREATE TRIGGER t AFTER INSERT ON trials BEGIN INSERT INTO trials(number) VALUES (1); END",
)
_statements(
    "a trigger that deletes all",
    "CREATE TRIGGER t AFTER INSERT ON trials BEGIN DELETE FROM studies; END",
)
_statements(
    "a trigger on a view",
    _RENAMED,
    "CREATE VIEW trials AS SELECT * FROM old",
    f"CREATE TRIGGER t INSTEAD OF INSERT ON trials BEGIN {_ENDLESS}; END",
)
_statements("a virtual table", "CREATE VIRTUAL TABLE v USING fts5(x)")
_statements("a table of an R-tree", "CREATE VIRTUAL TABLE v USING rtree(a, b, c)")
_statements(
    "a generated column",
    "CREATE TABLE g (x INTEGER, y INTEGER GENERATED ALWAYS AS (zeroblob(100000000)) VIRTUAL)",
)
_statements("a default that computes", "CREATE TABLE d (x DEFAULT (randomblob(1000000000)))")
_statements("a check that computes", "CREATE TABLE c (x CHECK (length(zeroblob(1000000000)) > x))")
_statements("an index of an expression", "CREATE INDEX e ON trials (abs(number))")
_statements("an index of a part", "CREATE INDEX e ON trials (number) WHERE abs(number) > 0")
_statements("an order of the author's", "CREATE TABLE o (x TEXT COLLATE NOCASE)")
_statements("statistics that lie", "ANALYZE", "UPDATE sqlite_stat1 SET stat = '1 ' || stat || '0'")
_statements(
    "statistics without end", "ANALYZE", f"UPDATE sqlite_stat1 SET stat = '{'9 ' * 50_000}'"
)
_statements("a table without row numbers", "CREATE TABLE w (x INTEGER PRIMARY KEY) WITHOUT ROWID")
_statements("a strict table", "CREATE TABLE s (x INTEGER) STRICT")
_statements(
    "a table of 1,900 columns", f"CREATE TABLE w ({', '.join(f'c{n}' for n in range(1900))})"
)
_statements("a schema of 3,000 tables", *(f"CREATE TABLE t{n} (x)" for n in range(3_000)))
_statements(
    "rows that delete others",
    "CREATE TABLE k (x INTEGER REFERENCES studies (study_id) ON DELETE CASCADE)",
)
for _name, _sql in {
    "no SQL": None,
    "a syntax error": "CREATE TABLE trials (",
    "SQL that selects": f"CREATE TABLE trials AS {_ENDLESS}",
    "SQL of a megabyte": f"CREATE TABLE trials ({'x' * 1_000_000})",
    "SQL in bytes": b"CREATE TABLE trials (\xff\x00)",
    "SQL with comments": "CREATE TABLE trials (/* */ x -- y\n)",
    "SQL of a view": f"CREATE VIEW trials AS {_ENDLESS}",
    "SQL of two statements": "CREATE TABLE trials (x); DROP TABLE studies",
    "a check in brackets": "CREATE TABLE trials (x, CHECK (" + "(" * 900 + "1" + ")" * 900 + "))",
}.items():
    _schema(f"{_name} in the schema", "UPDATE sqlite_master SET sql=? WHERE name='trials'", [_sql])
for _root in (0, 1, -1, 2, 10**6, 2**40):
    _schema(
        f"a table at page {_root}",
        "UPDATE sqlite_master SET rootpage=? WHERE name='trials'",
        [_root],
    )
_schema(
    "two tables at one page",
    "UPDATE sqlite_master SET rootpage=(SELECT rootpage FROM sqlite_master WHERE name='studies') "
    "WHERE name='trials'",
)
_schema("a table of another name", "UPDATE sqlite_master SET tbl_name='x' WHERE name='trials'")
_schema("a table of another kind", "UPDATE sqlite_master SET type='index' WHERE name='trials'")
_schema("no tables", "DELETE FROM sqlite_master WHERE name='trials'")

# Values of other kinds.
for _name, _value in {
    "bytes": "x'ff00ff'",
    "bytes of megabytes": "zeroblob(5000000)",
    "no value": "NULL",
    "a great number": "9223372036854775807",
    "an infinite number": "9e999",
    "text that is not UTF-8": "CAST(x'ff41' AS TEXT)",
    "text with NUL": "CAST(x'41004100' AS TEXT)",
    "text that controls a terminal": "char(27) || '[2J' || char(10) || 'x'",
    "JSON nested deep": f"'{'[' * 50_000}'",
    "JSON without end": "'\"'",
}.items():
    for _column in (
        "neural_mp_runs.name",
        "neural_mp_runs.fingerprint",
        "neural_mp_runs.lease",
        "studies.study_name",
        "trial_user_attributes.value_json",
        "study_user_attributes.value_json",
        "trials.state",
        "trials.number",
        "trials.datetime_start",
        "trial_values.value",
        "version_info.schema_version",
        "version_info.library_version",
    ):
        _table, _, _key = _column.partition(".")
        _statements(f"{_name} as {_column}", f"UPDATE OR IGNORE {_table} SET {_key} = {_value}")
_statements("a version of the future", "UPDATE version_info SET schema_version = 99")
_statements("a schema of the future", "UPDATE alembic_version SET version_num = 'v99.0.0.a'")
_statements("no version", "DELETE FROM version_info", "DELETE FROM alembic_version")
_statements("trials of one number", "UPDATE trials SET number = 0")
_statements("trials without runs", "DELETE FROM studies")
_statements("runs without trials", "DELETE FROM trials")
_statements(
    "runs of one name", "UPDATE OR REPLACE neural_mp_runs SET name = 'aaaaaaaaaaaa/tuning-0001'"
)

# Other forms.
for _size in (512, 1024, 8192, 16384, 65536):
    _statements(f"pages of {_size} bytes", f"PRAGMA page_size = {_size}", "VACUUM")
#: Forms in which a history must still be read.
_GOOD = [name for name in _SPOILERS if name.startswith("pages of ")]


def _vacuumed(file: Path, *pragmas: str) -> None:
    connection = sqlite3.connect(file, isolation_level=None)
    for pragma in pragmas:
        connection.execute(pragma)
    connection.execute("VACUUM")
    connection.close()


for _size in (512, 1024, 8192, 16384, 65536):
    _SPOILERS[f"pages of {_size} bytes"] = functools.partial(
        lambda file, size: _vacuumed(file, f"PRAGMA page_size = {size}"), size=_size
    )
_SPOILERS["pages that are given back"] = lambda file: _vacuumed(file, "PRAGMA auto_vacuum = FULL")
_GOOD.append("pages that are given back")


@_spoiler("a log of writes")
def _has_wal(file: Path) -> None:
    connection = sqlite3.connect(file)
    connection.execute("PRAGMA journal_mode = WAL")
    connection.close()


_GOOD.append("a log of writes")


@_spoiler("text in UTF-16")
def _is_utf16(file: Path) -> None:
    source = sqlite3.connect(file)
    target = sqlite3.connect(file.with_suffix(".new"))
    target.execute("PRAGMA encoding = 'UTF-16'")
    target.executescript("\n".join(source.iterdump()))
    target.close()
    source.close()
    file.with_suffix(".new").replace(file)


_GOOD.append("text in UTF-16")
for _part in range(17):
    _bytes(
        f"{_part} of 16 parts",
        lambda data, part=_part: data.__delitem__(slice(len(data) * part // 16 + part % 3, None)),
    )
for _seed in range(12):
    _bytes(
        f"pages of noise, {_seed}",
        lambda data, seed=_seed: data.__setitem__(
            slice(at := _PAGE * random.Random(seed).randrange(1, len(data) // _PAGE), at + _PAGE),
            random.Random(seed).randbytes(_PAGE),
        ),
    )
for _at, _value, _name in (
    (16, b"\0\0", "pages of 0 bytes"),
    (16, b"\0\3", "pages of 3 bytes"),
    (18, b"\3\3", "an unknown form"),
    (20, b"\xff", "255 bytes kept at the end of a page"),
    (28, b"\x7f\xff\xff\xff", "a size of 2^31 pages"),
    (32, b"\0\0\0\2", "a free page that is a table"),
    (36, b"\x7f\xff\xff\xff", "2^31 free pages"),
    (44, b"\0\0\0\x63", "an unknown form of the schema"),
    (52, b"\0\0\0\x63", "a greatest root page that is none"),
    (56, b"\0\0\0\x63", "an unknown encoding"),
    (_PAGE, b"\5", "a page of another kind"),
    (100, b"\5\0\0\xff\xff", "a schema of 65,535 rows"),
    (108, b"\0\0\0\1", "a schema within itself"),
):
    _bytes(
        _name,
        lambda data, at=_at, value=_value: data.__setitem__(slice(at, at + len(value)), value),
    )


@_spoiler("a terabyte of nothing")
def _is_sparse(file: Path) -> None:
    os.truncate(file, 1 << 40)


# Journals, which SQLite plays back when it opens a database.
def _journal(file: Path, suffix: str = "-journal") -> Path:
    return file.with_name(file.name + suffix)


def _header(pages: int, count: int = 0) -> bytes:
    fields = struct.pack(">IIIII", count, 0, pages, _SECTOR, _PAGE)
    return (_JOURNAL_MAGIC + fields).ljust(_SECTOR, b"\0")


@_spoiler("a journal that names another file, which SQLite deletes")
def _deletes(file: Path) -> None:
    name = str(file.parent.parent / _VICTIM).encode()
    checksum = struct.pack(">II", len(name), sum(name) & 0xFFFFFFFF)
    tail = struct.pack(">I", _LOCK_BYTE // _PAGE + 1) + name + checksum + _JOURNAL_MAGIC
    _journal(file).write_bytes(_header(file.stat().st_size // _PAGE) + tail)


@_spoiler("a journal of other pages")
def _plays_back(file: Path) -> None:
    page = struct.pack(">I", 1) + random.Random(0).randbytes(_PAGE)
    checksum = sum(page[4 + _PAGE - 200 :: -200]) & 0xFFFFFFFF
    content = _header(1, 1) + page + struct.pack(">I", checksum)
    _journal(file).write_bytes(content)


@_spoiler("a journal of 2^31 pages")
def _is_long(file: Path) -> None:
    _journal(file).write_bytes(_header(2**31 - 1, 2**31 - 1))


def _beside(kind: str, suffix: str) -> Spoiler:
    def spoil(file: Path) -> None:
        beside = _journal(file, suffix)
        if suffix != "-journal":
            _has_wal(file)
        outside = file.parent.parent / _VICTIM
        if kind == "noise":
            beside.write_bytes(random.Random(0).randbytes(40_000))
        elif kind == "nothing":
            beside.write_bytes(b"")
        elif kind == "a folder":
            beside.mkdir()
        elif kind == "a pipe":
            os.mkfifo(beside)
        elif kind == "a link to a file":
            beside.symlink_to(outside)
        elif kind == "a link to a device":
            beside.symlink_to("/dev/zero")
        else:
            beside.symlink_to(beside)

    return spoil


for _suffix in ("-journal", "-wal", "-shm"):
    for _kind in (
        "noise",
        "nothing",
        "a folder",
        "a pipe",
        "a link to a file",
        "a link to a device",
        "a link to itself",
    ):
        _SPOILERS[f"{_kind} as {_suffix}"] = _beside(_kind, _suffix)


def _log_of_writes(cut: float, noise: bool = False) -> Spoiler:
    def spoil(file: Path) -> None:
        copy = file.with_name("copy")
        shutil.copy(file, copy)
        _has_wal(copy)
        connection = sqlite3.connect(copy)
        connection.execute("PRAGMA wal_autocheckpoint = 0")
        connection.execute("CREATE TABLE more (x)")
        connection.executemany("INSERT INTO more VALUES (?)", [("x" * 100,)] * 500)
        connection.commit()
        data = bytearray(_journal(copy, "-wal").read_bytes())
        shutil.copy(copy, file)
        connection.close()
        copy.unlink()
        if noise:
            data[60:200] = random.Random(0).randbytes(140)
        _journal(file, "-wal").write_bytes(data[: round(len(data) * cut)])

    return spoil


for _percent in (0, 1, 25, 50, 75, 99, 100):
    _SPOILERS[f"{_percent} % of a log of writes"] = _log_of_writes(_percent / 100)
_SPOILERS["a log of writes with noise"] = _log_of_writes(1, noise=True)


# What lies in the place of the file.
def _instead(make: Callable[[Path], None]) -> Spoiler:
    def spoil(file: Path) -> None:
        file.unlink()
        make(file)

    return spoil


_SPOILERS |= {
    "a folder for the file": _instead(lambda file: file.mkdir()),
    "a pipe for the file": _instead(os.mkfifo),
    "a device for the file": _instead(lambda file: file.symlink_to("/dev/zero")),
    "a link to itself for the file": _instead(lambda file: file.symlink_to(file)),
    "a link to a text for the file": _instead(
        lambda file: file.symlink_to(file.parent.parent / _VICTIM)
    ),
    "a script for the file": _instead(lambda file: file.write_text("#!/bin/sh\n")),
}


def _report(url: str) -> None:
    page_of(read_record(url))


def _resume(url: str) -> None:
    with History(url, _FINGERPRINT, higher_is_better=True, resume=True) as history:
        history.read_trials()
        history.close_trial(history.begin_trial(), 0.5)


def _begin(url: str) -> None:
    with History(url, _FINGERPRINT, higher_is_better=True) as history:
        history.close_trial(history.begin_trial(), 0.5)


_OPENINGS: dict[str, Callable[[str], None]] = {
    "reported": _report,
    "resumed": _resume,
    "begun anew": _begin,
}


def _played(open_history: Callable[[str], None]) -> Callable[[Path, Path, str], None]:
    def play(folder: Path, canary: Path, name: str) -> None:
        workspace, victim = folder / "workspace", folder / _VICTIM
        workspace.mkdir()
        victim.write_text("precious\n")
        (workspace / HISTORY_FILE).write_bytes(_history())
        _SPOILERS[name](workspace / HISTORY_FILE)
        try:
            open_history(get_storage_url(workspace))
        finally:
            remaining = victim.read_text() if victim.exists() else "nothing"
            if remaining != "precious\n":
                raise AssertionError(f"a file outside holds {remaining!r}")

    return play


for _way, _open in _OPENINGS.items():
    _others = [name for name in _SPOILERS if name not in _GOOD]
    SQLITE.here(f"a run that is {_way}, with", *_others, refused=None)(_played(_open))
    SQLITE.here(f"a run that is {_way}, with", *_GOOD, refused=False)(_played(_open))

FAMILY = SQLITE.as_family()

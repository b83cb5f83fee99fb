"""Checks of SQLite files of unknown origin, before SQLite evaluates or plays back anything."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote

from neural_mp.errors import HistoryError
from neural_mp.io.files import require_regular_file

if TYPE_CHECKING:
    from sqlalchemy.engine import URL

#: Seconds to wait for another process that is writing to the same SQLite file.
SQLITE_BUSY_SECONDS = 60
#: Files beside a database that SQLite opens with it.
_COMPANIONS = ("-journal", "-wal", "-shm")
#: Last bytes of a journal that names a super-journal, a file of transactions over several
#: databases. SQLite deletes that file once the journal is played back.
_SUPER_JOURNAL_END = bytes.fromhex("d9d505f920a163d7")
#: Entries of a schema, several times those of Optuna: SQLAlchemy inspects each of them.
_MAX_ENTRIES = 1000
#: Entries of the schema; reading these evaluates nothing.
_SCHEMA_QUERY = f"SELECT type, name, sql, rootpage FROM sqlite_master LIMIT {_MAX_ENTRIES + 1}"
#: Characters of a name in an error.
_MAX_NAME_CHARS = 80
#: A name, number, text or sign in a schema; any other character belongs to an expression.
_TOKEN = re.compile(r"\s*(?:(\w+|\"[^\"]*\"|'[^']*'|[(),=])|(\S))")
_NAME = re.compile(r'[A-Za-z_]\w*|"[^"]*"')
#: Words in front of expressions.
_COMPUTING = frozenset(
    {"AS", "COLLATE", "DEFAULT", "GENERATED", "SELECT", "USING", "VIRTUAL", "WHERE"}
)
#: Characters with a meaning in a URL, or in Optuna's templates of URLs.
_URL_SIGNS = re.compile(r"[%?{}]")
#: Characters of a statement: far more than Optuna's tables have.
_MAX_CHARS = 20_000


def make_file_url(file: str) -> str:
    """Return the URL of a SQLite file, with the characters escaped that have a meaning in URLs.

    Raises:
        HistoryError: the installed version of SQLAlchemy has no URL for the file.
    """
    from sqlalchemy.engine import make_url

    escaped = _URL_SIGNS.sub(lambda match: f"%{ord(match[0]):02X}", file)
    url = f"sqlite:///{escaped}"
    if escaped != file and make_url(url).database != file:  # SQLAlchemy before 2.1
        raise HistoryError(
            f"the workspace must have no '%', '?', '{{' or '}}' in its path, got {file!r}; use "
            f"another workspace, or install sqlalchemy>=2.1"
        )
    return url


def get_database_file(url: str | URL) -> Path | None:
    """Return the file of a SQLite URL; None for other databases and those in memory."""
    from sqlalchemy.engine import make_url

    if isinstance(url, str) and not url.startswith("sqlite"):
        return None  # perhaps of a dialect that is not installed
    parsed = make_url(url)
    name = (parsed.database or "") if parsed.drivername.startswith("sqlite") else ""
    if name.startswith("file:"):  # a URI of SQLite
        name = unquote(name.removeprefix("file:").partition("?")[0])
        name = re.sub("^//[^/]*", "", name)
    return None if name in ("", ":memory:") else Path(name)


def check_sqlite_file(url: str) -> None:
    """Check that SQLite deletes nothing, waits for nothing and evaluates nothing at opening.

    SQLite evaluates views, triggers, constraints, defaults and the expressions of indexes during
    ordinary statements, so that a crafted one never ends.

    Raises:
        HistoryError: the file or its journal is of another kind, or the schema has computed
            content or too many entries.
    """
    if not url.startswith("sqlite"):
        return
    file = get_database_file(url)
    if file is not None:
        _check_files(url, Path(os.path.realpath(file)))
    if file is None or os.path.lexists(file):
        _check_tables(url)


def _check_files(url: str, file: Path) -> None:
    journal, *others = (file.with_name(file.name + suffix) for suffix in _COMPANIONS)
    try:
        for path in (file, journal, *others):
            require_regular_file(path)  # SQLite would wait at a pipe
        names_other_file = _read_end(journal, len(_SUPER_JOURNAL_END)) == _SUPER_JOURNAL_END
    except OSError as error:
        raise HistoryError(
            f"the history {url!r} cannot be opened: {error.filename}: {error.strerror}; use "
            f"another workspace"
        ) from None
    if names_other_file:
        raise HistoryError(
            f"the history {url!r} is refused: its journal {journal.name!r} names another file, "
            f"which SQLite would delete; use another workspace"
        )


def _read_end(file: Path, size: int) -> bytes:
    """Return the last bytes of a file; none if it is missing, shorter or a folder."""
    try:
        with file.open("rb") as opened:
            opened.seek(-size, os.SEEK_END)
            return opened.read(size)
    except (FileNotFoundError, IsADirectoryError):
        return b""
    except OSError:
        if file.stat().st_size < size:
            return b""
        raise


def _check_tables(url: str) -> None:
    """Raise a HistoryError for a schema with computed content, before its evaluation."""
    import sqlalchemy as sql

    engine = sql.create_engine(url, connect_args={"timeout": SQLITE_BUSY_SECONDS})
    try:
        with engine.connect() as connection:
            entries = connection.execute(sql.text(_SCHEMA_QUERY)).all()
    finally:
        engine.dispose()
    if len(entries) > _MAX_ENTRIES:
        raise HistoryError(
            f"the history {url!r} must have at most {_MAX_ENTRIES} tables and indexes, got more; "
            f"use another workspace"
        )
    for kind, name, statement, page in entries:
        if _may_compute(str(kind), statement if statement is None else str(statement)) or not page:
            raise HistoryError(
                f"the history {url!r} must contain plain tables only, got "
                f"{str(name)[:_MAX_NAME_CHARS]!r}, a view, trigger, virtual table, or table or "
                f"index with a computed column, constraint or default; use another workspace"
            )


def _may_compute(kind: str, statement: str | None) -> bool:
    """Whether an entry of a SQLite schema may compute.

    The statement that creates the entry is None for indexes of constraints.
    """
    if kind == "index" and statement is None:
        return False
    if kind not in ("table", "index") or statement is None or len(statement) > _MAX_CHARS:
        return True
    tokens = []
    for match in _TOKEN.finditer(statement):
        if match[2]:
            return True
        tokens.append(match[1])
    keywords = {token.upper() for token in tokens}
    start = tokens.index("(") if "(" in tokens else len(tokens)
    if (
        keywords & _COMPUTING
        or tokens[-1:] != [")"]
        or ("INDEX" not in keywords and kind == "index")
    ):
        return True
    inner = tokens[start + 1 : -1]
    if kind == "index":
        return not _are_names(inner)
    return not all(map(_is_plain_item, _split_table_items(inner)))


def _split_table_items(tokens: Sequence[str]) -> Iterator[list[str]]:
    """Yield the columns and constraints of a table."""
    depth, item = 0, list[str]()
    for token in tokens:
        depth += {"(": 1, ")": -1}.get(token, 0)
        if token == "," and depth == 0:
            yield item
            item = []
        else:
            item.append(token)
    yield item


def _is_plain_item(item: Sequence[str]) -> bool:
    """Whether a column or constraint only names columns, tables, types and their lengths."""
    keywords = [token.upper() for token in item]
    if "CHECK" in keywords:
        start = keywords.index("CHECK")
        named = start in (0, 2)  # CONSTRAINT name
        return named and _are_names(item[:start], ()) and _is_single_comparison(item[start + 1 :])
    depth = 0
    group: list[str] = []
    for token in item:
        if token == "(":
            depth, group = depth + 1, []
        elif token == ")":
            depth -= 1
            if not (_are_names(group) or all(t.isdigit() or t == "," for t in group)):
                return False
        elif depth:
            group.append(token)
        elif not _NAME.fullmatch(token):
            return False
        if depth not in (0, 1):
            return False
    return depth == 0


def _are_names(tokens: Sequence[str], separator: Sequence[str] = (",",)) -> bool:
    return all(_NAME.fullmatch(token) or token in separator for token in tokens)


def _is_single_comparison(tokens: Sequence[str]) -> bool:
    """Whether a check compares a column with a number, or with a list of texts."""
    match list(tokens):
        case ["(", name, "=", number, ")"]:
            return _NAME.fullmatch(name) is not None and number.isdigit()
        case ["(", name, in_, "(", *texts, ")", ")"] if in_.upper() == "IN":
            literal = all(text.startswith("'") or text == "," for text in texts)
            return _NAME.fullmatch(name) is not None and literal
    return False

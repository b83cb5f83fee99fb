"""Schema of a SQLite history: tables and indexes that store values and compute nothing.

SQLite evaluates views, triggers, constraints, defaults and the expressions of indexes during
ordinary statements, so that a crafted one never ends.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

#: A name, number, text or sign; any other character belongs to an expression.
_TOKEN = re.compile(r"\s*(?:(\w+|\"[^\"]*\"|'[^']*'|[(),=])|(\S))")
_NAME = re.compile(r'[A-Za-z_]\w*|"[^"]*"')
#: Words in front of expressions.
_COMPUTING = frozenset(
    {"AS", "COLLATE", "DEFAULT", "GENERATED", "SELECT", "USING", "VIRTUAL", "WHERE"}
)
#: Characters of a statement: far more than Optuna's tables have.
_MAX_CHARS = 20_000


def computes(kind: str, statement: str | None) -> bool:
    """Whether an entry of a SQLite schema may compute.

    Args:
        kind: `table`, `index`, `view` or `trigger`.
        statement: the statement that creates the entry; None for indexes of constraints.
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
    if "CHECK" in (token.upper() for token in item):
        start = [token.upper() for token in item].index("CHECK")
        named = len(item[:start]) in (0, 2)  # CONSTRAINT name
        return named and _are_names(item[:start], ()) and _is_single_comparison(item[start + 1 :])
    depth = 0
    group: list[str] = []
    for token in item:
        if token == "(":
            depth, group = depth + 1, []
        elif token == ")":
            depth -= 1
            if not (_are_names(group) or _are_numbers(group)):
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


def _are_numbers(tokens: Sequence[str]) -> bool:
    return all(token.isdigit() or token == "," for token in tokens)


def _is_single_comparison(tokens: Sequence[str]) -> bool:
    """Whether a check compares a column with a number, or with a list of texts."""
    match list(tokens):
        case ["(", name, "=", number, ")"]:
            return _NAME.fullmatch(name) is not None and number.isdigit()
        case ["(", name, in_, "(", *texts, ")", ")"] if in_.upper() == "IN":
            literal = all(text.startswith("'") or text == "," for text in texts)
            return _NAME.fullmatch(name) is not None and literal
    return False

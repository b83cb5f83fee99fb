"""Sentences that people wrote: the documentation of Python's own modules."""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Iterator
from functools import cache

MODULES = """
    argparse ast asyncio base64 bisect calendar cmath codecs collections concurrent.futures
    configparser contextlib copy csv datetime decimal difflib dis email.message enum fileinput
    fnmatch fractions ftplib functools gettext glob gzip hashlib heapq hmac html http.client
    imaplib inspect io ipaddress itertools json keyword linecache locale logging lzma mailbox
    math mimetypes operator os pathlib pdb pickle platform plistlib poplib pprint profile
    queue random re reprlib sched secrets selectors shelve shlex shutil signal site smtplib
    socket socketserver sqlite3 ssl stat statistics string struct subprocess symtable sys
    tarfile tempfile textwrap threading time timeit tokenize trace traceback tracemalloc
    turtle types typing unicodedata unittest urllib.parse urllib.request uuid warnings wave
    weakref webbrowser xmlrpc.client zipapp zipfile zlib
"""


def _documented() -> Iterator[str]:
    for name in MODULES.split():
        module = importlib.import_module(name)
        members = [getattr(module, member) for member in sorted(vars(module))]
        inner = [
            getattr(value, name, None)
            for value in members
            if inspect.isclass(value)
            for name in sorted(vars(value))
        ]
        for value in (*members, *inner):
            if inspect.isroutine(value) or inspect.isclass(value):
                yield inspect.getdoc(value) or ""


def _plain(text: str) -> str:
    return re.sub(r"\s+", " ", text).strip()


@cache
def described() -> tuple[tuple[str, str], ...]:
    """What a thing is in one sentence, and what is said of it beyond that: pairs of texts."""
    summaries: dict[str, str] = {}
    for text in _documented():
        first, _, rest = text.partition("\n\n")
        first, rest = _plain(first), _plain(rest)
        matched = re.match(r"[A-Z][a-z]+ [a-z].{20,120}\.$", first)
        if matched and len(rest) > 60 and not rest.startswith((">>>", "|", "-")):
            summaries.setdefault(rest[:300], first)
    pairs = {first: rest for rest, first in summaries.items()}
    return tuple(pairs.items())


def sentences() -> list[str]:
    """The first sentences alone."""
    return [first for first, _ in described()]

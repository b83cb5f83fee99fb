"""Public text reads as an engineer's: docstrings, headings, help texts, the field's terms."""

import ast
import functools
import inspect
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer

from neural_mp.cli.app import app

ROOT = Path(__file__).parents[1]
SOURCES = sorted((ROOT / "neural_mp").rglob("*.py"))
PAGES = [*sorted((ROOT / "docs").rglob("*.md")), *(ROOT / f for f in ("README.md", "CHANGELOG.md"))]
MAX_HELP_CHARS = 80
#: Names in a docstring: in quotes, or ahead of the colon in a list of arguments or attributes.
_NAMES = re.compile(r"`[^`]*`|^    [\w, ]+:", re.MULTILINE)
QUESTION = re.compile(r"(What|How|Where|Which|Whose|Who|Why)\b")
#: Paraphrases → the field's term, as in the glossary of `docs/architecture.md`.
TERMS = {
    r"\brepair(s|ed)?\b": "correction",
    r"\bbarred\b": "ineligible",
    r"\bharm(s|ed)?\b": "sensitivity or degradation",
    r"\bundisturbed\b": "lower decile",
    r"\banew\b": "again",
    r"\bin words\b": "as text",
    r"\bat hand\b": "available",
    r"\btold apart\b": "distinguished",
    r"\bit is no\b": "not a",
    r"\bround by round\b": "interleaved",
    r"\b(put|goes?|went|gone) back to (FP32|float|a higher)": "fall back",
    r"\bsigns? of life\b": "heartbeat",
    r"\beverything low\b": "lowest precision",
    r"\bdecided ops?\b": "tunable op",
    r"\bbound together\b": "tied ops",
    r"\bstrangers?\b": "untrusted input",
}


@functools.cache
def _docstrings(path: Path) -> tuple[tuple[int, str], ...]:
    return tuple(_parsed_docstrings(path))


def _parsed_docstrings(path: Path) -> Iterator[tuple[int, str]]:
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            text = ast.get_docstring(node)
            if text:
                yield getattr(node, "lineno", 1), _NAMES.sub("", text)


@functools.cache
def _prose(page: Path) -> tuple[tuple[int, str], ...]:
    """The lines of a page outside of code."""
    return tuple(_lines_outside_of_code(page))


def _lines_outside_of_code(page: Path) -> Iterator[tuple[int, str]]:
    fenced = False
    for number, line in enumerate(page.read_text().splitlines(), 1):
        if line.lstrip().startswith("```"):
            fenced = not fenced
        elif not fenced:
            yield number, re.sub(r"`[^`]*`", "", line)


@functools.cache
def _commands() -> tuple[tuple[str, str], ...]:
    """Every help text with the command or option that has one."""

    def texts(name: str, command: object) -> Iterator[tuple[str, str]]:
        yield name, (getattr(command, "help", "") or "").split("\n\n")[0]
        for parameter in getattr(command, "params", ()):
            yield f"{name} {parameter.name}", getattr(parameter, "help", "") or ""
        for child, subcommand in getattr(command, "commands", {}).items():
            yield from texts(f"{name} {child}", subcommand)

    return tuple(texts("neural-mp", typer.main.get_command(app)))


def test_no_docstring_opens_with_a_question_word():
    violations = [
        f"{path.relative_to(ROOT)}:{line}: {text.splitlines()[0]}"
        for path in SOURCES
        for line, text in _docstrings(path)
        if QUESTION.match(text)
    ]
    assert not violations, "\n".join(violations)


def test_no_heading_opens_with_a_question_word():
    violations = [
        f"{page.relative_to(ROOT)}:{number}: {line}"
        for page in PAGES
        for number, line in _prose(page)
        if line.startswith("#") and QUESTION.match(line.lstrip("# "))
    ]
    assert not violations, "\n".join(violations)


def test_help_is_one_short_line_that_names_the_thing():
    violations = [
        f"{name}: {text}"
        for name, text in _commands()
        if QUESTION.match(text) or len(inspect.cleandoc(text)) > MAX_HELP_CHARS
    ]
    assert not violations, "\n".join(violations)


@pytest.mark.parametrize("term", TERMS)
def test_public_text_uses_the_fields_term(term):
    pattern = re.compile(term, re.IGNORECASE)
    pages = [
        f"{page.relative_to(ROOT)}:{number}: {line.strip()}"
        for page in PAGES
        for number, line in _prose(page)
        if pattern.search(line)
    ]
    help_texts = [f"{name}: {text}" for name, text in _commands() if pattern.search(text)]
    docstrings = [
        f"{path.relative_to(ROOT)}:{line}: {text.splitlines()[0]}"
        for path in SOURCES
        for line, text in _docstrings(path)
        if pattern.search(text)
    ]
    violations = [*pages, *help_texts, *docstrings]
    assert not violations, f"write {TERMS[term]!r}:\n" + "\n".join(violations)


def test_an_old_docstring_is_found(tmp_path):
    old = tmp_path / "old.py"
    old.write_text('"""What a user\'s metric does, told in the same way in another process."""\n')
    ((_, text),) = _docstrings(old)
    assert QUESTION.match(text)

"""Comparison with golden files, or their generation on request.

`pytest tests/golden --write-golden` writes the files; a review of their diff shows what changed.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

_FILES = Path(__file__).parent / "files"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--write-golden", action="store_true", help="write tests/golden/files")


@pytest.fixture
def agree(request: pytest.FixtureRequest) -> Callable[[str, Any], None]:
    """Function: compare a document with the file of a name, or write the file."""

    def compare(name: str, document: Any) -> None:
        path = _FILES / f"{name}.json"
        text = json.dumps(document, indent=1, ensure_ascii=False) + "\n"
        if request.config.getoption("--write-golden", default=False):
            path.parent.mkdir(exist_ok=True)
            path.write_text(text, encoding="utf-8")
        assert json.loads(path.read_text(encoding="utf-8")) == json.loads(text)

    return compare

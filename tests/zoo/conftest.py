"""Collection of rows, and generation of `docs/layers/` on request."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable

import pytest
from zoo.harness import Row, write_page

from neural_mp.tuning import recording


@pytest.fixture(autouse=True)
def _ops_are_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels are read from the trace of the audit; times of ops are no part of a row."""
    monkeypatch.setattr(recording, "_profiled", lambda job, model: {})


_ROWS: dict[str, list[Row]] = defaultdict(list)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--layer-tables", action="store_true", help="write docs/layers/*.md")


@pytest.fixture
def record_row() -> Callable[[str, Row], None]:
    """Keeps the row of a case for the table of its framework."""
    return lambda framework, row: _ROWS[framework].append(row)


def pytest_sessionfinish(session: pytest.Session) -> None:
    if session.config.getoption("--layer-tables", default=False):
        for framework, rows in _ROWS.items():
            write_page(framework, rows)

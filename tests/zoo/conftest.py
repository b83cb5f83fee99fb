"""Collection of rows, and generation of `docs/layers/` on request."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable

import pytest
from zoo.harness import Row, write_page

from neural_mp.tuning import recording, unchecked
from neural_mp.tuning.measurement.objectives import Measurement


@pytest.fixture(autouse=True)
def _nothing_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels are read from the trace of the audit; times are no part of a row.

    Outputs are compared with the framework's own, so a run need not compare them with FP32.
    """
    monkeypatch.setattr(recording, "_profile_ops", lambda *_: {})
    monkeypatch.setattr(unchecked, "compared_with_fp32", lambda *_: (None, ()))
    monkeypatch.setattr(
        Measurement, "measure_rounds", lambda self, models, **_: [[1e-3] * 3] * len(models)
    )


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

"""TensorFlow's constructs go through tune, audit, save and reload, one small graph each."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from zoo.harness import Case, Row, check_page, convert
from zoo.tensorflow_cases import CASES


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_construct_is_converted_audited_saved_and_loaded(
    case: Case, tmp_path: Path, record_row: Callable[[str, Row], None]
) -> None:
    record_row("tensorflow", convert(case, tmp_path))


def test_the_page_lists_every_case() -> None:
    check_page("tensorflow", CASES)

"""OpenVINO models of every kind convert, or are said to stay in FP32."""

from __future__ import annotations

import pytest
from zoo import openvino_cases
from zoo.harness import Case, check_page, convert

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("quick_runs")]

CASES = list(openvino_cases.cases())


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_an_op_or_construct_is_converted(case: Case, tmp_path, record_row):
    record_row("openvino", convert(case, tmp_path))


def test_the_page_lists_every_case():
    check_page("openvino", CASES)

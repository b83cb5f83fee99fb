"""Every op of ONNX, and every construct of its models, converts or is said to stay in FP32."""

from __future__ import annotations

import onnx
import pytest
from zoo import onnx_constructs, onnx_ops
from zoo.harness import Case, check_complete, check_page, convert

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("quick_runs")]

CONSTRUCTS = list(onnx_constructs.cases())
CASES = [*onnx_ops.cases({case.name.split()[0] for case in CONSTRUCTS}), *CONSTRUCTS]


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_an_op_or_construct_is_converted(case: Case, tmp_path, record_row):
    record_row("onnx", convert(case, tmp_path))


def test_every_op_of_onnx_has_a_case():
    schemas = onnx.defs.get_all_schemas()
    check_complete(
        CASES, {schema.name for schema in schemas if not schema.domain}, onnx_ops.WITHOUT
    )


def test_ops_without_a_case_run_nowhere():
    tests = onnx_ops.single_op_tests()
    assert not [op for op in onnx_ops.WITHOUT if any(map(onnx_ops.runnable, tests[op]))]


def test_the_page_lists_every_case():
    check_page("onnx", CASES)

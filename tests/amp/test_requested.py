"""What is asked for without a conversion: a precision, its settings, edits that are known."""

import pytest

from neural_mp.amp import (
    AmpList,
    AutoMixedPrecisionOptions,
    ListEdit,
    keep_known_edits,
    resolve_precision,
)
from neural_mp.errors import ConfigurationError, UnknownOperatorError

VARIABLE = "NEURAL_MP_AUTO_MIXED_PRECISION_DATA_TYPE"


def asked(precision=None, data_type=None, environment=None):
    amp = AutoMixedPrecisionOptions(data_type=data_type)
    return resolve_precision("the rewrite", precision, amp, environment or {})[0]


def test_the_precision_counts_most_then_the_options_then_the_environment():
    assert asked() == "bf16"
    assert asked(environment={VARIABLE: "FLOAT16"}) == "fp16"
    assert asked(data_type="bfloat16", environment={VARIABLE: "FLOAT16"}) == "bf16"
    assert asked("bf16", environment={VARIABLE: "FLOAT16"}) == "bf16"
    assert asked("fp16", data_type="float16") == "fp16"


@pytest.mark.parametrize("given", [("bf16,fp16",), ("bf16", "float16")])
def test_what_contradicts_itself_is_refused(given):
    with pytest.raises(ConfigurationError, match="the rewrite requires a single 16-bit precision"):
        asked(*given)


def test_only_variables_made_for_tensorflow_may_name_what_another_framework_lacks():
    foreign = ListEdit(True, AmpList.ALLOW, "MatMul", "ITEX_AUTO_MIXED_PRECISION_ALLOWLIST_ADD")
    native = ListEdit(True, AmpList.ALLOW, "cos", "amp.allowlist_add")
    retained, warnings = keep_known_edits([foreign, native], "pytorch", lambda: {"cos"})
    assert retained == (native,)
    assert warnings == (
        f"{foreign.origin} names 'MatMul', which is not an op type of pytorch; the edit is ignored",
    )
    for edit, framework in (
        (foreign, "tensorflow"),
        (ListEdit(True, AmpList.DENY, "coss", "amp.denylist_add"), "pytorch"),
    ):
        with pytest.raises(UnknownOperatorError, match=edit.op_type):
            keep_known_edits([edit], framework, lambda: {"cos"})

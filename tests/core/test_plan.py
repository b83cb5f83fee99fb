import re
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from neural_mp.core.observations import Observations
from neural_mp.core.plan import PrecisionPlan, load_plan_file
from neural_mp.core.precision import FP32, OpConfig, Precision
from neural_mp.core.quant_spec import QUANT_CHOICES, QuantSpec
from neural_mp.errors import PlanError

schemes, algorithms = (st.sampled_from(QUANT_CHOICES[name]) for name in ("scheme", "algorithm"))
specs = st.builds(
    QuantSpec,
    st.sampled_from(["int8", "uint8"]),
    schemes,
    st.sampled_from(["per_channel", "per_tensor"]),
    algorithms,
)
groups = st.builds(
    QuantSpec,
    st.sampled_from(["int4", "uint4"]),
    schemes,
    st.just("per_group"),
    algorithms,
    group_size=st.integers(1, 1 << 20),
)
configs = st.one_of(
    st.builds(OpConfig, st.sampled_from([Precision.BF16, Precision.FP16, Precision.FP32])),
    st.builds(OpConfig, st.just(Precision.INT8), specs, specs),
    st.builds(OpConfig, st.just(Precision.INT4), groups),
)
plans = st.builds(
    PrecisionPlan, st.dictionaries(st.text(min_size=1, max_size=20), configs, max_size=8)
)
ranges = st.tuples(st.floats(-1e6, 0), st.floats(0, 1e6))


@given(plans)
def test_a_plan_reads_back_from_its_yaml(plan):
    again = PrecisionPlan.from_yaml(plan.to_yaml())
    assert again == plan
    assert hash(again) == hash(plan)


@given(
    plans,
    st.dictionaries(
        st.text(min_size=1), st.dictionaries(st.sampled_from(["minmax", "kl"]), ranges)
    ),
)
def test_a_plan_file_holds_what_calibration_saw(tmp_path_factory, plan, seen):
    file = tmp_path_factory.mktemp("plan") / "plan.yaml"
    plan.save(file, framework="pytorch", observations=Observations(seen, samples=7))
    again, observed = load_plan_file(file)
    assert again == plan
    assert observed.samples == 7
    assert {k: dict(v) for k, v in observed.ranges.items()} == seen


def test_plans_that_say_the_same_are_the_same():
    a, b = OpConfig(Precision.BF16), FP32
    assert PrecisionPlan({"x": a, "y": b}) == PrecisionPlan({"y": b, "x": a})
    assert len({PrecisionPlan({"x": a, "y": b}), PrecisionPlan({"y": b, "x": a})}) == 1
    assert PrecisionPlan({"x": a}) != PrecisionPlan({"x": b})


def test_a_plan_does_not_change_with_the_dict_it_came_from():
    source = {"x": FP32}
    plan = PrecisionPlan(source)
    source["y"] = FP32
    assert list(plan) == ["x"]


def test_a_person_can_edit_a_plan():
    text = PrecisionPlan({"conv": OpConfig(Precision.BF16), "fc": FP32}).to_yaml()
    assert "  conv: bf16\n" in text
    edited = PrecisionPlan.from_yaml(text.replace("conv: bf16", "conv: fp32"))
    assert edited["conv"] == FP32


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("ops: {conv: fp33}\nneural_mp_plan: 2", "ops.conv: .*'fp33'"),
        ("ops: {conv: [fp32]}\nneural_mp_plan: 2", r"ops.conv: expected a precision.*\['fp32'\]"),
        ("ops: {conv: {precision: int8, wieght: x}}\nneural_mp_plan: 2", "unknown key 'wieght'"),
        (
            "ops: {conv: {precision: int8, weight: int8 big}}\nneural_mp_plan: 2",
            "ops.conv.weight: 'big'",
        ),
        ("ops: {conv: 'int8,bf16'}\nneural_mp_plan: 2", "ops.conv: expected one precision"),
        ("ops: {conv: fp32}\nneural_mp_plan: 99", "neural_mp_plan must be 2, got 99"),
        ("conv: fp32", "expected a plan: a mapping with the key 'ops'"),
        ("ops: [", "line 1: not readable YAML"),
    ],
)
def test_a_malformed_plan_names_what_is_wrong(tmp_path, text, message):
    file = tmp_path / "plan.yaml"
    file.write_text(text)
    with pytest.raises(PlanError, match=message):
        PrecisionPlan.load(file)


def test_a_missing_plan_file_is_named(tmp_path):
    with pytest.raises(PlanError, match=r"missing\.yaml"):
        PrecisionPlan.load(tmp_path / "missing.yaml")


def test_a_malformed_range_names_the_tensor(tmp_path):
    file = tmp_path / "plan.yaml"
    document = yaml.safe_load(PrecisionPlan({"conv": FP32}).to_yaml())
    document["observations"] = {"ranges": {"relu": {"minmax": [0]}}}
    file.write_text(yaml.safe_dump(document))
    with pytest.raises(PlanError, match="observations.ranges.relu.minmax: expected a range"):
        load_plan_file(file)


def test_the_page_of_plans_lists_the_keys_of_observations():
    page = (Path(__file__).parents[2] / "docs" / "plans.md").read_text("utf-8")
    listed = set(re.findall(r"`observations\.(\w+)`", page))
    assert listed == set(Observations().to_dict()) - {"samples"}

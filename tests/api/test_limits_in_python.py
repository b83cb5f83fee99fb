"""What a tuning file limits can be set in Python, and the other way round."""

import pytest

from neural_mp import AccuracyCriterion, ExitPolicy, MixedPrecision, Precision
from neural_mp.errors import ConfigurationError

CONV = "conv2d"


@pytest.fixture(autouse=True)
def _quick(quick_runs, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def converter(net, digits, accuracy):
    return MixedPrecision(
        model=net,
        precisions="int8",
        metric=accuracy,
        eval_dataloader=digits[1].loader(),
        accuracy_criterion=0.05,
        objective="modelsize",
    )


def in_int8(result):
    return {op for op, config in result.plan.items() if config.precision is Precision.INT8}


def test_keywords_set_options(converter, net):
    assert converter.model is net
    assert converter.accuracy_criterion == AccuracyCriterion(0.05)
    assert converter().met
    with pytest.raises(ConfigurationError, match="no option 'workspase'.*'workspace'"):
        MixedPrecision(workspase="here")


@pytest.mark.slow
def test_excluded_ops_stay_in_fp32(converter):
    free = in_int8(converter())
    first, second, *remaining = sorted(free)
    converter.exclude = [first, second[:-1] + "."]
    kept_out = in_int8(converter())
    assert {first, second}.isdisjoint(kept_out)
    assert set(remaining) & kept_out
    converter.exclude = first
    assert first not in in_int8(converter())


@pytest.mark.slow
def test_limits_by_op_by_type_and_by_model(converter):
    op = sorted(in_int8(converter()))[0]
    converter.op_wise = {op: "fp32"}
    assert op not in in_int8(converter())
    converter.op_wise = {op: {"weight": {"dtype": "fp32"}}}
    assert op not in in_int8(converter())
    converter.op_wise = {}
    converter.optype_wise = {CONV: [Precision.FP32]}
    with_dense_only = converter()
    types = {with_dense_only.report.op_counts[CONV].get("int8", 0)}
    assert types == {0}
    converter.optype_wise, converter.model_wise = {}, {"activation": {"algorithm": ["kl"]}}
    result = converter()
    static = [c for c in result.plan.values() if c.activation is not None]
    assert static
    assert {config.activation.algorithm for config in static} == {"kl"}


def test_a_dict_holds_what_a_file_holds(net, digits, accuracy):
    converter = MixedPrecision(
        {
            "mixed_precision": {"precisions": ("int8",)},
            "quantization": {"op_wise": {".*": {"precisions": Precision.FP32}}},
            "tuning": {"exit_policy": {"max_trials": 2}, "objective": "modelsize"},
        },
        model=net,
    )
    converter.metric, converter.eval_dataloader = accuracy, digits[1].loader()
    assert converter.precisions == (Precision.INT8,)
    assert converter.exit_policy == ExitPolicy(max_trials=2)
    assert in_int8(converter()) == set()


def test_a_mistake_in_a_dict_is_named_by_its_key():
    with pytest.raises(ConfigurationError, match=r"tuning\.exit_policy\.max_trails.*'max_trials'"):
        MixedPrecision({"tuning": {"exit_policy": {"max_trails": 2}}})
    with pytest.raises(ConfigurationError, match=r"MixedPrecision\(model=…\)"):
        MixedPrecision(object())


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        (0.005, AccuracyCriterion(0.005)),
        ({"absolute": 0.002}, AccuracyCriterion(0.002, relative=False)),
        ({"relative": "2%", "higher_is_better": False}, AccuracyCriterion(0.02, True, False)),
        (AccuracyCriterion(0.3), AccuracyCriterion(0.3)),
    ],
)
def test_a_criterion_in_short(given, meant):
    assert MixedPrecision(accuracy_criterion=given).accuracy_criterion == meant


def test_an_exit_policy_in_short():
    converter = MixedPrecision(exit_policy={"timeout": 60})
    assert converter.exit_policy == ExitPolicy(timeout=60)

"""Settings of any kind, written as YAML and read back."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from neural_mp.config import (
    EvaluationSettings,
    MetricSettings,
    Options,
    PerformanceSettings,
    Settings,
    parse_settings,
    settings_to_yaml,
)
from neural_mp.config.inc_dialect import ONLY_THEIR_NAMES
from neural_mp.core.criterion import AccuracyCriterion, ExitPolicy
from neural_mp.core.precision import Precision
from neural_mp.core.quant_spec import QUANT_CHOICES
from neural_mp.data.registry import normalize_registered_name
from neural_mp.space.capability import Constraints, OpConstraint, QuantConstraint

characters = st.characters(exclude_categories=("Cs",), exclude_characters="\0")
words = st.text(characters, min_size=1, max_size=12)
plain = st.text("abc_:/.-0123456789e", min_size=1, max_size=8)
names = plain.filter(lambda name: name not in ("weight", "higher_is_better"))
# Components that only Intel Neural Compressor has make a file one of that dialect.
own_words = words.filter(lambda word: normalize_registered_name(word) not in ONLY_THEIR_NAMES)
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | words,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(words, inner, max_size=3),
    max_leaves=6,
)
options = st.dictionaries(words, values, max_size=3)
named = st.dictionaries(names, options, min_size=1, max_size=1)
precisions = st.sets(st.sampled_from(Precision), min_size=1).map(
    lambda chosen: tuple(precision for precision in Precision if precision in chosen)
)
amounts = st.floats(0, 1e9)
directions = st.sampled_from([True, False, None])
sizes = st.integers(1, 10**9)
dataloaders = st.fixed_dictionaries(
    {"dataset": named},
    optional={
        "batch_size": sizes,
        "last_batch": st.sampled_from(["rollover", "discard"]),
        "shuffle": st.booleans(),
        "seed": st.integers(0, 99),
        "transform": st.dictionaries(own_words, options, max_size=3),
    },
)


def chosen(kind):
    choices = st.lists(st.sampled_from(QUANT_CHOICES[kind]), min_size=1, unique=True)
    return st.none() | choices.map(tuple)


quants = st.builds(QuantConstraint, **{kind: chosen(kind) for kind in QUANT_CHOICES})
limits = st.builds(OpConstraint, st.none() | precisions, quants, quants)
op_limits = st.dictionaries(words, limits, max_size=3)
metric_lists = st.one_of(
    st.just(()),
    st.tuples(st.builds(MetricSettings, names, options)),
    st.lists(
        st.builds(MetricSettings, names, options, st.floats(0.001, 10)),
        min_size=1,
        max_size=3,
        unique_by=lambda metric: metric.name,
    ).map(tuple),
)
run_options = st.fixed_dictionaries(
    {},
    optional={
        "model": words,
        "framework": st.sampled_from(["pytorch", "tensorflow", "onnxrt"]),
        "inputs": st.lists(words, min_size=1, max_size=3).map(tuple),
        "outputs": st.lists(words, min_size=1, max_size=3).map(tuple),
        "precisions": precisions,
        "sampling_size": sizes,
        "strategy": words,
        "accuracy_criterion": st.builds(
            AccuracyCriterion, st.floats(0, 0.499), st.just(True), directions
        )
        | st.builds(AccuracyCriterion, amounts, st.just(False), directions),
        "objective": st.sampled_from(["performance", "footprint", "modelsize"]),
        "exit_policy": st.builds(ExitPolicy, amounts, sizes, st.booleans()),
        "random_seed": st.integers(0, 2**32 - 1),
        "rounding_steps": st.integers(1, 1000),
        "workspace": words,
        "resume": st.booleans(),
        "storage": words,
        "max_batches": sizes,
    },
).map(lambda chosen: Options(**chosen))
all_settings = st.builds(
    Settings,
    run_options,
    device=st.sampled_from(["cpu", "gpu"]),
    constraints=st.builds(Constraints, limits, op_limits, op_limits),
    calibration_dataloader=st.none() | dataloaders,
    evaluation=st.builds(
        EvaluationSettings,
        metric_lists,
        st.none() | dataloaders,
        st.none() | st.dictionaries(words, options, max_size=2),
        st.builds(
            PerformanceSettings,
            st.integers(0, 99),
            sizes,
            st.none() | sizes,
            st.none() | dataloaders,
            st.none() | st.integers(1, 8),
            sizes,
        ),
    ),
)


@pytest.mark.slow
@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow])
@given(all_settings)
def test_whatever_is_written_reads_back_the_same(settings):
    assert parse_settings(settings_to_yaml(settings)) == settings

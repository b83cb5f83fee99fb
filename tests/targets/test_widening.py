"""The path of plans for an accelerator: from narrow to wide, most noise removed per cost first."""

import itertools
from contextlib import suppress
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from neural_mp.core.observations import TensorNoise, WidthFigures
from neural_mp.core.plan import PrecisionPlan
from neural_mp.core.precision import FP32, OpConfig, Precision
from neural_mp.core.quant_spec import QuantSpec
from neural_mp.core.trial import Outcome, Trial
from neural_mp.search.widening import (
    WidthPlan,
    choose_algorithms,
    trace_widening_path,
    with_algorithms,
    with_best_calibration,
)
from neural_mp.strategies.widening import _try_path
from neural_mp.targets import Widths, load_profile
from neural_mp.targets.profile import TargetCosts

A8 = QuantSpec("uint8", "asymmetric", "per_tensor")
A16 = QuantSpec("uint16", "asymmetric", "per_tensor")
W8 = QuantSpec("int8", "symmetric", "per_channel")
W16 = QuantSpec("int16", "symmetric", "per_channel")
LAYER = (
    OpConfig(Precision.INT8, W8, A8),
    OpConfig(Precision.INT16, W8, A16),
    OpConfig(Precision.INT16, W16, A16),
    FP32,
)
COSTS = {Widths.W8A8: 1.0, Widths.W8A16: 2.0, Widths.W16A16: 4.0, None: 8.0}


def chain(tensors, weights):
    """A chain of layers: the tensor before each, and the weight of each, with noise in 8 bits."""
    names = [f"op{index}" for index in range(len(weights))]
    touching = [(names[0],), *itertools.pairwise(names), (names[-1],)]
    figures = WidthFigures(
        tuple(
            TensorNoise(f"t{i}", ops, {"8": noise, "16": noise / 65536})
            for i, (ops, noise) in enumerate(zip(touching, tensors, strict=True))
        ),
        {n: {"8": noise, "16": noise / 65536} for n, noise in zip(names, weights, strict=True)},
    )
    return dict.fromkeys(names, LAYER), figures


def cost(op, config):
    return COSTS[Widths.from_config(config)]


def words(plan):
    return [str(Widths.from_config(config) or config.precision) for config in plan.configs.values()]


def test_first_plan_is_the_narrowest_and_the_last_is_float():
    choices, figures = chain([1e-3, 1e-4, 1e-4], [1e-5, 1e-5])
    path = trace_widening_path(choices, figures, cost)
    assert words(path[0]) == ["w8a8", "w8a8"]
    assert path[0].noise == pytest.approx(1e-3 + 2e-4 + 2e-5)
    assert words(path[-1]) == ["fp32", "fp32"]
    assert path[-1].noise == pytest.approx(0.0)


def test_weight_of_much_noise_is_widened_with_its_activations_first():
    choices, figures = chain([1e-6, 1e-6, 1e-6, 1e-6], [1e-7, 1e-2, 1e-7])
    path = trace_widening_path(choices, figures, cost)
    first = next(plan for plan in path if "w16a16" in words(plan))
    assert words(first) == ["w8a8", "w16a16", "w8a8"]
    assert first.noise < 1e-5


def test_noise_of_ops_that_stay_in_float_is_left_out():
    """An op that a user keeps in FP32, or of unknown range, is no choice of the search."""
    choices, figures = chain([1e-7, 1e-2, 1e-7], [1e-8, 1e-8])
    tunable = {"op0": choices["op0"]}
    path = trace_widening_path(tunable, figures.restricted_to(tunable), cost)
    assert words(path[0]) == ["w8a8"]
    assert path[0].noise == pytest.approx(1e-7 + 1e-2 + 1e-8)


def test_noisy_tensor_widens_all_ops_that_touch_it():
    choices, figures = chain([1e-7, 1e-2, 1e-7], [1e-8, 1e-8])
    assert words(trace_widening_path(choices, figures, cost)[1]) == ["w8a16", "w8a16"]


noises = st.floats(1e-9, 1e-2)


@given(st.lists(noises, min_size=2, max_size=6), st.lists(noises, min_size=6, max_size=6))
def test_path_loses_noise_and_gains_cost_at_every_step(tensors, weights):
    """No op goes to float before every op is in its widest integers."""
    choices, figures = chain(tensors, weights[: len(tensors) - 1])
    path = trace_widening_path(choices, figures, cost)
    for before, after in itertools.pairwise(path):
        assert after.noise < before.noise
        assert after.cost > before.cost
    in_float = next(i for i, plan in enumerate(path) if "fp32" in words(plan))
    assert {"w8a8"}.isdisjoint(words(path[in_float - 1]))


@given(st.lists(noises, min_size=3, max_size=3), st.lists(noises, min_size=2, max_size=2))
def test_noise_of_a_plan_is_that_of_its_narrowest_readers(tensors, weights):
    """Computed by itself: each tensor in the narrowest width around it, each weight in its own."""
    choices, figures = chain(tensors, weights)
    for plan in trace_widening_path(choices, figures, cost):
        expected = 0.0
        for tensor in figures.tensors:
            specs = [plan.configs[op].activation for op in tensor.ops]
            bits = [spec.dtype.bits for spec in specs if spec]
            expected += tensor.noise[str(min(bits))] if bits else 0.0
        for op, noise in figures.weights.items():
            weight = plan.configs[op].weight
            expected += noise[str(weight.dtype.bits)] if weight else 0.0
        assert plan.noise == pytest.approx(expected, rel=1e-6, abs=1e-12)


def test_op_of_one_width_does_not_keep_its_neighbours_narrow():
    """A layer beside an op that has 8 bits only: the op goes to float, the layer to 16 bits."""
    only = (OpConfig(Precision.INT8, None, A8), FP32)
    figures = WidthFigures((TensorNoise("t", ("layer", "only"), {"8": 1e-2, "16": 1e-7}),))
    path = trace_widening_path({"layer": LAYER, "only": only}, figures, cost_of_pair)
    assert words(path[1]) == ["w8a16", "fp32"]
    assert path[1].noise == pytest.approx(1e-7)


def noisy(tensor, ops, minmax, **others):
    """A tensor with its typical noise by algorithm; other noises are ten times as large."""
    return TensorNoise(tensor, ops, {"8": 10 * minmax, "16": 0.0}, {"minmax": minmax, **others})


def test_algorithm_of_an_op_lowers_the_noise_of_all_tensors_that_it_decides_on():
    figures = WidthFigures(
        (
            noisy("x", ("first",), 0.02, kl=0.001, mse=0.015),
            noisy("first", ("first", "second"), 0.01, kl=0.08, mse=0.002),
            noisy("second", ("second",), 0.001, kl=0.00099),
        )
    )
    assert choose_algorithms(figures) == {"first": "mse"}
    quieter = with_algorithms(figures, {"first": "mse"})
    assert [t.noise["8"] for t in quieter.tensors] == pytest.approx([0.15, 0.02, 0.01])


def test_algorithms_that_lower_all_noise_by_less_than_a_tenth_are_left_out():
    figures = WidthFigures((noisy("x", ("op",), 0.01, kl=0.0), noisy("y", ("other",), 0.2)))
    assert choose_algorithms(figures) == {"op": "kl"}
    assert with_algorithms(figures, {"op": "kl"}) is None
    assert with_algorithms(figures, {}) is None


def test_wider_op_keeps_its_algorithm_only_for_a_reader_in_8_bits():
    """The reader converts to 8 bits by the range of the op that writes the tensor."""
    figures = WidthFigures((noisy("first", ("first", "second"), 0.01, kl=0.001),))
    narrow, wide = LAYER[:2]
    for reader, algorithm in ((narrow, "kl"), (wide, "minmax")):
        configs = with_best_calibration({"first": wide, "second": reader}, figures, {"first": "kl"})
        assert configs["first"].activation.algorithm == algorithm
        assert configs["second"] == reader


def cost_of_pair(op, config):
    return {"a8": 0.5, "fp32": 2.0}.get(str(Widths.from_config(config) or "fp32"), 1.0)


def test_last_trial_is_for_the_widest_plan_if_all_others_missed():
    """No plan between meets the target if the loss falls more slowly than the noise."""
    path = [WidthPlan({"op": LAYER[0]}, 10.0**-i, 1.0 + i) for i in range(20)]
    path[-1] = WidthPlan({"op": LAYER[2]}, 1e-20, 50.0)
    search = _try_path(path, SimpleNamespace(tolerance=0.01), 0.1, 3)
    (plan,) = next(search)
    proposed = [plan]
    with suppress(StopIteration):
        while True:
            met = plan == PrecisionPlan(path[-1].configs)
            outcome = Outcome.MET if met else Outcome.MISSED
            (plan,) = search.send([Trial(plan, outcome, 0.9, 0.09)])
            proposed.append(plan)
    assert len(proposed) == 3
    assert proposed[-1] == PrecisionPlan(path[-1].configs)


def tried_indices(unit, exponent, trials=5):
    """Indices of the plans tried, where the loss follows a power of the noise, from 4 % on."""
    path = [WidthPlan({f"op{i}": FP32}, unit * 0.8**i, i + 1.0) for i in range(80)]
    search, indices = _try_path(path, SimpleNamespace(tolerance=0.01), 0.04, trials), list[int]()
    with suppress(StopIteration):
        (plan,) = next(search)
        while True:
            indices.append(int(next(iter(plan.configs)).removeprefix("op")))
            loss = 0.04 * 0.8 ** (exponent * indices[-1])
            outcome = Outcome.MET if loss <= 0.01 else Outcome.MISSED
            (plan,) = search.send([Trial(plan, outcome, 1 - loss, loss)])
    return indices


@pytest.mark.parametrize("unit", [1e-3, 1e-25])
def test_trials_do_not_depend_on_the_scale_of_noise(unit):
    """Saturated outputs have noises far below those of others: only their ratios count."""
    assert tried_indices(unit, 1.0) == [8, 4, 6, 7]


def test_loss_that_falls_slowly_moves_the_next_trial_further():
    """The loss is the square root of the noise; plans from 13 on meet the target."""
    first, second, *others = tried_indices(1e-3, 0.5)
    assert first == 8
    assert second == 16
    assert min(index for index in (second, *others) if index >= 13) <= 15


def test_plan_near_the_tolerated_loss_is_the_last():
    """.8 % of 1 % tolerated: plans in between would miss in most cases."""
    assert tried_indices(1e-3, 0.9) == [8]


def test_ops_in_float_count_in_the_precision_of_the_target():
    costs = TargetCosts(load_profile("qnn"), {"a": 3.0, "b": 1.0}, {"a": 1.0, "b": 1.0})
    assert costs.multiplication_shares({"a": LAYER[0], "b": FP32}) == {"w8a8": 0.75, "fp16": 0.25}

"""Workloads of decoders: the measured times at their row counts choose the form of each layer."""

from __future__ import annotations

import random
from collections.abc import Mapping

import made_up
import pytest

from neural_mp.amp import FourLists
from neural_mp.core.graph import Op, OpGraph
from neural_mp.core.observations import Observations
from neural_mp.core.op_timings import FormTimes, Workload, describe_timed_form
from neural_mp.core.precision import FP32, OpConfig, Precision
from neural_mp.core.quant_spec import QuantSpec
from neural_mp.errors import ConfigurationError
from neural_mp.space import Capability, TuningSpace
from neural_mp.strategies.base import Probe, TuningProblem
from neural_mp.strategies.bit_allocation import weights_by_bytes

PROMPT = 128
WEIGHT = QuantSpec.parse("int8 symmetric per_channel")
DYNAMIC = OpConfig(Precision.INT8, WEIGHT, QuantSpec.parse("uint8 asymmetric per_tensor dynamic"))
INT8 = OpConfig(Precision.INT8, WEIGHT)
INT4 = OpConfig(Precision.INT4, QuantSpec.parse("uint4 asymmetric per_group 128"))
BF16 = OpConfig(Precision.BF16)
#: Microseconds of one layer of 4096 × 4096 for 1 and 128 rows, on a CPU with VNNI.
TIMES = {
    FP32: (2988, 44979),
    BF16: (2082, 9964),
    DYNAMIC: (502, 5201),
    INT8: (1052, 26807),
    INT4: (448, 24827),
}
NOISE = {str(WEIGHT): 0.001, str(INT4.weight): 0.002}


class _Probe(Probe):
    def __init__(self, times: Mapping[OpConfig, tuple[float, float]]) -> None:
        self.times_of_forms = times

    def weight_noise(self) -> Mapping[str, Mapping[str, float]]:
        return {"op0": NOISE, "op1": NOISE}

    def form_times(self, workload: Workload) -> Mapping[str, FormTimes]:
        times = {
            str(describe_timed_form(config)): {
                rows: duration
                for rows, duration in zip((1, PROMPT), seconds, strict=True)
                if rows in workload.row_counts
            }
            for config, seconds in self.times_of_forms.items()
        }
        return {"op0": times, "op1": times}


def _space(forms):
    ops = [Op("op0", "linear", ("x",), weights=1000), Op("op1", "linear", ("op0",), weights=1000)]
    lists = {Precision.BF16: FourLists(allow=frozenset({"linear"}))}
    return TuningSpace(
        OpGraph(ops, ["x"]), {op.name: Capability(tuple(forms)) for op in ops}, lists
    )


def _first_plan(*args, **options):
    configs = _first_configs(*args, **options)
    return {"dynamic" if config == DYNAMIC else config.precision for config in configs}


def _first_configs(workload, times=TIMES, objectives=None, forms=(DYNAMIC, INT8, INT4, BF16, FP32)):
    trials = made_up.run(
        _space(forms),
        lambda plan: 0.0,
        precisions=(Precision.INT4, Precision.INT8, Precision.BF16),
        tolerance=0.1,
        strategy="mincut",
        probe=_Probe(times),
        objectives=objectives or {"performance": 1.0},
        workload=workload,
    )
    return {*trials[0].plan.values()}


def test_a_workload_of_decode_chooses_4_bits():
    assert _first_plan(Workload(0.9, 0.1, PROMPT)) == {Precision.INT4}


def test_a_workload_of_prefill_chooses_dynamic_int8():
    assert _first_plan(Workload(0.1, 0.9, PROMPT)) == {"dynamic"}


def test_a_workload_of_prefill_chooses_bf16_where_no_dynamic_kernel_exists():
    chosen = _first_plan(Workload(0.0, 1.0, PROMPT), forms=(INT8, INT4, BF16, FP32))
    assert chosen == {Precision.BF16}


def test_a_form_slower_than_bf16_at_both_row_counts_is_never_chosen():
    slow = {**TIMES, INT4: (2100, 24827), INT8: (2100, 26807), DYNAMIC: (2100, 9965)}
    footprint = {"performance": 0.01, "footprint": 0.99}
    assert _first_plan(Workload(0.5, 0.5, PROMPT), slow, footprint) == {Precision.BF16}


@pytest.mark.parametrize(
    ("workload", "chosen"),
    [(Workload(1.0, 0.0, PROMPT), Precision.INT4), (Workload(0.0, 1.0, PROMPT), Precision.BF16)],
)
def test_a_form_slower_than_bf16_at_the_only_row_count_in_use_is_never_chosen(workload, chosen):
    footprint = {"performance": 0.01, "footprint": 0.99}
    assert _first_plan(workload, objectives=footprint, forms=(INT8, INT4, BF16, FP32)) == {chosen}


@pytest.mark.parametrize(("decode", "prefill"), [(1, 0), (1, 1), (0, 1)])
def test_the_choice_by_time_is_no_slower_than_bf16(decode, prefill):
    draw = random.Random(0)
    workload = Workload(decode, prefill, PROMPT)
    for _ in range(20):
        times = {config: (draw.random(), draw.random()) for config in TIMES}
        seconds = {
            config: workload.seconds_per_token(dict(zip((1, PROMPT), durations, strict=True)))
            for config, durations in times.items()
        }
        assert all(seconds[config] <= seconds[BF16] for config in _first_configs(workload, times))


def test_footprint_beside_the_workload_favours_4_bits():
    weights = {"performance": 0.1, "footprint": 0.9}
    assert _first_plan(Workload(0.3, 0.7, PROMPT), objectives=weights) == {Precision.INT4}


def test_a_limit_of_bytes_leaves_out_forms_that_bf16_beats_with_a_workload():
    slow = {**TIMES, INT4: (2100, 24827)}

    def smallest(workload):
        problem = TuningProblem(
            _space((INT8, INT4, BF16, FP32)),
            Observations(),
            (Precision.INT4, Precision.INT8, Precision.BF16),
            objectives={"performance": 1.0},
            probe=_Probe(slow),
            workload=workload,
        )
        return {config.precision for config in weights_by_bytes(problem).start.configs.values()}

    assert smallest(None) == {Precision.INT4}
    assert smallest(Workload(0.5, 0.5, PROMPT)) == {Precision.INT8}


def test_seconds_are_those_of_a_mean_token():
    assert Workload(3.0, 1.0, 10).seconds_per_token({1: 2.0, 10: 40.0}) == pytest.approx(2.5)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"decode": -1.0, "prefill": 1.0}, "workload.decode must be a finite number from 0"),
        ({"decode": 1.0, "prefill": float("nan")}, "workload.prefill must be a finite number"),
        ({"decode": 0.0, "prefill": 0.0}, "above 0, got 0 for both"),
        ({"decode": 1.0, "prompt": 0}, "workload.prompt must be a whole number from 1"),
    ],
)
def test_a_bad_workload_is_one_clear_error(values, said):
    with pytest.raises(ConfigurationError, match=said):
        Workload(**values)

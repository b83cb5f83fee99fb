"""What a comparison of two models says, and what it refuses."""

import copy
import io
import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from contract_nets import Normed, TwoOutputs, seeded
from torch import nn

import neural_mp
from neural_mp.adaptors.loaded_model import LoadedModel
from neural_mp.adaptors.pytorch.adaptor import PyTorchAdaptor
from neural_mp.api.optimized_model import OptimizedModel
from neural_mp.errors import ComparisonError, DataError
from neural_mp.reporting.displays import format_comparison_csv
from neural_mp.runs.report import Report
from neural_mp.testing import uniform
from neural_mp.testing.fixtures import machine
from neural_mp.tuning.measurement.comparison import compare_models

INT8 = neural_mp.Precision.INT8
IMAGES = np.random.default_rng(0).normal(size=(16, 1, 8, 8)).astype(np.float32)


def loaded(net: nn.Module, inputs=IMAGES) -> LoadedModel:
    adaptor = PyTorchAdaptor()
    return LoadedModel(adaptor, adaptor.load(net.eval(), example=inputs))


class Chain(nn.Module):
    """Three dense layers with something between them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.one, self.two, self.three = (nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.three(torch.tanh(self.two(torch.tanh(self.one(x[:, 0])))))


@pytest.fixture(scope="module")
def chain():
    return Chain(), loaded(Chain())


def changed(net: nn.Module, change) -> LoadedModel:
    variant = copy.deepcopy(net)
    with torch.no_grad():
        change(variant)
    return loaded(variant)


@pytest.fixture(scope="module")
def halved(chain):
    """The second layer gives half of what it gave."""

    def change(net):
        net.two.weight *= 0.5
        net.two.bias *= 0.5

    return changed(chain[0], change)


def test_a_model_is_equal_to_itself(chain):
    comparison = compare_models(chain[1], chain[1], [IMAGES])
    assert all(math.isinf(layer.sqnr) and layer.cosine == 1 for layer in comparison.layers)
    assert comparison.first is None
    assert comparison.worst(3) == ()
    assert "no divergence" in repr(comparison)


def test_all_batches_count_as_one_whole(chain, halved):
    whole = compare_models(chain[1], halved, [IMAGES])
    parts = compare_models(chain[1], halved, [IMAGES[:3], IMAGES[3:12], IMAGES[12:]])
    for reference, actual in zip(whole.layers, parts.layers, strict=True):
        assert reference.sqnr == pytest.approx(actual.sqnr, abs=1e-4)
        assert reference.max_abs_error == pytest.approx(actual.max_abs_error, rel=1e-5)
    assert whole.first.name == parts.first.name == "two"
    assert whole.first.sqnr == pytest.approx(20 * math.log10(2), abs=1e-3)


def test_noise_is_told_to_arise_where_it_was_not_in_the_inputs(chain, halved):
    layers = {layer.name: layer for layer in compare_models(chain[1], halved, [IMAGES]).layers}
    assert layers["two"].introduced_nsr == pytest.approx(0.25, abs=1e-4)  # half of the amplitude
    assert layers["two"].sqnr_drop == pytest.approx(120 - layers["two"].sqnr)
    assert layers["one"].introduced_nsr == 0
    behind = layers["three"]
    assert behind.inputs == ("tanh_2",) == tuple(set(layers) & {"tanh_2"})
    assert behind.sqnr_drop == pytest.approx(layers["tanh_2"].sqnr - behind.sqnr)


def test_without_an_op_below_20_decibels_they_part_where_the_fall_is_largest(chain):
    def change(net):
        net.one.weight *= 1.001
        net.two.bias += 0.02

    comparison = compare_models(chain[1], changed(chain[0], change), [IMAGES])
    assert min(layer.sqnr for layer in comparison.layers) > 20
    assert comparison.first.name == "one"
    assert "two" in {layer.name for layer in comparison.worst(1)}


def test_what_is_no_number_is_as_bad_as_can_be(chain):
    def change(net):
        net.two.weight[0, 0] = math.nan

    comparison = compare_models(chain[1], changed(chain[0], change), [IMAGES])
    assert comparison.first.name == "two"
    assert comparison.first.sqnr == pytest.approx(-90)
    document = json.loads(json.dumps(comparison.to_dict(), allow_nan=False))
    rows = {row["name"]: row for row in document["layers"]}
    assert rows["two"]["max_abs_error"] is None
    assert rows["one"]["sqnr"] is None
    assert document["first"] == "two"


def test_minus_infinity_in_both_is_no_difference():
    class Masked(nn.Module):
        def forward(self, x):
            return torch.softmax(x.masked_fill(x > 0, -math.inf), -1)

    model = loaded(Masked())
    comparison = compare_models(model, model, [IMAGES])
    assert all(math.isinf(layer.sqnr) for layer in comparison.layers)


def test_every_output_stands_under_its_place(chain):
    model = loaded(seeded(TwoOutputs))
    comparison = neural_mp.compare(model, model, IMAGES)
    assert [output.name for output in comparison.outputs] == ["0", "1"]


def test_models_of_different_origin_are_refused(chain):
    with pytest.raises(ComparisonError, match=r"0 ops in common: A has 'slice', .*B has 'first'"):
        compare_models(chain[1], loaded(seeded(TwoOutputs)), [IMAGES])


def test_other_outputs_are_refused(chain):
    class Twice(Chain):
        def forward(self, x):
            result = super().forward(x)
            return result, result

    with pytest.raises(
        ComparisonError, match=r"must have the same shapes, got .*\[\[16, 8, 8\]\] \(A\)"
    ):
        compare_models(chain[1], loaded(Twice()), [IMAGES])


def test_other_shapes_of_ops_are_refused(chain):
    class Wider(Chain):
        def __init__(self):
            super().__init__()
            self.one, self.two = nn.Linear(8, 6), nn.Linear(6, 8)

    with pytest.raises(ComparisonError, match=r"must have the same shape .*\[16, 8, 8\] \(A\)"):
        compare_models(chain[1], loaded(Wider()), [IMAGES])


def test_models_of_two_frameworks_are_refused(chain):
    class Other(PyTorchAdaptor):
        framework = "another"

    with pytest.raises(ComparisonError, match=r"got pytorch \(A\) and another \(B\)"):
        compare_models(chain[1], LoadedModel(Other(), chain[1].held), [IMAGES])


def test_an_empty_loader_and_batches_that_do_not_fit_are_named(chain):
    with pytest.raises(DataError, match="batches must yield at least one batch"):
        neural_mp.compare(chain[1], chain[1], [])
    with pytest.raises(DataError, match="batch 2 of batches"):
        neural_mp.compare(chain[1], chain[1], [IMAGES, IMAGES[..., :4]])


@pytest.mark.slow
def test_a_generator_is_walked_once_and_its_batches_are_not_kept(chain, halved):
    import gc
    import weakref

    alive: list[weakref.ref] = []

    def batches():
        for _ in range(6):
            batch = IMAGES.copy()
            alive.append(weakref.ref(batch))
            yield batch, "labels"
            del batch
            gc.collect()
            assert sum(reference() is not None for reference in alive) <= 2  # the first, and this

    gc.freeze()  # what was there before is not looked through again, here or in later tests
    comparison = neural_mp.compare(chain[1], halved, batches())
    assert (comparison.batches, comparison.samples) == (6, 96)


def test_what_a_repair_rescales_is_not_compared():
    net = seeded(Normed)
    model = loaded(net)
    adaptor, source = model.adaptor, model.held
    space = adaptor.space(source, machine()).restricted_to([INT8])
    tunable = model.in_space(space).with_calibration([IMAGES])
    plan = uniform(space, INT8)
    plan = plan.replacing({"dense": replace(plan["dense"], corrections=("smooth",))})
    result = OptimizedModel(tunable.convert_by_plan(space.resolve(plan)), plan, Report())
    comparison = neural_mp.compare(net, result, IMAGES)
    assert comparison.left_out["are rescaled by a correction"] == ("norm",)
    assert comparison.layers[-1].name == "dense"
    assert comparison.layers[-1].sqnr > 30
    # Without the plan, it looks as if the models parted there.
    assert compare_models(model, result.loaded, [IMAGES]).first.name == "norm"


def test_the_table_has_a_row_for_every_op_and_csv_a_line(chain, halved):
    from rich.console import Console

    comparison = compare_models(chain[1], halved, [IMAGES])
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(comparison)
    shown = console.export_text()
    assert "First divergence at two (linear): 6.0 dB" in shown
    assert all(layer.name in shown for layer in comparison.layers)
    lines = format_comparison_csv(comparison).splitlines()
    assert lines[0].startswith("name,type,dtype_a,dtype_b,sqnr")
    assert "one,linear,float32,float32,inf,0.0,0.0,1.0,0.0" in lines
    assert len(lines) == 1 + len(comparison.layers)

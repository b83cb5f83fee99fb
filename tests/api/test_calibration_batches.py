"""Batches of every form, read as the signature of a model calls for, in every framework."""

import itertools

import keras
import numpy as np
import pytest
import torch
from onnx_nets import graph, op
from torch import nn

from neural_mp import MixedPrecision
from neural_mp.api.loading import load_source
from neural_mp.errors import DataError
from neural_mp.tuning.evaluation.batches import Batches
from neural_mp.util.pytree import tree_leaves

WIDTHS = (16, 8, 12)
SIZE = 4
FRAMEWORKS = ("pytorch", "onnxrt", "tensorflow")
FORMS = ("array", "tuple", "list", "dict")
LABELS = ("without labels", "in a pair", "behind the inputs")


class Summed(nn.Module):
    """Dense layers of one, two or three inputs, added up."""

    def __init__(self, count):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, 5) for width in WIDTHS[:count])

    def _sum(self, *inputs):
        return sum(layer(tensor) for layer, tensor in zip(self.layers, inputs, strict=True))


class One(Summed):
    def forward(self, a):
        return self._sum(a)


class Two(Summed):
    def forward(self, a, b):
        return self._sum(a, b)


class Three(Summed):
    def forward(self, a, b, c):
        return self._sum(a, b, c)


def torch_net(count):
    torch.manual_seed(0)
    return (One, Two, Three)[count - 1](count).eval()


def onnx_net(count):
    names, rng = "abc"[:count], np.random.default_rng(0)
    weights = {
        f"w{name}": rng.normal(size=(width, 5)).astype(np.float32)
        for name, width in zip(names, WIDTHS, strict=False)
    }
    nodes = [op("MatMul", f"{name} w{name}", f"h{name}") for name in names]
    nodes.append(op("Sum", " ".join(f"h{name}" for name in names), "y"))
    inputs = {name: [None, width] for name, width in zip(names, WIDTHS, strict=False)}
    return graph(nodes, inputs, ["y"], weights)


def keras_net(count):
    inputs = [
        keras.Input((width,), name=name) for name, width in zip("abc", WIDTHS[:count], strict=False)
    ]
    hidden = [keras.layers.Dense(5)(tensor) for tensor in inputs]
    return keras.Model(inputs, keras.layers.add(hidden) if count > 1 else hidden[0])


NETS = {"pytorch": torch_net, "onnxrt": onnx_net, "tensorflow": keras_net}


def arrays(count):
    rng = np.random.default_rng(1)
    return [rng.normal(size=(SIZE, width)).astype(np.float32) for width in WIDTHS[:count]]


def batch_of(form, labelled, values):
    """A batch in some form; None where there is no such batch."""
    labels = np.zeros(SIZE, np.int64)
    if labelled == "behind the inputs":
        sequence = {"tuple": tuple, "list": list}.get(form)
        return None if sequence is None else sequence([*values, labels])
    match form:
        case "array":
            inputs = values[0] if len(values) == 1 else None
        case "dict":
            inputs = dict(zip("abc", values, strict=False))
        case _:
            inputs = {"tuple": tuple, "list": list}[form](values)
    if inputs is None:
        return None
    if labelled == "in a pair":
        return [inputs, labels] if form == "list" else (inputs, labels)
    return inputs


def read(framework, count, batch):
    """The batches as a model of so many inputs takes them, and that model."""
    batches = Batches([batch, batch], "calib_dataloader")
    model = batches.choose_reading(
        lambda first: load_source(NETS[framework](count), framework, None, example=first)
    )
    return batches, model


CASES = [
    (form, labelled, count)
    for form, labelled, count in itertools.product(FORMS, LABELS, (1, 2, 3))
    if batch_of(form, labelled, arrays(count)) is not None
]


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize(("form", "labelled", "count"), CASES)
def test_the_inputs_of_a_batch_are_those_that_the_model_takes(framework, form, labelled, count):
    values = arrays(count)
    batches, model = read(framework, count, batch_of(form, labelled, values))
    for inputs in batches.iterate_inputs():
        leaves = tree_leaves(inputs)
        assert len(leaves) == count
        for actual, expected in zip(leaves, values, strict=True):
            np.testing.assert_array_equal(actual, expected)
        assert np.shape(model(inputs)) == (SIZE, 5)


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_a_reading_that_is_not_the_documented_one_is_reported(framework):
    first, second = arrays(2)
    assumed, _ = read(framework, 2, (first, second))
    (assumption,) = assumed.assumption_notes
    assert "every batch of calib_dataloader was interpreted as inputs without labels" in assumption
    documented, _ = read(framework, 1, (first, np.zeros(SIZE)))
    assert documented.assumption_notes == ()


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_two_inputs_alone_calibrate_a_run(framework, tmp_path):
    tuner = MixedPrecision()
    tuner.model, tuner.precisions = NETS[framework](2), "int8"
    tuner.calib_dataloader, tuner.objective = [tuple(arrays(2))] * 2, "modelsize"
    tuner.workspace = tmp_path
    result = tuner()
    assert result.plan.counts()["int8"] >= 2
    assert any(
        "interpreted as inputs without labels" in warning for warning in result.report.warnings
    )


def test_the_users_own_example_does_not_hide_how_batches_are_read(tmp_path):
    tuner = MixedPrecision()
    tuner.model, tuner.precisions = torch_net(2), "int8"
    tuner.inputs = tuple(torch.from_numpy(value) for value in arrays(2))
    tuner.calib_dataloader, tuner.objective = [tuple(arrays(2))] * 2, "modelsize"
    tuner.workspace = tmp_path
    assert tuner().plan.counts()["int8"] == 2


def test_an_exported_program_says_how_batches_are_read():
    inputs = tuple(torch.from_numpy(value) for value in arrays(2))
    program = torch.export.export(torch_net(2), inputs)
    batches = Batches([tuple(arrays(2))], "calib_dataloader")
    batches.choose_reading(lambda first: load_source(program, None, None, example=first))
    assert len(next(batches.iterate_inputs())) == 2


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_batches_that_fit_in_no_way_are_refused_with_the_loader_named(framework):
    with pytest.raises(DataError, match="batch 1 of calib_dataloader"):
        read(framework, 3, tuple(arrays(2)))

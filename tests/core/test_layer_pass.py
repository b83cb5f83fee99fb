"""Where numbers stop being finite is told from what went through the layers."""

import numpy as np
import pytest

from neural_mp.core.training_numerics import LayerTrace, ModelTrace, ValueStats, first_non_finite

FINE = ValueStats(1.0)
BAD = ValueStats(2.0, inf=True)
NAN = ValueStats(2.0, nan=True, inf=True)


def layer(name, inputs=FINE, outputs=FINE, **more):
    return LayerTrace(name, "Dense", more.pop("dtype", "float16"), inputs, outputs, **more)


def trouble(*layers, batch=FINE, outputs=None, loss=None):
    outputs = layers[-1].outputs if outputs is None else outputs
    return first_non_finite(ModelTrace(batch, outputs, layers, loss))


def test_the_extent_of_nested_arrays():
    arrays = {"a": np.array([1.0, -3.0]), "b": [np.array([2], np.int64), np.zeros((0,))]}
    assert ValueStats.from_values(arrays) == ValueStats(3.0)
    assert ValueStats.from_values([]) == ValueStats()
    assert ValueStats.from_values(np.array([np.inf, 5.0])) == ValueStats(5.0, inf=True)
    assert ValueStats.from_values(np.array([np.nan, -np.inf])) == ValueStats(
        0.0, nan=True, inf=True
    )


def test_all_is_well():
    assert trouble(layer("a"), layer("b"), loss=1.0) is None


def test_what_is_infinite_on_purpose_is_no_trouble():
    assert trouble(layer("mask", outputs=BAD), layer("softmax", inputs=BAD)) is None


def test_the_first_layer_that_turns_finite_numbers_into_others():
    problem = trouble(layer("a"), layer("b", outputs=BAD), layer("c", BAD, NAN))
    assert problem.layer == "b"
    assert problem.message == "'b' (Dense) turns float16 inputs of at most 1 into Inf"
    assert problem.keep


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_a_layer_in_float32_is_not_kept_there_once_more(dtype):
    assert not trouble(layer("a", outputs=NAN, dtype=dtype)).keep


def test_numbers_that_do_not_fit_where_they_are_read():
    problem = trouble(layer("a", outputs=ValueStats(1e6), dtype="float32"), layer("b", BAD, BAD))
    assert problem.layer == "b"
    assert "reads values of up to 1e+06, which overflow float16" in problem.message


def test_batch_weights_loss_and_the_models_own_code():
    assert "batch contains NaN" in trouble(layer("a", NAN, NAN), batch=NAN).message
    assert (
        "weights of 'a' (Dense) contain Inf"
        in trouble(layer("a", outputs=NAN, weights=BAD)).message
    )
    assert (
        "the loss is nan, but the outputs of all" in trouble(layer("a"), loss=float("nan")).message
    )
    assert "outputs contain Inf, but the outputs of all" in trouble(layer("a"), outputs=BAD).message


def test_backwards_an_inner_layer_is_named_rather_than_the_one_around_it():
    problem = trouble(
        layer("block/a", gradients_above=FINE, gradients_below=BAD),
        layer("block", gradients_above=FINE, gradients_below=BAD, holds_layers=True),
        layer("b", gradients_above=FINE, gradients_below=FINE),
        loss=1.0,
    )
    assert problem.layer == "block/a"
    assert problem.message.startswith("backwards, 'block/a' (Dense) turns float16 gradients")

"""A result of a metric that is no number is the metric's fault, not the model's."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from neural_mp.core.criterion import Deadline
from neural_mp.errors import MetricError
from neural_mp.metrics import Accuracy
from neural_mp.tuning.evaluation.batches import Batches
from neural_mp.tuning.evaluation.evaluator import Evaluator
from neural_mp.tuning.evaluation.metric_values import convert_to_scalar


class Broken(float):
    def __float__(self):
        raise RuntimeError("no float today")


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (np.ma.masked, "mine must return a number, got a masked value"),
        (np.ma.array([1.0, 2.0], mask=True).mean(), "masked"),
        (np.ma.array(0.5, mask=True), "masked"),
        (Broken(1), r"got a Broken whose float\(\) raises RuntimeError: no float today"),
        (10**400, "in the range of a float"),
        ("0.5", "must return a number, got '0.5'"),
    ],
)
def test_what_is_no_number_is_named(value, words):
    with pytest.raises(MetricError, match=words):
        convert_to_scalar(value, "mine")


@pytest.mark.parametrize("value", [0.5, np.float32(0.5), np.ma.array(0.5), np.ma.array([0.5])])
def test_numbers_are_taken(value):
    assert convert_to_scalar(value, "mine") == 0.5


@pytest.mark.parametrize("result", [Broken(1), np.ma.masked])
def test_an_evaluation_blames_the_metric(result):
    class Mine(Accuracy):
        def result(self):
            return result

    evaluator = Evaluator(Batches([(np.eye(4), np.arange(4))], "data"), [(Mine(), 1.0)])
    with pytest.raises(MetricError, match="Mine must return a number"):
        evaluator(lambda inputs: inputs, Deadline())


class Editing(Accuracy):
    """Accuracy without the label 255, which is filled in place, as scripts of segmentation do."""

    def update(self, preds, labels):
        rows = labels["class"] if isinstance(labels, dict) else labels
        judged = rows != 255
        rows[~judged] = 0
        super().update(preds[judged], rows[judged])


def fill_ignored(pair):
    """Fill the label 255 in place, before the metric."""
    predictions, labels = pair
    rows = labels["class"] if isinstance(labels, dict) else labels
    rows[rows == 255] = 0
    return predictions, labels


@pytest.mark.parametrize(("postprocess", "accuracy"), [(None, 1.0), (fill_ignored, 0.6)])
@pytest.mark.parametrize("kind", [np.ndarray, torch.Tensor, dict])
def test_labels_that_user_code_edits_are_those_of_the_data_in_every_pass(
    kind, postprocess, accuracy
):
    rows = np.array([0, 1, 255, 255, 4])
    original = rows.copy()
    labels = {dict: {"class": rows}, torch.Tensor: torch.from_numpy(rows)}.get(kind, rows)
    evaluator = Evaluator(
        Batches([(np.eye(5), labels)], "data"),
        [(Editing(), 0.5), (Editing(), 0.5)],
        postprocess=postprocess,
    )
    for _ in range(3):
        assert evaluator(lambda inputs: inputs, Deadline()) == pytest.approx(accuracy)
        assert (rows == original).all()

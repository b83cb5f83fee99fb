"""Batches as users have them: dicts with labels in them, and loaders that are at fault."""

import numpy as np
import pytest
import torch
from torch import nn

from neural_mp import AccuracyCriterion, MixedPrecision
from neural_mp.errors import ConversionError, DataError
from neural_mp.tuning.evaluation.batches import Batches
from neural_mp.util.labels import get_batch_labels

WIDTH, CLASSES = 6, 3


class Pairs(nn.Module):
    """Two inputs and, as models of transformers take them, labels that may be left out."""

    def __init__(self):
        super().__init__()
        self.hidden = nn.Linear(WIDTH, 16)
        self.gate = nn.Linear(WIDTH, 16)
        self.head = nn.Linear(16, CLASSES)

    def forward(self, left, right, labels=None):
        logits = self.head(torch.relu(self.hidden(left)) * torch.sigmoid(self.gate(right)))
        if labels is None:
            return {"logits": logits}
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


class Collated(dict):
    """What a tokenizer returns: a mapping of a class of its own."""


class Accuracy:
    """Wants logits, with nothing before them."""

    def reset(self):
        self.right = self.all = 0

    def update(self, preds, labels):
        assert list(preds) == ["logits"]
        self.right += int((preds["logits"].argmax(1) == labels).sum())
        self.all += len(labels)

    def result(self):
        return self.right / self.all


def batches(net, count=4, size=8, **others):
    """Batches labelled by the net itself, the labels first."""
    torch.manual_seed(3)
    collated = []
    for _ in range(count):
        left, right = torch.randn(2, size, WIDTH)
        with torch.no_grad():
            labels = net(left, right)["logits"].argmax(1)
        collated.append(Collated(labels=labels, right=right, left=left, **others))
    return collated


@pytest.fixture
def net():
    torch.manual_seed(0)
    return Pairs().eval()


def tuner(net, tmp_path, evaluation, calibration=None):
    converter = MixedPrecision()
    converter.model, converter.precisions, converter.metric = net, "int8", Accuracy()
    converter.eval_dataloader, converter.calib_dataloader = evaluation, calibration
    converter.accuracy_criterion = AccuracyCriterion(
        0.5, relative=False, any_tolerance=True, any_baseline=True
    )
    converter.objective = "modelsize"
    converter.workspace = tmp_path / "workspace"
    return converter


@pytest.fixture
def tuned(net, tmp_path):
    return tuner(net, tmp_path, batches(net))()


def test_a_dict_with_labels_in_it_is_tuned_and_calibrated_with(net, tuned):
    assert tuned.report.baseline_accuracy == 1.0
    assert tuned.met
    assert tuned.plan.counts()["int8"] == 3


@pytest.mark.slow
def test_batches_that_hold_labels_and_pairs_go_together(net, tmp_path):
    collated = batches(net)
    pairs = [({"left": b["left"], "right": b["right"]}, b["labels"]) for b in collated]
    assert tuner(net, tmp_path, pairs, collated)().report.baseline_accuracy == 1.0
    assert tuner(net, tmp_path, collated, pairs)().report.baseline_accuracy == 1.0


def test_a_result_takes_a_batch_in_every_form(net, tuned):
    (batch, *_) = batches(net)
    left, right = batch["left"], batch["right"]
    expected = tuned(left, right)["logits"]
    for outputs in (
        tuned(**batch),
        tuned(batch),
        tuned(right=right, left=left),
        tuned({"right": right, "left": left}),
        tuned((left, right)),
    ):
        assert list(outputs) == ["logits"]
        torch.testing.assert_close(outputs["logits"], expected, rtol=0, atol=0)


def test_arrays_in_a_mapping_of_another_class_come_back_as_arrays(net, tuned):
    (batch, *_) = batches(net)
    arrays = Collated({key: value.numpy() for key, value in batch.items()})
    assert isinstance(tuned(arrays)["logits"], np.ndarray)


def test_a_result_names_the_input_that_is_missing_or_too_many(net, tuned):
    (batch, *_) = batches(net)
    with pytest.raises(DataError, match="must hold the inputs right, left, but 'right' is missing"):
        tuned(left=batch["left"])
    with pytest.raises(DataError, match=r"Pairs\.forward has no parameter 'rihgt', .*did you"):
        tuned(left=batch["left"], rihgt=batch["right"])


class Labelled(Pairs):
    """Cannot do without labels."""

    def forward(self, left, right, labels):
        return {"logits": super().forward(left, right)["logits"] + 0 * labels[:, None]}


def test_labels_that_a_model_must_be_given_are_fed(net, tmp_path):
    torch.manual_seed(0)
    needy = Labelled().eval()
    result = tuner(needy, tmp_path, batches(net))()
    assert result.report.baseline_accuracy == 1.0
    with pytest.raises(DataError, match="'labels' is missing"):
        result(left=torch.zeros(2, WIDTH), right=torch.zeros(2, WIDTH))


def test_inputs_that_are_named_are_taken_out_of_a_dict(net, tmp_path):
    converter = tuner(net, tmp_path, batches(net, index=torch.arange(8)))
    with pytest.raises(DataError, match="batch 1 of eval_dataloader: Pairs.* parameter 'index'"):
        converter()
    converter.inputs = "left, right"
    assert converter().report.baseline_accuracy == 1.0


@pytest.mark.parametrize(
    ("batch", "words"),
    [
        ({"x": 1, "y": 2}, "eval_dataloader must yield .* got a dict with the keys: x, y"),
        ({"x": 1, "label": 2, "labels": 3}, "got 'labels' and 'label'; remove one"),
        ({"labels": 3}, "got labels only"),
    ],
)
def test_labels_that_cannot_be_told_are_one_clear_error(batch, words):
    with pytest.raises(DataError, match=words):
        get_batch_labels(batch, "eval_dataloader")


def test_labels_of_several_kinds_come_as_a_dict():
    batch = {"input_ids": 0, "end_positions": 2, "start_positions": 1}
    assert get_batch_labels(batch, "it") == {"start_positions": 1, "end_positions": 2}


BROKEN = {
    "keys": lambda batch: {"left": batch["left"], "labels": batch["labels"]},
    "shapes": lambda batch: {**batch, "left": batch["left"][:, :2]},
    "words": lambda batch: {**batch, "left": np.array(["a"] * 8)},
    "dtypes": lambda batch: {**batch, "left": batch["left"].long()},
}


@pytest.mark.parametrize("at", [0, 2])
@pytest.mark.parametrize("kind", BROKEN)
@pytest.mark.parametrize("loader", ["eval_dataloader", "calib_dataloader"])
def test_the_loader_that_is_at_fault_is_blamed(net, tmp_path, loader, kind, at):
    good = batches(net)
    bad = [BROKEN[kind](batch) if n == at else batch for n, batch in enumerate(good)]
    converter = tuner(net, tmp_path, good, good)
    setattr(converter, loader, bad)
    with pytest.raises(DataError, match=f"batch {at + 1} of {loader}"):
        converter()


def test_an_op_that_fails_in_a_runtime_is_blamed_on_its_batch():
    """Some runtimes report a failing op as a ConversionError."""
    data = Batches([1, 2, 3], "eval_dataloader")

    def run():
        with data.blame_batch():
            for batch in data:
                if batch == 2:
                    raise ConversionError("the graph fails")

    with pytest.raises(ConversionError, match="^batch 2 of eval_dataloader: the graph fails$"):
        run()


@pytest.mark.parametrize("loader", ["eval_dataloader", "calib_dataloader"])
def test_a_loader_that_is_empty_is_named(net, tmp_path, loader):
    converter = tuner(net, tmp_path, batches(net), batches(net))
    setattr(converter, loader, [])
    with pytest.raises(DataError, match=f"^{loader} must yield at least one batch"):
        converter()


def test_what_the_users_own_calibration_data_raises_comes_through(net, tmp_path):
    def broken():
        yield batches(net)[0]
        raise KeyError("a file of mine")

    converter = tuner(net, tmp_path, batches(net), broken)
    with pytest.raises(KeyError, match="a file of mine"):
        converter()

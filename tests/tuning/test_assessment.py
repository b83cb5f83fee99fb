"""What is said of a plan that does not meet the target."""

import pytest
import torch
from torch import nn

from neural_mp import ExitPolicy, MixedPrecision
from neural_mp.core.trial import Outcome


class Attention(nn.Module):
    """Every row of an image is a token; those that are empty are masked, as people mask them."""

    def __init__(self, lost):
        super().__init__()
        self.query, self.key, self.head = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(64, 10)
        self.lost = lost

    def forward(self, x):
        rows = x.squeeze(1)
        empty = (rows.sum(2) == 0)[:, None, :]
        mask = empty * torch.finfo(torch.float32).min
        scores = self.query(rows) @ self.key(rows).transpose(1, 2) + mask
        attended = torch.softmax(scores, dim=2) @ rows
        logits = self.head(attended.flatten(1))
        return logits + scores.amax((1, 2))[:, None] if self.lost else logits


class Worse:
    """Right for FP32, the first pass; wrong for all others."""

    def __init__(self):
        self.passes = 0

    def reset(self):
        self.passes += 1

    def update(self, preds, labels):
        pass

    def result(self):
        return 1.0 if self.passes == 1 else 0.5


@pytest.fixture
def converter(digits, all_machine):
    torch.manual_seed(0)
    tuner = MixedPrecision()
    tuner.precisions = "bf16"
    tuner.hardware = all_machine
    tuner.metric = Worse()
    tuner.eval_dataloader = digits[1].loader()
    tuner.exit_policy = ExitPolicy(max_trials=1)
    tuner.early_stopping = False
    return tuner


def test_a_mask_that_becomes_infinite_inside_is_no_defect(converter):
    converter.model = Attention(lost=False).eval()
    (trial,) = converter().trials
    assert trial.outcome is Outcome.MISSED
    assert trial.error is None

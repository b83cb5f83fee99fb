"""`cond`, `while_loop` and `scan`: they run, are saved and reload; what stays in FP32 is said."""

import numpy as np
import pytest
import torch
from torch import nn
from torch._higher_order_ops.scan import scan
from torch._higher_order_ops.while_loop import while_loop

import neural_mp
from neural_mp import MixedPrecision


class Flow(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)


class Cond(Flow):
    def forward(self, x):
        hidden = self.first(x[:, 0])
        return torch.cond(
            x.sum() > 0, lambda h: self.second(h).relu(), lambda h: self.second(h) - 1, (hidden,)
        )


class While(Flow):
    def forward(self, x):
        def body(step, state):
            return step + 1, self.second(state).tanh()

        start = torch.zeros((), dtype=torch.int64)
        return while_loop(lambda step, _: step < 3, body, (start, self.first(x[:, 0])))[1]


class Scan(Flow):
    def forward(self, x):
        def body(state, step):
            state = (step + self.second(state)).tanh()
            return state, state.clone()

        return scan(body, x.new_zeros(x.shape[0], 8), self.first(x), dim=1)[1]


KINDS = {"cond": (Cond, 2), "while_loop": (While, 1), "scan": (Scan, 1)}


@pytest.mark.slow
@pytest.mark.parametrize("name", KINDS)
def test_bodies_run_reload_and_are_said_to_stay_in_fp32(name, tmp_path):
    kind, layers = KINDS[name]
    model = kind().eval()
    batches = [torch.randn(4, 5, 8) + 1.0, torch.randn(3, 6, 8) - 1.0]
    converter = MixedPrecision(
        model=model, precisions="int8", objective="modelsize", workspace=tmp_path / "workspace"
    )
    converter.calib_dataloader = [(batch, None) for batch in batches]
    result = converter()
    (warning,) = (line for line in result.report.warnings if f"within the op {name!r}" in line)
    assert warning.startswith(f"{layers} linear")
    assert "FP32" in warning
    assert result.plan["first"].precision.value == "int8"
    result.save(tmp_path / "saved")
    for form in (result, neural_mp.load(tmp_path / "saved")):
        for batch in batches:
            with torch.no_grad():
                expected = model(batch).numpy()
            outputs = np.asarray(form.loaded(batch))
            assert np.linalg.norm(outputs - expected) < 0.05 * np.linalg.norm(expected)

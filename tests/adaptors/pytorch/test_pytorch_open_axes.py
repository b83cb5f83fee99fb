"""Axes that are open, or fixed: who fixed them is said, and ONNX files name them for people."""

import numpy as np
import pytest
import torch
from torch import nn

import neural_mp
from neural_mp import MixedPrecision
from neural_mp.errors import DataError


class Words(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.head = nn.Embedding(50, 8), nn.Linear(8, 3)

    def forward(self, input_ids, attention_mask):
        hidden = self.head(self.table(input_ids)) * attention_mask[..., None]
        return {"logits": hidden.mean(1), "twice": torch.cat([hidden, hidden], 1)}


def tuned(model, batch):
    converter = MixedPrecision(model=model, precisions="int8", objective="modelsize")
    converter.exit_policy = {"performance_only": True}
    converter.calib_dataloader = [batch]
    return converter()


@pytest.mark.slow
def test_an_onnx_file_names_its_open_axes(tmp_path):
    onnx = pytest.importorskip("onnx")
    ids = torch.randint(0, 50, (4, 7))
    result = tuned(Words().eval(), {"input_ids": ids, "attention_mask": torch.ones(4, 7)})
    result.export_onnx(tmp_path / "words.onnx")
    graph = onnx.load(tmp_path / "words.onnx").graph
    found = {
        value.name: [d.dim_param or d.dim_value for d in value.type.tensor_type.shape.dim]
        for value in (*graph.input, *graph.output)
    }
    assert found == {
        "input_ids": ["batch", "input_ids_axis1"],
        "attention_mask": ["batch", "input_ids_axis1"],
        "logits": ["batch", 3],
        "twice": ["batch", "2*input_ids_axis1", 3],
    }
    reason = "ONNX Runtime before 1.21 knows opsets up to 21 only"
    onnxruntime = pytest.importorskip("onnxruntime", minversion="1.21", reason=reason)
    session = onnxruntime.InferenceSession(tmp_path / "words.onnx")
    feeds = {"input_ids": np.ones((2, 5), np.int64), "attention_mask": np.ones((2, 5), np.float32)}
    assert [found.shape for found in session.run(None, feeds)] == [(2, 3), (2, 10, 3)]


def exported(**options):
    net = nn.Sequential(nn.Flatten(), nn.Linear(16, 3)).eval()
    return torch.export.export(net, (torch.zeros(2, 4, 4),), **options)


def test_a_program_that_was_exported_with_a_fixed_batch_says_so_and_how_to_open_it(tmp_path):
    result = tuned(exported(), torch.zeros(2, 4, 4))
    (warning,) = (w for w in result.report.warnings if "batch size" in w)
    assert warning.startswith("the program was exported with a fixed batch size of 2")
    result.save(tmp_path)
    for form in (result, neural_mp.load(tmp_path)):
        with pytest.raises(DataError, match=r"expected 2, as in the exported program; .*Dim"):
            form(torch.zeros(5, 4, 4))


def test_a_program_that_was_exported_with_an_open_batch_takes_any():
    program = exported(dynamic_shapes=({0: torch.export.Dim("batch")},))
    assert tuned(program, torch.zeros(2, 4, 4))(torch.zeros(5, 4, 4)).shape == (5, 3)

"""Outputs of classes of other packages, in files that are read where these are not."""

import subprocess
import sys
from collections import OrderedDict

import pytest
import torch
from torch import nn

import neural_mp
from neural_mp import MixedPrecision
from neural_mp.errors import DataError

transformers = pytest.importorskip("transformers")

#: Loads the folder where the package cannot be imported, and says what comes out.
FRESH = """
import sys
sys.modules["transformers"] = None
import torch
import neural_mp
loaded = neural_mp.load(sys.argv[1])
ids = torch.arange(24).reshape(2, 12)
out = loaded(input_ids=ids, attention_mask=torch.ones_like(ids), labels=torch.zeros(2).long())
assert isinstance(out, dict), type(out)
assert out["logits"] is out.logits and out[0] is out.logits
assert out.hidden_states[-1].shape == (2, 12, 16)
assert out.loss is out.attentions is None, "names of the class that have no output"
torch.save(out.logits, sys.argv[2])
"""


@pytest.fixture(scope="module")
def tuned():
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.BertConfig(
        vocab_size=50, intermediate_size=32, output_hidden_states=True, **sizes
    )
    net = transformers.BertForSequenceClassification(config).eval()
    ids = torch.randint(0, 50, (8, 12))
    # The mask stands first here, and last in the model's own order.
    batch = transformers.BatchEncoding(
        {"attention_mask": torch.ones_like(ids), "labels": ids[:, 0] % 2, "input_ids": ids}
    )
    converter = MixedPrecision(model=net, precisions="int8", objective="modelsize")
    converter.exit_policy = {"performance_only": True}
    converter.calib_dataloader = [batch]
    return converter()


@pytest.mark.slow
def test_a_tuned_model_of_theirs_loads_where_transformers_is_missing(tuned, tmp_path):
    tuned.save(tmp_path / "saved")
    path = tmp_path / "logits.pt"
    command = [sys.executable, "-c", FRESH, str(tmp_path / "saved"), str(path)]
    run = subprocess.run(command, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    ids = torch.arange(24).reshape(2, 12)
    expected = tuned(input_ids=ids, attention_mask=torch.ones_like(ids)).logits
    torch.testing.assert_close(torch.load(path, weights_only=True), expected)


@pytest.mark.slow
def test_a_loaded_model_takes_its_inputs_in_the_models_own_order(tuned, tmp_path):
    tuned.save(tmp_path)
    loaded = neural_mp.load(tmp_path)
    ids = torch.arange(24).reshape(2, 12)
    mask = (ids % 5 > 0).long()
    expected = tuned(input_ids=ids, attention_mask=mask).logits
    torch.testing.assert_close(loaded(ids, mask).logits, expected)
    with pytest.raises(DataError, match="'attention_mask' is missing"):
        loaded(input_ids=ids)
    assert tuned(ids, mask).loss is loaded(ids, mask).loss is None
    with pytest.raises(
        AttributeError, match="has no output 'losses'; the outputs are logits, hidden_states"
    ):
        _ = loaded(ids, mask).losses


class Dicts(nn.Module):
    """Returns containers of Python's own."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 3)

    def forward(self, x):
        y = self.fc(x)
        return {"y": y, "both": OrderedDict(z=y + 1)}


def test_plain_containers_come_back_as_they_were(tmp_path):
    converter = MixedPrecision(model=Dicts().eval(), precisions="int8")
    converter.exit_policy = {"performance_only": True}
    converter.calib_dataloader = [torch.randn(8, 4)]
    converter().save(tmp_path)
    outputs = neural_mp.load(tmp_path)(torch.zeros(2, 4))
    assert type(outputs) is dict
    assert type(outputs["both"]) is OrderedDict

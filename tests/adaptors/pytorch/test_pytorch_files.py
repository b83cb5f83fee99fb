"""Files that people have of PyTorch models: taken, or refused with what to give instead."""

import sys

import pytest
import torch
from safetensors.torch import save_file
from tiny_bert import tiny_bert_config
from torch import nn

from neural_mp.adaptors.pytorch.adaptor import PyTorchAdaptor
from neural_mp.adaptors.registry import adaptor_for
from neural_mp.errors import MissingFrameworkError, ModelLoadError

transformers = pytest.importorskip("transformers")


@pytest.fixture
def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 3), nn.ReLU())


@pytest.fixture
def folder(tmp_path):
    """A sequence classifier as `save_pretrained` leaves it."""
    config = tiny_bert_config(num_labels=3)
    torch.manual_seed(0)
    net = transformers.BertForSequenceClassification(config).eval()
    net.save_pretrained(tmp_path / "net")
    return tmp_path / "net", net


def refused(path, match):
    with pytest.raises(ModelLoadError, match=match):
        adaptor_for(str(path)).load(str(path))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("name", ["net.pt", "net.jit"])
def test_torchscript_is_named_as_such(net, tmp_path, name):
    torch.jit.script(net).save(str(tmp_path / name))
    refused(tmp_path / name, r"is TorchScript.*give the nn\.Module")


def test_a_pickle_is_not_opened(net, tmp_path):
    torch.save(net.state_dict(), tmp_path / "net.pt")
    refused(tmp_path / "net.pt", r"is a pickle.*torch\.export\.save")


def test_weights_alone_are_no_model(net, tmp_path):
    save_file(net.state_dict(), tmp_path / "net.safetensors")
    refused(tmp_path / "net.safetensors", r"contains weights without a model; give the nn\.Module$")
    (tmp_path / "config.json").write_text("{}")
    refused(tmp_path / "net.safetensors", r"or the folder with config\.json")


@pytest.mark.slow
def test_a_folder_of_transformers_is_loaded_in_the_class_it_names(folder):
    path, net = folder
    tokens = torch.randint(0, 50, (3, 7))
    adaptor = adaptor_for(str(path))
    model = adaptor.load(str(path), example={"input_ids": tokens})
    with torch.no_grad():
        expected = net(tokens).logits
    result = adaptor.predict(model, {"input_ids": tokens})
    torch.testing.assert_close(result.logits, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_a_folder_without_transformers_says_what_to_install(folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(MissingFrameworkError, match="pip install transformers"):
        PyTorchAdaptor().load(str(folder[0]))


def test_a_folder_without_weights_says_so(folder):
    path, _ = folder
    (path / "model.safetensors").unlink()
    refused(path, r"must contain weights")

"""Folders of transformers: no network, no foreign kernels, no model larger than its weights."""

from __future__ import annotations

import json
import socket

import pytest
import torch
from tiny_bert import tiny_bert_config
from torch import nn

from neural_mp.adaptors.pytorch.decoders.transformers_folder import read_folder
from neural_mp.errors import ModelLoadError

transformers = pytest.importorskip("transformers")


@pytest.fixture
def folder(tmp_path):
    """A small encoder, as `save_pretrained` writes it."""
    config = tiny_bert_config()
    transformers.BertModel(config).save_pretrained(tmp_path / "bert")
    return tmp_path / "bert"


def _configure(folder, **changes):
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


@pytest.fixture
def asked(monkeypatch):
    """Hosts that were asked for, none of which answers."""
    addresses = []

    def refuse(*address, **_):
        addresses.append(address)
        raise OSError("no network in this test")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "create_connection", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    return addresses


NETWORK = {
    "model_type": "detr",
    "architectures": ["DetrForObjectDetection"],
    "backbone": "attacker/beacon",
    "use_timm_backbone": True,
    "backbone_kwargs": {"a": 1},
}


def test_a_folder_is_loaded_without_network(folder, asked):
    assert isinstance(read_folder(folder), nn.Module)
    (folder / "config.json").write_text(json.dumps(NETWORK))
    with pytest.raises(ModelLoadError, match="offline"):
        read_folder(folder)
    assert not asked


def test_the_hub_is_online_again_afterwards(folder):
    constants = pytest.importorskip("huggingface_hub.constants")
    previous = constants.HF_HUB_OFFLINE
    read_folder(folder)
    assert previous == constants.HF_HUB_OFFLINE
    (folder / "config.json").write_text(json.dumps(NETWORK))
    with pytest.raises(ModelLoadError):
        read_folder(folder)
    assert previous == constants.HF_HUB_OFFLINE


@pytest.mark.parametrize(
    "changes",
    [
        {"_attn_implementation": "attacker/kernel"},
        {"_attn_implementation": {"": "attacker/kernel"}},
        {"attn_implementation": {"text_config": {"x": ["attacker/kernel"]}}},
        {"text_config": {"_attn_implementation": {"": "attacker/kernel"}}},
        {"_experts_implementation": "attacker/kernel"},
    ],
)
def test_kernels_to_fetch_are_refused_at_any_depth(changes, folder, asked):
    _configure(folder, **changes)
    with pytest.raises(ModelLoadError, match="names the kernel"):
        read_folder(folder)
    assert not asked


@pytest.mark.parametrize(
    ("key", "value"), [("num_hidden_layers", 10**9), ("num_labels", 2**40), ("depths", [2, 10**9])]
)
def test_a_model_that_its_files_do_not_suffice_for_is_refused(key, value, folder):
    _configure(folder, **{key: value})
    with pytest.raises(ModelLoadError, match=f"is refused: {key} must be at most"):
        read_folder(folder)


def test_modules_are_counted_while_they_are_built(folder, monkeypatch):
    """A configuration may count its layers under any name."""

    def build(self, config):
        transformers.PreTrainedModel.__init__(self, config)
        self.layers = nn.ModuleList(nn.Linear(1, 1) for _ in range(10**9))

    monkeypatch.setattr(transformers.BertModel, "__init__", build)
    with pytest.raises(ModelLoadError, match="describes a model of more than .* weights"):
        read_folder(folder)
    built = nn.Sequential(*(nn.Linear(1, 1) for _ in range(3000)))
    assert len(list(built.parameters())) == 6000  # no limit outside


def test_a_header_that_exceeds_its_file_is_refused(folder):
    (folder / "model.safetensors").write_bytes((2**62).to_bytes(8, "little") + b"{}")
    with pytest.raises(ModelLoadError, match="exceeds the file"):
        read_folder(folder)


def test_weights_may_be_shared_or_absent(folder, tmp_path):
    """A head that is not stored, and tied weights."""
    config = json.loads((folder / "config.json").read_text())
    config["architectures"] = ["BertForMaskedLM"]
    (folder / "config.json").write_text(json.dumps(config))
    model = read_folder(folder)
    assert torch.isfinite(next(model.parameters())).all()


def _rewrite_weights(folder, change):
    from safetensors.torch import load_file, save_file

    file = folder / "model.safetensors"
    weights = load_file(file)
    change(weights)
    save_file(weights, file, metadata={"format": "pt"})


def test_names_of_unused_weights_are_few_and_escaped(folder, capfd, caplog):
    """`transformers` prints a line with raw control characters for every name."""
    extra = {f"\x1b[31m{number}\nforged": torch.ones(1) for number in range(1000)}
    _rewrite_weights(folder, lambda weights: weights.update(extra))
    read_folder(folder)
    printed = "".join(capfd.readouterr())
    assert "\x1b" not in printed
    assert "forged" not in printed.replace(r"\nforged", "")
    (message,) = [r.getMessage() for r in caplog.records if r.name.startswith("neural_mp")]
    assert message.endswith("and 996 more")
    assert r"'\x1b[31m0\nforged'" in message
    assert len(message) < 1000
    assert len(message.splitlines()) == 1


def test_missing_weights_are_named(folder, caplog):
    _rewrite_weights(folder, lambda weights: weights.pop("pooler.dense.bias"))
    read_folder(folder)
    assert "weights are missing and get random values: 'pooler.dense.bias'" in caplog.text


def test_a_weight_of_another_shape_is_one_error(folder):
    _rewrite_weights(folder, lambda weights: weights.update({"pooler.dense.bias": torch.ones(3)}))
    expected = r"'pooler\.dense\.bias' in the folder .* must have the shape \[\d+\].* got \[3\]"
    with pytest.raises(ModelLoadError, match=expected):
        read_folder(folder)

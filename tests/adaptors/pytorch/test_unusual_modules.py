"""Modules of unusual origin or with unusual ops convert, or are refused with the cause."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn

import neural_mp
from neural_mp import ExitPolicy, MixedPrecision
from neural_mp.adaptors.pytorch.adaptor import PyTorchAdaptor
from neural_mp.errors import CaptureError, ModelLoadError, NeuralMPError
from neural_mp.io.limits import trusting


def layers():
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 2, 3))


class ScriptedPart(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Conv2d(3, 4, 3), nn.Conv2d(2, 2, 1)
        self.middle = torch.jit.script(nn.Sequential(nn.Conv2d(4, 2, 3), nn.ReLU()).eval())

    def forward(self, x):
        return self.last(self.middle(self.first(x)))


IMAGES = torch.ones(2, 3, 8, 8)


@pytest.mark.slow
def test_modules_made_in_inference_mode_convert_and_reload(tmp_path):
    with torch.inference_mode():
        module = layers().eval()
        expected = module(IMAGES)
    adaptor = PyTorchAdaptor()
    model = adaptor.load(module, example=(IMAGES,))
    adaptor.save(model, tmp_path)
    for form in (model, adaptor.restore(tmp_path)):
        torch.testing.assert_close(adaptor.predict(form, (IMAGES,)), expected.clone())
    assert adaptor.native(model) is module
    assert all(parameter.is_inference() for parameter in module.parameters())


@pytest.mark.slow
def test_a_scripted_part_is_named_and_stays_beside_converted_modules():
    module, adaptor = ScriptedPart().eval(), PyTorchAdaptor()
    with pytest.raises(CaptureError, match=r"'middle' is TorchScript.*capture = 'modules'"):
        adaptor.load(module, example=(IMAGES,))
    model = adaptor.load(module, example=(IMAGES,), capture="modules")
    assert set(model.parts) == {"first", "last"}
    torch.testing.assert_close(adaptor.predict(model, (IMAGES,)), module(IMAGES).detach())


class Remembers(nn.Module):
    """Append keys to a list of the caller, as decoder layers fill a cache."""

    def __init__(self):
        super().__init__()
        self.keys, self.out = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x, memory):
        memory.append(self.keys(x))
        return self.out(torch.stack(memory).sum(0))


class SharesAList(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = Remembers(), Remembers()

    def forward(self, x):
        memory = []
        return self.second(self.first(x, memory), memory)


def test_modules_that_change_an_object_of_the_caller_stay_beside_converted_layers():
    module, x, adaptor = SharesAList().eval(), torch.randn(3, 4), PyTorchAdaptor()
    model = adaptor.load(module, example=(x,), capture="modules")
    assert set(model.parts) == {"first.keys", "first.out", "second.keys", "second.out"}
    torch.testing.assert_close(adaptor.predict(model, (x,)), module(x).detach())


def on_meta():
    with torch.device("meta"):
        return layers()


def quantized():
    float_model = nn.Sequential(nn.Linear(8, 4), nn.ReLU()).eval()
    return torch.ao.quantization.quantize_dynamic(float_model, {nn.Linear})


REFUSED = {
    "lazy": (lambda: nn.Sequential(nn.LazyConv2d(2, 3)), IMAGES, "'0.weight' has no shape yet"),
    "meta": (on_meta, IMAGES, "'0.weight' is on the meta device"),
    "quantized": (quantized, torch.ones(2, 8), "'0' is already quantized"),
}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", REFUSED)
def test_modules_without_usable_weights_are_refused_with_the_cause(kind):
    make, x, message = REFUSED[kind]
    with pytest.raises((ModelLoadError, CaptureError), match=message):
        PyTorchAdaptor().load(make().eval(), example=(x,))


class Padding(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def forward(self, x):
        y = self.layer(x)
        return nn.utils.rnn.pad_sequence([y[0], y[1, :3]], batch_first=True)


class Segments(Padding):
    def forward(self, x):
        lengths = torch.tensor([1, 1])
        return torch.segment_reduce(self.layer(x)[:, 0], "sum", lengths=lengths)


def tuned(module, batches, folder):
    converter = MixedPrecision(
        precisions="int8", cache=False, exit_policy=ExitPolicy(performance_only=True)
    )
    converter.workspace = folder / "run"
    converter.model, converter.calib_dataloader = module, batches
    return converter()


@pytest.mark.slow
@pytest.mark.parametrize("kind", [Padding, Segments])
def test_what_is_saved_is_loaded_or_the_conversion_names_what_to_trust(kind, tmp_path):
    x = torch.randn(2, 5, 4, generator=torch.Generator().manual_seed(0))
    result = tuned(kind().eval(), [x], tmp_path)
    result.save(tmp_path / "saved")
    messages = [warning for warning in result.report.warnings if "trust" in warning]
    if kind is Padding:
        assert not messages
        loaded = neural_mp.load(tmp_path / "saved")
    else:
        assert "neural_mp.load(path, trust=['aten.segment_reduce'])" in messages[0]
        with pytest.raises(NeuralMPError, match="segment_reduce"):
            neural_mp.load(tmp_path / "saved")
        loaded = neural_mp.load(tmp_path / "saved", trust=["aten.segment_reduce"])
    torch.testing.assert_close(loaded(x), result(x))


@pytest.mark.slow
def test_results_are_copied_and_say_how_to_store_them(tmp_path):
    x = torch.randn(4, 8)
    result = tuned(nn.Sequential(nn.Linear(8, 8), nn.ReLU()).eval(), [x], tmp_path)
    for copied in (copy.copy(result), copy.deepcopy({"result": result})["result"]):
        assert torch.equal(copied(x), result(x))
        assert copied.plan == result.plan
    with pytest.raises(pickle.PicklingError, match=r"result.save\(folder\), and neural_mp\.load"):
        pickle.dumps(result)


class PartlyConverted(nn.Module):
    """A layer in INT8, and weights that stay float."""

    def __init__(self):
        super().__init__()
        self.dense, self.scale = nn.Linear(8, 8), nn.Parameter(torch.rand(8))

    def forward(self, x):
        return self.dense(x) * self.scale + torch.linspace(0, 1, 8)


@pytest.mark.slow
def test_results_keep_their_types_and_are_not_traced(tmp_path):
    x = torch.randn(4, 8)
    result = tuned(PartlyConverted().eval(), [x], tmp_path)
    module, expected = result.model, result(x)
    for dtype in (torch.float64, torch.float16, torch.bfloat16):
        with pytest.raises(NeuralMPError, match=f"element types.* got {dtype}"):
            module.to(dtype)
        with pytest.raises(NeuralMPError, match="element types"):
            nn.Sequential(module, nn.Softmax(1)).to(dtype)
    with pytest.raises(NeuralMPError, match=r"device.* on meta"):
        module.to("meta")
    with pytest.raises(NeuralMPError, match="load_state_dict of the original model"):
        module.load_state_dict(module.state_dict())
    for traced in (module, lambda batch: result(batch)):
        with pytest.raises(NeuralMPError, match="traced for TorchScript"):
            torch.jit.trace(traced, x)
    unchanged = (module.float(), module.to("cpu"), module.to(memory_format=torch.channels_last))
    for variant in (module, *unchanged, module.share_memory()):
        assert torch.equal(variant(x), expected)


class TwoInputs(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(3, 4), nn.Linear(5, 4)

    def forward(self, left, right):
        return self.a(left) + self.b(right)


@pytest.mark.slow
@pytest.mark.parametrize("container", [tuple, list])
def test_evaluation_batches_of_three_hold_the_labels_last(container, tmp_path):
    torch.manual_seed(0)
    module = TwoInputs().eval()
    left, right = torch.randn(40, 3), torch.randn(40, 5)
    labels = module(left, right).argmax(1)
    converter = MixedPrecision(precisions="int8", cache=False)
    converter.workspace = tmp_path / "run"
    converter.model, converter.metric = module, "accuracy"
    parts = zip(left.split(10), right.split(10), labels.split(10), strict=True)
    converter.eval_dataloader = [container(part) for part in parts]
    result = converter()
    assert result.report.baseline_accuracy == 1
    assert any("inputs followed by labels" in warning for warning in result.report.warnings)


class LengthRegulator(nn.Module):
    """Rows repeated as often as the values of the input demand, padded to the longest."""

    def __init__(self):
        super().__init__()
        self.embedding, self.dense = nn.Embedding(4, 8), nn.Linear(8, 8)

    def forward(self, x):
        rows = self.embedding(x)
        repeated = [rows[i].repeat_interleave(x[i] + 1, dim=0) for i in range(len(rows))]
        return self.dense(nn.utils.rnn.pad_sequence(repeated, batch_first=True))


@pytest.mark.slow
def test_ops_on_sizes_that_depend_on_data_are_kept(tmp_path):
    x, second = torch.tensor([[0, 1], [2, 3]]), torch.tensor([[3, 3], [1, 0]])
    module, adaptor = LengthRegulator().eval(), PyTorchAdaptor()
    model = adaptor.load(module, example=(x,))
    adaptor.save(model, tmp_path)
    with trusting(["aten.pad_sequence"]):
        loaded = adaptor.restore(tmp_path)
    for form in (model, loaded):
        for batch in (x, second):
            torch.testing.assert_close(adaptor.predict(form, (batch,)), module(batch).detach())

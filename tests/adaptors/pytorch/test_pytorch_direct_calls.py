"""Calls that skip what was checked before give the same, and refuse the same."""

import numpy as np
import pytest
import torch
from machine import machine
from torch import nn

from neural_mp.adaptors.contract import Adaptor
from neural_mp.adaptors.loaded_model import LoadedModel
from neural_mp.adaptors.pytorch.kernels import direct_calls
from neural_mp.adaptors.pytorch.kernels.direct_calls import DirectCalls
from neural_mp.adaptors.registry import adaptor_for
from neural_mp.core.precision import Precision
from neural_mp.errors import DataError
from neural_mp.testing import uniform


class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(6, 4), nn.Linear(6, 4)

    def forward(self, x, y):
        return {"sum": self.a(x) + self.b(y), "difference": self.a(x) - self.b(y)}


class Counting(nn.Module):
    """Keeps state that a run changes."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 4)
        self.register_buffer("runs", torch.zeros(()))

    def forward(self, x):
        self.runs += 1
        return self.layer(x) + 0 * self.runs


class Overwriting(nn.Module):
    """Writes to its input."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 4)

    def forward(self, x):
        return self.layer(x.mul_(2))


@pytest.fixture(params=["fp32", "int8"])
def model(request):
    torch.manual_seed(0)
    net = Two().eval()
    x, y = torch.randn(2, 8, 6)
    adaptor = adaptor_for(net)
    source = adaptor.load(net, example=(x, y))
    if request.param == "fp32":
        return net, LoadedModel(adaptor, source)
    space = adaptor.space(source, machine())
    resolved = space.resolve(uniform(space, Precision.INT8))
    observations = adaptor.observe(source, [(x, y)], space)
    return net, LoadedModel(adaptor, adaptor.convert(source, resolved, observations, space))


def test_later_calls_give_what_the_first_one_does_in_every_form_and_order(model):
    net, loaded = model
    x, y = torch.randn(2, 5, 6)
    with torch.no_grad():
        expected = net(x, y)
    for inputs in ((x, y), [x, y], {"x": x, "y": y}, {"y": y, "x": x}):
        first, second, third = (loaded(inputs) for _ in range(3))
        for result in (first, second, third):
            assert list(result) == ["sum", "difference"]
            for name, value in result.items():
                torch.testing.assert_close(value, first[name], rtol=0, atol=0)
                torch.testing.assert_close(value, expected[name], rtol=0.1, atol=0.4)


def test_one_tensor_given_twice_does_not_stand_for_two(model):
    _, loaded = model
    x, y = torch.randn(2, 5, 6)
    repeated = loaded((x, x))["difference"]
    distinct = loaded((x, y))["difference"]
    again = loaded((x, y))["difference"]
    torch.testing.assert_close(distinct, again, rtol=0, atol=0)
    assert not torch.equal(repeated, distinct)


def test_arrays_come_back_as_arrays_and_strides_do_not_matter(model):
    _, loaded = model
    x, y = np.random.default_rng(0).random((2, 6, 5), dtype=np.float32)
    transposed = (x.T, y.T)
    first, second = loaded(transposed), loaded(transposed)
    assert all(isinstance(value, np.ndarray) for value in second.values())
    plain = loaded(tuple(map(np.ascontiguousarray, transposed)))
    np.testing.assert_array_equal(first["sum"], second["sum"])
    np.testing.assert_allclose(plain["sum"], second["sum"], rtol=1e-6)


def test_every_size_is_checked_when_it_is_met_first(model):
    _, loaded = model
    x, y = torch.randn(2, 5, 6)
    loaded((x, y))
    loaded((x, y))
    for _ in range(2):
        with pytest.raises(DataError):
            loaded((x, torch.randn(5, 7)))
        with pytest.raises(DataError):
            loaded((x,))
    loaded((x[:3], y[:3]))


def test_results_need_no_gradients_whoever_asks(model):
    _, loaded = model
    x, y = torch.randn(2, 5, 6)
    for _ in range(2):
        assert not loaded((x, y))["sum"].requires_grad
    assert torch.is_grad_enabled()


def test_an_fp32_result_runs_the_users_own_module():
    net = Two().eval()
    adaptor = adaptor_for(net)
    inputs = tuple(torch.randn(2, 8, 6))
    loaded = LoadedModel(adaptor, adaptor.load(net, example=inputs))
    assert type(loaded.held.cached_result(DirectCalls)._target) is Two
    assert loaded.held.cached_result(DirectCalls)._target.a.weight is net.a.weight


def test_an_fp32_result_returns_the_bits_of_the_users_own_module_from_the_first_call_on():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3))
    for _ in range(3):
        net(torch.randn(16, 3, 8, 8))  # statistics that folding multiplies into the weights
    net.eval()
    adaptor = adaptor_for(net)
    images = torch.randn(4, 3, 8, 8)
    loaded = LoadedModel(adaptor, adaptor.load(net, example=images))
    with torch.no_grad():
        expected = net(images)
    for inputs in (images, images, [images], {"input": images}, (images,), images):
        torch.testing.assert_close(loaded(inputs), expected, rtol=0, atol=0)


def test_an_fp32_result_returns_the_same_bits_for_inputs_within_containers():
    class Nested(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.norm = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)

        def forward(self, batch):
            return self.norm(self.conv(batch["images"][0])) * batch["scale"]

    torch.manual_seed(0)
    net, images = Nested(), torch.randn(4, 3, 8, 8)
    net({"images": [torch.randn(16, 3, 8, 8)], "scale": torch.ones(())})
    net.eval()
    adaptor, batch = adaptor_for(net), {"images": [images], "scale": torch.full((), 0.3)}
    loaded = LoadedModel(adaptor, adaptor.load(net, example={"batch": batch}))
    with torch.no_grad():
        expected = net(batch)
    for _ in range(3):
        torch.testing.assert_close(loaded({"batch": batch}), expected, rtol=0, atol=0)


@pytest.mark.parametrize("kind", [Counting, Overwriting])
def test_a_module_that_writes_to_itself_or_its_input_is_run_as_its_graph(kind):
    net = kind().eval()
    adaptor = adaptor_for(net)
    x = torch.randn(8, 6)
    loaded = LoadedModel(adaptor, adaptor.load(net, example=x))
    original = x.clone()
    outputs = [loaded(x) for _ in range(3)]
    torch.testing.assert_close(x, original, rtol=0, atol=0)
    torch.testing.assert_close(outputs[0], outputs[2], rtol=0, atol=0)
    if kind is Counting:
        assert float(net.runs) == 0


def test_a_graph_that_calibrated_a_layout_is_not_run_to_check_it(monkeypatch):
    net, images = nn.Sequential(nn.Linear(6, 4), nn.ReLU()).eval(), torch.rand(5, 6)
    adaptor = adaptor_for(net)
    model = adaptor.load(net, example=torch.rand(3, 6))
    space = adaptor.space(model, machine())
    adaptor.observe(model, [images], space)
    checked = []
    monkeypatch.setattr(direct_calls, "run_call", lambda *arguments: checked.append(arguments))
    assert torch.equal(adaptor.predict(model, images), net(images))
    assert not checked
    adaptor.predict(model, torch.rand(7, 6))
    assert len(checked) == 1


def test_sizes_known_at_capture_are_those_of_a_run():
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 16, 5)).eval()
    adaptor = adaptor_for(net)
    model = adaptor.load(net, example=torch.rand(2, 3, 6, 6))
    graph = adaptor.graph(model)
    names = [*graph.inputs, *(op.name for op in graph)]
    for count in (2, 5):
        images = torch.rand(count, 3, 6, 6)
        counts = adaptor.element_counts(model, images, names)
        assert counts == Adaptor.element_counts(adaptor, model, images, names)
        assert len(counts) > 3

"""The user's module is not modified, and state that converted models leave out is named."""

from __future__ import annotations

from collections.abc import Iterator
from types import CellType, FunctionType, SimpleNamespace

import numpy as np
import pytest
import stateful_nets as nets
import torch
from torch import nn
from torch.fx._lazy_graph_module import _LazyGraphModule

from neural_mp.adaptors.pytorch.adaptor import PyTorchAdaptor
from neural_mp.adaptors.pytorch.graph.module_state import preserve_module_state

EVERY_NET = (*nets.DEPENDENT, *nets.INDEPENDENT)


def state_of(value, path="", visited=None) -> Iterator[tuple]:
    """Yield path, identity and value of all that a module refers to; independent of the code."""
    visited = {} if visited is None else visited
    if isinstance(value, torch.Tensor):
        yield path, id(value), type(value), value.detach().clone().numpy().tobytes()
        return
    if isinstance(value, np.ndarray):
        yield path, id(value), value.tobytes()
        return
    if id(value) in visited:
        return
    visited[id(value)] = value
    parts = {}
    if isinstance(value, dict):
        parts = dict(value)
    elif isinstance(value, list | tuple | nets.deque):
        parts = dict(enumerate(value))
    elif isinstance(value, FunctionType):
        parts = dict(enumerate(value.__closure__ or ()))
        parts.update({name: nets.FEATURES for name in value.__code__.co_names if "FEAT" in name})
    elif isinstance(value, CellType):
        parts = {"cell": value.cell_contents}
    elif isinstance(value, nn.Module | nets.Statistics | SimpleNamespace):
        parts = dict(vars(value))
        parts["class"] = vars(type(value)).get("log")
    yield path, id(value), repr(value) if not parts else sorted(map(str, parts))
    for name, part in parts.items():
        yield from state_of(part, f"{path}.{name}", visited)


def loaded(make, capture, x):
    torch.manual_seed(0)
    module, adaptor = make().eval(), PyTorchAdaptor()
    state = list(state_of(module))
    with torch.no_grad():
        reference = make().eval()
        reference.load_state_dict(module.state_dict())
        expected = reference(x)
    nets.ClassLog.log.clear()
    nets.FEATURES.clear()
    model = adaptor.load(module, example=(x,), capture=capture)
    return module, state, expected, adaptor, model


@pytest.mark.slow
@pytest.mark.parametrize("capture", ["whole", "modules"])
@pytest.mark.parametrize("make", EVERY_NET, ids=lambda make: make.__name__)
def test_every_attribute_of_the_users_module_is_the_same_object_with_the_same_value(make, capture):
    if capture == "modules" and make in (nets.hooked, nets.hooked_closure, nets.hooked_global):
        pytest.skip("hooks of the user run with the user's code")
    if capture == "modules" and make is nets.ClassLog:
        pytest.skip("the class belongs to the user's code, which runs")
    x = torch.randn(3, 8, generator=torch.Generator().manual_seed(1))
    module, state, _, adaptor, model = loaded(make, capture, x)
    for _ in range(2):
        adaptor.predict(model, (x,))
    assert list(state_of(module)) == state


@pytest.mark.slow
@pytest.mark.parametrize("capture", ["whole", "modules"])
@pytest.mark.parametrize("make", EVERY_NET, ids=lambda make: make.__name__)
def test_every_call_computes_what_the_first_call_of_the_module_does(make, capture):
    if capture == "modules" and make is nets.hooked:
        pytest.skip("the hook writes to the dict of the user's module, and the copy reads its own")
    x = torch.randn(3, 8, generator=torch.Generator().manual_seed(1))
    _, _, expected, adaptor, model = loaded(make, capture, x)
    for _ in range(3):
        torch.testing.assert_close(adaptor.predict(model, (x,)), expected)
    torch.testing.assert_close(
        adaptor.predict(model, (torch.cat([x, x, x]),))[:3].shape, expected.shape
    )


@pytest.mark.slow
@pytest.mark.parametrize("capture", ["whole", "modules"])
@pytest.mark.parametrize("make", nets.DEPENDENT, ids=lambda make: make.__name__)
def test_state_that_outputs_depend_on_is_named(make, capture):
    *_, model = loaded(make, capture, torch.ones(3, 8))
    warnings = [warning for warning in model.warnings if "in converted models" in warning]
    if capture == "whole":
        assert len(warnings) == 1 + (make is nets.Buffers)
    assert any(repr(nets.DEPENDENT[make]) in warning for warning in warnings)


@pytest.mark.slow
def test_a_table_that_is_computed_once_is_no_state():
    *_, model = loaded(nets.Table, "whole", torch.ones(3, 8))
    assert not model.warnings


def test_a_graph_whose_code_is_generated_on_demand_runs_after_its_state_is_restored():
    traced = torch.export.export(nn.Linear(4, 2), (torch.ones(3, 4),)).module(check_guards=False)
    graph = _LazyGraphModule(traced, traced.graph)
    inputs = torch.ones(3, 4)
    with preserve_module_state(graph):
        expected = graph(inputs)
    assert torch.equal(graph(inputs), expected)

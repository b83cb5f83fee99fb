"""Arguments of ops in graphs within a program, and those that other ops of the program change."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from program_files import calls_of, changed, saved
from torch._higher_order_ops.map import map as mapped
from torch._higher_order_ops.scan import scan
from torch._higher_order_ops.while_loop import while_loop

from neural_mp.api.loading import load_source
from neural_mp.errors import ModelLoadError

aten = torch.ops.aten
X = torch.linspace(-1, 1, 8).reshape(2, 4)
Run = Callable[[torch.Tensor, torch.Tensor], Any]
Graph = dict[str, Any]


def _norm(y, b):
    return aten._native_batch_norm_legit_no_training(y, b, b, b, b, 0.1, 1e-5)[0]


def _branch(y, b):
    return torch.cond(y.sum() > 0, lambda y, b: _norm(y, b[0:4]), lambda y, b: y * 2, (y, b))


def _branch_in_a_branch(y, b):
    return torch.cond(y.sum() < 99, _branch, lambda y, b: y * 3, (y, b))


def _loop(y, b):
    first = (torch.tensor(0), y)
    return while_loop(lambda i, _: i < 3, lambda i, y: (i + 1, _norm(y, b[0:4])), first)[1]


def _scan(y, b):
    return scan(lambda c, x: (_norm(c, b[0:4]), c * x), y, torch.stack([y, y]))[1]


def _rows(y, b):
    return mapped(lambda row: _norm(row, b[0:4]), torch.stack([y, y, y]))


def _autocast(y, b):
    with torch.no_grad():
        return _norm(y, b[0:4]) + y


NESTED: dict[str, Run] = {
    "branch": _branch,
    "branch in a branch": _branch_in_a_branch,
    "loop": _loop,
    "scan": _scan,
    "rows": _rows,
    "context": _autocast,
}


def _shrink(graph: Graph) -> None:
    """Make the weights of a norm fewer than its channels, although the graph still says four."""
    (node,) = calls_of(graph, "slice")
    node["inputs"][3]["arg"] = {"as_int": 1}


def _loaded(path) -> Any:
    return load_source(str(path), None, None)


@pytest.mark.parametrize("name", NESTED)
def test_ops_in_nested_graphs_are_taken_if_their_arguments_fit(tmp_path, name):
    path = saved(tmp_path, NESTED[name], torch.ones(8))
    expected = torch.export.load(path).module()(X)
    model = _loaded(path)
    got = model.adaptor.predict(model.held, X)
    np.testing.assert_allclose(got, expected.detach().numpy(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", NESTED)
def test_ops_in_nested_graphs_are_refused_if_their_arguments_do_not_fit(tmp_path, name):
    path = changed(saved(tmp_path, NESTED[name], torch.ones(8)), _shrink)
    with pytest.raises(ModelLoadError, match=r"refused: .*a value per channel \(4\), got \(1,\)$"):
        _loaded(path)


def test_what_a_loop_carries_keeps_its_shape(tmp_path):
    def run(y, b):
        first = (torch.tensor(0), y)
        body = lambda i, y: (i + 1, aten.narrow(_norm(y, b), 1, 0, 4) + 0)  # noqa: E731
        return while_loop(lambda i, _: i < 3, body, first)[1]

    def cut(graph: Graph) -> None:
        (node,) = calls_of(graph, "narrow")
        node["inputs"][3]["arg"] = {"as_int": 1}

    path = saved(tmp_path, run)
    assert _loaded(path) is not None
    with pytest.raises(ModelLoadError, match="carries must keep their shape"):
        _loaded(changed(path, cut))


def test_an_op_is_not_hidden_in_another_one(tmp_path):
    def hide(graph: Graph) -> None:
        (node,) = calls_of(graph, "batch_norm")
        operator = {"name": "op", "arg": {"as_operator": node["target"]}, "kind": 1}
        token = {**node["inputs"][0], "name": "token"}
        node["inputs"] = [token, operator, *node["inputs"]]
        node["target"] = "torch.ops.higher_order.with_effects"

    # Before torch 2.10, torch itself refuses the call.
    refusals = "must be called by itself, not by with_effects|While executing %with_effects"
    with pytest.raises(ModelLoadError, match=refusals):
        _loaded(changed(saved(tmp_path, lambda y, b: (y, _norm(y, b))), hide))


def test_an_op_that_changes_a_shape_in_place_counts(tmp_path):
    def run(y, b):
        z = y.relu()
        return y, _norm(aten.as_strided_(z, [2, 4], [4, 1]), b)

    def enlarge(graph: Graph) -> None:
        (strided,) = calls_of(graph, "as_strided_")
        strided["inputs"][1]["arg"] = {"as_ints": [1, 8]}
        strided["inputs"][2]["arg"] = {"as_ints": [8, 1]}
        (norm,) = calls_of(graph, "batch_norm")
        norm["inputs"][0]["arg"] = {"as_tensor": {"name": "relu"}}

    with pytest.raises(ModelLoadError, match=r"a value per channel \(8\), got \(4,\)"):
        _loaded(changed(saved(tmp_path, run), enlarge))


IDS, WEIGHT, OFFSETS = torch.tensor([0, 1, 2, 3]), torch.ones(5, 4), torch.tensor([0, 2, 3])


def _bag(offsets: torch.Tensor) -> torch.Tensor:
    return F.embedding_bag(IDS.clone(), WEIGHT.clone(), offsets, mode="sum")


GOOD_OFFSETS: dict[str, tuple[Run, torch.Tensor]] = {
    "constant": (lambda y, b: (y, _bag(b)), OFFSETS),
    "of 32 bits": (lambda y, b: (y, _bag(b.to(torch.int64).clone())), OFFSETS.int()),
    "counted": (lambda y, b: (y, _bag(torch.arange(0, 4, 2))), OFFSETS),
    "in a branch": (
        lambda y, b: torch.cond(y.sum() > 9, _bag, lambda b: _bag(b) * 2, (b,)) + y.sum(),
        OFFSETS,
    ),
    "beside an update": (lambda y, b: (y.relu_(), _bag(b).relu_()), OFFSETS),
}
HOSTILE_OFFSETS: dict[str, tuple[Run, torch.Tensor, str]] = {
    "cast to fewer bits": (
        lambda y, b: (y, _bag(b.to(torch.int8).to(torch.int64))),
        torch.tensor([0, 200, 256]),
        "integers of 32 or 64 bits",
    ),
    "read as another type": (
        lambda y, b: (y, _bag(b.view(torch.int32))),
        OFFSETS,
        "integers of 32 or 64 bits",
    ),
    "of 8 bits": (
        lambda y, b: (y, _bag(b.to(torch.int64))),
        torch.tensor([0, 200, 3], dtype=torch.uint8),
        "ascending order",
    ),
    "differences that overflow": (
        lambda y, b: (y, _bag(b)),
        torch.tensor([0, 2**63 - 1, -5, 3]),
        "ascending order",
    ),
    "in order along one axis": (
        lambda y, b: (y, _bag(b.reshape(4))),
        torch.tensor([[0, 3], [1, 4]]),
        "ascending order",
    ),
    "counted down": (
        lambda y, b: (y, _bag(torch.arange(0, -4, -1))),
        OFFSETS,
        "an input, a constant, or of the op arange",
    ),
    "changed afterwards": (
        lambda y, b: (y, _bag(b), b.neg_()),
        OFFSETS,
        "must not be changed by an op",
    ),
    "changed by a loop": (
        lambda y, b: while_loop(
            lambda i, *_: i < 3,
            lambda i, o, s: (i + 1, o - 1, s + _bag(o)),
            (torch.tensor(0), b, torch.zeros(3, 4)),
        )[2],
        OFFSETS,
        "must not change from one iteration",
    ),
}


@pytest.mark.parametrize("name", GOOD_OFFSETS)
def test_bags_are_taken_if_they_begin_in_ascending_order(tmp_path, name):
    run, offsets = GOOD_OFFSETS[name]
    path = saved(tmp_path, run, offsets)
    expected = torch.export.load(path).module()(X)
    model = _loaded(path)
    got = model.adaptor.predict(model.held, X)
    if isinstance(expected, tuple):
        got, expected = got[1], expected[1]
    np.testing.assert_allclose(got, expected.detach().numpy(), rtol=1e-5)


@pytest.mark.parametrize("name", HOSTILE_OFFSETS)
def test_bags_are_refused_if_they_may_begin_in_another_order(tmp_path, name):
    run, offsets, fault = HOSTILE_OFFSETS[name]
    with pytest.raises(ModelLoadError, match=f"offsets must .*{fault}|offsets {fault}"):
        _loaded(saved(tmp_path, run, offsets))


def test_a_write_that_the_graph_does_not_pass_on_is_seen(tmp_path):
    def negate(graph: Graph) -> None:
        (node,) = calls_of(graph, "mul_")
        node["inputs"][0]["arg"] = {"as_tensor": {"name": "b_buffer"}}
        node["inputs"][1]["arg"] = {"as_int": -(10**7)}
        (bag,) = calls_of(graph, "embedding_bag")
        offsets = next(argument for argument in bag["inputs"] if argument["name"] == "offsets")
        offsets["arg"] = {"as_tensor": {"name": "b_buffer"}}

    path = saved(tmp_path, lambda y, b: (y, _bag(aten.mul_(b.clone(), 1))), OFFSETS)
    with pytest.raises(ModelLoadError, match="offsets must not be changed by an op"):
        _loaded(changed(path, negate))

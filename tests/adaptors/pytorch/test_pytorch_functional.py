"""Capture traces a model once, and computes what the model's own code does."""

from __future__ import annotations

from unittest.mock import Mock

import pytest
import torch
from torch import nn
from torch.export import Dim, ExportedProgram
from torch.nn import functional as F

from neural_mp.adaptors.pytorch.adaptor import PyTorchAdaptor
from neural_mp.adaptors.pytorch.capture import functionalize, graph_capture
from neural_mp.adaptors.pytorch.graph.graph_edit import has_tensors
from neural_mp.adaptors.pytorch.versions import make_unguarded_module


class Residual(nn.Module):
    """Updated in place, all of it by what nobody else reads."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.short, self.head = nn.Conv2d(2, 4, 1), nn.Linear(4, 3)

    def forward(self, x):
        y = F.relu(self.norm(self.conv(x)), inplace=True)
        y += self.short(x)
        y = F.hardtanh(y, inplace=True)
        return self.head(F.dropout(y, 0.5, self.training).mean((2, 3)))


class Reshaped(nn.Module):
    """Ops that copy or do not, as memory has it; sizes that are asked of results."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.mix = nn.Conv2d(2, 8, 2, 2), nn.Linear(8, 8)

    def forward(self, x):
        tokens = self.embed(x).flatten(2).transpose(1, 2)
        batch, count = tokens.shape[:2]
        values, gates = self.mix(tokens).to(torch.float64).to(x.dtype).chunk(2, dim=-1)
        return (values * gates).permute(2, 0, 1).reshape(4, -1), tokens.reshape(batch, count * 8)


class SeenElsewhere(nn.Module):
    """What is updated in place is read through a view, too."""

    def forward(self, x):
        y = x * 2
        row = y[:, 0]
        y.relu_()
        row.add_(3)
        return y, row


class ReadBefore(nn.Module):
    """What is updated in place was read before."""

    def forward(self, x):
        y = x * 2
        shifted = y + 1
        y.add_(shifted)
        return y, shifted


class Dropped(nn.Module):
    """Every kind of dropout, which inference leaves out; and a mask that is filled in place."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv2d(2, 4, 3, padding=1), nn.Linear(4, 3)
        kinds = (nn.Dropout, nn.Dropout2d, nn.AlphaDropout, nn.FeatureAlphaDropout)
        self.dropped = nn.Sequential(*(kind(0.5, flag) for kind in kinds for flag in (False, True)))

    def forward(self, x):
        y = self.dropped(self.conv(x))
        mask = torch.zeros_like(y).masked_fill_(y > 0, -1.0)
        y.mul_(2)
        return self.head((y + mask).mean((2, 3)))


class Literals(nn.Module):
    """Tensors made of numbers in the code, one of which is updated in place."""

    def forward(self, x):
        offset = torch.tensor([[[1.0]], [[2.0]]])
        offset.mul_(0.5)
        return torch.where(x > 0, x, torch.tensor(-1.0)) + offset


def exported(module: nn.Module) -> ExportedProgram:
    x = torch.randn(3, 2, 8, 8)
    shapes = ({0: Dim.AUTO, 2: Dim.AUTO, 3: Dim.AUTO},)
    with torch.no_grad():
        return torch.export.export(module.eval(), (x,), dynamic_shapes=shapes, strict=False)


def ops_of(module: torch.fx.GraphModule) -> list[str]:
    """Every op that gives tensors, with what it reads."""
    return [
        f"{node.target} of {[str(source.target) for source in node.all_input_nodes]}"
        for node in module.graph.nodes
        if node.op == "call_function" and has_tensors(node)
    ]


@pytest.mark.slow
@pytest.mark.parametrize("kind", [Residual, Reshaped, ReadBefore, Dropped, Literals])
def test_a_graph_is_rewritten_to_what_torch_makes_of_it(kind):
    program = exported(kind())
    mine = make_unguarded_module(program)
    assert functionalize.make_functional(mine)
    theirs = make_unguarded_module(program.run_decompositions({}))
    theirs.graph.eliminate_dead_code()
    assert ops_of(mine) == ops_of(theirs)


@pytest.mark.parametrize("kind", [Residual, Reshaped, SeenElsewhere, ReadBefore, Dropped, Literals])
def test_a_captured_graph_computes_what_the_module_does_for_any_size(kind):
    torch.manual_seed(0)
    module = kind().eval()
    graph = graph_capture.convert_to_graph(exported(module))
    for shape in ((3, 2, 8, 8), (5, 2, 12, 6)):
        x = torch.randn(shape)
        with torch.no_grad():
            torch.testing.assert_close(graph(x), module(x.clone()))
    assert not [op for op in ops_of(graph) if "_." in op.partition(" of ")[0]]


@pytest.mark.parametrize("kind", [Residual, Reshaped, SeenElsewhere, Dropped, Literals])
def test_a_model_with_updates_in_place_is_traced_once(kind, monkeypatch):
    monkeypatch.setattr(
        ExportedProgram, "run_decompositions", lambda *_: pytest.fail("traced a second time")
    )
    model = PyTorchAdaptor().load(kind(), example=torch.randn(4, 2, 8, 8))
    assert not model.warnings


def test_a_size_is_worked_out_of_the_inputs_and_reads_no_result():
    graph = graph_capture.convert_to_graph(exported(Reshaped()))
    sizes = graph.graph.find_nodes(op="call_function", target=torch.ops.aten.sym_size.int)
    assert sizes
    assert all(node.args[0].op == "placeholder" for node in sizes)


def test_a_program_of_the_users_is_left_as_it_was():
    program = exported(Residual())
    original = str(program.graph)
    PyTorchAdaptor().load(program)
    assert str(program.graph) == original


def test_a_large_first_batch_is_not_run_whole():
    record = Mock(return_value=None)  # a list would be restored as state of the module
    module = Residual().eval()
    module.register_forward_pre_hook(lambda _, inputs: record(inputs[0]))
    PyTorchAdaptor().load(module, example=torch.randn(64, 2, 8, 8))
    real = [call.args[0] for call in record.call_args_list if type(call.args[0]) is torch.Tensor]
    assert real
    assert max(map(len, real)) == 2

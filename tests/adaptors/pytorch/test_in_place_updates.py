"""Updates in place become new values: graphs compute what the module's own code does in eager."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.export import Dim, ExportedProgram

from neural_mp.adaptors.pytorch.capture import functionalize, graph_capture
from neural_mp.adaptors.pytorch.versions import make_unguarded_module

Code = Callable[[torch.Tensor], object]


class Net(nn.Module):
    """Run a function of one tensor; `seen` is state that some functions update."""

    def __init__(self, code: Callable[..., object]) -> None:
        super().__init__()
        self.code = code
        self.register_buffer("seen", torch.zeros(5))
        self.gain = nn.Parameter(torch.ones(5))

    def forward(self, x: torch.Tensor) -> object:
        """Return the result of the function."""
        return self.code(x)


def exported(net: nn.Module, rows: object = Dim.AUTO) -> ExportedProgram:
    with torch.no_grad():
        return torch.export.export(net.eval(), (torch.randn(4, 5),), dynamic_shapes=({0: rows},))


def in_place_ops(module: torch.fx.GraphModule) -> list[str]:
    return [
        str(node.target)
        for node in module.graph.nodes
        if isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable
    ]


def assert_equal(results: object, expected: object) -> None:
    torch.testing.assert_close(results, expected, rtol=0, atol=0, equal_nan=True)


def write_rows(x):
    y = torch.zeros_like(x)
    y[:, 1] = x[:, 0]
    y[1:, 2:4] = x[1:, :2]
    y[0] = 3
    return y, y.sum(0)


def add_to_columns(x):
    y = x * 2
    y[:, 1:4] += x[:, :1]
    y[:, ::2] *= 2
    return y


def write_a_part_of_a_part(x):
    y = x.clone()
    part = y[:, 1:]
    part[:, 1].mul_(3)
    corner = part[0, 2:]
    corner.copy_(x[1, :2])
    return y, part, corner


def write_the_diagonal(x):
    y = x.new_zeros(5, 5)
    y.diagonal().add_(x.sum(0))
    return y


def read_other_views_after(x):
    y = x * 2
    turned, first = y.t(), y[0]
    left, right = y.split([2, 3], dim=1)
    y[:, 1:3].sub_(1)
    turned = turned + 1
    y.relu_()
    return turned, first, left, right


def keep_the_dtype(x):
    y = x * 2
    y.add_(x.double())
    y.lt_(0.5)
    counts = torch.zeros(5, dtype=torch.int64)
    counts.add_(torch.ones(5, dtype=torch.int32))
    return y, counts


def copy_from_another_dtype(x):
    y = torch.empty_like(x)
    y.copy_(x.double() * 3)
    y[:, 0] = torch.arange(x.shape[0])
    return y


def broadcast_a_smaller_operand(x):
    y = x + 1
    y.mul_(x[0]).div_(x[:, :1].abs() + 1)
    return y


def scatter_and_put(x):
    order = x.argsort(dim=1)
    mask = torch.zeros_like(x)
    mask.scatter_(1, order[:, :2], 1)
    inverse = torch.empty_like(order[0])
    inverse[order[0]] = torch.arange(5)
    sums = torch.zeros_like(x).scatter_add_(1, order, x)
    sums[x > 0] = 0
    sums.index_add_(0, torch.tensor([1, 0]), x[:2])
    return mask, inverse, sums


def use_many_ops(x):
    y = x.abs()
    y.pow_(2).clamp_(max=3).neg_().exp_().square_().multiply_(2).floor_divide_(0.3)
    z = torch.full_like(x, 2.0)
    z[:, 0].zero_()
    z[:, 1].fill_(7)
    return y.triu_(), z.addcmul_(x, x, value=0.5).lerp_(x, 0.25)


def write_through_views_of_all(x):
    y = x * 2
    y[:].add_(1)
    y.detach()[1:].mul_(3)
    return y


def read_the_old_value(x):
    y = x * 2
    row = y[0] + 1
    y[1:] = row
    y[0] = y[1] - row
    return y, row


def pad_rows(x):
    y = x * 2
    y.mul_(2)
    return nn.utils.rnn.pad_sequence([y[0], y[1, :3]], batch_first=True)


REWRITTEN: tuple[Code, ...] = (
    write_rows,
    add_to_columns,
    write_a_part_of_a_part,
    write_the_diagonal,
    read_other_views_after,
    keep_the_dtype,
    copy_from_another_dtype,
    broadcast_a_smaller_operand,
    scatter_and_put,
    use_many_ops,
    write_through_views_of_all,
    read_the_old_value,
    pad_rows,
)


@pytest.mark.parametrize("code", REWRITTEN)
def test_updates_of_new_tensors_are_rewritten_without_a_trace(code):
    torch.manual_seed(0)
    module = make_unguarded_module(exported(Net(code)))
    assert in_place_ops(module)
    assert functionalize.make_functional(module)
    assert not in_place_ops(module)
    for rows in (4, 7):
        x = torch.randn(rows, 5)
        assert_equal(module(x), code(x))


def update_the_input(net, x):
    x.add_(1)
    return x * 2


def update_a_part_of_the_input(net, x):
    x[:, 0] = 0
    return x * 2


def update_a_buffer(net, x):
    net.seen.add_(x.sum(0))
    return x * net.seen


def update_a_parameter_through_a_view(net, x):
    net.gain.detach()[1:].mul_(2)
    return x * net.gain


def update_a_transposed_tensor(net, x):
    y = x * 2
    y.t()[0].add_(1)
    return y


def update_one_of_several_parts(net, x):
    y = x * 2
    left, _ = y.split([2, 3], dim=1)
    left.mul_(3)
    return y


def update_the_same_memory_as_integers(net, x):
    y = x * 2
    y.view(torch.int32).bitwise_and_(-2)
    return y


def draw_numbers(net, x):
    return torch.empty_like(x).uniform_() * 0 + x


REFUSED = (
    update_the_input,
    update_a_part_of_the_input,
    update_a_buffer,
    update_a_parameter_through_a_view,
    update_a_transposed_tensor,
    update_one_of_several_parts,
    update_the_same_memory_as_integers,
    draw_numbers,
)


def net_of(code: Callable[..., object]) -> Net:
    net = Net(code)
    net.code = lambda x: code(net, x)
    return net


@pytest.mark.parametrize("code", REFUSED)
def test_other_updates_are_left_to_torch_and_computed_alike(code):
    torch.manual_seed(0)
    program = exported(net_of(code), rows=None)
    assert not functionalize.make_functional(make_unguarded_module(program))
    graph, x = graph_capture.convert_to_graph(program), torch.randn(4, 5)
    with torch.no_grad():
        assert_equal(graph(x.clone()), net_of(code)(x.clone()))


#: Numbers of a step: the operation, the tensor, another tensor, and an axis, position or factor.
STEPS = st.lists(st.tuples(*[st.integers(0, 23)] * 4), min_size=2, max_size=7)


def run_steps(steps: list[tuple[int, int, int, int]], x: torch.Tensor) -> list[torch.Tensor]:
    """Return all tensors of a program: new ones, views of views, and updates of any of them."""
    tensors = [x * 2, torch.zeros(4, 5), (x * 3).double()]
    for operation, first, second, number in steps:
        tensor, other = tensors[first % len(tensors)], tensors[second % len(tensors)]
        if operation < 8 and tensor.ndim:
            tensors.append(part_of(tensor, operation, number))
        elif operation < 10:
            tensors.append(tensor + other.sum())
        else:
            update(tensor, other, operation, number)
    return tensors


def part_of(tensor: torch.Tensor, operation: int, number: int) -> torch.Tensor:
    """Return a view of some elements of a tensor."""
    axis = number % tensor.ndim
    size = tensor.shape[axis]
    if operation < 3:
        return tensor.select(axis, number % size)
    if operation < 5 and tensor.ndim > 1 and min(tensor.shape) > 1:
        return tensor.diagonal(number % 3 - 1)
    indices = slice(number % max(size - 1, 1), None, 1 + number // 12)
    return tensor[(slice(None),) * axis + (indices,)]


def update(tensor: torch.Tensor, other: torch.Tensor, operation: int, number: int) -> None:
    """Update a tensor by another one if that fits, else by the sum of that one."""
    is_smaller = tensor.shape[tensor.ndim - other.ndim :] == other.shape
    # A copy, as torch refuses operands that share a part of their memory.
    source = other.clone() if is_smaller and other.ndim <= tensor.ndim else other.sum()
    match operation % 7:
        case 0:
            tensor.copy_(source)
        case 1:
            tensor.add_(source)
        case 2:
            tensor.mul_(number - 5)
        case 3:
            tensor.masked_fill_(tensor > source, number)
        case 4:
            tensor.fill_(number)
        case 5:
            tensor.clamp_(max=number)
        case _:
            tensor.ge_(source)


@pytest.mark.slow
@settings(max_examples=60)
@given(STEPS)
def test_programs_of_updates_of_parts_compute_the_same_in_eager_torch_and_here(steps):
    torch.manual_seed(0)
    net = Net(lambda x: run_steps(steps, x))
    program = exported(net, rows=None)
    module, theirs = (
        make_unguarded_module(program),
        make_unguarded_module(program.run_decompositions({})),
    )
    assert functionalize.make_functional(module)
    assert not in_place_ops(module)
    for _ in range(2):
        x = torch.randn(4, 5)
        expected = run_steps(steps, x)
        assert_equal(theirs(x), expected)
        assert_equal(module(x), expected)

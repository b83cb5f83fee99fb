"""`autocast` runs torch in 16 bits by the four lists, which users edit, and trains as FP32 does."""

import contextlib

import pytest
import torch
from autocast_nets import BF16, FP16, FP32, GatedNet, amp
from torch import nn
from torch.nn import functional as F

from neural_mp.adaptors.pytorch.graph.op_types import TYPES
from neural_mp.adaptors.pytorch.training.function_types import (
    Handling,
    all_op_types,
    classify_torch_function,
)
from neural_mp.training import GradScaler, autocast


def trained(split, context, epochs=3):
    torch.manual_seed(0)
    net = GatedNet()
    optimizer = torch.optim.Adam(net.parameters(), 3e-3)
    images, labels = torch.from_numpy(split.images).float(), torch.from_numpy(split.labels)
    for _ in range(epochs):
        for inputs, targets in zip(images.split(64), labels.split(64), strict=True):
            optimizer.zero_grad()
            with context():
                loss = F.cross_entropy(net(inputs), targets)
            loss.backward()
            optimizer.step()
    return net.eval()


def accuracy(net, split):
    with torch.no_grad():
        answers = net(torch.from_numpy(split.images).float()).argmax(1)
    return float((answers == torch.from_numpy(split.labels)).float().mean())


def result_dtypes(net, inputs):
    """Layer → dtype of what it returns."""
    dtypes = {}
    hooks = [
        layer.register_forward_hook(lambda _, __, out, name=name: dtypes.update({name: out.dtype}))
        for name, layer in net.named_children()
    ]
    net(inputs)
    for hook in hooks:
        hook.remove()
    return dtypes


def test_training_reaches_the_accuracy_of_float32(digits):
    reference = accuracy(trained(digits[0], contextlib.nullcontext), digits[1])
    ours = trained(digits[0], lambda: autocast("bf16"))
    assert reference > 0.9
    assert accuracy(ours, digits[1]) > reference - 0.03
    assert {p.dtype for p in ours.parameters()} == {FP32}


def test_float16_trains_with_a_loss_scale(gated_net, digit_batch):
    optimizer, scaler = torch.optim.SGD(gated_net.parameters(), 0.1), GradScaler("cpu")
    losses = []
    for _ in range(8):
        optimizer.zero_grad()
        with autocast("fp16"):
            loss = F.cross_entropy(gated_net(digit_batch[0]), digit_batch[1])
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        losses.append(float(loss.detach()))
    assert scaler.steps > 0
    assert losses[-1] < losses[0]


def test_a_scaled_loss_does_not_overflow_inside(square):
    scaler = GradScaler("cpu")
    with autocast("fp16"):
        loss = (square @ square)[0, 0]
        scaled = scaler.scale(loss)
    assert loss.dtype is FP16
    assert float(scaled.detach()) == float(loss.detach()) * scaler.loss_scale


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_every_layer_runs_in_what_its_list_says(gated_net, digit_batch, precision):
    with autocast(precision) as context:
        dtypes = result_dtypes(gated_net, digit_batch[0])
        loss = F.cross_entropy(gated_net(digit_batch[0]), digit_batch[1])
    low = BF16 if precision == "bf16" else FP16
    assert str(context.precision) == precision
    assert {dtypes[name] for name in ("conv1", "conv2", "batch_norm", "hidden", "head")} == {low}
    # In FP16 layer norm is dangerous, and softmax is right behind it.
    behind = FP32 if precision == "fp16" else low
    assert (dtypes["layer_norm"], dtypes["softmax"], loss.dtype) == (behind, behind, FP32)


def test_gradients_are_float32_and_those_of_float32_but_for_rounding(gated_net, digit_batch):
    gradients = []
    for context in (contextlib.nullcontext(), autocast("bf16")):
        gated_net.zero_grad()
        with context:
            loss = F.cross_entropy(gated_net(digit_batch[0]), digit_batch[1])
        loss.backward()
        assert {p.grad.dtype for p in gated_net.parameters()} == {FP32}
        gradients.append(torch.cat([p.grad.flatten() for p in gated_net.parameters()]))
    exact, ours = gradients
    assert not torch.equal(exact, ours)
    assert float((exact - ours).norm() / exact.norm()) < 0.05


def test_running_statistics_stay_float32_and_follow_the_data(digit_batch):
    norms = [nn.BatchNorm2d(1), nn.BatchNorm2d(1)]
    shifted = digit_batch[0] * 3 + 5
    norms[0](shifted)
    with autocast("bf16", amp(clearlist_remove="relu", allowlist_add="relu")):
        assert norms[1](F.relu(shifted)).dtype is BF16
    for name in ("running_mean", "running_var"):
        exact, ours = (getattr(norm, name) for norm in norms)
        assert ours.dtype is FP32
        torch.testing.assert_close(ours, exact, rtol=0.02, atol=0.02)
    assert int(norms[1].num_batches_tracked) == 1


def test_edits_move_ops(square):
    def found(**options):
        with autocast("bf16", amp(**options)):
            low = square @ square
            functions = (torch.softmax, lambda x, _: F.layer_norm(x, (4,)), lambda x, _: x.exp())
            return [low.dtype, *(function(low, -1).dtype for function in functions)]

    assert found() == [BF16, BF16, BF16, FP32]
    assert found(inferlist_remove="softmax") == [BF16, FP32, BF16, FP32]
    assert found(inferlist_remove="layer_norm", denylist_add="layer_norm")[2] is FP32
    assert found(denylist_remove="exp", inferlist_add=["exp"])[3] is BF16
    assert found(allowlist_remove="matmul") == [FP32] * 4


def test_on_no_list_is_float32(square):
    with autocast("bf16"):
        assert F.mse_loss(square @ square, square).dtype is FP32


def test_danger_spreads_through_infer_and_clear_and_ends_at_allow(square):
    with autocast("bf16"):
        low = square @ square
        dangerous = low.exp()
        through_clear = dangerous.reshape(2, 8).relu().T.contiguous()[:8].reshape(-1)
        assert (low.reshape(-1) * 2).dtype is BF16
        assert (low.reshape(-1) * through_clear).dtype is FP32
        assert torch.cat([low.reshape(-1), through_clear]).dtype is FP32
        assert torch.cat([low, square]).dtype is BF16
        cast_by_hand = dangerous.to(BF16)
        assert (cast_by_hand + low).dtype is FP32
        behind_allow = dangerous @ low
        assert behind_allow.dtype is BF16
        assert (behind_allow + low).dtype is BF16
        written = torch.zeros(4, 4)
        written[0] = dangerous[0]
        assert (written * low).dtype is FP32


def test_infer_stays_float32_where_nothing_draws_it(square):
    with autocast("bf16"):
        assert torch.softmax(square, -1).dtype is FP32
        assert (square + square).dtype is FP32


def test_operators_methods_and_functions_are_one_op(square):
    with autocast("bf16", amp(inferlist_remove="add,softmax,mul", denylist_add="add,softmax,mul")):
        low = square @ square
        results = [
            low + low,
            1 + low,
            low.add(1),
            torch.add(low, low),
            torch.ops.aten.add(low, low),
            low.softmax(-1),
            F.softmax(low, -1),
            torch.softmax(low, -1),
            nn.Softmax(-1)(low),
            torch.special.softmax(low, -1),
            low * low,
            low.multiply(2),
            2 * low,
        ]
    assert {result.dtype for result in results} == {FP32}


@pytest.mark.parametrize(
    ("function", "op_type"),
    [
        *((getattr(torch.Tensor, f"__{name}__"), "add") for name in ("add", "radd", "iadd")),
        *((getattr(torch.Tensor, f"__{name}__"), "div") for name in ("truediv", "rdiv", "idiv")),
        (torch.Tensor.__rsub__, "rsub"),
        (torch.Tensor.__matmul__, "matmul"),
        (torch.Tensor.__rmatmul__, "matmul"),
        (torch.Tensor.__rpow__, "pow"),
        (torch.Tensor.__getitem__, "getitem"),
        (torch.Tensor.__setitem__, "index_put"),
        (torch.Tensor.add_, "add"),
        (torch.Tensor.T.__get__, "numpy_T"),
        (torch.ops.aten.linear.default, "linear"),
        (torch.special.expit, "sigmoid"),
        (F.linear, "linear"),
        (F.relu_, "relu"),
        (F.cross_entropy, "cross_entropy_loss"),
        (F.max_pool2d_with_indices, "max_pool2d_with_indices"),
        (F.multi_head_attention_forward, "scaled_dot_product_attention"),
        (F.unfold, "im2col"),
        (torch.Tensor.unfold, "unfold"),
    ],
)
def test_functions_find_their_op_type(function, op_type):
    assert classify_torch_function(function).op_type == op_type


#: Composed in Python, or not of numbers in memory: no list, hence FP32, and no edit can name them.
NAMELESS = {
    "fill_diagonal",
    "fractional_max_pool2d_with_indices",
    "fractional_max_pool3d_with_indices",
    "gaussian_nll_loss",
    "hsmm",
    "dsmm",
    "saddmm",
    "interpolate",
    "lobpcg",
    "lu",
    "svd_lowrank",
    "local_response_norm",
    "max_unpool1d",
    "multilabel_soft_margin_loss",
    "pca_lowrank",
    "triplet_margin_with_distance_loss",
}


@pytest.mark.filterwarnings("ignore")
def test_every_function_that_torch_lets_us_see_has_a_name_that_edits_know():
    functions = [
        classify_torch_function(function) for function in torch.overrides.get_testing_overrides()
    ]
    computing = {
        function.op_type for function in functions if function.handling is Handling.COMPUTES
    }
    assert len(computing) > 500
    assert computing - all_op_types() <= NAMELESS


def test_every_listed_type_of_the_common_namespaces_is_reached():
    reached = {
        classify_torch_function(getattr(space, name)).op_type
        for space in (torch, torch.Tensor, F, torch.linalg, torch._VF)
        for name in dir(space)
        if callable(getattr(space, name, None))
    }
    listed = {op_type for types in TYPES.values() for op_type in types}
    assert len(listed - reached) < len(listed) / 10, sorted(listed - reached)

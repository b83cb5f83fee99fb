"""`autocast` runs torch in 16 bits by the four lists, which users edit, and trains as FP32 does."""

import contextlib
import copy
import logging
import pickle
import subprocess
import sys
import threading
import weakref

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from neural_mp import AutoMixedPrecisionOptions
from neural_mp.adaptors.pytorch.op_types import TYPES
from neural_mp.adaptors.pytorch.training.function_types import Handling, all_op_types, function_of
from neural_mp.errors import (
    ConfigurationError,
    NeuralMPError,
    UnknownOperatorError,
    UnknownPrecisionError,
)
from neural_mp.training import GradScaler, autocast

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
AMP_VARIABLE = "NEURAL_MP_AUTO_MIXED_PRECISION_{}"


class Net(nn.Module):
    """Convolutions, a batch norm, a layer norm, a gate by softmax; [batch, 1, 8, 8] → 10 logits."""

    def __init__(self):
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 16, 3), nn.Conv2d(16, 16, 3)
        self.batch_norm = nn.BatchNorm2d(16)
        self.hidden, self.layer_norm = nn.Linear(256, 32), nn.LayerNorm(32)
        self.softmax, self.head = nn.Softmax(-1), nn.Linear(32, 10)

    def forward(self, images):
        features = F.relu(self.batch_norm(self.conv1(images)))
        features = self.layer_norm(self.hidden(F.relu(self.conv2(features)).flatten(1)))
        return self.head(features * (1 + self.softmax(features)))


class Casts(TorchDispatchMode):
    """Counts what torch really casts, below all that Python sees."""

    def __init__(self):
        super().__init__()
        self.shapes = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func in (torch.ops.aten._to_copy.default, torch.ops.aten.to.dtype):
            self.shapes.append(tuple(args[0].shape))
        return func(*args, **(kwargs or {}))


@pytest.fixture
def net():
    torch.manual_seed(0)
    return Net()


@pytest.fixture(scope="module")
def batch(digits):
    return torch.from_numpy(digits[0].images[:64]).float(), torch.from_numpy(digits[0].labels[:64])


@pytest.fixture
def square():
    torch.manual_seed(0)
    return torch.randn(4, 4)


def amp(**options):
    return AutoMixedPrecisionOptions(**options)


def trained(split, context, epochs=3):
    torch.manual_seed(0)
    net = Net()
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
    found = {}
    hooks = [
        layer.register_forward_hook(lambda _, __, out, name=name: found.update({name: out.dtype}))
        for name, layer in net.named_children()
    ]
    net(inputs)
    for hook in hooks:
        hook.remove()
    return found


def test_training_reaches_the_accuracy_of_float32(digits):
    reference = accuracy(trained(digits[0], contextlib.nullcontext), digits[1])
    ours = trained(digits[0], lambda: autocast("bf16"))
    assert reference > 0.9
    assert accuracy(ours, digits[1]) > reference - 0.03
    assert {p.dtype for p in ours.parameters()} == {FP32}


def test_float16_trains_with_a_loss_scale(net, batch):
    optimizer, scaler = torch.optim.SGD(net.parameters(), 0.1), GradScaler("cpu")
    losses = []
    for _ in range(8):
        optimizer.zero_grad()
        with autocast("fp16"):
            loss = F.cross_entropy(net(batch[0]), batch[1])
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
def test_every_layer_runs_in_what_its_list_says(net, batch, precision):
    with autocast(precision) as context:
        found = result_dtypes(net, batch[0])
        loss = F.cross_entropy(net(batch[0]), batch[1])
    low = BF16 if precision == "bf16" else FP16
    assert str(context.precision) == precision
    assert {found[name] for name in ("conv1", "conv2", "batch_norm", "hidden", "head")} == {low}
    # In FP16 layer norm is dangerous, and softmax is right behind it.
    behind = FP32 if precision == "fp16" else low
    assert (found["layer_norm"], found["softmax"], loss.dtype) == (behind, behind, FP32)


def test_gradients_are_float32_and_those_of_float32_but_for_rounding(net, batch):
    gradients = []
    for context in (contextlib.nullcontext(), autocast("bf16")):
        net.zero_grad()
        with context:
            loss = F.cross_entropy(net(batch[0]), batch[1])
        loss.backward()
        assert {p.grad.dtype for p in net.parameters()} == {FP32}
        gradients.append(torch.cat([p.grad.flatten() for p in net.parameters()]))
    exact, ours = gradients
    assert not torch.equal(exact, ours)
    assert float((exact - ours).norm() / exact.norm()) < 0.05


def test_running_statistics_stay_float32_and_follow_the_data(batch):
    norms = [nn.BatchNorm2d(1), nn.BatchNorm2d(1)]
    shifted = batch[0] * 3 + 5
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
            *(low + low, 1 + low, low.add(1), torch.add(low, low), torch.ops.aten.add(low, low)),
            *(low.softmax(-1), F.softmax(low, -1), torch.softmax(low, -1), nn.Softmax(-1)(low)),
            *(torch.special.softmax(low, -1), low * low, low.multiply(2), 2 * low),
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
    assert function_of(function).op_type == op_type


#: Composed in Python, or not of numbers in memory: no list, hence FP32, and no edit can name them.
NAMELESS = {
    *("fill_diagonal", "fractional_max_pool2d_with_indices", "fractional_max_pool3d_with_indices"),
    *("gaussian_nll_loss", "hsmm", "dsmm", "saddmm", "interpolate", "lobpcg", "lu", "svd_lowrank"),
    *("local_response_norm", "max_unpool1d", "multilabel_soft_margin_loss", "pca_lowrank"),
    "triplet_margin_with_distance_loss",
}


@pytest.mark.filterwarnings("ignore")
def test_every_function_that_torch_lets_us_see_has_a_name_that_edits_know():
    made = [function_of(function) for function in torch.overrides.get_testing_overrides()]
    computing = {function.op_type for function in made if function.handling is Handling.COMPUTES}
    assert len(computing) > 500
    assert computing - all_op_types() <= NAMELESS


def test_every_listed_type_of_the_common_namespaces_is_reached():
    reached = {
        function_of(getattr(space, name)).op_type
        for space in (torch, torch.Tensor, F, torch.linalg, torch._VF)
        for name in dir(space)
        if callable(getattr(space, name, None))
    }
    listed = {op_type for types in TYPES.values() for op_type in types}
    assert len(listed - reached) < len(listed) / 10, sorted(listed - reached)


def test_what_is_written_into_keeps_its_type_and_gets_the_values(square):
    with autocast("bf16"):
        low = square @ square
        total, rows, out = torch.zeros(4, 4), torch.zeros(4, 4), torch.empty(4, 4)
        same = total
        total += low
        total.add_(low)
        rows[1] = low[1]
        torch.mm(square, low, out=out)
        rectified = low.clone()
        assert F.relu(rectified, inplace=True) is rectified
        counter = torch.zeros(2, dtype=torch.int64)
        counter += 1
    assert same is total
    assert [t.dtype for t in (total, rows, out, rectified)] == [FP32, FP32, FP32, BF16]
    assert torch.equal(total, 2 * low.float())
    assert torch.equal(rows[1], low[1].float())
    assert torch.equal(out, square @ low.float())
    assert torch.equal(rectified, low.clamp(min=0))
    assert counter.tolist() == [1, 1]


def test_an_in_place_layer_writes_into_its_input_wherever_an_edit_puts_it(square):
    with autocast("bf16", amp(clearlist_remove="relu", denylist_add="relu")):
        low = square @ square
        assert nn.ReLU(inplace=True)(low) is low
    assert low.dtype is BF16
    assert bool((low >= 0).all())


def test_float64_complex_and_integers_are_left_alone(square):
    with autocast("bf16"):
        double = square.double()
        assert (double @ double).dtype is torch.float64
        assert (double * (square @ square)).dtype is torch.float64
        assert (square.to(torch.complex64) @ square.to(torch.complex64)).dtype is torch.complex64
        assert (
            torch.ones(2, 2, dtype=torch.int64) @ torch.ones(2, 2, dtype=torch.int64)
        ).sum() == 8


def test_an_op_without_a_kernel_for_16_bits_runs_in_float32(square):
    symmetric = square @ square.T + 10 * torch.eye(4)
    with autocast("bf16", amp(allowlist_add="linalg_cholesky")):
        for _ in range(2):
            assert torch.linalg.cholesky(symmetric).dtype is FP32


def test_other_errors_of_torch_stay_as_they_are(square):
    with autocast("bf16"), pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        square @ torch.zeros(3, 3)


def test_a_weight_is_cast_once_in_a_context_and_counts_anew_in_the_next():
    layer, inputs = nn.Linear(5, 5, bias=False), torch.ones(1, 5)
    with Casts() as casts:
        for _ in range(2):
            with autocast("bf16"):
                outputs = inputs
                for _ in range(10):
                    outputs = layer(outputs)
    assert casts.shapes.count((5, 5)) == 2
    with torch.no_grad(), autocast("bf16"):
        before = layer(inputs)
        layer.weight.zero_()
        assert float(layer(inputs).abs().sum()) == 0 != float(before.abs().sum())


def test_a_cast_without_gradients_is_not_used_with_them():
    layer, inputs = nn.Linear(3, 3), torch.ones(1, 3)
    with autocast("bf16"):
        with torch.no_grad():
            layer(inputs)
        layer(inputs).sum().backward()
    assert layer.weight.grad is not None


def test_casts_die_with_the_context():
    layer = nn.Linear(3, 3)
    with autocast("bf16"):
        kept = weakref.ref(layer(torch.ones(1, 3)))
        weight = weakref.ref(layer.weight)
    assert kept() is None
    del layer
    assert weight() is None


def test_of_nested_contexts_the_innermost_counts(square):
    outer, inner = autocast("bf16"), autocast("fp16", amp(inferlist_remove="softmax"))
    with outer:
        assert (square @ square).dtype is BF16
        with inner:
            low = square @ square
            assert (low.dtype, low.softmax(-1).dtype) == (FP16, FP32)
            with outer:
                assert (square @ square).dtype is BF16
        low = square @ square
        assert (low.dtype, low.softmax(-1).dtype) == (BF16, BF16)
    assert (square @ square).dtype is FP32


def test_one_object_serves_again_inside_itself_after_an_error_and_as_a_decorator(square):
    context = autocast("bf16")

    @context
    def product(matrix, depth=1):
        return product(matrix, depth - 1) if depth else matrix @ matrix

    with context, context:
        assert (square @ square).dtype is BF16
    with pytest.raises(ZeroDivisionError), context:
        1 / 0  # noqa: B018
    assert product(square).dtype is BF16
    assert (square @ square).dtype is FP32


def test_what_makes_a_tensor_of_a_tensor_keeps_its_type(square):
    with autocast("bf16"):
        low = square @ square
        made = [torch.as_tensor(low), torch.zeros_like(low), low.new_zeros(2), nn.Parameter(low)]
        made += [low.detach(), low.clone(), low.data, low.T, low[0], low.cpu()]
        assert low.detach().data_ptr() == low.data_ptr()
    assert {tensor.dtype for tensor in made} == {BF16}


def test_other_threads_are_not_touched(square):
    found = []
    with autocast("bf16"):
        thread = threading.Thread(target=lambda: found.append((square @ square).dtype))
        thread.start()
        thread.join()
    assert found == [FP32]


def test_torchs_own_autocast_is_off_inside_and_on_again_behind(square):
    with torch.autocast("cpu", BF16):
        with autocast("bf16", amp(allowlist_remove="matmul")):
            assert (square @ square).dtype is FP32
        assert (square @ square).dtype is BF16
    assert not torch._C._is_any_autocast_enabled()


SEQUENCE = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(0))
LAYERS = {
    "recurrent behind a product": lambda: nn.Sequential(nn.Linear(8, 8), nn.LSTM(8, 8), First()),
    "gru": lambda: nn.Sequential(nn.GRU(8, 8, 2, bidirectional=True), First()),
    "attention": lambda: SelfAttention(),
    "encoder": lambda: nn.TransformerEncoderLayer(8, 2, 16, 0, batch_first=True),
    "norms": lambda: nn.Sequential(
        *(nn.Conv1d(5, 4, 3), nn.InstanceNorm1d(4, affine=True, track_running_stats=True)),
        *(nn.PReLU(), nn.GroupNorm(2, 4), nn.BatchNorm1d(4), nn.RMSNorm(6)),
    ),
    "weight norm": lambda: nn.utils.parametrizations.weight_norm(nn.Linear(8, 8)),
    "images": lambda: nn.Sequential(
        *(
            nn.Unflatten(1, (1, 5)),
            nn.Conv2d(1, 2, 3),
            nn.Upsample(scale_factor=2, mode="bilinear"),
        ),
        *(nn.AvgPool2d(2), nn.Dropout(0.0), nn.Flatten(), nn.LeakyReLU(inplace=True)),
    ),
}


class First(nn.Module):
    def forward(self, outputs):
        return outputs[0]


class SelfAttention(nn.MultiheadAttention):
    """The last two steps of the first sequence are padding."""

    def __init__(self):
        super().__init__(8, 2, batch_first=True)

    def forward(self, x):
        padded = torch.zeros(2, 5, dtype=torch.bool)
        padded[0, 3:] = True
        return super().forward(x, x, x, key_padding_mask=padded)[0]


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("name", LAYERS)
def test_layers_of_every_kind_train(name, precision):
    torch.manual_seed(0)
    layer = LAYERS[name]()
    gradients, outputs = [], []
    for context in (contextlib.nullcontext(), autocast(precision)):
        layer.zero_grad()
        with context:
            outputs.append(layer(SEQUENCE))
            loss = F.binary_cross_entropy_with_logits(
                outputs[-1], torch.ones_like(outputs[-1], dtype=FP32)
            )
        loss.backward()
        assert loss.dtype is FP32
        assert {p.grad.dtype for p in layer.parameters()} == {FP32}
        gradients.append(torch.cat([p.grad.flatten() for p in layer.parameters()]))
    assert not torch.equal(*gradients)
    assert float((gradients[0] - gradients[1]).norm() / gradients[0].norm()) < 0.05
    torch.testing.assert_close(outputs[1].float(), outputs[0], rtol=0.1, atol=0.05)


def test_attention_is_one_op_with_its_masks_kept():
    torch.manual_seed(0)
    attention = SelfAttention().eval()
    changed = SEQUENCE.clone()
    changed[0, 3:] = 100.0  # padding: nobody may look at it
    with torch.no_grad(), autocast("bf16"):
        seen, unseen = attention(SEQUENCE), attention(changed)
    assert seen.dtype is BF16
    assert torch.equal(seen[0, :3], unseen[0, :3])
    with autocast("bf16", amp(allowlist_remove="scaled_dot_product_attention")):
        assert attention(SEQUENCE).dtype is FP32


def attention_by_hand(queries, keys, values, mask):
    scores = queries @ keys.transpose(-1, -2) / queries.shape[-1] ** 0.5
    return torch.softmax(scores + mask, -1) @ values


@pytest.mark.parametrize("attention", [F.scaled_dot_product_attention, attention_by_hand])
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_a_row_that_is_masked_altogether_by_the_lowest_number_stays_finite(precision, attention):
    queries = SEQUENCE[:, None]
    mask = torch.zeros(5, 5)
    mask[0], mask[1, 3:] = torch.finfo(FP32).min, -torch.inf
    exact = attention(queries, queries, queries, mask)
    with autocast(precision):
        ours = attention(queries, queries, queries, mask)
    assert ours.dtype in (BF16, FP16)
    assert bool(ours.isfinite().all())
    torch.testing.assert_close(ours[:, :, 1:].float(), exact[:, :, 1:], rtol=0.05, atol=0.05)


def test_inference_keeps_the_weights_casts(net, batch):
    net.eval()
    with torch.inference_mode(), autocast("bf16"), Casts() as casts:
        logits = [net(batch[0]) for _ in range(3)]
    assert torch.equal(logits[0], logits[2])
    assert casts.shapes.count(tuple(net.conv2.weight.shape)) == 1


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_a_recomputed_block_is_decorated(use_reentrant):
    torch.manual_seed(0)
    block = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 8))
    decorated = autocast("bf16")(block.forward)
    gradients = []
    for call in (block, lambda x: checkpoint(decorated, x, use_reentrant=use_reentrant)):
        block.zero_grad()
        with autocast("bf16"):
            loss = call(SEQUENCE.clone().requires_grad_()).float().sum()
        loss.backward()
        gradients.append(block[0].weight.grad.clone())
    assert torch.equal(*gradients)


def test_compiled_functions_run_uncompiled_inside(square):
    compiled_runs = []

    def backend(graph, _):
        def run(*inputs):
            compiled_runs.append(1)
            return graph.forward(*inputs)

        return run

    compiled = torch.compile(lambda x: torch.softmax(x @ x, -1), backend=backend)
    assert compiled(square).dtype is FP32
    with autocast("bf16"):
        assert compiled(square).dtype is BF16
    assert len(compiled_runs) == 1
    compiled(square)
    assert len(compiled_runs) == 2

    @torch.compile(backend=backend)
    def around(x):
        with autocast("bf16"):
            low = x @ x
        return low, x @ x

    assert [result.dtype for result in around(square)] == [BF16, FP32]


def test_all_but_the_clear_list_may_be_forced(square):
    with autocast("bf16", amp(unsafe_force_all=True)):
        assert square.exp().dtype is BF16
        assert F.cross_entropy(square, torch.arange(4)).dtype is BF16
        assert torch.linalg.cholesky(square.T @ square + 10 * torch.eye(4)).dtype is FP32
        assert square.reshape(2, 8).dtype is FP32


def test_the_precision_may_be_said_elsewhere(square, monkeypatch):
    with autocast():
        assert (square @ square).dtype is BF16
    with autocast(amp=amp(data_type="float16")):
        assert (square @ square).dtype is FP16
    monkeypatch.setenv(AMP_VARIABLE.format("DATA_TYPE"), "FLOAT16")
    with autocast():
        assert (square @ square).dtype is FP16
    with autocast("bf16"):
        assert (square @ square).dtype is BF16


def test_the_environment_edits_lists_and_tensorflows_names_are_left(square, monkeypatch, caplog):
    monkeypatch.setenv(AMP_VARIABLE.format("INFERLIST_REMOVE"), "softmax")
    monkeypatch.setenv("ITEX_AUTO_MIXED_PRECISION_ALLOWLIST_ADD", "MatMul")
    with caplog.at_level(logging.WARNING), autocast("bf16"):
        assert (square @ square).softmax(-1).dtype is FP32
    assert "names 'MatMul', which is not an op type of pytorch; the edit is ignored" in caplog.text


def test_the_log_has_what_was_decided(square, tmp_path):
    for _ in range(2):
        with autocast("bf16", amp(log_path=tmp_path / "log")):
            (square @ square).exp()
    lines = (tmp_path / "log" / "autocast_bf16.tsv").read_text().splitlines()
    assert lines[0].split("\t") == ["op type", "list", "dtype of the result", "times"]
    assert sorted(lines[1:]) == ["exp\tdeny\tfloat32\t2", "matmul\tallow\tbfloat16\t2"]


def test_a_model_that_holds_one_can_be_copied_and_saved(square):
    layer = nn.Linear(4, 4)
    layer.context = autocast("fp16", amp(allowlist_remove="linear"))
    with layer.context:
        layer(square)
    for twin in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        with twin.context:
            assert (square @ square).dtype is FP16
            assert twin(square).dtype is FP32


@pytest.mark.parametrize(
    ("given", "error", "said"),
    [
        (("fp32",), ConfigurationError, "bf16 or fp16, got 'fp32'"),
        (("int8",), ConfigurationError, "bf16 or fp16, got 'int8'"),
        (("bf16,fp16",), ConfigurationError, "one 16-bit precision"),
        (("bf17",), UnknownPrecisionError, "did you mean 'bf16'"),
        ((16,), UnknownPrecisionError, "must be a string"),
        (("bf16", {"denylist_add": "exp"}), ConfigurationError, "AutoMixedPrecisionOptions"),
        (("bf16", amp(data_type="fp16")), ConfigurationError, "amp.data_type fp16"),
        (("bf16", amp(denylist_add="softmx")), UnknownOperatorError, "did you mean .*'softmax'"),
        (
            ("bf16", amp(denylist_add="matmul")),
            ConfigurationError,
            "remove the type from that list",
        ),
        (("bf16", amp(log_path="/dev/null/x")), ConfigurationError, "cannot be written to"),
    ],
)
def test_bad_options_are_named_before_anything_runs(given, error, said):
    with pytest.raises(error, match=said) as caught:
        autocast(*given)
    assert isinstance(caught.value, NeuralMPError)


def test_results_are_plain_tensors(square):
    with autocast("bf16"):
        low = (square @ square).exp()
        twin = copy.deepcopy(low)
    assert type(low) is torch.Tensor
    assert not vars(low)
    assert torch.equal(low, twin)


def test_torchs_compiler_is_not_imported_for_it():
    code = (
        "import sys, torch\nfrom neural_mp.training import autocast\n"
        "with autocast('bf16'): torch.ones(2, 2) @ torch.ones(2, 2)\n"
        "assert 'torch._dynamo' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)

"""Dtypes of results, cached casts, and nesting of `autocast` contexts."""

import copy
import threading
import weakref

import pytest
import torch
from autocast_nets import BF16, FP16, FP32, Casts, amp
from torch import nn
from torch.nn import functional as F

from neural_mp.training import autocast


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
        original = layer(inputs)
        layer.weight.zero_()
        assert float(layer(inputs).abs().sum()) == 0 != float(original.abs().sum())


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
        output = weakref.ref(layer(torch.ones(1, 3)))
        weight = weakref.ref(layer.weight)
    assert output() is None
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
        tensors = [torch.as_tensor(low), torch.zeros_like(low), low.new_zeros(2), nn.Parameter(low)]
        tensors += [low.detach(), low.clone(), low.data, low.T, low[0], low.cpu()]
        assert low.detach().data_ptr() == low.data_ptr()
    assert {tensor.dtype for tensor in tensors} == {BF16}


def test_other_threads_are_not_touched(square):
    dtypes = []
    with autocast("bf16"):
        thread = threading.Thread(target=lambda: dtypes.append((square @ square).dtype))
        thread.start()
        thread.join()
    assert dtypes == [FP32]


def test_torchs_own_autocast_is_off_inside_and_on_again_behind(square):
    with torch.autocast("cpu", BF16):
        with autocast("bf16", amp(allowlist_remove="matmul")):
            assert (square @ square).dtype is FP32
        assert (square @ square).dtype is BF16
    assert not torch._C._is_any_autocast_enabled()


def test_inference_keeps_the_weights_casts(gated_net, digit_batch):
    gated_net.eval()
    with torch.inference_mode(), autocast("bf16"), Casts() as casts:
        logits = [gated_net(digit_batch[0]) for _ in range(3)]
    assert torch.equal(logits[0], logits[2])
    assert casts.shapes.count(tuple(gated_net.conv2.weight.shape)) == 1


@pytest.mark.slow
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


def test_results_are_plain_tensors(square):
    with autocast("bf16"):
        low = (square @ square).exp()
        twin = copy.deepcopy(low)
    assert type(low) is torch.Tensor
    assert not vars(low)
    assert torch.equal(low, twin)

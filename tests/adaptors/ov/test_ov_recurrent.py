"""Recurrent layers: eligibility, INT8, 16 bits, layers that the plugin would give one kernel."""

import os

import numpy as np
import pytest
import torch
from ov_nets import require_by_channel
from torch import nn

import neural_mp
from neural_mp import convert_with_plan
from neural_mp.adaptors.common.kernels.runtime_probe import ONEDNN_LIMIT
from neural_mp.adaptors.loaded_model import LoadedModel
from neural_mp.adaptors.openvino.adaptor import OpenVinoAdaptor
from neural_mp.adaptors.openvino.runtime import Runner, make_core, ops, ov
from neural_mp.core.enums import Approach
from neural_mp.core.hardware import detect
from neural_mp.core.observations import Observations
from neural_mp.core.plan import PrecisionPlan
from neural_mp.core.precision import Precision
from neural_mp.profiling.audit import audit_model
from neural_mp.space import list_effective_ops
from neural_mp.testing import machine, signal_to_noise, uniform

F32 = np.float32
BATCH, STEPS, SIZE = 2, 6, 32
SEQUENCES = ("LSTMSequence", "GRUSequence")
INT8, BF16 = Precision.INT8, Precision.BF16


def drawn(*shape: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(F32)


def sequence(
    kind: str, x, direction: str = "forward", steps: int = STEPS, seed: int = 0, **options
):
    """An LSTM or GRU over [batch, steps, size]; for `start`, with that initial state."""
    directions, gates = 2 if direction == "bidirectional" else 1, 4 if kind == "LSTM" else 3
    biases = gates + bool(options.get("linear_before_reset"))
    zeros = options.pop("start", ops.constant(np.zeros((BATCH, directions, SIZE), F32)))
    lengths = ops.constant(np.full(BATCH, steps, np.int64))
    sizes = options.pop("magnitudes", F32(0.1))
    weights = [drawn(directions, gates * SIZE, SIZE, seed=seed + index) * sizes for index in (0, 1)]
    arguments = [*weights, drawn(directions, biases * SIZE, seed=seed + 2), SIZE, direction]
    if kind == "LSTM":
        return ops.lstm_sequence(x, zeros, zeros, lengths, *arguments, **options)
    return ops.gru_sequence(x, zeros, lengths, *arguments, **options)


def is_sequence(node) -> bool:
    return node.get_type_name() in SEQUENCES


def of(build) -> ov.Model:
    x = ops.parameter([BATCH, STEPS, SIZE], F32, name="x")
    built = build(x)
    outputs = built if isinstance(built, list) else [built.output(0)]
    return ov.Model(outputs, [x], "recurrent")


@pytest.mark.parametrize(
    ("kind", "options", "reason"),
    [
        ("LSTM", {"clip": 1.0}, "neither clipping"),
        ("LSTM", {"activations": ["sigmoid", "relu", "tanh"]}, "neither clipping nor other"),
        ("LSTM", {"steps": 3}, "sequences of one length"),
        ("GRU", {"steps": 3}, "sequences of one length"),
        ("GRU", {"activations": ["sigmoid", "relu"]}, "neither clipping nor other activations"),
        ("GRU", {"linear_before_reset": True}, "gain no time below 256 units, got 32"),
    ],
)
def test_a_layer_without_an_integer_kernel_has_a_reason(kind, options, reason):
    adaptor = OpenVinoAdaptor()
    model = adaptor.load(of(lambda x: sequence(kind, x, **options)))
    kernels = adaptor.kernels(model, machine())
    (kernel,) = (kernels[op] for op, node in model.structure.nodes.items() if is_sequence(node))
    assert reason in kernel.int8
    assert not kernel.missing
    assert any(kind in warning and "FP32 or 16 bits" in warning for warning in model.warnings)


def quantized(source, images):
    """Return the INT8 forms for this machine and every CPU, their plan, and the FP32 outputs."""
    adaptor = OpenVinoAdaptor()
    model = adaptor.load(source, example=images)
    space = adaptor.space(model, machine())
    plan = space.resolve(uniform(space, INT8))
    converted = adaptor.convert(model, plan, adaptor.observe(model, [images], space), space)
    portable = adaptor.portability.with_reduced_range(converted)
    assert not adaptor.portability.full_range_kernels(portable)
    return (
        adaptor,
        (converted, portable),
        list_effective_ops(space, plan),
        adaptor.predict(model, images),
    )


@pytest.mark.parametrize("kind", ["LSTM", "GRU"])
def test_layers_of_the_same_sizes_have_their_own_scales_on_every_cpu(kind):
    def stacked(x):
        first = ops.squeeze(sequence(kind, x).output(0), np.array([1]))
        return sequence(kind, first, seed=7)

    images = drawn(BATCH, STEPS, SIZE, seed=3) * F32(3)
    adaptor, forms, planned, expected = quantized(of(stacked), images)
    for converted in forms:
        assert signal_to_noise(expected, adaptor.predict(converted, images)) > 25
        audit = audit_model(LoadedModel(adaptor, converted), planned)
        assert audit.holds
        ran = [op.ran_in for op in audit.ops if op.planned.type in SEQUENCES]
        assert ran == [INT8, INT8]


@pytest.mark.parametrize("kind", ["LSTM", "GRU"])
def test_both_directions_run_in_integer_kernels(kind):
    """They become ops of their own; all results keep their names, shapes and order."""
    images = drawn(BATCH, STEPS, SIZE, seed=3)
    source = of(lambda x: sequence(kind, x, "bidirectional").outputs())
    names = ["hidden", "last", "cell"][: len(source.outputs)]
    for output, name in zip(source.outputs, names, strict=True):
        output.set_names({name})
    adaptor, forms, planned, expected = quantized(source, images)
    for converted in forms:
        results = adaptor.predict(converted, images)
        assert [ours.shape for ours in results] == [theirs.shape for theirs in expected]
        assert all(signal_to_noise(b, a) > 25 for a, b in zip(results, expected, strict=True))
        audit = audit_model(LoadedModel(adaptor, converted), planned)
        assert audit.holds
        assert [op.ran_in for op in audit.ops if op.planned.approach is not None] == [INT8, INT8]
        assert [output.any_name for output in adaptor.native(converted).outputs] == names
        kernels = Runner(adaptor.native(converted)).executed_kernels()
        assert [k.precision for k in kernels if k.type == "RNNSeq"] == ["u8", "u8"]


@pytest.mark.parametrize(("kind", "gates"), [("LSTM", 4), ("GRU", 3)])
def test_gates_may_have_weights_of_other_magnitudes(kind, gates):
    """The plugin reorders the gates of an LSTM, and leaves their scales in place."""
    magnitudes = np.repeat(F32([0.3, 0.05, 0.1, 0.2][:gates]), SIZE)[None, :, None]
    images = drawn(BATCH, STEPS, SIZE, seed=3)

    def build(x):
        return sequence(kind, x, magnitudes=magnitudes)

    adaptor, (converted, _), _, expected = quantized(of(build), images)
    assert signal_to_noise(expected, adaptor.predict(converted, images)) > 30


def test_states_of_any_size_in_both_directions_are_quantized():
    """The initial state, zeros in the size of the batch, is computed in the model."""

    def build(x):
        batch = ops.gather(ops.shape_of(x, "i64"), np.array([0]), np.array(0))
        start = ops.broadcast(F32(0), ops.concat([batch, np.array([2, SIZE])], 0))
        return sequence("LSTM", x, "bidirectional", start=start)

    images = drawn(BATCH, STEPS, SIZE, seed=3)
    adaptor, (converted, _), planned, expected = quantized(of(build), images)
    assert signal_to_noise(expected, adaptor.predict(converted, images)) > 25
    assert audit_model(LoadedModel(adaptor, converted), planned).holds


@pytest.mark.parametrize("direction", ["forward", "reverse", "bidirectional"])
@pytest.mark.parametrize(
    ("kind", "options"), [("LSTM", {}), ("GRU", {}), ("GRU", {"linear_before_reset": True})]
)
def test_layers_run_in_16_bits(kind, options, direction):
    adaptor = OpenVinoAdaptor()
    images = drawn(BATCH, STEPS, SIZE, seed=3)
    model = adaptor.load(of(lambda x: sequence(kind, x, direction, **options)), example=images)
    expected = adaptor.predict(model, images)
    space = adaptor.space(model, machine(BF16, Precision.FP16))
    for precision, least in ((BF16, 35), (Precision.FP16, 60)):
        plan = space.resolve(uniform(space, precision))
        converted = adaptor.convert(model, plan, Observations(), space)
        assert least < signal_to_noise(expected, adaptor.predict(converted, images)) < 100
    if detect().support(BF16).native and ONEDNN_LIMIT not in os.environ:
        converted = adaptor.convert(
            model, space.resolve(uniform(space, BF16)), Observations(), space
        )
        kernels = Runner(adaptor.native(converted)).executed_kernels()
        assert {k.precision for k in kernels if k.type == "RNNSeq"} == {"bf16"}


class Tagger(nn.Module):
    """A recurrent layer of PyTorch in both directions, and a class for each step."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.layer = getattr(nn, kind)(SIZE, SIZE, batch_first=True, bidirectional=True)
        self.head = nn.Linear(2 * SIZE, 5)

    def forward(self, x):
        return self.head(self.layer(x)[0])


@pytest.mark.parametrize("kind", ["LSTM", "GRU"])
def test_layers_of_pytorch_are_saved_for_plain_openvino(kind, tmp_path, monkeypatch):
    """LSTM in INT8; GRU, whose reset gate has no integer kernel, in BF16."""
    monkeypatch.setenv("FORCE_BF16", "1")
    torch.manual_seed(0)
    images = drawn(BATCH, STEPS, SIZE, seed=3)
    net = Tagger(kind).eval()
    source = ov.convert_model(net, example_input=torch.as_tensor(images))
    adaptor = OpenVinoAdaptor()
    model = adaptor.load(source, example=images)
    space = adaptor.space(model, machine(BF16))
    plan = uniform(space, INT8 if kind == "LSTM" else BF16)
    assert sum(space.graph[op].type in SEQUENCES for op in plan) == 2
    observations = adaptor.observe(model, [images], space)
    converted = convert_with_plan(source, plan, observations=observations, inputs=images)
    assert signal_to_noise(net(torch.as_tensor(images)).detach().numpy(), converted(images)) > 25
    converted.save(tmp_path)
    again = neural_mp.load(tmp_path)
    assert np.array_equal(again(images), converted(images))
    settings = {"INFERENCE_PRECISION_HINT": "f32"}
    plain = make_core().compile_model(tmp_path / "model.xml", "CPU", settings)
    assert np.array_equal(plain(images)[0], converted(images))


class Reader(nn.Module):
    """A GRU of PyTorch with 256 units in both directions, from an initial state that is given."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.GRU(40, 256, batch_first=True, bidirectional=True)
        self.head = nn.Linear(512, 5)

    def forward(self, x, start):
        every, last = self.layer(x, start)
        return self.head(every), last


def test_a_gru_of_pytorch_stores_its_weights_alone_step_by_step(tmp_path):
    require_by_channel()
    torch.manual_seed(0)
    net = Reader().eval()
    inputs = (drawn(3, 7, 40, seed=1), drawn(2, 3, 256, seed=2))
    tensors = tuple(map(torch.as_tensor, inputs))
    source = ov.convert_model(net, example_input=tensors)
    adaptor = OpenVinoAdaptor()
    model = adaptor.load(source, example=inputs)
    assert not model.warnings
    space = adaptor.space(model, machine())
    grus = [op for op in space.tunable_ops if space.graph[op].type == "GRUSequence"]
    configs = {op: space.capabilities[op].config(INT8) for op in grus}
    assert {config.approach for config in configs.values()} == {Approach.WEIGHT_ONLY}
    converted = convert_with_plan(source, PrecisionPlan(configs), inputs=inputs)
    audit = converted.audit()
    assert audit.holds
    assert {op.name for op in audit.ops if op.planned.approach is not None} == {*grus}
    for theirs, ours in zip(net(*tensors), converted(inputs), strict=True):
        assert 30 < signal_to_noise(theirs.detach().numpy(), ours) < 80
    assert not adaptor.portability.full_range_kernels(converted.held)
    assert adaptor.weight_bytes(converted.held) < 0.3 * adaptor.weight_bytes(model)
    longer = (drawn(2, 9, 40, seed=1), drawn(2, 2, 256, seed=2))
    expected = net(*map(torch.as_tensor, longer))[0].detach().numpy()
    assert signal_to_noise(expected, converted(longer)[0]) > 30
    converted.save(tmp_path)
    again = neural_mp.load(tmp_path)
    for first, second in zip(converted(inputs), again(inputs), strict=True):
        assert np.array_equal(first, second)
    assert again.audit().holds

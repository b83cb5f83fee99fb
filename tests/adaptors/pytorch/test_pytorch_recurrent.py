"""LSTM and GRU in dynamic INT8: right numbers in every form, and a reason where there is none."""

import numpy as np
import pytest
import torch
from machine import machine
from onnxruntime import InferenceSession
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence

import neural_mp
from neural_mp import AccuracyCriterion, MixedPrecision
from neural_mp.adaptors.loaded_model import LoadedModel
from neural_mp.adaptors.pytorch import versions
from neural_mp.adaptors.pytorch.graph import recurrent
from neural_mp.adaptors.registry import adaptor_for
from neural_mp.core.enums import Approach
from neural_mp.core.plan import PrecisionPlan
from neural_mp.core.precision import FP32, OpConfig, Precision
from neural_mp.profiling.audit import audit_model
from neural_mp.space import list_effective_ops
from neural_mp.testing import uniform

INT8, BF16 = Precision.INT8, Precision.BF16
INPUT, HIDDEN, BATCH, LENGTH = 12, 32, 4, 9
#: Decibels that rounding to 8 bits leaves, at least.
MIN_SQNR = 25


class Layer(nn.Module):
    """A recurrent layer that returns all that torch's own returns."""

    def __init__(self, kind, **options):
        super().__init__()
        self.layer = getattr(nn, kind)(INPUT, HIDDEN, **options)

    def forward(self, x):
        return self.layer(x)


class WithStates(Layer):
    """Is given its first states."""

    def forward(self, x, h, c):
        states = (h, c) if isinstance(self.layer, nn.LSTM) else h + c
        return self.layer(x, states)


class Packed(Layer):
    """Runs on packed sequences."""

    def forward(self, x, lengths):
        packed = pack_padded_sequence(x, lengths, enforce_sorted=False)
        state = x.new_zeros(1, x.shape[1], HIDDEN)
        return self.layer(packed, (state, state))[0].data


def sequences(count=1, batch=BATCH, length=LENGTH):
    torch.manual_seed(count)
    return [torch.randn(length, batch, INPUT) for _ in range(count)]


def sqnr(reference, output):
    reference, output = reference.double(), output.double()
    return float(10 * torch.log10((reference**2).mean() / ((reference - output) ** 2).mean()))


def flat(result):
    return [leaf for leaf in torch.utils._pytree.tree_leaves(result)]


class Case:
    """A net converted to INT8 as far as it goes."""

    def __init__(self, net, example, plan=None):
        self.net = net.eval()
        self.adaptor = adaptor_for(net)
        self.held = self.adaptor.load(net, example=example)
        self.space = self.adaptor.space(self.held, machine(BF16))
        self.resolved = self.space.resolve(uniform(self.space, INT8) if plan is None else plan)
        observations = self.adaptor.observe(self.held, [example], self.space)
        self.converted = self.adaptor.convert(self.held, self.resolved, observations, self.space)

    def __call__(self, *inputs):
        return flat(self.adaptor.predict(self.converted, inputs))

    def wanted(self, *inputs):
        with torch.no_grad():
            return flat(self.net(*inputs))

    def audit(self):
        planned = list_effective_ops(self.space, self.resolved)
        return audit_model(LoadedModel(self.adaptor, self.converted), planned)

    @property
    def layer(self):
        return next(op.name for op in self.space.graph if op.type in ("lstm", "gru", "rnn_tanh"))


FORMS = {
    "plain": {},
    "bidirectional": {"bidirectional": True},
    "stacked": {"num_layers": 3},
    "both": {"num_layers": 2, "bidirectional": True},
    "batch first": {"batch_first": True},
    "without biases": {"bias": False},
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", ["LSTM", "GRU"])
def test_int8_gives_the_numbers_of_fp32_for_any_batch_and_length(kind, form):
    torch.manual_seed(0)
    case = Case(Layer(kind, **FORMS[form]), sequences()[0])
    assert case.resolved.plan[case.layer].approach is Approach.DYNAMIC
    for batch, length in ((BATCH, LENGTH), (1, 5), (7, 23)):
        (x,) = sequences(batch=batch, length=length)
        outputs, expected = case(x), case.wanted(x)
        assert len(outputs) == len(expected)
        for output, reference in zip(outputs, expected, strict=True):
            assert output.shape == reference.shape
            assert MIN_SQNR < sqnr(reference, output) < 80, "rounded, and not more than that"


@pytest.mark.parametrize("kind", ["LSTM", "GRU"])
def test_what_ran_is_the_integer_kernel_alone(kind):
    case = Case(Layer(kind, num_layers=2), sequences()[0])
    audit = case.audit()
    assert audit.holds
    (ran,) = [op for op in audit.ops if op.name == case.layer]
    assert ran.ran_in is INT8
    assert ran.kernels == (f"aten::quantized_{kind.lower()}",)


@pytest.mark.parametrize("kind", ["LSTM", "GRU"])
def test_first_states_that_are_given_count(kind):
    torch.manual_seed(0)
    (x,) = sequences()
    h, c = torch.randn(2, 1, BATCH, HIDDEN)
    case = Case(WithStates(kind), (x, h, c))
    for states in ((h, c), (h * 0, c * 0)):
        for output, reference in zip(case(x, *states), case.wanted(x, *states), strict=True):
            assert sqnr(reference, output) > MIN_SQNR


@pytest.mark.parametrize(
    ("net", "reason"),
    [
        (lambda: Layer("LSTM", proj_size=8), "its outputs are projected"),
        (lambda: Packed("LSTM"), "its sequences are packed"),
        (lambda: Layer("RNN"), "integer kernels exist for LSTM and GRU only"),
    ],
)
def test_what_has_no_kernel_stays_in_fp32_and_says_why(net, reason):
    built = net().eval()
    lengths = (torch.full((BATCH,), LENGTH),) if isinstance(built, Packed) else ()
    model = adaptor_for(built).load(built, example=(*sequences(), *lengths))
    space = adaptor_for(built).space(model, machine())
    kinds = ("lstm", "rnn_tanh")
    layer = next(op.name for op in space.graph if op.type in kinds)
    assert reason in space.capabilities[layer].reasons[INT8]
    assert any("stays in FP32" in warning and reason in warning for warning in model.warnings)


def test_a_torch_without_the_kernels_says_so_and_runs_the_rounded_weights_in_float(monkeypatch):
    torch.manual_seed(0)
    (x,) = sequences()
    case = Case(Layer("LSTM"), x)
    monkeypatch.setattr(recurrent, "find_kernel_obstacle", lambda: "no kernel in this build")
    again = Case(case.net, x)
    assert again.space.capabilities[again.layer].reasons[INT8] == "no kernel in this build"
    from neural_mp.adaptors.pytorch.kernels.lowering import lower_to_kernels

    portable = case.converted.portable_graph
    with torch.no_grad():
        floats = flat(lower_to_kernels(portable)(x))
    for output, reference in zip(floats, case.wanted(x), strict=True):
        assert MIN_SQNR < sqnr(reference, output) < 80


def test_activations_keep_to_seven_bits_where_products_of_bytes_saturate(monkeypatch):
    torch.manual_seed(0)
    (x,) = sequences()
    monkeypatch.setattr(versions, "has_exact_byte_products", lambda: True)
    exact = Case(Layer("LSTM"), x)
    monkeypatch.setattr(versions, "has_exact_byte_products", lambda: False)
    reduced = Case(exact.net, x)
    (reference, *_), (eight, *_), (seven, *_) = exact.wanted(x), exact(x), reduced(x)
    assert sqnr(reference, seven) > MIN_SQNR
    # On a CPU whose products saturate, 8 bits are worse than 7.
    assert not torch.equal(seven, eight)


def test_beside_bf16_ops_the_layer_reads_and_writes_float32():
    class Mixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.before, self.layer = nn.Linear(INPUT, INPUT), nn.GRU(INPUT, HIDDEN)
            self.after = nn.Linear(HIDDEN, 5)

        def forward(self, x):
            return self.after(self.layer(self.before(x))[0])

    torch.manual_seed(0)
    (x,) = sequences()
    net = Mixed().eval()
    space = Case(net, x).space
    layer = next(op.name for op in space.graph if op.type == "gru")
    dynamic = space.capabilities[layer].config(INT8)
    plan = PrecisionPlan(
        {op: dynamic if op == layer else OpConfig(BF16) for op in ("before", layer, "after")}
    )
    case = Case(net, x, plan)
    (output,), (reference,) = case(x), case.wanted(x)
    assert output.dtype is torch.float32
    assert sqnr(reference, output) > MIN_SQNR


class Tagger(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.layer = getattr(nn, kind)(INPUT, HIDDEN, batch_first=True, bidirectional=True)
        self.head = nn.Linear(2 * HIDDEN, 4)

    def forward(self, x):
        return self.head(self.layer(x)[0][:, -1])


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["LSTM", "GRU"])
def test_a_run_converts_saves_and_brings_back_a_recurrent_net(kind, tmp_path):
    torch.manual_seed(0)
    net = Tagger(kind).eval()
    batches = [x.transpose(0, 1).contiguous() for x in sequences(4, batch=16)]
    with torch.no_grad():
        labelled = [(x, net(x).argmax(1)) for x in batches]
    tuner = MixedPrecision()
    tuner.model, tuner.precisions, tuner.metric = net, "int8", "topk"
    tuner.eval_dataloader, tuner.objective = labelled, "modelsize"
    tuner.accuracy_criterion = AccuracyCriterion(0.2, relative=False)
    tuner.workspace = tmp_path / "runs"
    result = tuner()
    assert result.met
    layer = next(op for op in result.plan if kind.lower() in op)
    assert result.plan[layer].precision is INT8
    assert not [warning for warning in result.report.warnings if "stays in FP32" in warning]
    assert result.audit().holds
    result.save(tmp_path / "saved")
    restored = neural_mp.load(tmp_path / "saved")
    assert restored.audit().holds
    for x in (batches[0], batches[0][:3, :5]):
        torch.testing.assert_close(restored(x), result(x), rtol=0, atol=0)
    result.export_onnx(tmp_path / "net.onnx")
    session = InferenceSession(tmp_path / "net.onnx")
    (outputs,) = session.run(None, {session.get_inputs()[0].name: batches[0].numpy()})
    np.testing.assert_allclose(outputs, labelled_outputs(net, batches[0]), atol=0.05)


def labelled_outputs(net, x):
    with torch.no_grad():
        return net(x).numpy()


def test_fp32_layers_of_a_plan_stay_as_they_are():
    (x,) = sequences()
    case = Case(Layer("LSTM"), x, PrecisionPlan({}))
    assert case.converted is case.held
    layer = case.layer
    assert case.resolved.effective[layer] is FP32.precision

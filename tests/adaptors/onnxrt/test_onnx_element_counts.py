"""Element counts of tensors: by shape inference, and of a run where that does not suffice."""

import numpy as np
import onnx
import onnx.parser
import pytest

from neural_mp.adaptors.contract import Adaptor
from neural_mp.adaptors.onnxrt.adaptor import OnnxRuntimeAdaptor
from neural_mp.adaptors.onnxrt.graph.sessions import Runner

_BATCH = np.random.default_rng(0).standard_normal((6, 4), dtype=np.float32)


def _loaded(body, declared=()):
    text = (
        f'<ir_version: 8, opset_import: ["" : 17]> net (float[batch, 4] x) => (float[k, m] y) '
        f"<{', '.join(declared)}> {{ {body} }}"
    )
    model = onnx.parser.parse_model(text)
    return OnnxRuntimeAdaptor().load(model, inputs=(_BATCH,))


def _as_observed(model):
    adaptor = OnnxRuntimeAdaptor()
    graph = adaptor.graph(model)
    names = [*graph.inputs, *(op.name for op in graph)]
    counts = adaptor.element_counts(model, (_BATCH,), names)
    assert counts == Adaptor.element_counts(adaptor, model, (_BATCH,), names)
    return counts


@pytest.fixture
def sessions(monkeypatch):
    """The sessions that are made."""
    runners, original = [], Runner.__init__

    def init(self, *arguments, **settings):
        runners.append(self)
        original(self, *arguments, **settings)

    monkeypatch.setattr(Runner, "__init__", init)
    return runners


def test_shapes_left_from_another_batch_size_do_not_count():
    model = _loaded("a = Relu(x) y = Sigmoid(a)", ["float[1, 4] a"])
    assert set(_as_observed(model).values()) == {24.0}


def test_sizes_that_follow_from_the_inputs_take_no_run(sessions):
    model = _loaded("a = Relu(x) y = Concat <axis = 1> (a, a)")
    del sessions[:]
    counts = OnnxRuntimeAdaptor().element_counts(
        model, (_BATCH,), [op.name for op in OnnxRuntimeAdaptor().graph(model)]
    )
    assert sorted(counts.values()) == [24.0, 48.0]
    assert not sessions


def test_sizes_that_depend_on_values_are_those_of_a_run():
    body = "a = Relu(x) p = NonZero(a) t = Transpose(p) f = Cast <to = 1> (t) y = Relu(f)"
    counts = _as_observed(_loaded(body))
    assert 2.0 * (_BATCH > 0).sum() in counts.values()

"""Arguments of any structure reach the converted model as they do the module."""

from __future__ import annotations

import collections
import dataclasses

import numpy as np
import pytest
import torch
from torch import nn

from neural_mp.adaptors.pytorch.adaptor import PyTorchAdaptor
from neural_mp.adaptors.pytorch.graph.call_signature import call_signature
from neural_mp.errors import CaptureError, DataError

Pair = collections.namedtuple("Pair", "left right")


@dataclasses.dataclass
class Batch:
    left: torch.Tensor
    right: torch.Tensor
    scale: float = 2.0


@dataclasses.dataclass
class Scores:
    logits: torch.Tensor
    hidden: torch.Tensor | None = None


@dataclasses.dataclass(frozen=True)
class Nested:
    scores: Scores
    others: list[Scores]


class Base(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(3, 4), nn.Linear(5, 4)

    def joined(self, left, right):
        return self.a(left).relu() + self.b(right)


class OnePair(Base):
    def forward(self, pair):
        return self.joined(*pair)


class OnePairAndOption(Base):
    def forward(self, pair, scale=None):
        return self.joined(*pair)


class Two(Base):
    def forward(self, left, right):
        return self.joined(left, right)


class Keywords(Base):
    def forward(self, left, **kwargs):
        return self.joined(left, **kwargs)


class OnlyKeywords(Base):
    def forward(self, **kwargs):
        return self.joined(**kwargs)


class Anything(Base):
    def forward(self, *args, **kwargs):
        return self.joined(*args, **kwargs)


class OneDict(Base):
    def forward(self, batch, **options):
        return self.joined(batch["left"], batch["right"])


class NestedPair(Base):
    def forward(self, left, others):
        return self.joined(left, others["right"][0])


class OneDataclass(Base):
    def forward(self, batch):
        return self.joined(batch.left, batch.right) * batch.scale


class OneNamedTuple(Base):
    def forward(self, pair):
        return self.joined(pair.left, pair.right)


LEFT, RIGHT = torch.ones(6, 3), torch.full((6, 5), 0.5)
BOTH = {"left": LEFT, "right": RIGHT}
#: Module, its batch as the toolkit takes it, and the arguments of a plain call.
CASES = {
    "a tuple as the only argument": (OnePair, (LEFT, RIGHT), ((LEFT, RIGHT),), {}),
    "a list as the only argument": (OnePair, [LEFT, RIGHT], ([LEFT, RIGHT],), {}),
    "an enclosed tuple": (OnePair, ((LEFT, RIGHT),), ((LEFT, RIGHT),), {}),
    "an enclosed tuple of two": (OnePairAndOption, ((LEFT, RIGHT),), ((LEFT, RIGHT),), {}),
    "a tuple by keyword": (OnePair, {"pair": (LEFT, RIGHT)}, ((LEFT, RIGHT),), {}),
    "two arguments": (Two, (LEFT, RIGHT), (LEFT, RIGHT), {}),
    "two keywords": (Two, BOTH, (), BOTH),
    "keywords by **kwargs": (Keywords, BOTH, (), BOTH),
    "only **kwargs": (OnlyKeywords, BOTH, (), BOTH),
    "keywords to *args, **kwargs": (Anything, BOTH, (), BOTH),
    "positions to *args, **kwargs": (Anything, (LEFT, RIGHT), (LEFT, RIGHT), {}),
    "a dict as the only argument": (OneDict, BOTH, (BOTH,), {}),
    "nested": (
        NestedPair,
        (LEFT, {"right": [RIGHT]}),
        (LEFT, {"right": [RIGHT]}),
        {},
    ),
    "a dataclass": (OneDataclass, Batch(LEFT, RIGHT), (Batch(LEFT, RIGHT),), {}),
    "a named tuple": (OneNamedTuple, (Pair(LEFT, RIGHT),), (Pair(LEFT, RIGHT),), {}),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_a_batch_reaches_the_model_as_a_call_does_the_module(case, tmp_path):
    kind, batch, args, kwargs = CASES[case]
    torch.manual_seed(0)
    module, adaptor = kind().eval(), PyTorchAdaptor()
    expected = module(*args, **kwargs).detach()
    model = adaptor.load(module, example=batch)
    torch.testing.assert_close(adaptor.predict(model, batch), expected)
    torch.testing.assert_close(model.module(*args, **kwargs), expected)
    adaptor.save(model, tmp_path)
    restored = adaptor.restore(tmp_path)
    torch.testing.assert_close(adaptor.predict(restored, batch), expected)


@pytest.mark.slow
@pytest.mark.parametrize("case", ["a dataclass", "a named tuple"])
def test_restored_models_take_dicts_of_fields(case, tmp_path):
    kind, batch, args, _ = CASES[case]
    module, adaptor = kind().eval(), PyTorchAdaptor()
    adaptor.save(adaptor.load(module, example=batch), tmp_path)
    restored = adaptor.restore(tmp_path)
    fields = {**BOTH, "scale": 2.0} if case == "a dataclass" else BOTH
    torch.testing.assert_close(restored.module(fields), module(*args).detach())
    torch.testing.assert_close(adaptor.predict(restored, (fields,)), module(*args).detach())


class Images(nn.Module):
    """Takes a list of images of any size, and returns a list of dicts."""

    def __init__(self):
        super().__init__()
        self.conv, self.head = nn.Conv2d(3, 4, 3), nn.Linear(4, 2)

    def forward(self, images):
        return [{"scores": self.head(self.conv(image[None]).mean((2, 3)))} for image in images]


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 2, 3])
def test_lists_of_another_length_reach_modules_captured_one_by_one(count):
    adaptor, module = PyTorchAdaptor(), Images().eval()
    images = [torch.rand(3, 9 + n, 8) for n in range(3)]
    model = adaptor.load(module, example=images[:2], capture="modules")
    got = adaptor.predict(model, images[:count])
    assert len(got) == count
    torch.testing.assert_close(got[0], {k: v.detach() for k, v in module(images[:1])[0].items()})


class Numbers(Base):
    def forward(self, x, scale=1.0, flip=False, count=4, mask=None):
        y = self.a(x) * scale
        y = y.flip(1) if flip else y
        return y[:, :count] if mask is None else y[:, :count] * mask


GIVEN = {"x": LEFT, "scale": 2.0, "flip": True, "count": 3}


@pytest.mark.slow
@pytest.mark.parametrize(
    "other", [{"scale": 3.0}, {"flip": False}, {"count": 2}, {"count": 3.5}, {"x": 1.0}], ids=str
)
def test_other_numbers_than_those_of_capture_are_refused(other, tmp_path):
    module, adaptor = Numbers().eval(), PyTorchAdaptor()
    model = adaptor.load(module, example=GIVEN)
    adaptor.save(model, tmp_path)
    for form in (model, adaptor.restore(tmp_path)):
        torch.testing.assert_close(form.module(**GIVEN), module(**GIVEN).detach())
        with pytest.raises(DataError, match=r"as at capture, got"):
            form.module(**GIVEN | other)
    with pytest.raises(DataError, match=r"as at capture, got"):
        adaptor.predict(adaptor.restore(tmp_path), GIVEN | other)


@torch.no_grad()
def test_a_dataclass_may_hold_tensors_of_other_sizes_than_at_capture():
    module, adaptor = OneDataclass().eval(), PyTorchAdaptor()
    model = adaptor.load(module, example=Batch(LEFT, RIGHT))
    fewer = Batch(LEFT[:3], RIGHT[:3])
    got = adaptor.predict(model, fewer)
    torch.testing.assert_close(torch.as_tensor(got), module(fewer))


@pytest.mark.parametrize("inputs", [[LEFT, RIGHT], ([LEFT, RIGHT],), ([LEFT, RIGHT], LEFT)])
def test_a_list_is_the_first_argument_where_a_second_one_is_optional(inputs):
    signature = call_signature(OnePairAndOption())
    call = signature.call(inputs, like=signature.call(([LEFT, RIGHT], LEFT)))
    assert len(call.args[0]) == 2
    assert call.args[0][0] is LEFT


@torch.no_grad()
def test_an_optional_input_may_be_none(tmp_path):
    module, adaptor = OnePairAndOption().eval(), PyTorchAdaptor()
    model = adaptor.load(module, example=((LEFT, RIGHT), None))
    adaptor.save(model, tmp_path)
    for form in (model, adaptor.restore(tmp_path)):
        got = adaptor.predict(form, ((LEFT, RIGHT), None))
        torch.testing.assert_close(torch.as_tensor(got), module((LEFT, RIGHT), None))
        with pytest.raises(DataError, match="must be None, as at capture, got a tensor"):
            form.module((LEFT, RIGHT), LEFT)


@pytest.mark.parametrize("inputs", [None, (None, None), {"pair": None}], ids=str)
def test_inputs_that_are_all_none_are_refused(inputs):
    with pytest.raises(DataError, match="must hold arrays or tensors, got"):
        call_signature(OnePairAndOption()).call(inputs)


class Returns(Base):
    def __init__(self, make):
        super().__init__()
        self.make = make

    def forward(self, left, right):
        return self.make(self.joined(left, right), left)


OUTPUTS = {
    "dataclass": Scores,
    "dataclass with None": lambda y, x: Scores(y),
    "nested dataclasses": lambda y, x: Nested(Scores(y, x), [Scores(x)]),
    "named tuple": Pair,
    "dict of dataclasses": lambda y, x: {"scores": Scores(y, x)},
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", OUTPUTS)
def test_outputs_keep_their_class(kind, tmp_path):
    module, adaptor = Returns(OUTPUTS[kind]).eval(), PyTorchAdaptor()
    model = adaptor.load(module, example=(LEFT, RIGHT))
    expected, got = module(LEFT, RIGHT), model.module(LEFT, RIGHT)
    assert type(got) is type(expected)
    np.testing.assert_allclose(_first(got), _first(expected), rtol=1e-5)
    adaptor.save(model, tmp_path)
    restored = adaptor.predict(adaptor.restore(tmp_path), (LEFT, RIGHT))
    np.testing.assert_allclose(_first(restored), _first(expected), rtol=1e-5)


def _first(outputs):
    while not isinstance(outputs, torch.Tensor):
        if dataclasses.is_dataclass(outputs):
            outputs = getattr(outputs, dataclasses.fields(outputs)[0].name)
        else:
            outputs = next(iter(outputs.values() if isinstance(outputs, dict) else outputs))
    return outputs.detach().numpy()


def test_outputs_of_a_class_without_parts_are_named():
    class Opaque:
        def __init__(self, y, x):
            self.y = y

    with pytest.raises(CaptureError, match="got an Opaque"):
        PyTorchAdaptor().load(Returns(Opaque).eval(), example=(LEFT, RIGHT))


def test_a_missing_argument_and_an_unknown_key_are_named():
    signature = call_signature(Keywords())
    with pytest.raises(DataError, match="must hold 'left'"):
        call_signature(Options()).call({"scale": LEFT, "right": RIGHT})
    assert set(signature.call(BOTH).kwargs) == {"left", "right"}
    with pytest.raises(DataError, match="no parameter 'rigth'.*right"):
        call_signature(Two()).call({"left": LEFT, "rigth": RIGHT})


class Options(Base):
    def forward(self, left, scale=1.0, **kwargs):
        return self.joined(left, **kwargs) * scale

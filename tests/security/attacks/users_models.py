"""Models that return what no metric takes, or raise."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from attacks.users_ways import (
    Comes,
    Given,
    Own,
    OwnError,
    Refused,
    Right,
    Tiny,
    tiny_keras,
    tiny_onnx,
)
from torch import nn


def returning(change: Callable[[Any], Any], **options: Any) -> Callable[[Given], None]:
    """A module that returns something else than its logits."""

    class Changed(Tiny):
        def forward(self, x: torch.Tensor) -> Any:
            return change(super().forward(x))

    def set_up(run: Given) -> None:
        run.converter.model = Changed().eval()
        for name, value in options.items():
            setattr(run.converter, name, value)

    return set_up


def model(make: Callable[[], Any], **options: Any) -> Callable[[Given], None]:
    """Another model."""

    def set_up(run: Given) -> None:
        run.converter.model = make()
        for name, value in options.items():
            setattr(run.converter, name, value)

    return set_up


def broken_metric(make: Callable[[], Any]) -> Callable[[Given], None]:
    """A metric that raises, for a model of another framework."""

    def set_up(run: Given) -> None:
        from attacks.users_ways import fit_metric, raiser

        run.converter.model = make()
        run.converter.metric = fit_metric(update=raiser(OwnError("mine")))

    return set_up


def with_loader(make: Callable[[], Any], loader: Any, **options: Any) -> Callable[[Given], None]:
    def set_up(run: Given) -> None:
        run.converter.model = make()
        run.converter.eval_dataloader = loader
        for name, value in options.items():
            setattr(run.converter, name, value)

    return set_up


def act(_: Any) -> Any:
    raise OwnError("mine")


class Flag(nn.Module):
    """Its graph cannot be captured as a whole."""

    def __init__(self, then: Callable[[Any], Any]) -> None:
        super().__init__()
        self.head, self.then = nn.Linear(64, 10), then

    def forward(self, x: torch.Tensor) -> Any:
        y = self.head(x.flatten(1))
        return self.then(y) if float(y.sum()) != 0 else y


def modules(then: Callable[[Any], Any], **options: Any) -> Callable[[Given], None]:
    """The same, converted module by module, so that it returns what it likes."""
    return model(lambda: Flag(then).eval(), capture="modules", **options)


WRONG_FORM = [(np.zeros((8, 3), np.float32), np.zeros(8, np.int64))] * 2
WORDS = [(np.array(["a"] * 8, object), np.zeros(8, np.int64))] * 2
RAGGED = [([[1.0, 2.0], [3.0]], [0, 1])] * 2

MODELS: dict[str, tuple[Callable[[Given], None], Comes]] = {
    "returns None": (returning(lambda y: None), Refused("None|no output|returns nothing")),
    "returns a word": (returning(lambda y: "logits"), Refused("str|logits|output")),
    "returns a number": (returning(lambda y: 3), Refused("int|3|no output|shape")),
    "returns a dict": (returning(lambda y: {"logits": y}), Right()),
    "returns a dict of two": (
        returning(lambda y: {"a": y, "b": y + 1}),
        Refused("must be one array, got 2"),
    ),
    "returns a tuple of two": (
        returning(lambda y: (y, y + 1)),
        Refused("must be one array, got 2"),
    ),
    "returns an empty tuple": (returning(lambda y: ()), Refused("tuple|output")),
    "returns NaN only": (returning(lambda y: y * float("nan")), Refused(r"NaN.*float32\[8, 10\]")),
    "returns Inf only": (returning(lambda y: y + float("inf")), Right(False)),
    "returns complex numbers": (returning(lambda y: torch.complex(y, y)), Refused("complex")),
    "returns 0 axes": (returning(lambda y: y.sum()), Refused(r"shape \(\)")),
    "returns another batch size": (
        returning(lambda y: torch.cat([y, y])),
        Refused(r"\(16, 10\).*\(8,\)"),
    ),
    "returns one sample less": (returning(lambda y: y[1:]), Refused(r"\(7, 10\).*\(8,\)")),
    "returns three axes": (returning(lambda y: y[..., None]), Refused(r"\(8, 10, 1\)")),
    "by modules: None": (modules(lambda y: None), Refused("None")),
    "by modules: a word": (modules(lambda y: "no"), Refused("a str|'no'")),
    "by modules: a number": (modules(lambda y: 3), Refused(r"shape \(\)")),
    "by modules: an object": (modules(lambda y: object()), Refused("object")),
    "by modules: a ragged list": (
        modules(lambda y: [[1.0, 2.0], [3.0]]),
        Refused("do not form one array|ragged|list"),
    ),
    "by modules: objects": (
        modules(lambda y: np.array([object()] * 8)),
        Refused("object"),
    ),
    "by modules: a dict of words": (modules(lambda y: {"a": "b"}), Refused("dict.*'a'")),
    "by modules: NaN": (modules(lambda y: y * float("nan")), Refused("NaN")),
    "by modules: raises": (modules(act), Refused("OwnError: mine|CaptureError.*mine")),
    "that raises when it is captured": (returning(act), Refused("OwnError: mine")),
    "of another framework: ONNX": (model(tiny_onnx), Right()),
    "of another framework: Keras": (model(tiny_keras), Right()),
    "ONNX: inputs of another form": (
        with_loader(tiny_onnx, WRONG_FORM),
        Refused(r"batch 1 of eval_dataloader.*\[8, 3\]"),
    ),
    "Keras: inputs of another form": (
        with_loader(tiny_keras, WRONG_FORM),
        Refused(r"batch 1 of eval_dataloader.*\[8, 3\]"),
    ),
    "PyTorch: inputs of another form": (
        with_loader(lambda: Tiny().eval(), WRONG_FORM),
        Refused(r"eval_dataloader"),
    ),
    "ONNX: inputs that are words": (
        with_loader(tiny_onnx, WORDS),
        Refused("batch 1 of eval_dataloader.*object"),
    ),
    "Keras: inputs that are words": (
        with_loader(tiny_keras, WORDS),
        Refused("batch 1 of eval_dataloader.*object"),
    ),
    "PyTorch: inputs that are words": (
        with_loader(lambda: Tiny().eval(), WORDS),
        Refused("eval_dataloader.*object"),
    ),
    "ONNX: inputs that are ragged": (
        with_loader(tiny_onnx, RAGGED),
        Refused("batch 1 of eval_dataloader"),
    ),
    "Keras: inputs that are ragged": (
        with_loader(tiny_keras, RAGGED),
        Refused("batch 1 of eval_dataloader"),
    ),
    "PyTorch: inputs that are ragged": (
        with_loader(lambda: Tiny().eval(), RAGGED),
        Refused("eval_dataloader"),
    ),
    "ONNX: a metric that raises": (broken_metric(tiny_onnx), Own(OwnError)),
    "Keras: a metric that raises": (broken_metric(tiny_keras), Own(OwnError)),
}

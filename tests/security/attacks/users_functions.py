"""Evaluation functions and postprocesses that take, return or raise something else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from attacks.users_loaders import Made
from attacks.users_metrics import TuningError
from attacks.users_ways import (
    After,
    Comes,
    Given,
    Own,
    OwnError,
    Refused,
    Right,
    batches,
    raiser,
    tiny_keras,
    tiny_onnx,
)


def eval_func(function: Any, make: Callable[[], Any] | None = None) -> Callable[[Given], None]:
    """An evaluation function in place of a metric."""

    def set_up(run: Given) -> None:
        converter = run.converter
        converter.metric = converter.eval_dataloader = None
        converter.calib_dataloader = batches()
        converter.eval_func = function() if isinstance(function, Made) else function
        if make is not None:
            converter.model = make()

    return set_up


def postprocess(function: Any) -> Callable[[Given], None]:
    """A postprocess before the metric."""

    def set_up(run: Given) -> None:
        run.converter.postprocess = function() if isinstance(function, Made) else function

    return set_up


class ResetOfOne:
    def __call__(self, pair: Any) -> Any:
        return pair

    def reset(self, to: Any) -> None:
        pass


def _later(error: Any) -> Made:
    return Made(lambda: After(1, raiser(error)))


FUNCTIONS: dict[str, tuple[Callable[[Given], None], Comes]] = {
    "eval_func": (eval_func(lambda model: 1.0), Right()),
    "eval_func of no argument": (
        eval_func(lambda: 1.0),
        Refused(r"eval_func\(model\).*takes \(\)"),
    ),
    "eval_func of two": (
        eval_func(lambda model, data: 1.0),
        Refused(r"eval_func\(model\).*takes \(model, data\)"),
    ),
    "eval_func by keyword": (
        eval_func(lambda *, model: 1.0),
        Refused(r"eval_func\(model\).*takes \(\*, model\)"),
    ),
    "eval_func that is a class": (eval_func(dict), Refused("eval_func")),
    "eval_func that is a number": (eval_func(0.9), Refused("eval_func.*float")),
    "eval_func that returns None": (eval_func(lambda model: None), Refused("eval_func.*None")),
    "eval_func that returns a word": (eval_func(lambda model: "0.9"), Refused("eval_func.*'0.9'")),
    "eval_func that returns an array": (
        eval_func(lambda model: np.ones((2, 2))),
        Refused(r"eval_func must return one number, got float64\[2, 2\]"),
    ),
    "eval_func that returns the model": (eval_func(lambda model: model), Refused("eval_func")),
    "eval_func that returns a tuple": (
        eval_func(lambda model: (0.9, 1)),
        Refused("eval_func.*tuple"),
    ),
    "eval_func that returns a dict": (eval_func(lambda model: {"a": 0.5}), Right()),
    "eval_func that returns an empty dict": (
        eval_func(lambda model: {}),
        Refused("eval_func.*empty"),
    ),
    "eval_func that returns NaN": (eval_func(lambda model: np.nan), Refused("nan")),
    "eval_func that raises": (eval_func(raiser(OwnError("mine"))), Own(OwnError)),
    "eval_func that raises a TypeError": (eval_func(raiser(TypeError("mine"))), Own(TypeError)),
    "eval_func that raises StopIteration": (
        eval_func(raiser(StopIteration("mine"))),
        Own(StopIteration),
    ),
    "eval_func that exits": (eval_func(raiser(SystemExit("mine"))), Own(SystemExit)),
    "eval_func that is interrupted": (
        eval_func(raiser(KeyboardInterrupt("mine"))),
        Own(KeyboardInterrupt),
    ),
    "eval_func that raises later": (eval_func(_later(OwnError("mine"))), Own(OwnError)),
    "eval_func that raises StopIteration later": (
        eval_func(_later(StopIteration("mine"))),
        Own(StopIteration),
    ),
    "eval_func that exits later": (eval_func(_later(SystemExit("mine"))), Own(SystemExit)),
    "eval_func that is interrupted later": (
        eval_func(_later(KeyboardInterrupt("mine"))),
        Right(),
    ),
    "eval_func that raises what is called as ours later": (
        eval_func(_later(TuningError("mine"))),
        Own(TuningError),
    ),
    "ONNX: eval_func of two": (
        eval_func(lambda model, data: 1.0, tiny_onnx),
        Refused(r"eval_func\(model\).*takes \(model, data\)"),
    ),
    "Keras: eval_func of two": (
        eval_func(lambda model, data: 1.0, tiny_keras),
        Refused(r"eval_func\(model\).*takes \(model, data\)"),
    ),
    "ONNX: eval_func that raises later": (
        eval_func(_later(OwnError("mine")), tiny_onnx),
        Own(OwnError),
    ),
    "Keras: eval_func that raises later": (
        eval_func(_later(OwnError("mine")), tiny_keras),
        Own(OwnError),
    ),
    "postprocess": (postprocess(lambda pair: pair), Right()),
    "postprocess of no argument": (
        postprocess(lambda: None),
        Refused(r"postprocess\(\(predictions, labels\)\).*takes \(\)"),
    ),
    "postprocess of two": (
        postprocess(lambda preds, labels: (preds, labels)),
        Refused(r"postprocess\(\(predictions, labels\)\).*takes \(preds, labels\)"),
    ),
    "postprocess that returns None": (
        postprocess(lambda pair: None),
        Refused(r"postprocess must return \(predictions, labels\), got None"),
    ),
    "postprocess that returns predictions": (
        postprocess(lambda pair: pair[0]),
        Refused(r"postprocess must return \(predictions, labels\), got float32\[8, 10\]"),
    ),
    "postprocess that returns three": (
        postprocess(lambda pair: (*pair, 1)),
        Refused("postprocess must return .*tuple of 3"),
    ),
    "postprocess that returns a word": (
        postprocess(lambda pair: "ab"),
        Refused("postprocess must return .*a str"),
    ),
    "postprocess that is a number": (
        postprocess(3),
        Refused("postprocess must be a function.*got 3"),
    ),
    "postprocess that raises": (postprocess(raiser(OwnError("mine"))), Own(OwnError)),
    "postprocess that raises StopIteration": (
        postprocess(raiser(StopIteration("mine"))),
        Own(StopIteration),
    ),
    "postprocess that exits": (postprocess(raiser(SystemExit("mine"))), Own(SystemExit)),
    "postprocess with a reset of one": (
        postprocess(ResetOfOne()),
        Refused(r"postprocess.reset\(\).*takes \(to\)"),
    ),
}

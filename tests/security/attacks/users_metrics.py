"""Metrics that lack a method, take something else, return something else, or raise."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from attacks.users_loaders import DeepError
from attacks.users_ways import (
    After,
    Comes,
    Given,
    NeedsTwoError,
    Own,
    OwnError,
    Refused,
    Right,
    fit_metric,
    raiser,
)

from neural_mp.errors import MetricError


def metric(make: Callable[[], Any], workers: int = 1) -> Callable[[Given], None]:
    """Another metric, made anew for each case."""

    def set_up(run: Given) -> None:
        converter = run.converter
        converter.metric = make()
        if workers > 1:
            converter.workers, converter.strategy = workers, "random"
            converter.exit_policy = {"max_trials": 2}

    return set_up


class Lacks:
    """A metric with these methods."""

    def __init__(self, *names: str) -> None:
        for name in names:
            setattr(self, name, lambda *_: 1.0)


class TuningError(Exception):
    """A user's own that is only called so."""


class DeepMetricError(MetricError):
    """A user's own, derived from one of ours."""


class PassesBaseline:
    """Right in the first pass; raises in the next."""

    def __init__(self, act: Callable[[], Any], calls: int = 1) -> None:
        self.passes, self.act, self.calls = 0, act, calls

    def reset(self) -> None:
        self.passes += 1

    def update(self, preds: Any, labels: Any) -> None:
        if self.passes > self.calls:
            self.act()

    def result(self) -> float:
        return 1.0


def act_with_more() -> None:
    error = OwnError("mine")
    error.add_note("a note")
    raise error from KeyError("why")


def unlike() -> None:
    raise UnlikeError(threading.Lock())


class UnlikeError(Exception):
    """Holds what no process can send."""

    def __str__(self) -> str:
        return "mine"


def result(value: Any) -> Callable[[Given], None]:
    return metric(lambda: fit_metric(result=lambda: value))


def update(function: Any) -> Callable[[Given], None]:
    return metric(lambda: fit_metric(update=function))


def _in_trial(error: Any, workers: int = 1) -> Callable[[Given], None]:
    return metric(lambda: PassesBaseline(raiser(error)), workers)


METRICS: dict[str, tuple[Callable[[Given], None], Comes]] = {
    "no update": (metric(lambda: Lacks("reset", "result")), Refused("no update")),
    "no reset": (metric(lambda: Lacks("update", "result")), Refused("no reset")),
    "no result": (metric(lambda: Lacks("update", "reset")), Refused("no result")),
    "update of no argument": (
        update(lambda: None),
        Refused(r"Metric.update\(predictions.*takes \(\)"),
    ),
    "update of one": (update(lambda preds: None), Refused(r"Metric.update.*takes \(preds\)")),
    "update of three": (
        update(lambda preds, labels, weight: None),
        Refused(r"Metric.update.*takes \(preds, labels, weight\)"),
    ),
    "update by keyword": (
        update(lambda *, preds, labels: None),
        Refused(r"Metric.update.*takes \(\*, preds, labels\)"),
    ),
    "result of one": (
        metric(lambda: fit_metric(result=lambda x: 1)),
        Refused(r"result\(\).*\(x\)"),
    ),
    "reset of one": (metric(lambda: fit_metric(reset=lambda x: 1)), Refused(r"reset\(\).*\(x\)")),
    "returns None": (result(None), Refused("Metric must return a number, got None")),
    "returns a word": (result("high"), Refused("Metric must return a number, got 'high'")),
    "returns an array": (result(np.ones(3)), Refused(r"one number, got float64\[3\]")),
    "returns an array of one": (result(np.ones(1)), Right()),
    "returns a tensor": (result(torch.tensor(0.5)), Right()),
    "returns a tensor of two": (result(torch.ones(2)), Refused(r"one number, got float32\[2\]")),
    "returns a list": (result([0.5]), Refused(r"number, got \[0.5\] \(list\)")),
    "returns True": (result(True), Refused(r"True \(bool\)")),
    "returns a complex number": (result(1j), Refused("1j")),
    "returns a huge number": (result(10**400), Refused("in the range of a float")),
    "returns a dict": (result({"a": 0.5, "b": 0.6}), Right()),
    "returns an empty dict": (result({}), Refused("Metric.*empty")),
    "returns a dict of words": (result({"a": "b"}), Refused("number, got 'b'")),
    "returns NaN": (result(float("nan")), Refused("FP32 model is nan")),
    "returns Inf": (result(float("inf")), Refused("FP32 model is inf")),
    "a number": (metric(lambda: 3), Refused("metric")),
    "a word that is none": (metric(lambda: "acuracy"), Refused("'acuracy'.*accuracy")),
    "a class": (metric(lambda: type(fit_metric())), Refused("instance")),
    "a function of no argument": (metric(lambda: lambda: 1.0), Refused(r"must take .*got \(\)")),
    "a function of three": (
        metric(lambda: lambda a, b, c: 1.0),
        Refused(r"must take .*got \(a, b, c\)"),
    ),
    "a function of a model": (metric(lambda: lambda model: 1.0), Refused("eval_func")),
    "a function that returns None": (metric(lambda: lambda preds, labels: None), Refused("None")),
    "update raises": (update(raiser(OwnError("mine"))), Own(OwnError)),
    "update raises a TypeError": (update(raiser(TypeError("mine"))), Own(TypeError)),
    "update raises StopIteration": (update(raiser(StopIteration("mine"))), Own(StopIteration)),
    "update exits": (update(raiser(SystemExit("mine"))), Own(SystemExit)),
    "update raises GeneratorExit": (update(raiser(GeneratorExit("mine"))), Own(GeneratorExit)),
    "update is interrupted": (
        update(raiser(KeyboardInterrupt("mine"))),
        Own(KeyboardInterrupt),
    ),
    "update raises an error that is called as ours": (
        update(raiser(TuningError("mine"))),
        Own(TuningError),
    ),
    "update raises an error derived from ours": (
        update(raiser(DeepMetricError("mine"))),
        Own(DeepMetricError),
    ),
    "result raises": (metric(lambda: fit_metric(result=raiser(OwnError("mine")))), Own(OwnError)),
    "result raises later": (
        metric(lambda: fit_metric(result=After(1, raiser(OwnError("mine"))))),
        Own(OwnError),
    ),
    "result returns a word later": (
        metric(lambda: fit_metric(result=After(1, lambda: "bad"))),
        Refused("'bad'", trials=1),
    ),
    "reset raises": (metric(lambda: fit_metric(reset=raiser(OwnError("mine")))), Own(OwnError)),
    "in a trial: raises": (_in_trial(OwnError("mine")), Own(OwnError)),
    "in a trial: StopIteration": (_in_trial(StopIteration("mine")), Own(StopIteration)),
    "in a trial: exits": (_in_trial(SystemExit("mine")), Own(SystemExit)),
    "in a trial: GeneratorExit": (_in_trial(GeneratorExit("mine")), Own(GeneratorExit)),
    "in a trial: interrupted": (_in_trial(KeyboardInterrupt("mine")), Right()),
    "in a trial: called as ours": (_in_trial(TuningError("mine")), Own(TuningError)),
    "in a trial: derived from ours": (_in_trial(DeepError("mine")), Own(DeepError)),
    "in a trial: derived from MetricError": (
        _in_trial(DeepMetricError("mine")),
        Own(DeepMetricError),
    ),
    "in a trial: with a cause and a note": (
        metric(lambda: PassesBaseline(act_with_more)),
        Own(OwnError, function="act_with_more", cause=KeyError, note="a note"),
    ),
    "in a worker: raises": (_in_trial(OwnError("mine"), 2), Own(OwnError)),
    "in a worker: StopIteration": (_in_trial(StopIteration("mine"), 2), Own(StopIteration)),
    "in a worker: exits": (_in_trial(SystemExit("mine"), 2), Own(SystemExit)),
    "in a worker: interrupted": (_in_trial(KeyboardInterrupt("mine"), 2), Right()),
    "in a worker: derived from ours": (_in_trial(DeepError("mine"), 2), Own(DeepError)),
    "in a worker: of two arguments": (
        _in_trial(NeedsTwoError("mi", "ne"), 2),
        Own(NeedsTwoError),
    ),
    "in a worker: with a cause and a note": (
        metric(lambda: PassesBaseline(act_with_more), 2),
        Own(OwnError, function="act_with_more", cause=KeyError, note="a note"),
    ),
    "in a worker: that cannot be sent": (
        metric(lambda: PassesBaseline(unlike), 2),
        Own(UnlikeError, function="unlike"),
    ),
}

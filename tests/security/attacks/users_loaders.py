"""Loaders that lie about their length, give something else, or raise."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from attacks.users_ways import (
    COUNT,
    Comes,
    Given,
    NeedsTwoError,
    Own,
    OwnError,
    Refused,
    Right,
    batches,
    fit_metric,
    raiser,
)

from neural_mp.common import DataLoader
from neural_mp.errors import DataError, TuningError


def loader(data: Any, **options: Any) -> Callable[[Given], None]:
    """Another evaluation loader, made anew for each case."""

    def set_up(run: Given) -> None:
        run.converter.eval_dataloader = data() if isinstance(data, Made) else data
        for name, value in options.items():
            setattr(run.converter, name, value)

    return set_up


def calibration(data: Any) -> Callable[[Given], None]:
    """Another calibration loader."""

    def set_up(run: Given) -> None:
        run.converter.calib_dataloader = data() if isinstance(data, Made) else data

    return set_up


class Made:
    """Something that is made when it is handed over."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self._make = make

    def __call__(self) -> Any:
        return self._make()


class Walked:
    """A loader that is walked, of a length that it may lie about."""

    def __init__(self, length: Any, content: Any = None) -> None:
        self.length, self.found = length, content

    def __iter__(self) -> Iterator[Any]:
        return iter(batches() if self.found is None else self.found)

    def __len__(self) -> Any:
        return self.length() if callable(self.length) else self.length


class Numbered:
    """The same, of batches that are read by their number."""

    def __init__(self, length: Any) -> None:
        self.length = length

    def __getitem__(self, index: int) -> Any:
        return batches()[index]

    def __len__(self) -> Any:
        return self.length() if callable(self.length) else self.length


class OneShot:
    """A loader with a generator in it that ends for good."""

    def __init__(self) -> None:
        self.batches = (batch for batch in batches())

    def __iter__(self) -> Iterator[Any]:
        return self.batches


class Resets:
    """An iterator that begins anew each time it is walked."""

    def __iter__(self) -> Iterator[Any]:
        self.left = batches()
        return self

    def __next__(self) -> Any:
        if not self.left:
            raise StopIteration
        return self.left.pop(0)


class SameArray:
    """A generator that gives the same array each time, filled anew."""

    def __new__(cls) -> Any:
        def give() -> Iterator[Any]:
            array = np.empty_like(batches()[0][0])
            for inputs, labels in batches():
                array[:] = inputs
                yield array, labels

        return give()


class Raising:
    """Raises where it is said."""

    def __init__(self, where: str, error: Any) -> None:
        self.where, self.act = where, raiser(error)

    def __iter__(self) -> Any:
        if self.where == "iter":
            self.act()
        return self._found()

    def _found(self) -> Iterator[Any]:
        for number, batch in enumerate(batches()):
            if self.where == f"batch {number}":
                self.act()
            yield batch


class LaterRaising(Raising):
    """Raises in the second pass that gets to the last batch."""

    passes = 0

    def _found(self) -> Iterator[Any]:
        for number, batch in enumerate(batches()):
            if number == COUNT - 1:
                self.passes += 1
                if self.passes > 1:
                    self.act()
            yield batch


class RaisingItems:
    def __init__(self, error: Any) -> None:
        self.act = raiser(error)

    def __getitem__(self, index: int) -> Any:
        return self.act()

    def __len__(self) -> int:
        return COUNT


class Vanishes:
    """Gives nothing after the first full pass."""

    full = 0

    def __iter__(self) -> Iterator[Any]:
        data = batches() if not self.full else []
        for number, batch in enumerate(data, start=1):
            self.full += number == len(data)
            yield batch


class NotWalked:
    def __iter__(self) -> Any:
        return 3


def with_labels(change: Callable[[Any], Any]) -> list[Any]:
    return [(inputs, change(labels)) for inputs, labels in batches()]


def later(batch: Any) -> list[Any]:
    return [*batches(2), batch]


def infinite() -> Iterator[Any]:
    while True:
        yield from batches()


class DeepError(TuningError):
    """A user's own, derived from one of ours."""


class DeepDataError(DataError):
    """Another."""


def chained() -> Any:
    error = OwnError("mine")
    error.__cause__ = KeyError("why")
    error.add_note("a note")
    return error


X, Y = batches()[0]
OWN = fit_metric

LOADERS: dict[str, tuple[Callable[[Given], None], Comes]] = {
    "length too large": (loader(Walked(99)), Right()),
    "length too small": (loader(Walked(1)), Right()),
    "length 0": (loader(Walked(0)), Right()),
    "length negative": (loader(Walked(-3)), Right()),
    "length a float": (loader(Walked(2.5)), Right()),
    "length None": (loader(Walked(None)), Right()),
    "length raises": (loader(Walked(raiser(OwnError("mine")))), Right()),
    "length exits": (loader(Walked(raiser(SystemExit("mine")))), Own(SystemExit)),
    "numbered: length negative": (loader(Numbered(-3)), Refused(r"len\(eval_dataloader\).*>= 0")),
    "numbered: length a float": (loader(Numbered(2.5)), Refused(r"len\(eval_dataloader\).*float")),
    "numbered: length a word": (loader(Numbered("3")), Refused(r"len\(eval_dataloader\).*str")),
    "numbered: length raises": (loader(Numbered(raiser(OwnError("mine")))), Own(OwnError)),
    "numbered: length too small": (loader(Numbered(2)), Right()),
    "numbered: length too large": (
        loader(Numbered(9)),
        Own(IndexError, "list index out of range", "__getitem__"),
    ),
    "gives nothing": (
        loader(Walked(3, [])),
        Refused("eval_dataloader must yield at least one batch"),
    ),
    "gives nothing, a function": (
        loader(lambda: []),
        Refused("eval_dataloader must yield at least one batch"),
    ),
    "gives nothing in later passes": (
        loader(Made(Vanishes)),
        Refused(
            "eval_dataloader must yield at least one batch, got none .3 in the previous pass.",
            trials=1,
        ),
    ),
    "one shot inside": (
        loader(Made(OneShot)),
        Refused("eval_dataloader must return a new iterator.*same generator again"),
    ),
    "one shot inside a function": (
        loader(Made(lambda: (lambda g: lambda: g)(iter(batches())))),
        Refused("eval_dataloader must return a new iterator.*same list_iterator again"),
    ),
    "a generator": (loader(Made(lambda: (b for b in batches()))), Right()),
    "a map": (loader(Made(lambda: map(tuple, batches()))), Right()),
    "a generator with one array": (loader(Made(SameArray)), Right()),
    "an iterator that resets": (loader(Made(Resets)), Right()),
    "a generator without end": (loader(Made(infinite), max_batches=3), Right()),
    "a function without end": (loader(infinite, max_batches=3), Right()),
    "bare arrays": (loader([X, X]), Refused(r"\(inputs, labels\).*float32\[8, 1, 8, 8\]")),
    "tuples of one": (loader([(X,)]), Refused(r"\(inputs, labels\).*tuple of 1.*float32\[8")),
    "tuples of three": (  # two inputs and labels
        loader([(X, Y, Y)]),
        Refused(r"batch 1 of eval_dataloader.*inputs.*float32\[8, 1, 8, 8\], int64\[8\]"),
    ),
    "dicts without labels": (loader([{"x": X}]), Refused("eval_dataloader.*dict with the keys: x")),
    "dicts with labels": (loader([{"x": X, "labels": Y}] * 3), Right()),
    "None": (loader([None]), Refused(r"\(inputs, labels\), got None")),
    "words": (loader(["ab"]), Refused(r"\(inputs, labels\), got a str")),
    "inputs None": (loader([(None, Y)]), Refused("eval_dataloader.*None")),
    "labels None": (loader(with_labels(lambda y: None)), Refused("None|labels")),
    "labels None, own metric": (
        loader(with_labels(lambda y: None), metric=fit_metric()),
        Refused(r"batch 1 of eval_dataloader has labels None and predictions float32\[8, 10\]"),
    ),
    "labels too short": (loader(with_labels(lambda y: y[:5])), Refused(r"\(8, 10\).*\(5,\)")),
    "labels too short, own metric": (
        loader(with_labels(lambda y: y[:5]), metric=fit_metric()),
        Refused(r"batch 1 of eval_dataloader has predictions float32\[8, 10\].*int64\[5\]"),
    ),
    "labels too short in the middle": (
        loader(later((X, Y[:5])), metric=fit_metric()),
        Refused(r"batch 3 of eval_dataloader.*int64\[5\]"),
    ),
    "labels that are words": (
        loader(with_labels(lambda y: np.array(["a"] * len(y)))),
        Refused("labels must be numbers"),
    ),
    "labels out of range": (
        loader(with_labels(lambda y: y + 5)),
        Refused("labels must be classes"),
    ),
    "labels as a list": (loader(with_labels(list)), Right()),
    "other inputs in the middle": (
        loader(later((X[:, :, :4], Y))),
        Refused(r"batch 3 of eval_dataloader.*\[8, 1, 4, 8\]"),
    ),
    "other axes in the middle": (
        loader(later((X[0, 0], Y))),
        Refused("batch 3 of eval_dataloader"),
    ),
    "another element type in the middle": (loader(later((X.astype(np.float64), Y))), Right()),
    "another form in the middle": (loader(later((X,))), Refused("tuple of 1")),
    "a smaller batch last": (loader(later((X[:3], Y[:3]))), Right()),
    "an empty batch last": (loader(later((X[:0], Y[:0]))), Right()),
    "a number": (loader(3), Refused("eval_dataloader.*got int")),
    "a word": (loader("data"), Refused("eval_dataloader.*got str")),
    "a function of one argument": (
        loader(lambda size: batches()),
        Refused(r"eval_dataloader\(\).*takes \(size\)"),
    ),
    "a function of a keyword": (
        loader(lambda *, size: batches()),
        Refused(r"eval_dataloader\(\).*takes \(\*, size\)"),
    ),
    "a function that gives a number": (
        loader(lambda: 3),
        Refused("must return or yield batches, got an int"),
    ),
    "a class whose walk is a number": (
        loader(NotWalked()),
        Refused("eval_dataloader cannot be iterated: iter.. returned non-iterator"),
    ),
    "raises at once": (loader(Raising("iter", OwnError("mine"))), Own(OwnError)),
    "raises in the first batch": (loader(Raising("batch 0", OwnError("mine"))), Own(OwnError)),
    "raises in the middle": (loader(Raising("batch 1", OwnError("mine"))), Own(OwnError)),
    "raises TypeError": (loader(Raising("batch 1", TypeError("mine"))), Own(TypeError)),
    "raises StopIteration at once": (
        loader(Raising("iter", StopIteration("mine"))),
        Own(StopIteration),
    ),
    "raises StopIteration for an item": (
        loader(RaisingItems(StopIteration("mine"))),
        Own(StopIteration),
    ),
    "raises with a cause and a note": (
        loader(Made(lambda: Raising("batch 1", chained()))),
        Own(OwnError, cause=KeyError, note="a note"),
    ),
    "raises an error derived from ours": (
        loader(Raising("batch 1", DeepError("mine"))),
        Own(DeepError),
    ),
    "raises an error derived from DataError": (
        loader(Raising("batch 1", DeepDataError("mine"))),
        Own(DeepDataError),
    ),
    "exits": (loader(Raising("batch 1", SystemExit("mine"))), Own(SystemExit)),
    "raises GeneratorExit": (
        loader(Raising("iter", GeneratorExit("mine"))),
        Own(GeneratorExit),
    ),
    "raises in a trial": (
        loader(Made(lambda: LaterRaising("", OwnError("mine")))),
        Own(OwnError),
    ),
    "raises an error derived from ours in a trial": (
        loader(Made(lambda: LaterRaising("", DeepError("mine")))),
        Own(DeepError),
    ),
    "exits in a trial": (
        loader(Made(lambda: LaterRaising("", SystemExit("mine")))),
        Own(SystemExit),
    ),
    "collate_fn that takes two": (
        loader(DataLoader(list(zip(X, Y, strict=True)), 4, collate_fn=lambda a, b: a)),
        Refused("collate_fn"),
    ),
    "collate_fn that raises": (
        loader(DataLoader(list(zip(X, Y, strict=True)), 4, collate_fn=raiser(OwnError("mine")))),
        Own(OwnError),
    ),
    "calibration: bare arrays": (calibration([X, X]), Right()),
    "calibration: words": (calibration(["a", "b"]), Refused("calib_dataloader")),
    "calibration: nothing": (
        calibration([]),
        Refused("calib_dataloader must yield at least one batch"),
    ),
    "calibration: None": (
        calibration([None]),
        Refused("batch 1 of calib_dataloader.*got None"),
    ),
    "calibration: NaN": (calibration([(X * np.nan, Y)]), Refused("NaN")),
    "calibration: a function of two": (
        calibration(lambda a, b: batches()),
        Refused(r"calib_dataloader\(\).*takes \(a, b\)"),
    ),
    "calibration: raises": (calibration(Raising("batch 1", OwnError("mine"))), Own(OwnError)),
    "calibration: one shot inside": (
        calibration(Made(OneShot)),
        Refused("calib_dataloader must return a new iterator.*same generator"),
    ),
    "calibration: without end": (calibration(infinite), Right()),
    "needs two arguments": (
        loader(Made(lambda: Raising("batch 1", NeedsTwoError("mi", "ne")))),
        Own(NeedsTwoError),
    ),
}

"""Conversion of scripts' settings, loaders, metrics and postprocesses for the tuning loop."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from neural_mp.common import DataLoader as OurDataLoader
from neural_mp.compat.inc.components import load_vocabulary
from neural_mp.config import Options, Settings, load_settings, settings_from
from neural_mp.core.enums import Dialect
from neural_mp.errors import ConfigurationError
from neural_mp.metrics import METRICS, build_metric


class Dotted(dict[str, Any]):
    """A dict with keys as attributes; reading a missing key creates the key."""

    def __init__(self, content: Mapping[str, Any] | None = None) -> None:
        super().__init__()
        for key, value in (content or {}).items():
            self[key] = value

    def __setitem__(self, key: str, value: object) -> None:
        super().__setitem__(key, Dotted(value) if type(value) is dict else value)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name not in self:
            self[name] = Dotted()
        return self[name]

    def __setattr__(self, name: str, value: object) -> None:
        self[name] = value

    def __delattr__(self, name: str) -> None:
        self.pop(name, None)

    def plain(self) -> dict[str, Any]:
        """Return plain dicts, without keys that were read but never set."""
        entries = {key: _to_plain(value) for key, value in self.items()}
        return {key: value for key, value in entries.items() if value != {}}


def _to_plain(value: object) -> object:
    if isinstance(value, Dotted):
        return value.plain()
    if isinstance(value, tuple | list):
        return [_to_plain(item) for item in value]
    return value


#: Settings that scripts make before a `Quantization` or a `MixedPrecision`.
conf = Dotted()


def convert_to_settings(conf: object) -> Settings:
    """Return the settings of a configuration.

    Args:
        conf: None; the path of a YAML file; settings as attributes or as a dict; or an object of
            `neural_compressor.conf.config` that holds any of these.
    """
    conf = getattr(conf, "conf", conf) if not isinstance(conf, Dotted) else conf
    if isinstance(conf, str | os.PathLike):
        return _without_label(load_settings(Path(conf), Dialect.INC))
    if conf is None or isinstance(conf, Mapping):
        return _without_label(settings_from(Dotted(conf).plain(), dialect=Dialect.INC))
    raise ConfigurationError(
        f"conf must be the path of a YAML file or a configuration, got {conf!r} of type "
        f"{type(conf).__name__}"
    )


def _without_label(settings: Settings) -> Settings:
    """Drop a model name that is a mere label, which is usual in INC."""
    name = settings.options.model
    if name is None or Path(name).exists() or ":" in name:
        return settings
    options = {key: value for key, value in vars(settings.options).items() if key != "model"}
    return replace(settings, options=Options(**options))


class DataLoader(OurDataLoader):
    """`common.DataLoader`: batches of a dataset.

    Args:
        dataset: any object with `__getitem__` and `__len__`, or any iterable.
        batch_size: samples per batch.
        collate_fn: list of samples → batch.
        last_batch: `rollover` or `discard`.
        sampler, batch_sampler, num_workers, pin_memory, distributed: ignored; samples are read
            sequentially in one process.
        shuffle: whether to shuffle the samples.
    """

    def __init__(
        self,
        dataset: Any,
        batch_size: int = 1,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        last_batch: str = "rollover",
        sampler: object = None,
        batch_sampler: object = None,
        num_workers: int = 0,
        pin_memory: bool = False,
        shuffle: bool = False,
        distributed: bool = False,
    ) -> None:
        super().__init__(dataset, batch_size, collate_fn, shuffle, last_batch)


class Later:
    """A deferred object, by class and options: `common.Metric`, `common.Postprocess`.

    Args:
        kind: the class, or a factory function.
        name: ignored.
        **options: arguments of the class.
    """

    def __init__(self, kind: Callable[..., Any], name: str = "user", **options: object) -> None:
        self.kind, self.name, self.options = kind, name, options

    def made(self) -> Any:
        """Create the object."""
        return self.kind(**self.options)


class Metric(Later):
    """A metric by class or, as in INC 2.x, by name: `name="topk"`."""

    def __init__(
        self, metric_cls: Any = None, name: str = "user_metric", **options: object
    ) -> None:
        super().__init__(metric_cls, name, **options)

    def made(self) -> Any:
        """Create the metric, or look the name up in the vocabulary."""
        if self.kind is not None:
            return super().made()
        return build_named_metric(self.name, self.options)


class Postprocess(Later):
    """A postprocess by class; its objects are called with `(predictions, labels)`."""

    def __init__(
        self, postprocess_cls: Callable[..., Any], name: str = "user_postprocess", **options: object
    ) -> None:
        super().__init__(postprocess_cls, name, **options)


def build_named_metric(name: str, options: Any, framework: str | None = None) -> Any:
    """Return the metric with an INC name."""
    return build_metric(name, options, load_vocabulary(framework).metrics or METRICS)


def build_user_metric(given: object, framework: str | None = None) -> Any:
    """Return a metric for the tuning loop, or several by name, which must all meet the target.

    Args:
        given: an object with update, reset and result; a class of such objects; a `Metric`; a
            dict of names with their options, as in YAML.
        framework: framework of the names.
    """
    if given is None:
        return None
    if isinstance(given, Later):
        return given.made()
    if isinstance(given, Mapping):
        named = {key: value for key, value in given.items() if key not in _NO_METRICS}
        metrics = {key: build_named_metric(key, value, framework) for key, value in named.items()}
        if len(metrics) == 1:
            return next(iter(metrics.values()))
        return {**metrics, **{key: given[key] for key in _NO_METRICS if key in given}}
    return given() if inspect.isclass(given) else given


#: Keys of a dict of metrics that are not metrics.
_NO_METRICS = ("weight", "higher_is_better")


def build_user_postprocess(given: object) -> Callable[[Any], Any] | None:
    """Return a postprocess as a function of `(predictions, labels)`."""
    postprocess: Any = given.made() if isinstance(given, Later) else given
    postprocess = postprocess() if inspect.isclass(postprocess) else postprocess
    if postprocess is None or callable(postprocess):
        return postprocess
    raise ConfigurationError(
        f"postprocess must be a function of (predictions, labels), got {given!r}"
    )


def list_tensor_names(given: Any) -> list[str] | None:
    """Return tensor names as a list; None if none are given."""
    if not given:
        return None
    names = given.split(",") if isinstance(given, str) else list(given)
    return [str(name).strip() for name in names]

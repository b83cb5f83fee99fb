"""Calls of the parts of a model of several graphs, recorded in a run of `eval_func`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from neural_mp.adaptors.composite.adaptor import make_call_key, require_parts
from neural_mp.adaptors.loaded_model import AnyModel, LoadedModel, TransferredModel
from neural_mp.adaptors.registry import adaptor_for
from neural_mp.api.loading import resolve_source
from neural_mp.config import Options
from neural_mp.errors import ConfigurationError, DataError
from neural_mp.tuning.evaluation.batches import Batches
from neural_mp.util.batch_cache import copy_batch
from neural_mp.util.user_calls import call_user


@dataclass
class _Recording:
    """Calls in batches, each of which begins with a call of the part that is called first.

    Attributes:
        limit: number of batches from which on no further call is recorded.
    """

    limit: int
    batches: list[dict[str, Any]] = field(default_factory=list)
    _first: str | None = None

    def add_call(self, part: str, inputs: Any) -> None:
        """Add a call with a copy of its inputs."""
        self._first = self._first or part
        if part == self._first:
            if len(self.batches) >= self.limit:
                self.limit = 0
                return
            self.batches.append({})
        if self.limit:
            batch = self.batches[-1]
            batch[make_call_key(len(batch), part)] = copy_batch(inputs)


@dataclass
class _RecordedPart:
    """A part that is loaded, as it was given, with the inputs of its first call."""

    name: str
    source: Any
    add_call: Callable[[str, Any], None]
    _loaded: AnyModel | None = None

    def __call__(self, *inputs: object, **named: object) -> Any:
        """Run and record one call."""
        fed: Any = named or (inputs[0] if len(inputs) == 1 else inputs)
        fed = dict(fed) if isinstance(fed, Mapping) else fed
        self.add_call(self.name, fed)
        if self._loaded is None:
            adaptor = adaptor_for(self.source)
            self._loaded = LoadedModel(adaptor, adaptor.load(self.source, example=fed))
        return TransferredModel(self._loaded)(fed)


def record_part_calls(options: Options) -> Batches:
    """Return the calls that `eval_func` makes to the parts, up to `sampling_size` batches.

    Raises:
        ConfigurationError: `eval_func` is missing, or data are set beside; or a name is invalid.
        DataError: a part is never called.
    """
    if options.eval_func is None or options.eval_dataloader is not None:
        raise ConfigurationError(
            "a model of several parts requires eval_func, a function of the parts that returns a "
            "number, in place of eval_dataloader: def eval_func(parts): parts['encoder'](…)"
        )
    sources = require_parts(options.model)
    recording = _Recording(int(options.sampling_size))
    parts = {
        name: _RecordedPart(name, resolve_source(source), recording.add_call)
        for name, source in sources.items()
    }
    call_user(options.eval_func, parts, form="eval_func(parts)", kind=ConfigurationError)
    calls = {key.partition(":")[2] for batch in recording.batches for key in batch}
    for name in sources:
        if name not in calls:
            raise DataError(
                f"eval_func must call each part, but did not call {name!r}; remove the part, or "
                f"call parts[{name!r}](inputs)"
            )
    return Batches(recording.batches, "the calls of eval_func")

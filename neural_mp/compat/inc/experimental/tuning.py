"""`Quantization` and `MixedPrecision` of their version 1."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar

from neural_mp.api.mixed_precision import MixedPrecision as Tuning
from neural_mp.compat.inc.absent import NotHereError
from neural_mp.compat.inc.given import (
    DataLoader,
    metric_of,
    named_dataset,
    postprocess_of,
    tensor_names,
)
from neural_mp.compat.inc.model import native
from neural_mp.compat.inc.result import Result
from neural_mp.compat.inc.settings import settings_of
from neural_mp.core.precision import Precision


class _Experiment:
    """What both have in common.

    Args:
        conf_fname_or_obj: the path of a YAML file, settings by attribute, or None.

    Attributes:
        model: the framework's object, a path, or a `common.Model`.
        calib_dataloader, eval_dataloader: batches of `(inputs, labels)`.
        eval_func: native model → accuracy.
        metric: an object with update, reset and result, or a `common.Metric`.
        postprocess: a `common.Postprocess`, or what takes `(predictions, labels)`.
        objective: what is made small.
        input, output: names of the model's inputs and outputs.
        q_func: what trains in INT8, which is not here.
    """

    #: The precisions where the configuration names none.
    default: ClassVar[tuple[Precision, ...]] = (Precision.BF16,)

    def __init__(self, conf_fname_or_obj: Any = None) -> None:
        self.settings = settings_of(conf_fname_or_obj)
        self.model: Any = self.settings.model.name
        self.calib_dataloader: Any = None
        self.eval_dataloader: Any = None
        self.eval_func: Any = None
        self.metric: Any = None
        self.postprocess: Any = None
        self.objective: Any = None
        self.input: Any = None
        self.output: Any = None
        self.q_func: Any = None
        self._precisions = sorted(map(str, self.settings.precisions or self.default))

    @property
    def precisions(self) -> list[str]:
        """The precisions by their words, in alphabetical order."""
        return self._precisions

    @precisions.setter
    def precisions(self, words: str | Iterable[str]) -> None:
        listed = words.split(",") if isinstance(words, str) else words
        self._precisions = sorted(str(word).strip() for word in listed)

    def dataset(self, name: str, *shape: Any, **options: Any) -> Any:
        """A dataset by its name.

        Args:
            name: such as `dummy`.
            *shape: the shape of a `dummy`.
            **options: its options.

        Raises:
            ConfigurationError: there is none of that name, or an option is not its own.
        """
        if shape:
            options["shape"] = shape[0]
        return named_dataset(name, options, self.settings.model.framework)

    def dataloader(self, dataset: Any, batch_size: int = 1, **options: Any) -> DataLoader:
        """Batches of a dataset."""
        return DataLoader(dataset, batch_size, **options)

    def fit(self) -> Result:
        """Tune.

        Returns:
            A usable model, always; where theirs would be None, it is the FP32 one, and a logged
            warning says so.

        Raises:
            NeuralMPError: something asked for does not exist or does not fit.
        """
        if self.q_func is not None:
            raise NotHereError("q_func trains in INT8, which is not here; leave it out")
        tuning = Tuning(self.settings)
        tuning.model = native(self.model)
        tuning.precisions = self.precisions
        tuning.calib_dataloader = self.calib_dataloader
        tuning.eval_dataloader = self.eval_dataloader
        tuning.eval_func = self.eval_func
        tuning.metric = metric_of(self.metric, self.settings.model.framework)
        tuning.postprocess = postprocess_of(self.postprocess)
        tuning.objective = self.objective or tuning.objective
        tuning.inputs = tensor_names(self.input) or tuning.inputs
        tuning.outputs = tensor_names(self.output) or tuning.outputs
        return Result(tuning.fit())

    __call__ = fit

    def __repr__(self) -> str:
        return type(self).__name__


class GraphOptimization(_Experiment):
    """`GraphOptimization` of theirs, which is mixed precision."""


class MixedPrecision(_Experiment):
    """`MixedPrecision` of theirs: BF16 where nothing else is said."""


class Quantization(_Experiment):
    """`Quantization` of theirs: INT8 where nothing else is said."""

    default = (Precision.INT8,)

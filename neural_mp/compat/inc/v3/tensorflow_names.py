"""Names of `neural_compressor.tensorflow` and its modules."""

# What is imported and not used is for scripts.
# ruff: noqa: F401

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from neural_mp.api.mixed_precision import MixedPrecision
from neural_mp.api.replay import Conversion, convert_by_rules
from neural_mp.compat.inc.components.dummy import dummy, dummy_v2
from neural_mp.compat.inc.import_aliases import make_absent_getter
from neural_mp.compat.inc.model import (
    BaseModel,
    Model,
    Result,
    evaluate_on_graphs,
    get_node_name,
    native,
)
from neural_mp.compat.inc.user_objects import DataLoader
from neural_mp.compat.inc.utils import CpuInfo, dump_elapsed_time, iterator_sess_run, logger
from neural_mp.compat.inc.v3.base_config import FP32_ONLY, BaseConfig, ComposableConfig, Int8Config
from neural_mp.compat.inc.v3.base_tuning import EvaluationFuncWrapper, OrderedTrials, TuningConfig
from neural_mp.compat.inc.v3.flow import (
    list_algorithm_configs,
    merge_algorithm_rules,
    parse_config_dict,
)
from neural_mp.core.criterion import ExitPolicy
from neural_mp.core.precision import Precision
from neural_mp.errors import DataError
from neural_mp.space import OpConstraint
from neural_mp.tuning.evaluation.batches import inputs_of_batch

if TYPE_CHECKING:
    import tensorflow as tf

BaseDataLoader = DataLoader
DummyDatasetV2 = dummy_v2
DummyDataset = dummy
TensorflowBaseModel = KerasModel = BaseModel


def default_collate(batch: Sequence[Any]) -> Any:
    """Return samples as one batch: arrays of equal shape are stacked, dicts and lists by item."""
    first = batch[0]
    if isinstance(first, Mapping):
        return {key: default_collate([sample[key] for sample in batch]) for key in first}
    if isinstance(first, Sequence):
        return [default_collate(samples) for samples in zip(*batch, strict=True)]
    if isinstance(first, np.ndarray) and len({sample.shape for sample in batch}) == 1:
        return np.stack(batch)
    return batch


class BatchSampler:
    """Lists of samples from a sampler.

    Args:
        sampler: iterable of indices or samples.
        batch_size: length of a list.
        drop_last: whether an incomplete last list is left out.
    """

    def __init__(self, sampler: Collection[Any], batch_size: int, drop_last: bool = True) -> None:
        self.sampler, self.batch_size, self.drop_last = sampler, batch_size, drop_last

    def __iter__(self) -> Iterator[list[Any]]:
        batch: list[Any] = []
        for index in self.sampler:
            batch.append(index)
            if len(batch) == self.batch_size:
                yield batch
                batch = []
        if batch and not self.drop_last:
            yield batch

    def __len__(self) -> int:
        whole, rest = divmod(len(self.sampler), self.batch_size)
        return whole + bool(rest and not self.drop_last)


class IterableFetcher:
    """Batches from an iterable dataset, one per call.

    Args:
        dataset: the dataset.
        collate_fn: list of samples → batch.
        drop_last: whether an incomplete last batch is left out.
        distributed: ignored.
    """

    def __init__(
        self,
        dataset: Iterable[Any],
        collate_fn: Callable[[list[Any]], Any],
        drop_last: bool,
        distributed: bool = False,
    ) -> None:
        self.dataset, self.collate_fn, self.drop_last = dataset, collate_fn, drop_last
        self.dataset_iter = iter(dataset)

    def __call__(self, batched_indices: Sequence[Any]) -> Any:
        """Return the next batch, of as many samples as there are indices.

        Raises:
            StopIteration: there are no more samples.
        """
        samples = [sample for sample, _ in zip(self.dataset_iter, batched_indices, strict=False)]
        if not samples or (self.drop_last and len(samples) < len(batched_indices)):
            raise StopIteration
        return self.collate_fn(samples)


class StaticQuantConfig(Int8Config):
    """INT8 with calibrated ranges; `weight_dtype` and `act_dtype` may be floats."""

    name: ClassVar[str] = "static_quant"
    tried: ClassVar[Mapping[str, Any]] = {"act_algorithm": ["kl", "minmax"]}
    algorithm_option: ClassVar[str] = "act_algorithm"
    defaults: ClassVar[Mapping[str, Any]] = {
        "weight_dtype": "int8",
        "weight_sym": True,
        "weight_granularity": "per_tensor",
        "weight_algorithm": "minmax",
        "act_dtype": "int8",
        "act_sym": True,
        "act_granularity": "per_tensor",
        "act_algorithm": "minmax",
    }

    def constraint(self) -> OpConstraint:
        """Return the constraint of an op."""
        dtypes = {str(self.options["weight_dtype"]), str(self.options["act_dtype"])}
        if "fp32" in dtypes:
            return FP32_ONLY
        if "bf16" in dtypes:
            return OpConstraint((Precision.BF16,))
        return super().constraint()


class SmoothQuantConfig(Int8Config):
    """INT8 with calibrated ranges, and channels scaled where that reduces noise."""

    name: ClassVar[str] = "smooth_quant"
    tried: ClassVar[Mapping[str, Any]] = {"alpha": np.arange(0.1, 1.0, 0.1).tolist()}
    corrects: ClassVar[bool] = True
    lists: ClassVar[frozenset[str]] = frozenset({"op_types"})
    defaults: ClassVar[Mapping[str, Any]] = {
        "alpha": 0.5,
        "folding": False,
        "percentile": 99.999,
        "op_types": ["MatMul", "Conv2D"],
        "scales_per_op": True,
        "record_max_info": False,
        "weight_clip": True,
        "auto_alpha_args": {},
    }
    idle: ClassVar[Mapping[str, str]] = {
        "alpha": "channels are scaled with 0.5, or equalized by weights, whichever is better",
    }


#: Name of an algorithm → its configuration.
TENSORFLOW_CONFIGS = {kind.name: kind for kind in (StaticQuantConfig, SmoothQuantConfig)}
#: The default configuration of an algorithm has no options.
get_default_static_quant_config, get_default_sq_config = StaticQuantConfig, SmoothQuantConfig


_ITERATIONS = 100


@dataclass(frozen=True)
class _LoaderInputs:
    """The inputs of the first batches of a loader, pairs of inputs and labels."""

    loader: Iterable[Any]
    most: int

    def __iter__(self) -> Iterator[Any]:
        for batch in itertools.islice(self.loader, self.most):
            yield inputs_of_batch(batch)


class _RecordedSession:
    """A session whose feeds are recorded, as dicts of input names."""

    def __init__(self, session: tf.compat.v1.Session, batches: list[Any]) -> None:
        self._session, self._batches = session, batches

    def run(
        self, fetches: object, feed_dict: Mapping[Any, Any] | None = None, *arguments: object
    ) -> Any:
        """Run the session."""
        if feed_dict:
            named = {get_node_name(getattr(k, "name", k)): value for k, value in feed_dict.items()}
            self._batches.append(named)
        return self._session.run(fetches, feed_dict, *arguments)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._session, name)


def quantize_model(
    model: object,
    quant_config: object,
    calib_dataloader: Iterable[Any] | None = None,
    calib_iteration: int = _ITERATIONS,
    calib_func: Callable[[Any], Any] | None = None,
) -> Result:
    """Return a model converted by a configuration.

    Args:
        model: the framework's object, a path, or a `Model`.
        quant_config: a configuration, a list of configurations, or a dict.
        calib_dataloader: batches of `(inputs, labels)`.
        calib_iteration: number of batches.
        calib_func: runs a `Model` with its own data, if there is no loader.

    Raises:
        DataError: neither a loader nor a function is given, or the function runs nothing.
    """
    configs = quant_config if isinstance(quant_config, list) else [quant_config]
    parsed = [parse_config_dict(config, TENSORFLOW_CONFIGS) for config in configs]
    algorithms = list_algorithm_configs(ComposableConfig(m for c in parsed for m in c.members()))
    for algorithm in algorithms:
        algorithm.warn_without_effect()
    conversion = Conversion(
        merge_algorithm_rules(algorithms),
        corrects=any(algorithm.corrects for algorithm in algorithms),
        inputs=getattr(model, "_input_names", None),
        outputs=getattr(model, "_output_names", None),
    )
    data = _make_calibration_batches(model, calib_dataloader, calib_iteration, calib_func)
    return Result(convert_by_rules(native(model), conversion, data))


def _make_calibration_batches(
    model: object, loader: Iterable[Any] | None, most: int, function: Callable[[Any], Any] | None
) -> Iterable[Any] | None:
    if loader is not None:
        return _LoaderInputs(loader, most)
    if function is None:
        return None
    batches: list[Any] = []
    observed = model if isinstance(model, Model) else Model(model)
    plain = observed.sess
    vars(observed)["sess"] = _RecordedSession(plain, batches)
    try:
        function(observed)
    finally:
        vars(observed)["sess"] = plain
    if not batches:
        raise DataError(
            "calib_func must run the session of the model (model.sess.run) with a feed_dict, no "
            "run was seen; give calib_dataloader"
        )
    return batches[:most]


def autotune(
    model: object,
    tune_config: TuningConfig,
    eval_fn: Callable[..., Any],
    eval_args: Iterable[Any] | None = None,
    calib_dataloader: Iterable[Any] | None = None,
    calib_iteration: int = _ITERATIONS,
    calib_func: Callable[[Any], Any] | None = None,
) -> Result | Model:
    """Return a converted model that meets the target; the given one, in FP32, if none does.

    Args:
        model: the framework's object, a path, or a `Model`.
        tune_config: configurations to try, or a tolerance alone; see `TuningConfig`.
        eval_fn: model, `*eval_args` → accuracy.
        eval_args: further arguments of `eval_fn`.
        calib_dataloader: as in `quantize_model`.
        calib_iteration: as in `quantize_model`.
        calib_func: as in `quantize_model`.

    Raises:
        ConfigurationError: the direction of `eval_fn` is unclear.
        NeuralMPError: a configuration is invalid, or the model cannot be converted.
    """
    evaluation = EvaluationFuncWrapper(eval_fn, eval_args)
    wrapped = model if isinstance(model, Model) else Model(model)
    if tune_config.searches:
        return _search_model(wrapped, tune_config, evaluation, calib_dataloader, calib_iteration)

    def convert_model(config: BaseConfig) -> Result:
        return quantize_model(
            model, copy.deepcopy(config), calib_dataloader, calib_iteration, calib_func
        )

    return OrderedTrials(tune_config, evaluation).select_model(wrapped, convert_model)


def _search_model(
    model: Model,
    options: TuningConfig,
    evaluation: EvaluationFuncWrapper,
    loader: Iterable[Any] | None,
    most: int,
) -> Result:
    tuning = MixedPrecision()
    tuning.model = native(model)
    tuning.accuracy_criterion = options.criterion(evaluation.eval_fn)
    tuning.exit_policy = ExitPolicy(max_trials=options.max_trials)
    tuning.eval_func = evaluate_on_graphs(evaluation.evaluate, tuning.model)
    tuning.calib_dataloader = None if loader is None else _LoaderInputs(loader, most)
    return Result(tuning.fit())


__getattr__ = make_absent_getter(globals())

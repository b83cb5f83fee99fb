"""Helpers that scripts import from INC's `utils` and internal modules."""

from __future__ import annotations

import functools
import importlib
import random
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from neural_mp.api.optimized_model import load as load_saved
from neural_mp.compat.inc.import_aliases import make_absent_getter
from neural_mp.compat.inc.model import Model, get_own_object
from neural_mp.compat.inc.script_log import logger
from neural_mp.compat.inc.user_objects import Dotted
from neural_mp.core.hardware import detect
from neural_mp.core.int8_accumulation import Int8Accumulation
from neural_mp.core.precision import Precision

if TYPE_CHECKING:
    import tensorflow as tf
    from tensorflow.core.framework.graph_pb2 import GraphDef

    from neural_mp.compat.inc.model import Result


debug, info, warning = logger.debug, logger.info, logger.warning
error, log = logger.error, logger.log

#: Constraints, as written in scripts, that keep an op in FP32.
FP32 = {"weight": {"dtype": ["fp32"]}, "activation": {"dtype": ["fp32"]}}
#: Options of all runs.
options = Dotted({"random_seed": 1978, "workspace": "./nc_workspace", "resume_from": None})


def set_random_seed(seed: int) -> None:
    """Seed the random generators of Python and numpy."""
    options.random_seed = seed
    random.seed(seed)
    np.random.seed(seed)


def set_workspace(workspace: str) -> None:
    """Set the workspace in `options`; tuning stores trials in its own workspace."""
    options.workspace = workspace


def load(
    checkpoint_dir: str | Path | None = None,
    model: object = None,
    *others: object,
    **ignored: object,
) -> Any:
    """Load the module itself from a folder that a result's `save` wrote.

    Args:
        checkpoint_dir: default: `nc_workspace/saved`.
        model: ignored: the folder holds the whole model.
        *others: ignored.
        **ignored: ignored.

    Raises:
        ModelLoadError: the folder holds no saved model, or is damaged.
    """
    return get_own_object(load_saved(checkpoint_dir or Path("nc_workspace") / "saved"))


class OptimizedModel:
    """`utils.load_huggingface.OptimizedModel`."""

    @classmethod
    def from_pretrained(cls, folder: str, **ignored: object) -> Any:
        """Load a torch model saved by a result's `save`."""
        return load(folder)


def save_for_huggingface_upstream(model: Result, tokenizer: Any, output_dir: str | Path) -> None:
    """Save a tokenizer, and a result in the subfolder `model`."""
    tokenizer.save_pretrained(output_dir)
    model.save(Path(output_dir) / "model")


def dump_elapsed_time(customized_msg: str = "") -> Callable[[Callable[..., Any]], Any]:
    """Return a decorator that logs the duration of a function."""

    def decorate_function(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def call_timed(*arguments: object, **named: object) -> Any:
            start = time.perf_counter()
            result = function(*arguments, **named)
            duration = 1000 * (time.perf_counter() - start)
            logger.info("%s takes %.2f ms", customized_msg or function.__qualname__, duration)
            return result

        return call_timed

    return decorate_function


class LazyImport:
    """A module, function or class, imported on first use.

    Args:
        module_name: the dotted name.
    """

    def __init__(self, module_name: str) -> None:
        self._module_name = module_name

    def __getattr__(self, name: str) -> Any:
        return getattr(self._import_target(), name)

    def __call__(self, *arguments: object, **options: object) -> Any:
        """Call the imported object."""
        return self._import_target()(*arguments, **options)

    def _import_target(self) -> Any:
        try:
            return importlib.import_module(self._module_name)
        except ModuleNotFoundError:
            module, _, name = self._module_name.rpartition(".")
            return getattr(importlib.import_module(module), name)


class CpuInfo:
    """Native instructions of the CPU."""

    @property
    def bf16(self) -> bool:
        """Whether the CPU has BF16."""
        return detect().support(Precision.BF16).native

    @property
    def vnni(self) -> bool:
        """Whether INT8 accumulation is exact."""
        return detect().int8_accumulation is Int8Accumulation.EXACT


class Performance:
    """A stopwatch."""

    def __init__(self) -> None:
        self._seconds: list[float] = []
        self._started = 0.0

    def start(self) -> None:
        """Start."""
        self._started = time.perf_counter()

    def end(self) -> None:
        """Record the time since `start`."""
        self._seconds.append(time.perf_counter() - self._started)

    def result_list(self) -> list[float]:
        """The recorded seconds."""
        return self._seconds


def is_ckpt_format(model_path: str | Path) -> bool:
    """Whether a folder holds one checkpoint of TensorFlow 1."""
    endings = [file.suffix for file in Path(model_path).iterdir()]
    return endings.count(".meta") == 1 and endings.count(".index") == 1


def is_saved_model_format(model_path: str | Path) -> bool:
    """Whether a folder holds a SavedModel."""
    return any((Path(model_path) / f"saved_model.{ending}").is_file() for ending in ("pb", "pbtxt"))


def strip_unused_nodes(
    graph_def: GraphDef, input_node_names: Iterable[str], output_node_names: Sequence[str]
) -> GraphDef:
    """Return the part of a TensorFlow graph that its outputs depend on."""
    import tensorflow as tf

    return tf.compat.v1.graph_util.extract_sub_graph(graph_def, list(output_node_names))


def iterator_sess_run(
    sess: tf.compat.v1.Session,
    iter_op: tf.Operation,
    feed_dict: Mapping[Any, Any],
    output_tensor: object,
    iteration: int = -1,
    measurer: Performance | None = None,
) -> Any:
    """Run a TensorFlow graph that reads its own data.

    Args:
        sess: a session of TensorFlow 1.
        iter_op: the op that initializes the iterator.
        feed_dict: values for `iter_op`.
        output_tensor: the tensors to fetch.
        iteration: number of runs; -1 for all data.
        measurer: its `start` and `end` are called around every run.

    Returns:
        The results of all runs, concatenated along the first axis.
    """
    import tensorflow as tf

    sess.run(iter_op, feed_dict)
    outputs: list[Any] = []
    while len(outputs) != iteration:
        try:
            if measurer is not None:
                measurer.start()
            outputs.append(sess.run(output_tensor))
            if measurer is not None:
                measurer.end()
        except tf.errors.OutOfRangeError:
            break
    if outputs and isinstance(outputs[0], tuple | list):
        return [np.concatenate(parts) for parts in zip(*outputs, strict=True)]
    return np.concatenate(outputs) if outputs else outputs


def get_torch_version() -> Any:
    """Return torch's version as a `packaging` version, for comparisons."""
    import torch
    from packaging.version import Version

    return Version(str(torch.__version__))


def inputs_of_pair(batch: Any) -> Any:
    """Return the inputs of a batch: the first of two parts, as in (inputs, label)."""
    return batch[0] if isinstance(batch, tuple | list) and len(batch) == 2 else batch


def get_example_inputs(model: object, dataloader: Iterable[Any] | None) -> Any:
    """Return the inputs of the first batch; None without data."""
    if dataloader is None:
        return None
    inputs = inputs_of_pair(next(iter(dataloader)))
    if isinstance(inputs, Mapping):
        return {key: value for key, value in inputs.items() if key != "label"}
    return tuple(inputs) if isinstance(inputs, list) else inputs


class Configured:
    """Base of the classes of `conf.config`: holds the settings of `Quantization` or `Benchmark`.

    Args:
        conf: path of a YAML file, or settings as attributes.
    """

    def __init__(self, conf: object = None) -> None:
        self.conf = conf


Quantization_Conf = Graph_Optimization_Conf = QuantConf = BenchmarkConf = Conf = Configured
DotDict = Dotted
BaseModel = Model


__getattr__ = make_absent_getter(globals())

"""`Model`: a model under their names, whatever framework it is of."""

from __future__ import annotations

import logging
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from neural_mp.adaptors.loaded_model import AnyModel
from neural_mp.api.loading import load_source
from neural_mp.api.optimized_model import OptimizedModel
from neural_mp.compat.inc.user_objects import tensor_names
from neural_mp.errors import ConfigurationError, did_you_mean

logger = logging.getLogger(__name__)

#: Framework's own object of a result → all that the result holds; scripts hand on the former.
_results: WeakKeyDictionary[Any, OptimizedModel] = WeakKeyDictionary()


def own_object(optimized: OptimizedModel) -> Any:
    """The framework's own object of a result; what belongs to it is noted while it lives."""
    found = optimized.model
    # Not every object can be referred to weakly; such a one is loaded anew where it is needed.
    with suppress(TypeError):
        _results[found] = optimized
    return found


class Tuned:
    """A model that was tuned.

    Attributes:
        optimized: the `OptimizedModel`, with plan, report and trials.
    """

    def __init__(self, optimized: OptimizedModel) -> None:
        self.optimized = optimized

    @cached_property
    def model(self) -> Any:
        """The framework's own object."""
        return own_object(self.optimized)


def native(model: object) -> Any:
    """What a `Model` or a tuned one holds; anything else as it is."""
    if isinstance(model, Model):
        return model.root
    return model.model if isinstance(model, Tuned) else model


def runnable(model: object) -> Any:
    """What is measured: of a tuned model all that it holds, of a `Model` what it was made of."""
    if isinstance(model, Tuned):
        return model.optimized
    found = native(model)
    with suppress(TypeError):
        return _results.get(found, found)
    return found


def outputs_there(model: object, given: object) -> list[str] | None:
    """The names of outputs that a model has; a name that hits nothing only warns, as there.

    Args:
        model: what is tuned; names are looked up in a TensorFlow graph, and others let through.
        given: names as a list, or in one string with commas between; None for none.

    Returns:
        None where no name is left.
    """
    names = tensor_names(given)
    nodes = getattr(model, "node", None)
    if names is None or nodes is None:
        return names
    known = {node.name for node in nodes}
    for name in names:
        if node_name(name) not in known:
            logger.warning(
                "output names %r, which is no tensor of the graph%s; it is left out",
                name,
                did_you_mean(name, known),
            )
    return [name for name in names if node_name(name) in known] or None


class Model:
    """A model by path or as an object; what is not here is looked up in the object.

    Args:
        root: the object, or the path of a model.
        **options: taken for their sake; a model says itself what it is.

    Attributes:
        root: what was given.
        input_tensor_names, output_tensor_names: of a TensorFlow model; found by themselves.
    """

    def __init__(self, root: object, **options: object) -> None:
        self.root = native(root)
        self.name = options.get("name", "")
        self._input_names: list[str] | None = None
        self._output_names: list[str] | None = None

    @cached_property
    def loaded(self) -> AnyModel:
        """The model, with the adaptor of its framework.

        Raises:
            ModelLoadError: it cannot be read.
        """
        return load_source(self.root, None, self._input_names, outputs=self._output_names)

    @property
    def model(self) -> Any:
        """The framework's own object."""
        return self.loaded.native if isinstance(self.root, str) else self.root

    def framework(self) -> str:
        """The framework's name."""
        return self.loaded.adaptor.framework

    @property
    def graph_def(self) -> Any:
        """The graph of a TensorFlow model, frozen."""
        return graph_def_of(self.loaded)

    @cached_property
    def sess(self) -> Any:
        """A session of TensorFlow 1 with the graph in it."""
        import tensorflow as tf

        graph = tf.Graph()
        with graph.as_default():
            tf.graph_util.import_graph_def(self.graph_def, name="")
        return tf.compat.v1.Session(graph=graph)

    @property
    def graph(self) -> Any:
        """The graph of that session; of an ONNX model its own."""
        return self.sess.graph if self.framework() == "tensorflow" else self.model.graph

    @property
    def input_tensor_names(self) -> list[str]:
        """The inputs of a TensorFlow model."""
        return self._input_names or list(self.loaded.held.signature.input_tensors)

    @input_tensor_names.setter
    def input_tensor_names(self, names: object) -> None:
        self._input_names = tensor_names(names)
        self._forget()

    @property
    def output_tensor_names(self) -> list[str]:
        """Its outputs."""
        return self._output_names or list(self.loaded.held.signature.output_tensors)

    @output_tensor_names.setter
    def output_tensor_names(self, names: object) -> None:
        self._output_names = tensor_names(names)
        self._forget()

    @property
    def input_tensor(self) -> list[Any]:
        """The tensors that are fed, in the graph of `sess`."""
        return [self.sess.graph.get_tensor_by_name(_tensor(n)) for n in self.input_tensor_names]

    @property
    def output_tensor(self) -> list[Any]:
        """The tensors that are fetched."""
        return [self.sess.graph.get_tensor_by_name(_tensor(n)) for n in self.output_tensor_names]

    def _forget(self) -> None:
        for name in ("loaded", "sess"):
            vars(self).pop(name, None)

    def __call__(self, *inputs: object, **named: object) -> Any:
        """Run the model, as its framework does."""
        return self.model(*inputs, **named)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "root":
            raise AttributeError(name)
        return getattr(self.model, name)


def graph_def_of(model: Any) -> Any:
    """The graph of a TensorFlow model, frozen.

    Args:
        model: a model of TensorFlow's, converted or not, or one that is loaded.

    Raises:
        ConfigurationError: it is a model of another framework.
    """
    if hasattr(model, "graph_def"):
        return model.graph_def
    loaded = model if hasattr(model, "adaptor") else load_source(model, None, None)
    if loaded.adaptor.framework != "tensorflow":
        raise ConfigurationError(
            f"graph_def is for TensorFlow models; this is one of {loaded.adaptor.framework}"
        )
    return loaded.held.graph.to_graph_def()


def node_name(tensor: str) -> str:
    """The node that a TensorFlow tensor is a result of: `final` of `final:0`."""
    return tensor.partition(":")[0]


def _tensor(name: str) -> str:
    return name if ":" in name else f"{name}:0"


BaseModel = Model


class Result(Tuned):
    """An `OptimizedModel` under their names; all else is looked up in it, then in its model."""

    def __init__(self, optimized: OptimizedModel) -> None:
        super().__init__(optimized)
        if optimized.met is False:
            logger.warning(
                "no plan met the accuracy target; what comes back is the FP32 model, where theirs "
                "would be None"
            )

    @property
    def graph_def(self) -> Any:
        """The graph of a TensorFlow model, frozen.

        Raises:
            ConfigurationError: it is a model of another framework.
        """
        return graph_def_of(self.model)

    def nodes(self) -> Any:
        """The nodes of an ONNX model's graph.

        Raises:
            ConfigurationError: it is a model of another framework.
        """
        graph: Any = getattr(self.model, "graph", None)
        if not hasattr(graph, "node"):
            raise ConfigurationError(
                f"nodes() is for ONNX models; this is one of {self.optimized.framework}"
            )
        return graph.node

    def framework(self) -> str:
        """The framework's name."""
        return self.optimized.framework

    def save(self, path: str | Path | None = None) -> None:
        """Save the model: into a folder, or, for `.onnx`, `.pb` and `.pbtxt`, into a file.

        Args:
            path: where; `nc_workspace/saved` by default.
        """
        self.optimized.save(path or Path("nc_workspace") / "saved")

    def export(self, path: str | Path, conf: object = None) -> None:
        """Write the model as an ONNX file.

        Args:
            path: the file.
            conf: taken for their sake; the file holds the model as it is.
        """
        self.optimized.export_onnx(path)

    def __call__(self, *inputs: object, **named: object) -> Any:
        """Run the model, as the framework's own object where that can be called."""
        run = self.model if callable(self.model) else self.optimized
        return run(*inputs, **named)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "optimized":
            raise AttributeError(name)
        for holder in (self.optimized, self.model):
            if hasattr(holder, name):
                return getattr(holder, name)
        raise AttributeError(
            f"neither the result nor its {self.optimized.framework} model has {name!r}"
        )

    def __repr__(self) -> str:
        return repr(self.optimized)

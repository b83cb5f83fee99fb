"""`Model`: a model of any framework with INC's attribute names."""

from __future__ import annotations

import io
import logging
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import cached_property, wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from neural_mp.adaptors.loaded_model import AnyModel, TransferredModel
from neural_mp.api.loading import load_source
from neural_mp.api.optimized_model import OptimizedModel
from neural_mp.compat.inc.script_log import logger as script_logger
from neural_mp.compat.inc.user_objects import list_tensor_names
from neural_mp.core.hardware import HOST_TARGET, TARGETS
from neural_mp.errors import ConfigurationError, did_you_mean
from neural_mp.reporting.console import SafeConsole
from neural_mp.reporting.formatting import create_table
from neural_mp.reporting.tables import before_and_after, build_trial_table, verdict_line

if TYPE_CHECKING:
    import tensorflow as tf
    from tensorflow.core.framework.graph_pb2 import GraphDef

logger = logging.getLogger(__name__)

#: Width of tables in the log.
_LOG_COLUMNS = 120
#: End of the reasons of a run that kept FP32.
_FP32_RESULT = "the result is the FP32 model"
#: Framework's object of a result → the whole result, since scripts pass on the former.
_results: WeakKeyDictionary[Any, OptimizedModel] = WeakKeyDictionary()


def get_own_object(optimized: OptimizedModel) -> Any:
    """Return the framework's object of a result; keep the result while the object lives."""
    instance = optimized.model
    # Objects without weak references are loaded again when needed.
    with suppress(TypeError):
        _results[instance] = optimized
    return instance


def native(model: object) -> Any:
    """Return the object inside a `Model` or `Result`; anything else unchanged."""
    if isinstance(model, Model):
        return model.root
    return model.model if isinstance(model, Result) else model


def runnable(model: object) -> Any:
    """Return the object to measure: the `OptimizedModel` of a `Result`, the root of a `Model`."""
    if isinstance(model, Result):
        return model.optimized
    instance = native(model)
    with suppress(TypeError):
        return _results.get(instance, instance)
    return instance


def list_existing_ports(
    model: object, inputs: object, outputs: object
) -> tuple[list[str] | None, list[str] | None]:
    """Return the names of existing inputs and outputs; like INC, only warn about unknown names.

    Args:
        model: the model; names are checked for ONNX models, for TensorFlow graphs, and for files
            of both, SavedModels included.
        inputs: names as a list or a comma-separated string, or None.
        outputs: likewise.

    Returns:
        None for the inputs if one is unknown; for the outputs if none is known, or, in an ONNX
        model, if one is unknown.
    """
    input_names, output_names = list_tensor_names(inputs), list_tensor_names(outputs)
    existing = _list_known_ports(model) if input_names or output_names else None
    if existing is None:
        return input_names, output_names
    inputs = _keep_known("input", input_names, existing[0])
    outputs = _keep_known("output", output_names, existing[1])
    # INC reads no names for ONNX models, and metrics count all outputs.
    is_complete = outputs == output_names or _read_onnx_graph(model) is None
    return inputs if inputs == input_names else None, (outputs if is_complete else None) or None


def _keep_known(kind: str, names: list[str] | None, known: set[str]) -> list[str]:
    """Return the known names; log the others."""
    for name in names or ():
        if not {name, get_node_name(name)} & known:
            hint = did_you_mean(name, known)
            logger.warning("%s %r is ignored: the model has no such tensor%s", kind, name, hint)
    return [name for name in names or () if {name, get_node_name(name)} & known]


def _list_known_ports(model: object) -> tuple[set[str], set[str]] | None:
    """Return possible names of inputs and outputs; None if they are checked on loading."""
    graph = _read_onnx_graph(model)
    if graph is not None:
        return {port.name for port in graph.input}, {port.name for port in graph.output}
    nodes = getattr(model, "node", None)
    if nodes is None and isinstance(model, str | Path) and Path(model).suffix == ".pb":
        nodes = _nodes_of_file(Path(model))
    if nodes is not None:
        names = {node.name for node in nodes}
        return names, names
    if not isinstance(model, str | Path) or not (Path(model) / "saved_model.pb").is_file():
        return None
    signature = load_source(model, None, None).held.signature
    return _list_port_names(signature.inputs), _list_port_names(signature.outputs)


def _read_onnx_graph(model: object) -> Any:
    """Return the graph of an ONNX model; None for other models and unreadable files."""
    if isinstance(model, str | Path) and Path(model).suffix == ".onnx":
        import onnx
        from google.protobuf.message import DecodeError

        with suppress(OSError, DecodeError):
            return onnx.load(model, load_external_data=False).graph
        return None
    return getattr(model, "graph", None) if hasattr(model, "opset_import") else None


def _nodes_of_file(path: Path) -> Iterable[Any] | None:
    """Return the nodes of a graph file; None if loading the file will fail."""
    import tensorflow as tf
    from google.protobuf.message import DecodeError

    with suppress(OSError, DecodeError):
        nodes: Iterable[Any] = tf.compat.v1.GraphDef.FromString(path.read_bytes()).node
        return nodes
    return None


def _list_port_names(ports: Iterable[Any]) -> set[str]:
    names = {name for port in ports for name in (port.name, port.alias, port.tensor) if name}
    return {get_node_name(name) for name in names}


class Model:
    """A model by path or as an object; delegates unknown attributes to the object.

    Args:
        root: the object, or the path of a model.
        **options: ignored.

    Attributes:
        root: the argument.
        input_tensor_names, output_tensor_names: of a TensorFlow model; detected automatically.
    """

    def __init__(self, root: object, **options: object) -> None:
        self.root = native(root)
        self.name = options.get("name", "")
        self._input_names: list[str] | None = None
        self._output_names: list[str] | None = None

    @cached_property
    def loaded(self) -> AnyModel:
        """Return the model with the adaptor of its framework."""
        return load_source(self.root, None, self._input_names, outputs=self._output_names)

    @property
    def model(self) -> Any:
        """The framework's object; of a graph file the graph."""
        if not isinstance(self.root, str | Path):
            return self.root
        return self.graph if Path(self.root).suffix == ".pb" else self.loaded.native

    def framework(self) -> str:
        """The framework's name."""
        return self.loaded.adaptor.framework

    @property
    def graph_def(self) -> Any:
        """The frozen graph of a TensorFlow model."""
        return graph_def_of(self.loaded)

    @cached_property
    def sess(self) -> Any:
        """A TensorFlow 1 session with the graph."""
        import tensorflow as tf

        return tf.compat.v1.Session(graph=import_graph(self.graph_def))

    @property
    def graph(self) -> Any:
        """The graph of `sess`; of an ONNX model its own graph."""
        return self.sess.graph if self.framework() == "tensorflow" else self.model.graph

    @property
    def input_tensor_names(self) -> list[str]:
        """Input names of a TensorFlow model."""
        return self._input_names or list(self.loaded.held.signature.input_tensors)

    @input_tensor_names.setter
    def input_tensor_names(self, names: object) -> None:
        self._input_names = list_tensor_names(names)
        self._forget_loaded()

    @property
    def output_tensor_names(self) -> list[str]:
        """Output names of a TensorFlow model."""
        return self._output_names or list(self.loaded.held.signature.output_tensors)

    @output_tensor_names.setter
    def output_tensor_names(self, names: object) -> None:
        self._output_names = list_tensor_names(names)
        self._forget_loaded()

    @property
    def input_tensor(self) -> list[Any]:
        """The input tensors in the graph of `sess`."""
        return self._tensors(self.input_tensor_names)

    @property
    def output_tensor(self) -> list[Any]:
        """The output tensors in the graph of `sess`."""
        return self._tensors(self.output_tensor_names)

    def _tensors(self, names: list[str]) -> list[Any]:
        tensors = (name if ":" in name else f"{name}:0" for name in names)
        return [self.sess.graph.get_tensor_by_name(tensor) for tensor in tensors]

    def _forget_loaded(self) -> None:
        for name in ("loaded", "sess"):
            vars(self).pop(name, None)

    def __call__(self, *inputs: object, **named: object) -> Any:
        """Run the model as its framework does."""
        return self.model(*inputs, **named)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "root":
            raise AttributeError(name)
        return getattr(self.model, name)


def graph_def_of(model: Any) -> Any:
    """Return the frozen graph of a TensorFlow model, converted or not, or of a loaded one."""
    if hasattr(model, "graph_def"):
        return model.graph_def
    loaded = model if hasattr(model, "adaptor") else load_source(model, None, None)
    if loaded.adaptor.framework != "tensorflow":
        raise ConfigurationError(
            f"graph_def needs a TensorFlow model, got one of {loaded.adaptor.framework}"
        )
    return loaded.held.graph.to_graph_def()


def import_graph(graph_def: GraphDef) -> tf.Graph:
    """Return a TensorFlow graph with the nodes of a frozen one."""
    import tensorflow as tf

    graph = tf.Graph()
    with graph.as_default():
        tf.graph_util.import_graph_def(graph_def, name="")
    return graph


def evaluate_on_graphs(
    function: Callable[[Any], float] | None, source: object, target: str = HOST_TARGET
) -> Callable[[Any], float] | None:
    """Return an evaluation that gets the object of the FP32 source, as in INC.

    A `tf.Graph` if the source is one, and for an accelerator the ONNX message.
    """
    suffix = Path(source).suffix if isinstance(source, str | Path) else ""
    is_message = hasattr(source, "graph") and hasattr(source, "SerializeToString")
    if function is not None and target not in TARGETS and (suffix == ".onnx" or is_message):
        return _evaluate_on_messages(function)
    is_graph = suffix == ".pb" or hasattr(source, "get_tensor_by_name") or hasattr(source, "node")
    if function is None or not is_graph:
        return function
    evaluate = function

    @wraps(function)
    def evaluate_graph(model: Model) -> float:
        return evaluate(import_graph(model.graph_def))

    return evaluate_graph


def _evaluate_on_messages(evaluate: Callable[[Any], float]) -> Callable[[Any], float]:
    @wraps(evaluate)
    def evaluate_message(model: TransferredModel) -> float:
        return evaluate(model.loaded.native)

    return evaluate_message


def get_node_name(tensor: str) -> str:
    """Return the node that produces a TensorFlow tensor: `final` for `final:0`."""
    return tensor.partition(":")[0]


BaseModel = Model


def _log_run(optimized: OptimizedModel) -> None:
    """Log FP32 beside the result and the trials, as INC does at the end of its tuning loop."""
    if not optimized.trials:
        return
    report, console = optimized.report, SafeConsole(file=io.StringIO(), width=_LOG_COLUMNS)
    rows, figures = before_and_after(report), (report.source_name, "result", "change")
    title = verdict_line(report, optimized.met)
    console.print(create_table(title, "", *figures, right=figures, rows=rows))
    trials = [(trial, trial.speedup) for trial in optimized.trials]
    console.print(build_trial_table(trials, "Trials"))
    for line in console.file.getvalue().splitlines():  # type: ignore[attr-defined]
        script_logger.info("%s", line)


class Result:
    """An `OptimizedModel` with INC's names; delegates other names to the result, then the model.

    Attributes:
        optimized: the `OptimizedModel`, with plan, report and trials.
    """

    def __init__(self, optimized: OptimizedModel) -> None:
        self.optimized = optimized
        _log_run(optimized)
        if optimized.met is False:
            messages = (text for text in optimized.report.warnings if _FP32_RESULT in text)
            message = next(messages, verdict_line(optimized.report, optimized.met))
            reason = message[: message.index(_FP32_RESULT) + len(_FP32_RESULT)]
            logger.warning("%s, where Intel Neural Compressor returns None", reason)

    @cached_property
    def model(self) -> Any:
        """The framework's own object."""
        return get_own_object(self.optimized)

    @property
    def graph_def(self) -> Any:
        """The frozen graph of a TensorFlow model."""
        return graph_def_of(self.model)

    def nodes(self) -> Any:
        """The nodes of an ONNX model's graph."""
        graph: Any = getattr(self.model, "graph", None)
        if not hasattr(graph, "node"):
            raise ConfigurationError(
                f"nodes() needs an ONNX model, got one of {self.optimized.framework}"
            )
        return graph.node

    def framework(self) -> str:
        """The framework's name."""
        return self.optimized.framework

    def save(self, path: str | Path | None = None) -> None:
        """Save the model: as a folder, or for `.onnx`, `.pb` and `.pbtxt` as a file.

        `path` is `nc_workspace/saved` by default.
        """
        self.optimized.save(path or Path("nc_workspace") / "saved")

    def export(self, path: str | Path, conf: object = None) -> None:
        """Write the model, unchanged, as an ONNX file; `conf` is ignored."""
        self.optimized.export_onnx(path)

    def __call__(self, *inputs: object, **named: object) -> Any:
        """Run the model, through the framework's object if callable."""
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

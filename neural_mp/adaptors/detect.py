"""Detection of a model's framework by names alone, without importing a framework."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class DetectionRule:
    """Features that identify the models of a framework.

    Attributes:
        members: file names, one of which a model folder contains.
        packages: top-level packages of the model classes.
        classes: names of these classes or of their base classes.
        types: built-in types that hold a serialized model.
        mark: the bytes of a serialized model from its fifth byte on; empty for any.
    """

    suffixes: tuple[str, ...] = ()
    members: tuple[str, ...] = ()
    packages: tuple[str, ...] = ()
    classes: tuple[str, ...] = ()
    types: tuple[type, ...] = ()
    mark: bytes = b""

    def matches_source(self, source: object) -> bool:
        """Whether an object, or the content of a path, looks like a model of the framework."""
        if isinstance(source, str | Path):
            path = Path(source)
            return path.suffix in self.suffixes or any(
                (path / member).is_file() for member in self.members
            )
        if isinstance(source, bytes | bytearray):
            marked = bytes(source[4 : 4 + len(self.mark)]) == self.mark
            return isinstance(source, self.types) and marked
        return any(
            kind.__module__.split(".")[0] in self.packages and kind.__name__ in self.classes
            for kind in type(source).__mro__
        )


@dataclass(frozen=True)
class FrameworkEntry:
    """A framework with an adaptor in this package.

    Attributes:
        adaptor: class name of the adaptor, in the module `adaptor` of `home`.
        home: the package with all code specific to the framework.
        rule: features that identify the models.
        package: the package that must be installed.
        extra: the extra of neural-mp that installs the package.
        trains: whether the adaptor offers training, as known before the framework is imported.
        reads: formats of models that other frameworks transfer (`Transfer.format`).
    """

    adaptor: str
    home: str
    rule: DetectionRule
    package: str
    extra: str
    trains: bool = False
    reads: tuple[str, ...] = ()

    @property
    def is_installed(self) -> bool:
        """Whether the package is installed; it is not imported."""
        return importlib.util.find_spec(self.package) is not None


#: Framework → its adaptor and the rule that detects its models.
FRAMEWORKS: Mapping[str, FrameworkEntry] = {
    "litert": FrameworkEntry(
        "LiteRtAdaptor",
        "neural_mp.adaptors.litert",
        # The file identifier of the schema. First, as other bytes are taken for ONNX models.
        DetectionRule(suffixes=(".tflite",), types=(bytes, bytearray), mark=b"TFL3"),
        "ai_edge_litert",
        "litert",
        reads=("saved_model",),
    ),
    "onnxrt": FrameworkEntry(
        "OnnxRuntimeAdaptor",
        "neural_mp.adaptors.onnxrt",
        DetectionRule(
            suffixes=(".onnx",),
            packages=("onnx", "onnx_ir"),
            classes=("ModelProto", "Model"),
            types=(bytes, bytearray),
        ),
        "onnxruntime",
        "onnx",
        reads=("onnx",),
    ),
    "openvino": FrameworkEntry(
        "OpenVinoAdaptor",
        "neural_mp.adaptors.openvino",
        DetectionRule(suffixes=(".xml",), packages=("openvino",), classes=("Model",)),
        "openvino",
        "openvino",
        reads=("onnx", "saved_model"),
    ),
    "pytorch": FrameworkEntry(
        "PyTorchAdaptor",
        "neural_mp.adaptors.pytorch",
        DetectionRule(
            suffixes=(".pt2", ".pt", ".pth", ".jit", ".safetensors"),
            # The second is that of an adapter, which the adaptor refuses with the way to a model.
            members=("config.json", "adapter_config.json"),
            packages=("torch",),
            classes=("Module", "ExportedProgram"),
        ),
        "torch",
        "torch",
        trains=True,
    ),
    "tensorflow": FrameworkEntry(
        "TensorFlowAdaptor",
        "neural_mp.adaptors.tensorflow",
        DetectionRule(
            suffixes=(".pb", ".pbtxt", ".keras", ".h5", ".hdf5"),
            members=("saved_model.pb", "saved_model.pbtxt"),
            packages=("tensorflow", "keras", "tf_keras"),
            classes=(
                "Layer",
                "Model",
                "Graph",
                "GraphDef",
                "ConcreteFunction",
                "GenericFunction",
                "Function",
                "AutoTrackable",
                "Module",
                "Trackable",
            ),
        ),
        "tensorflow",
        "tensorflow",
        trains=True,
    ),
}

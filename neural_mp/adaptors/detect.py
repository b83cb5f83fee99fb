"""Whose model is this? Told from names alone, without importing a framework."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class DetectionRule:
    """What the models of a framework are recognised by.

    Attributes:
        suffixes: endings of its files.
        members: names of files, one of which lies in the folder of a model.
        packages: the packages that its classes come from.
        classes: the names of those classes, or of classes that they are derived from.
        types: types of Python's own that hold a model.
    """

    suffixes: tuple[str, ...] = ()
    members: tuple[str, ...] = ()
    packages: tuple[str, ...] = ()
    classes: tuple[str, ...] = ()
    types: tuple[type, ...] = ()

    def fit(self, source: object) -> bool:
        """Whether an object, or what lies at a path, looks like a model of the framework."""
        if isinstance(source, str | Path):
            path = Path(source)
            return path.suffix in self.suffixes or any(
                (path / member).is_file() for member in self.members
            )
        return isinstance(source, self.types) or any(
            kind.__module__.split(".")[0] in self.packages and kind.__name__ in self.classes
            for kind in type(source).__mro__
        )


@dataclass(frozen=True)
class FrameworkEntry:
    """A framework that an adaptor comes with this package for.

    Attributes:
        adaptor: the name of the adaptor's class, in the module `adaptor` of `home`.
        home: the package that holds all that knows the framework.
        marks: what its models are recognised by.
        package: what must be installed.
        extra: the extra of this package that installs it.
    """

    adaptor: str
    home: str
    marks: DetectionRule
    package: str
    extra: str


#: Framework → where its adaptor is and whose models it takes.
FRAMEWORKS: Mapping[str, FrameworkEntry] = {
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
    ),
    "pytorch": FrameworkEntry(
        "PyTorchAdaptor",
        "neural_mp.adaptors.pytorch",
        DetectionRule(
            suffixes=(".pt2", ".pt", ".pth", ".jit", ".safetensors"),
            members=("config.json",),
            packages=("torch",),
            classes=("Module", "ExportedProgram"),
        ),
        "torch",
        "torch",
    ),
    "tensorflow": FrameworkEntry(
        "TensorFlowAdaptor",
        "neural_mp.adaptors.tensorflow",
        DetectionRule(
            suffixes=(".pb", ".pbtxt", ".keras", ".h5", ".hdf5"),
            members=("saved_model.pb", "saved_model.pbtxt"),
            packages=("tensorflow", "keras", "tf_keras"),
            classes=(
                *("Layer", "Model", "Graph", "GraphDef", "ConcreteFunction", "GenericFunction"),
                *("Function", "AutoTrackable", "Module", "Trackable"),
            ),
        ),
        "tensorflow",
        "tensorflow",
    ),
}

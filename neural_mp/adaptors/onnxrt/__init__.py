"""ONNX models in ONNX Runtime. Importing this package imports neither."""

from neural_mp.adaptors.onnxrt.adaptor import OnnxRuntimeAdaptor

__all__ = ["OnnxRuntimeAdaptor"]

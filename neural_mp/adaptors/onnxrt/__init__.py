"""The ONNX Runtime adaptor."""

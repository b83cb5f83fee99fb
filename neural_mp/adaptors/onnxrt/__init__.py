"""All that knows ONNX Runtime."""

"""The graph of an ONNX model: files, structure and sessions."""

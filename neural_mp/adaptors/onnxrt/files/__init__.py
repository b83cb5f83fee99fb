"""ONNX models in files: load, check, save."""

"""Models of runtimes that compile graphs with named tensors: ONNX Runtime and OpenVINO."""

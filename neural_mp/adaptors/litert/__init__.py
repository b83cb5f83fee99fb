"""The adaptor of LiteRT (TensorFlow Lite): `.tflite` files in and out, run by XNNPACK's kernels."""

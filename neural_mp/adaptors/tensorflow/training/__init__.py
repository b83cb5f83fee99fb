"""Mixed precision while a Keras or TensorFlow model is trained."""

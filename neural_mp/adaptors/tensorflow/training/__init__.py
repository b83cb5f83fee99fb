"""Mixed-precision training of Keras and TensorFlow models."""

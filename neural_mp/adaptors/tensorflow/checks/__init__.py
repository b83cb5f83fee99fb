"""Security checks of untrusted TensorFlow and Keras files."""

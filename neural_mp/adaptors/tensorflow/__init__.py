"""All that knows TensorFlow."""

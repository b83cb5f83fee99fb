"""All that knows TensorFlow."""

from neural_mp.adaptors.tensorflow.log_suppression import hush

hush()

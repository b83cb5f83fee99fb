"""All that knows TensorFlow."""

from neural_mp.adaptors.tensorflow.quiet import hush

hush()

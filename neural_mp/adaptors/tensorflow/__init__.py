"""TensorFlow-specific code."""

from neural_mp.adaptors.tensorflow.log_suppression import suppress_startup_logs

suppress_startup_logs()

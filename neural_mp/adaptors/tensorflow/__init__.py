"""All that knows TensorFlow."""

from neural_mp.adaptors.tensorflow.log_suppression import suppress_startup_logs

suppress_startup_logs()

"""TensorFlow: Keras models, SavedModels and frozen graphs."""

from neural_mp.adaptors.tensorflow.adaptor import TensorFlowAdaptor

__all__ = ["TensorFlowAdaptor"]

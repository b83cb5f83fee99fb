"""PyTorch: captured with `torch.export`, run on oneDNN's integer kernels without a compiler."""

from neural_mp.adaptors.pytorch.adaptor import PyTorchAdaptor

__all__ = ["PyTorchAdaptor"]

"""What scripts and files for Intel Neural Compressor say, in this package."""

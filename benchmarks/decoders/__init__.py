"""Parts of the benchmark of language models."""

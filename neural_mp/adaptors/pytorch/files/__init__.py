"""Files of models: read, saved and exported for other runtimes."""

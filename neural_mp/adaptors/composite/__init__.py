"""Models of several graphs, each in its own framework, as one model."""

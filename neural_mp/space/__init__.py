"""What every op of a model may run in here, and what a plan comes down to."""

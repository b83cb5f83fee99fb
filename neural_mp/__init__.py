"""The fastest model that still meets your accuracy target."""

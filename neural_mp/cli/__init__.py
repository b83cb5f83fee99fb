"""The commands of `neural-mp`."""

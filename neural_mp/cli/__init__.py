"""The commands of `neural-mp`, one module each."""

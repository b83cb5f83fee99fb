"""The commands of `neural-mp`, each in a file of its own."""

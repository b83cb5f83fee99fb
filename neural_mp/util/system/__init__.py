"""The operating system: environment, memory, processes, interruption."""

"""Small random instances of architectures that packages define, with seeded inputs."""

"""What is true of all frameworks, written once."""

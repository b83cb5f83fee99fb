"""The loop: propose, convert, evaluate, record, until the target is met."""

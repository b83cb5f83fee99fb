"""The tuning loop: propose, convert, evaluate and record plans until the target is met."""

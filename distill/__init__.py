"""Train a draft for a target that has none, on the target's own answers."""

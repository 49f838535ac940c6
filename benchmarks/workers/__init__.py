"""One file per system, run in that system's environment."""

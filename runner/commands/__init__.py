"""The commands of `specrun`, by what they are for."""

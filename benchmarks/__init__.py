"""specrun beside its peers: `make peers`."""

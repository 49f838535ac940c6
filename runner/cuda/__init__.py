"""The accept step on a GPU. Nothing of it is imported where there is none."""

"""Many requests at once: batched engines, the scheduler, the HTTP server."""

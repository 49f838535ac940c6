"""The server's metrics (`runner/serving/metrics.py`) as Triton's custom metrics."""

import threading
from typing import Any

from specrun.runner.serving.service import Load, Service
from specrun.runner.statistics import Statistics

COUNTERS = {
    "requests": "Requests that ended.",
    "cancelled": "Requests whose client went away.",
    "prompt_tokens": "Tokens of prompts.",
    "prefix_cache_hits": "Prompt tokens not read again.",
    "generation_tokens": "Tokens written.",
    "spec_decode_num_drafts": "Rounds with a proposal.",
    "spec_decode_num_draft_tokens": "Proposed tokens.",
    "spec_decode_num_accepted_tokens": "Accepted ones.",
}
GAUGES = {"num_requests_running": "Requests that run.", "num_requests_waiting": "Requests that wait."}


class TritonMetrics:
    """Of one instance. All calls are made one at a time: two at once would end the whole server."""

    def __init__(self, pb_utils: Any, model: str, service: Service) -> None:
        self._service = service
        self._lock = threading.Lock()
        self._shown: Load | None = None
        kind, labels = pb_utils.MetricFamily, {"model": model}
        # A family ends with the last reference to it.
        self._families = {
            **{name: kind(f"specrun:{name}_total", text, kind.COUNTER) for name, text in COUNTERS.items()},
            **{name: kind(f"specrun:{name}", text, kind.GAUGE) for name, text in GAUGES.items()},
        }
        self._metrics = {name: family.Metric(labels=labels) for name, family in self._families.items()}

    def finished(self, statistics: Statistics, cancelled: bool) -> None:
        """One request has ended, however."""
        counts = {
            "requests": 1,
            "cancelled": int(cancelled),
            "prompt_tokens": statistics.prompt_tokens,
            "prefix_cache_hits": statistics.reused_tokens,
            "generation_tokens": statistics.emitted,
            "spec_decode_num_drafts": statistics.proposed_at[0],
            "spec_decode_num_draft_tokens": statistics.proposed,
            "spec_decode_num_accepted_tokens": statistics.accepted_at.total(),
        }
        with self._lock:
            for name, count in counts.items():
                self._metrics[name].increment(count)

    def show_load(self) -> None:
        """What goes on at present."""
        load = self._service.load
        if load == self._shown:
            return
        self._shown = load
        with self._lock:
            self._metrics["num_requests_running"].set(load.running)
            self._metrics["num_requests_waiting"].set(load.waiting)

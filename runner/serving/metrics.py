"""What a server counts, for Prometheus. Names of speculative decoding as vLLM's, which dashboards read."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from specrun.runner.serving.service import Service
from specrun.runner.statistics import Statistics

SECONDS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60)


class Metrics:
    """Of one server."""

    def __init__(self, service: Service) -> None:
        self._service = service
        registry = self._registry = CollectorRegistry()
        self._requests = Counter("specrun:requests", "Requests by HTTP status.", ["status"], registry=registry)
        self._prompt = Counter("specrun:prompt_tokens", "Tokens of prompts.", registry=registry)
        self._reused = Counter("specrun:prefix_cache_hits", "Prompt tokens not read again.", registry=registry)
        self._written = Counter("specrun:generation_tokens", "Tokens written.", registry=registry)
        self._drafts = Counter("specrun:spec_decode_num_drafts", "Rounds with a proposal.", registry=registry)
        self._drafted = Counter("specrun:spec_decode_num_draft_tokens", "Proposed tokens.", registry=registry)
        self._accepted = Counter("specrun:spec_decode_num_accepted_tokens", "Accepted ones.", registry=registry)
        self._accepted_at = Counter(
            "specrun:spec_decode_num_accepted_tokens_per_pos",
            "Accepted ones by position after the last committed token.",
            ["position"],
            registry=registry,
        )
        self.first_token = Histogram("specrun:time_to_first_token_seconds", "", buckets=SECONDS, registry=registry)
        self.between_tokens = Histogram("specrun:inter_token_latency_seconds", "", buckets=SECONDS, registry=registry)
        gauges = {
            "num_requests_running": lambda: service.load.running,
            "num_requests_waiting": lambda: service.load.waiting,
            "prefix_cache_bytes": lambda: service.prefixes.size,
            "kv_cache_usage_perc": lambda: service.load.running / service.load.slots,
        }
        for name, value in gauges.items():
            Gauge(f"specrun:{name}", "", registry=registry).set_function(value)
        self._drafted_rounds = Gauge(
            "specrun:drafted_rounds", "Rounds by how far ahead a draft was to guess.", ["positions"], registry=registry
        )
        self._verified_rounds = Gauge(
            "specrun:verified_rounds",
            "Rounds of the batch with guesses, by how many of a request were verified at most.",
            ["nodes"],
            registry=registry,
        )

    def answered(self, status: int) -> None:
        self._requests.labels(str(status)).inc()

    def finished(self, statistics: Statistics) -> None:
        """One choice has ended, however."""
        self._prompt.inc(statistics.prompt_tokens)
        self._reused.inc(statistics.reused_tokens)
        self._written.inc(statistics.emitted)
        self._drafts.inc(statistics.proposed_at[0])
        self._drafted.inc(statistics.proposed)
        self._accepted.inc(statistics.accepted_at.total())
        for position, count in statistics.accepted_at.items():
            self._accepted_at.labels(str(position)).inc(count)

    def render(self) -> bytes:
        for gauge, counts in (
            (self._drafted_rounds, self._service.pace.drafted),
            (self._verified_rounds, self._service.pace.verified),
        ):
            for label, count in list(counts.items()):
                gauge.labels(str(label)).set(count)
        return generate_latest(self._registry)

"""`specrun bench`: plain against speculative decoding over prompt sets, interleaved."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from specrun.engines.manifest import TREE_SUFFIX
from specrun.runner.compare import Comparison, Divergence, compare_all
from specrun.runner.runner import Request, Runner
from specrun.runner.sampling import Sampling
from specrun.runner.statistics import STAGES, Statistics

HEADER = (
    *("prompt set", "proposer", "k", "nodes", "p-min", "temp", "top-p", "prompts", "tokens", "plain tok/s", "tok/s"),
    *("speed-up", "accept len", "round cost", "identical"),
)


@dataclass(frozen=True)
class Row:
    """One prompt set with one setting. Rates in tokens per second, end to end (prefill included)."""

    prompt_set: str
    proposer: str
    k: int
    nodes: int  # proposed per round, at most
    p_min: float
    temperature: float
    top_p: float
    prompts: int
    tokens: int
    plain_tok_s: float
    tok_s: float
    speedup: float
    acceptance_length: float  # tokens emitted per round
    acceptance_per_position: list[float]  # share of the proposals that reach a position with a token accepted there
    milliseconds_per_token: dict[str, float]  # by stage, of the first run of each prompt
    plain_milliseconds_per_token: dict[str, float]
    round_cost: float  # decoding time of a round divided by that of a plain step
    identical: bool
    differing: int  # prompts whose output differs
    within_rounding: int  # how many of these differ only where rounding decided
    divergences: list[Divergence]

    @property
    def lossless(self) -> bool:
        return self.differing == self.within_rounding


@dataclass(frozen=True)
class Setting:
    """A way to speculate."""

    proposer: str
    k: int | None  # None: the bundle's, for this proposer
    nodes: int
    p_min: float


def bench_set(
    runner: Runner,
    prompt_set: str,
    prompts: Sequence[tuple[int, ...]],
    settings: Sequence[Setting],
    sampling: Sampling,
    max_tokens: int,
    repeats: int,
    progress: Callable[[], None] = lambda: None,
) -> list[Row]:
    """Measure one prompt set (token ids per prompt) under each setting. `progress`: after each run."""
    comparisons = []
    for prompt in prompts:
        requests = [
            Request(
                prompt,
                max_tokens,
                sampling,
                proposer=setting.proposer,
                k=setting.k,
                nodes=setting.nodes,
                p_min=setting.p_min,
            )
            for setting in settings
        ]
        comparisons.append(compare_all(runner, requests, repeats, progress))
    columns = zip(*comparisons, strict=True)
    return [
        _row(
            prompt_set, setting, setting.k or runner.bundle.manifest.positions(setting.proposer), sampling, list(column)
        )
        for setting, column in zip(settings, columns, strict=True)
    ]


def _row(prompt_set: str, setting: Setting, k: int, sampling: Sampling, comparisons: list[Comparison]) -> Row:
    plain_tokens = sum(len(each.plain.ids) for each in comparisons)
    tokens = sum(len(each.speculative.ids) for each in comparisons)
    plain_tok_s = plain_tokens / sum(each.plain_seconds for each in comparisons)
    tok_s = tokens / sum(each.speculative_seconds for each in comparisons)
    divergences = [each.divergence for each in comparisons if each.divergence is not None]
    statistics = [each.speculative.statistics for each in comparisons]
    rounds = sum(each.rounds for each in statistics)
    round_seconds = sum(each.speculative_decode_seconds for each in comparisons) / rounds
    step_seconds = sum(each.plain_decode_seconds for each in comparisons) / plain_tokens
    return Row(
        prompt_set=prompt_set,
        proposer=setting.proposer,
        k=k,
        nodes=setting.nodes if setting.proposer.endswith(TREE_SUFFIX) else k,
        p_min=setting.p_min,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        prompts=len(comparisons),
        tokens=tokens,
        plain_tok_s=plain_tok_s,
        tok_s=tok_s,
        speedup=tok_s / plain_tok_s,
        acceptance_length=tokens / rounds,
        round_cost=round_seconds / step_seconds,
        acceptance_per_position=_per_position(statistics),
        milliseconds_per_token=_stages(statistics, tokens),
        plain_milliseconds_per_token=_stages([each.plain.statistics for each in comparisons], plain_tokens),
        identical=not divergences,
        differing=len(divergences),
        within_rounding=sum(each.within_rounding for each in divergences),
        divergences=divergences,
    )


def _per_position(statistics: Sequence[Statistics]) -> list[float]:
    proposed: Counter[int] = sum((each.proposed_at for each in statistics), Counter())
    accepted: Counter[int] = sum((each.accepted_at for each in statistics), Counter())
    return [accepted[position] / proposed[position] for position in sorted(proposed)]


def _stages(statistics: Sequence[Statistics], tokens: int) -> dict[str, float]:
    return {stage: 1000 * sum(each.seconds[stage] for each in statistics) / tokens for stage in STAGES}


def table(rows: Sequence[Row]) -> str:
    """The rows as aligned text."""
    return align([HEADER, *map(cells, rows)], left=2)


def cells(row: Row) -> tuple[str, ...]:
    """One row as text, under HEADER."""
    return (
        row.prompt_set,
        row.proposer,
        str(row.k),
        str(row.nodes),
        f"{row.p_min:g}",
        f"{row.temperature:g}",
        f"{row.top_p:g}",
        str(row.prompts),
        str(row.tokens),
        f"{row.plain_tok_s:.1f}",
        f"{row.tok_s:.1f}",
        f"{row.speedup:.2f}x",
        f"{row.acceptance_length:.2f}",
        f"{row.round_cost:.2f}",
        _verdict(row),
    )


def align(lines: Sequence[Sequence[str]], left: int) -> str:
    """Columns of text: the first `left` ones to the left, the others to the right."""
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if column < left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )


def _verdict(row: Row) -> str:
    if row.identical:
        return "yes"
    if row.lossless:
        return f"{row.differing} by rounding"
    return f"NO ({row.differing - row.within_rounding})"


def to_json(rows: Sequence[Row]) -> list[dict[str, Any]]:
    return [asdict(row) for row in rows]

"""`specrun verify`: the proof, on the machine where a bundle will run, that it writes what the model alone would."""

import dataclasses
import importlib.util
import json
import math
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from specrun.engines.manifest import NGRAM, TREE_SUFFIX
from specrun.runner.bench import align
from specrun.runner.compare import Divergence, explain
from specrun.runner.filters import LogitsError
from specrun.runner.grammar import Grammar, GrammarError
from specrun.runner.processors import Processing
from specrun.runner.runner import Completion, Request, Runner
from specrun.runner.sampling import AcceptRule, Sampling

Array = np.ndarray[Any, Any]

KS = (1, 3, 8)
SCHEMA = {
    "type": "object",
    "properties": {"topic": {"type": "string", "maxLength": 12}, "rating": {"enum": [1, 2, 3, 4, 5]}},
    "required": ["topic", "rating"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},
}
JSON_TOKENS = 64  # enough for any document of that schema
SEEDS = 8  # of the distribution test, for each prompt
LEAST_P_VALUE = 1e-5  # a correct bundle fails the distribution test once in 100,000 runs
ENOUGH_PROPOSED = 50  # tokens of which one should have been accepted


@dataclass(frozen=True)
class Setting:
    """What all proposers are tried with."""

    name: str
    sampling: Sampling
    processing: Processing = field(default_factory=Processing)


def settings() -> list[Setting]:
    """Greedy and seeded; the last one only where grammars can be followed."""
    found = [
        Setting("greedy", Sampling(seed=1)),
        Setting("temperature 1", Sampling(1.0, seed=2)),
        Setting(
            "temperature 0.7, top-p 0.9, penalties",
            Sampling(0.7, top_p=0.9, seed=3),
            Processing(repetition_penalty=1.1, frequency_penalty=0.3),
        ),
    ]
    if importlib.util.find_spec("llguidance") is not None:
        processing = Processing(grammar=Grammar("json_schema", json.dumps(SCHEMA)))
        found.append(Setting("temperature 1, JSON schema", Sampling(1.0, seed=4), processing))
    return found


@dataclass
class ProposerReport:
    """One proposer against plain decoding, over prompts, settings and k."""

    proposer: str
    runs: int = 0
    identical: int = 0
    tokens: int = 0
    proposed: int = 0
    accepted: int = 0
    divergences: list[Divergence] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)  # of runs that did not end

    @property
    def lossless(self) -> bool:
        return not self.errors and all(each.within_rounding for each in self.divergences)

    @property
    def never_accepted(self) -> bool:
        return self.accepted == 0 and self.proposed >= ENOUGH_PROPOSED


@dataclass(frozen=True)
class Check:
    """Something that must hold."""

    name: str
    passed: bool
    found: str


@dataclass(frozen=True)
class Verification:
    proposers: list[ProposerReport]
    checks: list[Check]

    @property
    def passed(self) -> bool:
        return all(check.passed for check in self.checks)

    def to_json(self) -> dict[str, Any]:
        return {
            "passed": self.passed,
            "checks": [dataclasses.asdict(check) for check in self.checks],
            "proposers": [dataclasses.asdict(report) for report in self.proposers],
        }


def runs_of(runner: Runner, prompts: int) -> int:
    """How many generations `verify` takes."""
    equality = len(settings()) * prompts * (1 + len(runner.proposers) * len(KS))
    return equality + prompts * SEEDS * len(_distribution_rules(runner)) + 2 * prompts + 1


def verify(
    runner: Runner, prompts: Sequence[str], max_tokens: int, progress: Callable[[], None] = lambda: None
) -> Verification:
    """Try everything that speculation might change. `prompts`: texts, put through the chat template if there is one.
    `progress` is called after each generation."""
    encode = runner.encode_chat if runner.has_chat_template else runner.encode
    encoded = [encode(prompt) for prompt in prompts]

    def generate(request: Request) -> Completion:
        completion = runner.generate(request)
        progress()
        return completion

    reports = {name: ProposerReport(name) for name in runner.proposers}
    parsed: list[bool] = []
    for setting in settings():
        for prompt in encoded:
            request = Request(prompt, max_tokens, setting.sampling, setting.processing)
            if setting.processing.grammar is not None:
                request = dataclasses.replace(request, max_tokens=JSON_TOKENS)
            plain = generate(request.plain())
            for report in reports.values():
                for k in KS:
                    way = dataclasses.replace(request, proposer=report.proposer, k=k)
                    report.runs += 1
                    try:
                        completion = generate(way)
                    except (GrammarError, LogitsError) as error:  # plain decoding of the same request had none
                        report.errors.append(str(error))
                        continue
                    _count(report, runner, way, plain, completion)
                    if setting.processing.grammar is not None:
                        parsed.append(_parses(completion))
    done = list(reports.values())
    checks = [_equality(done), *([_json(parsed)] if parsed else []), _acceptance(done)]
    checks.append(_neighbours(generate, encoded, max_tokens, runner.bundle.manifest.proposer))
    checks.append(_restart(runner, generate, prompts[0], encoded[0], max_tokens))
    for rule, proposer in _distribution_rules(runner):
        sampling = Sampling(1.0, top_p=0.95, accept=rule)
        checks.append(_distribution(runner, encoded, max_tokens, sampling, proposer, progress))
    return Verification(done, checks)


def table(verification: Verification) -> str:
    """As aligned text: the proposers, then the checks."""
    header = ("proposer", "runs", "identical", "by rounding", "tokens", "proposed", "accepted")
    rows = [
        (
            report.proposer,
            str(report.runs),
            str(report.identical),
            str(sum(each.within_rounding for each in report.divergences)),
            str(report.tokens),
            str(report.proposed),
            str(report.accepted),
        )
        for report in verification.proposers
    ]
    checks = [f"{'ok  ' if check.passed else 'FAIL'}  {check.name}: {check.found}" for check in verification.checks]
    return "\n".join([align([header, *rows], left=1), "", *checks])


def _count(report: ProposerReport, runner: Runner, way: Request, plain: Completion, completion: Completion) -> None:
    report.tokens += len(completion.ids)
    report.proposed += completion.statistics.proposed
    report.accepted += completion.statistics.accepted_at.total()
    if completion.ids == plain.ids:
        report.identical += 1
    else:
        report.divergences.append(explain(runner, way, plain.ids, completion.ids))


def _equality(reports: list[ProposerReport]) -> Check:
    runs, identical = sum(report.runs for report in reports), sum(report.identical for report in reports)
    broken = [report.proposer for report in reports if not report.lossless]
    errors = [f"{report.proposer}: {error}" for report in reports for error in report.errors]
    found = f"{identical} of {runs} outputs identical to plain decoding"
    if identical < runs:
        found += (
            ", the others differ where rounding decided" if not broken else f"; NOT by rounding: {', '.join(broken)}"
        )
    if errors:
        found += f"; {len(errors)} runs broke off, the first: {errors[0]}"
    return Check("the same tokens, greedy and seeded, whatever the proposer and k", not broken, found)


def _parses(completion: Completion) -> bool:
    try:
        value = json.loads(completion.text)
    except ValueError:
        return False
    return set(value) == {"topic", "rating"}


def _json(parsed: list[bool]) -> Check:
    found = f"{sum(parsed)} of {len(parsed)} outputs are JSON after the schema"
    return Check("a JSON schema is followed", all(parsed), found)


def _acceptance(reports: list[ProposerReport]) -> Check:
    never = [report.proposer for report in reports if report.never_accepted]
    silent = [report.proposer for report in reports if not report.proposed]
    found = f"never: {', '.join(never)}; this draft does not fit the target" if never else "every proposer"
    if silent:
        found += f" (proposed nothing at all: {', '.join(silent)})"
    return Check("what is proposed is accepted now and then", not never, found)


def _neighbours(
    generate: Callable[[Request], Completion], prompts: list[tuple[int, ...]], max_tokens: int, proposer: str
) -> Check:
    """Requests one after the other: a batch of one has no other neighbours. `proposer`: guesses in every round."""
    requests = [Request(prompt, max_tokens, Sampling(1.0, seed=5), proposer=proposer) for prompt in prompts]
    first = [generate(request).ids for request in requests]
    again = [generate(request).ids for request in reversed(requests)][::-1]
    same = sum(one == other for one, other in zip(first, again, strict=True))
    return Check("the same tokens after other requests", same == len(first), f"{same} of {len(first)} identical")


def _restart(
    runner: Runner, generate: Callable[[Request], Completion], text: str, prompt: tuple[int, ...], max_tokens: int
) -> Check:
    """A process of its own loads the bundle and repeats a request."""
    wanted = generate(Request(prompt, max_tokens, Sampling(1.0, seed=6), proposer=runner.bundle.manifest.proposer))
    command = [
        *(sys.executable, "-m", "specrun.runner.cli", "generate", str(runner.bundle.path), "--json"),
        *("--prompt", text, "--temperature", "1", "--seed", "6", "--max-tokens", str(max_tokens)),
        *(["--chat"] if runner.has_chat_template else []),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        return Check("the same tokens after a restart", False, done.stderr.strip())
    same = tuple(json.loads(done.stdout)["ids"]) == wanted.ids
    return Check("the same tokens after a restart", same, "identical" if same else "other tokens")


def _distribution_rules(runner: Runner) -> list[tuple[AcceptRule, str | None]]:
    """The accept rules with a proposer for each: the bundle's default; a draft's chain where there is one."""
    chains = [name for name in runner.proposers if not name.startswith(NGRAM) and not name.endswith(TREE_SUFFIX)]
    rules: list[tuple[AcceptRule, str | None]] = [("coupled", None)]
    return [*rules, ("rejection", chains[0])] if chains else rules


def _distribution(
    runner: Runner,
    prompts: list[tuple[int, ...]],
    max_tokens: int,
    sampling: Sampling,
    proposer: str | None,
    progress: Callable[[], None],
) -> Check:
    """Where each token falls in its row's distribution, likeliest first, must be uniform over seeds (Rosenblatt's
    transformation; a token's own share is spread by a random number that has nothing to do with the seed)."""
    spread = np.random.default_rng(0)
    places: list[float] = []

    def look(position: int, logits: Array, token: int) -> None:
        probs = reference_probs(logits, sampling)
        order = np.argsort(-probs, kind="stable")
        rank = int(np.flatnonzero(order == token)[0])
        places.append(float(probs[order[:rank]].sum() + spread.random() * probs[token]))
        if probs[token] == 0:
            places[-1] = math.inf

    for seed in range(SEEDS):
        for prompt in prompts:
            seeded = dataclasses.replace(sampling, seed=seed)
            runner.generate(Request(prompt, max_tokens, seeded, proposer=proposer), look)
            progress()
    p_value = uniformity(np.array(places))
    impossible = sum(map(math.isinf, places))
    found = f"p-value {p_value:.3g} of {len(places)} tokens (Kolmogorov-Smirnov)"
    if impossible:
        found += f"; {impossible} tokens that the filters exclude"
    return Check(
        f"tokens over seeds follow the model's distribution ({sampling.accept} rule)",
        p_value >= LEAST_P_VALUE and not impossible,
        found,
    )


def reference_probs(logits: Array, sampling: Sampling) -> Array:
    """The distribution after temperature and filters, in double precision and by sorting: float64 [vocabulary].

    Deliberately not the code that chooses the tokens.
    """
    scores = logits.astype(np.float64) / sampling.temperature
    probs = np.exp(scores - scores.max())
    order = np.argsort(-scores, kind="stable")
    if sampling.top_k:
        probs[scores < scores[order[min(sampling.top_k, len(order)) - 1]]] = 0
    if sampling.top_p < 1:
        # Where rounding decides whether one more token belongs to the nucleus, it does.
        reached = np.cumsum(probs[order]) / probs.sum()
        last = min(int(np.searchsorted(reached, sampling.top_p * (1 + 1e-6))), len(order) - 1)
        probs[scores < scores[order[last]]] = 0
    probs[probs < sampling.min_p * probs.max()] = 0
    return np.asarray(probs / probs.sum())


def uniformity(places: Array) -> float:
    """p-value that numbers in [0, 1] are uniform: Kolmogorov-Smirnov, asymptotic."""
    count = len(places)
    ranked = np.sort(places)
    steps = np.arange(count + 1) / count
    distance = max(float((steps[1:] - ranked).max()), float((ranked - steps[:-1]).max()))
    scaled = distance * (math.sqrt(count) + 0.12 + 0.11 / math.sqrt(count))
    terms = (2 * (-1) ** (term - 1) * math.exp(-2 * (term * scaled) ** 2) for term in range(1, 101))
    return min(1.0, max(0.0, sum(terms))) if scaled > 0.2 else 1.0

"""Text from a bundle."""

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from specrun.engines.errors import RequestError
from specrun.runner.commands.divergence import describe_divergence
from specrun.runner.commands.exit_codes import EXIT_DIFFERENT
from specrun.runner.commands.options import (
    bundle_argument,
    filter_options,
    json_option,
    processing_of,
    processing_options,
    sampling_of,
)
from specrun.runner.sampling import Sampling

if TYPE_CHECKING:
    from specrun.runner.runner import Request, Runner


@click.command()
@bundle_argument
@click.option("--prompt", required=True, help="Text to continue, or with --chat what the user says.")
@click.option("--chat", is_flag=True, help="Put the prompt through the model's chat template.")
@click.option("--max-tokens", type=int, default=128, show_default=True)
@click.option("--temperature", type=float, default=Sampling.temperature, show_default=True, help="0: greedy.")
@filter_options
@click.option("--seed", type=int, help="Random if not given; shown with the result.")
@click.option(
    "--accept",
    default=Sampling.accept,
    show_default=True,
    help="coupled or rejection (other tokens than plain).",
)
@processing_options
@click.option("--logprobs", type=int, help="With --json: log-probabilities of each token and of so many others.")
@click.option("--stop", multiple=True, help="End before this text; may be repeated.")
@click.option("--k", type=int, help="Positions drafted in every round; default: decided each round, at most as built.")
@click.option("--nodes", type=int, help="Nodes of a proposed tree; default: as built.")
@click.option("--p-min", type=float, help="What a draft finds less likely is not proposed; default: as built.")
@click.option(
    "--proposer", help="One that the bundle has (guesses in every round), or none; default: as built, where it pays."
)
@click.option("--compare", "comparing", is_flag=True, help="Run plain and speculative, compare output and speed.")
@json_option
def generate(bundle: Path, prompt: str, chat: bool, comparing: bool, as_json: bool, **options: Any) -> int:
    """Generate text with BUNDLE."""
    from specrun.runner.runner import Request, Runner

    if options["logprobs"] is not None and (comparing or not as_json):
        raise RequestError("got --logprobs without --json, which prints them")
    names = ("max_tokens", "stop", "proposer", "k", "nodes", "p_min", "logprobs")
    settings = {name: options[name] for name in names}
    request = Request(
        (0,), sampling=sampling_of(options), processing=processing_of(options), **settings
    )  # before loading
    runner = Runner.open(bundle)
    request = replace(request, prompt_ids=runner.encode_chat(prompt) if chat else runner.encode(prompt))
    if comparing:
        return _compare(runner, request, as_json)
    if as_json:
        click.echo(json.dumps(runner.generate(request).to_json()))
        return 0
    return _stream(runner, request)


def _stream(runner: "Runner", request: "Request") -> int:
    from specrun.runner.statistics import Statistics

    statistics = Statistics()
    request = replace(request, sampling=request.sampling.with_seed())
    for event in runner.stream(request, statistics):
        click.echo(event.text, nl=False)
    click.echo()
    click.echo(
        f"{statistics.emitted} tokens, {statistics.tok_s:.1f} tokens/s, "
        f"{statistics.acceptance_length:.2f} tokens per round"
        + (f", seed {request.sampling.seed}" if request.sampling.temperature > 0 else ""),
        err=True,
    )
    return 0


COMPARE_REPEATS = 3


def _compare(runner: "Runner", request: "Request", as_json: bool) -> int:
    from specrun.runner.compare import compare

    result = compare(runner, request, COMPARE_REPEATS)
    if as_json:
        click.echo(json.dumps(result.to_json()))
        return 0 if result.lossless else EXIT_DIFFERENT
    figures = result.to_json()
    click.echo(result.speculative.text)
    click.echo(f"\n{'':<13}{'tokens':>7}{'tokens/s':>10}{'rounds':>8}{'tokens per round':>18}")
    for name, completion in (("plain", result.plain), ("speculative", result.speculative)):
        statistics = completion.statistics
        click.echo(
            f"{name:<13}{len(completion.ids):>7}{figures[name]['tok_s']:>10.1f}"
            f"{statistics.rounds:>8}{statistics.acceptance_length:>18.2f}"
        )
    click.echo(f"identical output: {'yes' if result.identical else 'NO'}, speed-up: {result.speedup:.2f}x")
    if result.divergence is not None:
        click.echo(describe_divergence(result.divergence))
    return 0 if result.lossless else EXIT_DIFFERENT

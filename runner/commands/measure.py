"""What a bundle is worth: its proof, its speed, its logits against those of another build."""

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from specrun.engines.errors import RequestError, UnfitError
from specrun.runner.commands.divergence import describe_divergence
from specrun.runner.commands.exit_codes import EXIT_DIFFERENT
from specrun.runner.commands.options import bundle_argument, filter_options, json_option, sampling_of

if TYPE_CHECKING:
    from specrun.engines.manifest import Bundle
    from specrun.runner.bench import Row, Setting
    from specrun.runner.runner import Runner


@click.command()
@bundle_argument
@click.option(
    "--set", "prompt_set", help="chat, code-editing, summarizing, random-words or a file; default: one prompt of each."
)
@click.option("--max-tokens", type=int, default=32, show_default=True, help="Of each output.")
@json_option
def verify(bundle: Path, prompt_set: str | None, max_tokens: int, as_json: bool) -> int:
    """Prove on this machine that BUNDLE writes what its model alone would.

    Every proposer and k against plain decoding, greedy and seeded, with penalties and a JSON schema; again after other
    requests and after a restart; the distribution over seeds; whether drafts are accepted at all. A few minutes for a
    small model. Exit code 1 if anything fails.
    """
    from specrun.runner import verify as verification
    from specrun.runner.prompt_set import PROMPT_SETS, load_prompt_set
    from specrun.runner.runner import Runner

    if max_tokens < 1:
        raise RequestError(f"got max-tokens {max_tokens}, expected 1 or more")
    prompts = load_prompt_set(prompt_set) if prompt_set else [load_prompt_set(name)[0] for name in PROMPT_SETS]
    runner = Runner.open(bundle)
    with click.progressbar(
        length=verification.runs_of(runner, len(prompts)), label="generations", file=sys.stderr
    ) as bar:
        result = verification.verify(runner, prompts, max_tokens, progress=lambda: bar.update(1))
    click.echo(json.dumps(result.to_json()) if as_json else verification.table(result))
    if not as_json:
        for report in result.proposers:
            for divergence in report.divergences:
                click.echo(f"{report.proposer}: {describe_divergence(divergence)}")
    return 0 if result.passed else EXIT_DIFFERENT


@click.command()
@click.argument("bundle", type=click.Path(path_type=Path), required=False)
@click.option(
    "--set",
    "prompt_sets",
    multiple=True,
    help="chat, code-editing, summarizing, random-words or a file; default: all.",
)
@click.option("--proposer", "proposers", multiple=True, help="May be repeated; default: all that the bundle has.")
@click.option("--k", "ks", type=int, multiple=True, help="May be repeated; default: as built.")
@click.option("--nodes", "nodes", type=int, multiple=True, help="Of trees; may be repeated; default: as built.")
@click.option("--p-min", type=float, help="What a draft finds less likely is not proposed; default: as built.")
@click.option("--temperature", "temperatures", type=float, multiple=True, help="May be repeated; default: 0.")
@filter_options
@click.option("--seed", type=int, default=0, show_default=True)
@click.option(
    "--max-tokens", type=int, default=128, show_default=True, help="Of each output; with --server on the average."
)
@click.option("--repeats", type=int, default=3, show_default=True, help="Timed runs per prompt; medians are taken.")
@click.option("--report", type=click.Path(path_type=Path), help="Also write an HTML page with plots to this file.")
@click.option("--server", help="URL of a running server, instead of BUNDLE: measure it under load.")
@click.option(
    "--clients", type=int, multiple=True, help="Of a server, at the same time; may be repeated; default: 1, 4, 16."
)
@click.option("--rate", type=float, help="Requests to a server per second; default: clients ask again when answered.")
@click.option("--api-key", envvar="SPECRUN_API_KEY", help="Of a server; also SPECRUN_API_KEY.")
@json_option
def bench(
    bundle: Path | None,
    prompt_sets: tuple[str, ...],
    temperatures: tuple[float, ...],
    max_tokens: int,
    repeats: int,
    report: Path | None,
    server: str | None,
    clients: tuple[int, ...],
    rate: float | None,
    api_key: str | None,
    as_json: bool,
    **options: Any,
) -> int:
    """Measure plain against speculative decoding, interleaved, end to end.

    speed-up: ratio of tokens/s, prefill included. accept len: tokens per round. round cost: time of a round
    divided by that of a plain step.
    """
    from specrun.runner import bench as benchmark
    from specrun.runner.prompt_set import PROMPT_SETS, load_prompt_set
    from specrun.runner.runner import Runner

    if repeats < 1:
        raise RequestError(f"got repeats {repeats}, expected 1 or more")
    if (bundle is None) == (server is None):
        raise RequestError("got a bundle and a server, or neither; expected one of them")
    if server is not None:
        sets = {name: load_prompt_set(name) for name in prompt_sets or PROMPT_SETS}
        temperature = temperatures[0] if temperatures else 0.0
        return _bench_server(
            sets, server, api_key, clients or (1, 4, 16), max_tokens, temperature, repeats, rate, as_json
        )
    assert bundle is not None
    samplings = [sampling_of(options | {"temperature": temperature}) for temperature in temperatures or (0.0,)]
    sets = {name: load_prompt_set(name) for name in prompt_sets or PROMPT_SETS}
    write_report = _report_writer() if report is not None else None
    runner = Runner.open(bundle)
    settings = _bench_settings(runner, options)
    encode = runner.encode_chat if runner.has_chat_template else runner.encode
    prompts = {name: [encode(prompt) for prompt in texts] for name, texts in sets.items()}
    runs = sum(len(ids) for ids in prompts.values()) * len(samplings) * (len(settings) + 1) * repeats
    rows = []
    with click.progressbar(length=runs, label="runs", file=sys.stderr) as bar:
        for name, ids in prompts.items():
            for sampling in samplings:
                rows += benchmark.bench_set(
                    runner, name, ids, settings, sampling, max_tokens, repeats, progress=lambda: bar.update(1)
                )
    click.echo(json.dumps(benchmark.to_json(rows)) if as_json else benchmark.table(rows))
    if not as_json:
        for row in rows:
            for divergence in row.divergences:
                click.echo(f"{row.prompt_set}: {describe_divergence(divergence)}")
    if report is not None and write_report is not None:
        write_report(rows, runner.bundle, report)
    return 0 if all(row.lossless for row in rows) else EXIT_DIFFERENT


def _bench_server(
    sets: dict[str, list[str]],
    server: str,
    api_key: str | None,
    clients: tuple[int, ...],
    max_tokens: int,
    temperature: float,
    repeats: int,
    rate: float | None,
    as_json: bool,
) -> int:
    try:
        from specrun.runner.serving.load_test import LoadOptions, load_table, run_load
    except ModuleNotFoundError as error:
        raise UnfitError(f"this needs {error.name}, which is not installed: pip install 'specrun[serve]'") from error
    if min(clients) < 1 or max_tokens < 1 or (rate is not None and rate <= 0):
        raise RequestError("got clients, tokens or a rate below 1, expected more")
    options = LoadOptions(server.rstrip("/"), api_key, clients, max_tokens, temperature, repeats, rate)
    with click.progressbar(length=len(sets) * len(clients) * repeats * 2, label="bursts", file=sys.stderr) as bar:
        rows = run_load(options, sets, lambda: bar.update(1))
    click.echo(json.dumps([row.to_json() for row in rows]) if as_json else load_table(rows))
    return 0


def _bench_settings(runner: "Runner", options: dict[str, Any]) -> "list[Setting]":
    """Every proposer with every k, trees with every number of nodes."""
    from specrun.engines.manifest import TREE_SUFFIX
    from specrun.runner.bench import Setting

    manifest = runner.bundle.manifest
    nodes = options["nodes"] or (manifest.nodes,)
    p_min = manifest.p_min if options["p_min"] is None else options["p_min"]
    return [
        Setting(proposer, k, count, p_min)
        for proposer in options["proposers"] or runner.proposers
        for k in options["ks"] or (None,)
        for count in (nodes if proposer.endswith(TREE_SUFFIX) else nodes[:1])
    ]


def _report_writer() -> "Callable[[Sequence[Row], Bundle, Path], None]":
    """Before the long measurement: whether its result can be drawn."""
    try:
        from specrun.runner.report import write_report
    except ModuleNotFoundError as error:
        raise UnfitError(
            f"a report needs {error.name}, which is not installed: pip install 'specrun[report]'"
        ) from error
    return write_report


@click.command()
@bundle_argument
@click.argument("other", type=click.Path(path_type=Path))
@click.option(
    "--set", "prompt_sets", multiple=True, help="chat, code-editing, summarizing, random-words or a file; default: all."
)
@json_option
def compare(bundle: Path, other: Path, prompt_sets: tuple[str, ...], as_json: bool) -> None:
    """Compare the targets of BUNDLE and OTHER, two builds of one model, on real prompts: the same choices, and how far
    logits are apart. For backends and precisions against each other.
    """
    from specrun.runner.backend_comparison import compare_backends
    from specrun.runner.prompt_set import PROMPT_SETS, load_prompt_set
    from specrun.runner.runner import Runner

    texts = [text for name in prompt_sets or PROMPT_SETS for text in load_prompt_set(name)]
    runners = [Runner.open(path) for path in (bundle, other)]
    ids = [runners[0].encode(text) for text in texts]
    with click.progressbar(length=len(ids), label="prompts", file=sys.stderr) as bar:
        found = compare_backends(runners, ids, lambda: bar.update(1))
    if as_json:
        click.echo(json.dumps([each.to_json() for each in found]))
        return
    for path, runner in zip((bundle, other), runners, strict=True):
        click.echo(f"{path}: {runner.bundle.manifest.backend}, {runner.bundle.manifest.precision}")
    click.echo(
        f"{'prompt':>7}{'tokens':>8}{'same choice':>13}{'largest difference':>20}{'mean':>10}{'largest logit':>15}"
    )
    for index, each in enumerate(found, start=1):
        click.echo(
            f"{index:>7}{each.tokens:>8}{100 * each.agreement:>11.1f} %{each.largest_difference:>20.2e}"
            f"{each.mean_difference:>10.1e}{each.largest_logit:>15.1f}"
        )
    tokens = sum(each.tokens for each in found)
    same = sum(each.agreement * each.tokens for each in found) / tokens
    click.echo(f"{'all':>7}{tokens:>8}{100 * same:>11.1f} %{max(each.largest_difference for each in found):>20.2e}")

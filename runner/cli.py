"""The command line. The only module that imports every stage, each one when its command runs."""

import contextlib
import json
import logging
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from specrun.engines.errors import RequestError, SpecrunError, UnfitError
from specrun.runner.grammar import Grammar
from specrun.runner.processors import Processing
from specrun.runner.sampling import Sampling

if TYPE_CHECKING:
    from specrun.engines.manifest import Bundle
    from specrun.runner.bench import Row, Setting
    from specrun.runner.runner import Request, Runner

EXIT_DIFFERENT = 1  # plain and speculative output differ by more than rounding, or another check of verify failed
EXIT_USAGE = 2
EXIT_REFUSED = 3  # bad input, or an unfit machine
EXIT_INTERRUPTED = 130

Command = TypeVar("Command", bound=Callable[..., Any])


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="specrun")
def cli() -> None:
    """A Hugging Face language model in, a deployed one out that is faster and writes the very same tokens.

    Exit codes: 0 done; 1 plain and speculative output differ by more than rounding; 2 wrong usage;
    3 refused, with one line on stderr that says why; 130 interrupted.
    """


def main() -> None:
    """Entry point of the `specrun` command."""
    sys.exit(run(sys.argv[1:]))


def run(arguments: Sequence[str]) -> int:
    """Run the command line and return its exit code. Errors of the user's are one line on stderr."""
    _log_to_stderr()
    try:
        code = cli.main(args=list(arguments), standalone_mode=False, prog_name="specrun")
    except click.ClickException as error:
        hint = f" (see {error.ctx.command_path} --help)" if isinstance(error, click.UsageError) and error.ctx else ""
        return _fail(error.format_message() + hint, EXIT_USAGE)
    except SpecrunError as error:
        return _fail(str(error), EXIT_REFUSED)
    except (click.Abort, KeyboardInterrupt):
        return _fail("interrupted", EXIT_INTERRUPTED)
    except BrokenPipeError:  # the reader of our output went away, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    return code if isinstance(code, int) else 0


def _fail(message: str, code: int) -> int:
    click.echo(f"error: {' '.join(message.split())}", err=True)
    return code


def _log_to_stderr() -> None:
    """Progress and warnings of our own modules; other libraries keep their own handlers."""
    logger = logging.getLogger("specrun")
    logger.handlers.clear()
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Format())
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False


class _Format(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        prefix = "" if record.levelno < logging.WARNING else f"{record.levelname.lower()}: "
        return prefix + record.getMessage()


def _options(*options: Callable[[Command], Command]) -> Callable[[Command], Command]:
    def decorate(command: Command) -> Command:
        for option in reversed(options):
            command = option(command)
        return command

    return decorate


bundle_argument = click.argument("bundle", type=click.Path(path_type=Path))
filter_options = _options(
    click.option("--top-p", type=float, default=Sampling.top_p, show_default=True, help="1: off."),
    click.option("--top-k", type=int, default=Sampling.top_k, show_default=True, help="0: off."),
    click.option("--min-p", type=float, default=Sampling.min_p, show_default=True, help="0: off."),
)
processing_options = _options(
    click.option("--logit-bias", multiple=True, metavar="TOKEN=BIAS", help="Added to a token id's logit."),
    click.option("--repetition-penalty", type=float, default=Processing.repetition_penalty, show_default=True),
    click.option("--frequency-penalty", type=float, default=Processing.frequency_penalty, show_default=True),
    click.option("--presence-penalty", type=float, default=Processing.presence_penalty, show_default=True),
    click.option("--min-tokens", type=int, default=Processing.min_tokens, show_default=True),
    click.option("--allow-token", type=int, multiple=True, help="Only these token ids; may be repeated."),
    click.option("--forbid-token", type=int, multiple=True, help="Never this token id; may be repeated."),
    click.option("--json-schema", type=click.Path(path_type=Path, exists=True, dir_okay=False), help="Output is JSON."),
    click.option("--regex", help="Output matches this regular expression (Rust's syntax)."),
)
json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


@cli.command()
@click.argument("model")
@click.option("--out", type=click.Path(path_type=Path), required=True, help="Directory to write.")
@click.option("--precision", default="fp32", show_default=True, help="fp32 or fp16.")
@click.option("--width", type=int, help="Tokens per call; with --capacity: write a fully static file.")
@click.option("--capacity", type=int, help="Tokens that the KV cache holds; with --width.")
def export(model: str, out: Path, precision: str, width: int | None, capacity: int | None) -> None:
    """Write MODEL as one ONNX graph of standard operators, validated against PyTorch.

    MODEL: a Hugging Face folder, a .gguf file, a hub id (org/name) or smollm2-135m.
    """
    with _export_packages():
        from specrun.export.checkpoint import Checkpoint
        from specrun.export.graph import export_model
    export_model(Checkpoint.open(model, _downloads()), out, precision, width, capacity)
    click.echo(str(out))


@cli.command()
@click.argument("model")
@click.option("--out", type=click.Path(path_type=Path), required=True, help="Bundle to write.")
@click.option(
    "--draft",
    "drafts",
    multiple=True,
    help="Draft model (a MODEL), Medusa or EAGLE head (a folder), early-exit[:LAYERS] or skip:LAYERS. May be repeated; "
    "by default n-gram lookup and a tree of the first propose. Without: n-gram lookup only.",
)
@click.option("--k", type=int, default=4, show_default=True, help="Positions drafted per round.")
@click.option("--nodes", type=int, default=16, show_default=True, help="Nodes of a proposed tree.")
@click.option(
    "--p-min", type=float, default=0.1, show_default=True, help="What a draft finds less likely is not proposed."
)
@click.option(
    "--backend",
    default="ort",
    show_default=True,
    help="ort (ONNX Runtime on the CPU), ort-cuda, tensorrt or tensorrt-rtx.",
)
@click.option(
    "--precision",
    help="fp32, fp16, int8, int8-weights or int4-weights; by default fp32 for ort, fp16 for the others.",
)
@click.option(
    "--text",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    help="To calibrate with, and to measure what quantization lost; default: built in.",
)
@click.option("--accept-quality-loss", is_flag=True, help="Build a quantized model however much it lost.")
@click.option("--capacity", type=int, help="Prompt and output tokens together; default: 2048, or what the model has.")
@click.option("--gpu", "gpus", multiple=True, help="Architecture that the bundle will run on (sm89); may be repeated.")
def build(
    model: str,
    out: Path,
    drafts: tuple[str, ...],
    k: int,
    nodes: int,
    p_min: float,
    backend: str,
    precision: str | None,
    text: Path | None,
    accept_quality_loss: bool,
    capacity: int | None,
    gpus: tuple[str, ...],
) -> None:
    """Build MODEL into a bundle, unless it is there already, made from the same inputs.

    MODEL: as for `specrun export`, or a directory that it left.
    """
    with _export_packages():
        from specrun.engines.build import BuildOptions, build_bundle
    options = BuildOptions(
        model, out, drafts, k, nodes, p_min, backend, precision, text, accept_quality_loss, capacity, gpus
    )
    build_bundle(options, _downloads())
    click.echo(str(out))


@cli.command()
@click.argument("model")
@click.option("--method", required=True, help="medusa, eagle3 or draft (a small language model).")
@click.option(
    "--data",
    multiple=True,
    default=["self"],
    show_default=True,
    help="self: the model writes prompts itself; or a file of prompts, or a directory of text that prompts are made "
    "from: Python source, documentation, WordNet. May be repeated; one that is given twice counts twice.",
)
@click.option("--out", type=click.Path(path_type=Path), required=True, help="Directory for the checkpoint.")
@click.option(
    "--work",
    type=click.Path(path_type=Path),
    help="Where answers and training states are kept, so that a run can go on; default: OUT.work.",
)
@click.option("--tokens", type=int, default=1_000_000, show_default=True, help="Tokens that the target shall write.")
@click.option("--draft-vocabulary", type=int, default=8192, show_default=True, help="Tokens that the draft knows.")
@click.option("--start", type=click.Path(path_type=Path), help="Go on from this draft.")
@click.option("--epochs", type=float, default=3.0, show_default=True)
@click.option("--batch", type=int, default=6, show_default=True, help="Conversations per step.")
@click.option("--learning-rate", type=float, default=8e-4, show_default=True)
@click.option("--seed", type=int, default=0, show_default=True)
def distill(
    model: str,
    method: str,
    data: tuple[str, ...],
    out: Path,
    work: Path | None,
    tokens: int,
    draft_vocabulary: int,
    start: Path | None,
    epochs: float,
    batch: int,
    learning_rate: float,
    seed: int,
) -> None:
    """Train a draft for MODEL on its own answers, and write it as its authors publish such drafts.

    MODEL: as for `specrun export`. An interrupted run goes on where it stopped, if called again.
    """
    with _export_packages():
        from specrun.distill.distill import DistillOptions
        from specrun.distill.distill import distill as run_distill
        from specrun.distill.training import TrainingOptions
    training = TrainingOptions(epochs, batch, learning_rate, seed)
    work = work or out.with_name(f"{out.name}.work")
    run_distill(DistillOptions(model, method, data, out, work, tokens, draft_vocabulary, start, training), _downloads())
    click.echo(str(out))


@cli.command()
@bundle_argument
@json_option
def info(bundle: Path, as_json: bool) -> None:
    """Show what BUNDLE holds, after checking every file's hash."""
    from specrun.engines.manifest import Bundle
    from specrun.engines.schema import to_json

    manifest = Bundle.open(bundle).manifest
    if as_json:
        click.echo(json.dumps(to_json(manifest), indent=2))
        return
    for role, model in (("target", manifest.target), ("draft", manifest.draft)):
        if model is not None:
            click.echo(f"{role:<11}{model.name} ({model.family}, {model.parameters:,} parameters)")
    for kind, head in manifest.heads.items():
        click.echo(f"{kind:<11}{head.name} ({head.parameters:,} parameters)")
    click.echo(f"{'engine':<11}{manifest.backend}, {manifest.precision}, capacity {manifest.capacity} tokens")
    if manifest.quality is not None:
        click.echo(
            f"{'quality':<11}{100 * manifest.quality.agreement:.1f} % of the unquantized model's choices, "
            f"perplexity {100 * manifest.quality.perplexity_change:+.2f} %, on {manifest.quality.tokens:,} tokens"
        )
    click.echo(
        f"{'proposer':<11}{manifest.proposer}, k = {manifest.k}, trees of {manifest.nodes} nodes, "
        f"p-min {manifest.p_min:g}"
    )
    if manifest.gpus:
        click.echo(f"{'GPUs':<11}accept step for {', '.join(manifest.gpus)}")
    size = sum(file.bytes for file in manifest.files.values())
    click.echo(f"{'files':<11}{len(manifest.files)}, {size / 2**20:.0f} MiB, hashes correct")
    click.echo(f"{'built with':<11}{', '.join(f'{name} {value}' for name, value in manifest.versions.items())}")


@cli.command()
@bundle_argument
@click.option("--layers", "all_layers", is_flag=True, help="List every layer.")
@json_option
def inspect(bundle: Path, all_layers: bool, as_json: bool) -> None:
    """Show what the engines of BUNDLE are made of: size, widths, layers by precision, and which fell back.

    A layer fell back if it is a matrix product or attention and computes in another precision than the bundle's: in
    int8 those that calibration found too sensitive.
    """
    from specrun.engines.manifest import Bundle
    from specrun.runner.inspection import inspect_engines, render

    opened = Bundle.open(bundle)
    found = list(inspect_engines(opened))
    if as_json:
        click.echo(json.dumps([each.to_json() for each in found]))
        return
    click.echo("\n\n".join(render(each, opened, all_layers) for each in found))


@cli.command()
@bundle_argument
@click.argument("other", type=click.Path(path_type=Path))
@click.option("--set", "prompt_sets", multiple=True, help="chat, code-editing, summarizing or a file; default: chat.")
@json_option
def compare(bundle: Path, other: Path, prompt_sets: tuple[str, ...], as_json: bool) -> None:
    """Compare the targets of BUNDLE and OTHER, two builds of one model, on real prompts: the same choices, and how far
    logits are apart. For backends and precisions against each other.
    """
    from specrun.runner.backend_comparison import compare_backends
    from specrun.runner.prompt_set import load_prompt_set
    from specrun.runner.runner import Runner

    texts = [text for name in prompt_sets or ("chat",) for text in load_prompt_set(name)]
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


@cli.command()
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
@click.option("--k", type=int, help="Positions drafted per round; default: as built.")
@click.option("--nodes", type=int, help="Nodes of a proposed tree; default: as built.")
@click.option("--p-min", type=float, help="What a draft finds less likely is not proposed; default: as built.")
@click.option("--proposer", help="One that the bundle has, or none (plain decoding); default: as built.")
@click.option("--compare", "comparing", is_flag=True, help="Run plain and speculative, compare output and speed.")
@json_option
def generate(bundle: Path, prompt: str, chat: bool, comparing: bool, as_json: bool, **options: Any) -> int:
    """Generate text with BUNDLE."""
    from specrun.runner.runner import Request, Runner

    if options["logprobs"] is not None and (comparing or not as_json):
        raise RequestError("got --logprobs without --json, which prints them")
    names = ("max_tokens", "stop", "proposer", "k", "nodes", "p_min", "logprobs")
    settings = {name: options[name] for name in names}
    request = Request((0,), sampling=_sampling(options), processing=_processing(options), **settings)  # before loading
    runner = Runner.open(bundle)
    request = replace(request, prompt_ids=runner.encode_chat(prompt) if chat else runner.encode(prompt))
    if comparing:
        return _compare(runner, request, as_json)
    if as_json:
        click.echo(json.dumps(runner.generate(request).to_json()))
        return 0
    return _stream(runner, request)


def _sampling(options: dict[str, Any]) -> Sampling:
    names = ("temperature", "top_k", "top_p", "min_p", "seed", "accept")
    return Sampling(**{name: options[name] for name in names if name in options})


def _processing(options: dict[str, Any]) -> Processing:
    names = ("repetition_penalty", "frequency_penalty", "presence_penalty", "min_tokens")
    return Processing(
        logit_bias=dict(map(_bias, options["logit_bias"])),
        allowed_token_ids=frozenset(options["allow_token"]) or None,
        forbidden_token_ids=frozenset(options["forbid_token"]),
        grammar=_grammar(options["json_schema"], options["regex"]),
        **{name: options[name] for name in names},
    )


def _bias(option: str) -> tuple[int, float]:
    token, _, bias = option.partition("=")
    try:
        return int(token), float(bias)
    except ValueError as error:
        raise RequestError(f"got --logit-bias {option}, expected a token id and a number, as in 42=-1.5") from error


def _grammar(json_schema: Path | None, regex: str | None) -> Grammar | None:
    if json_schema is not None and regex is not None:
        raise RequestError("got --json-schema and --regex, expected one of them")
    if json_schema is not None:
        return Grammar("json_schema", json_schema.read_text(encoding="utf-8"))
    return None if regex is None else Grammar("regex", regex)


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
        click.echo(_describe(result.divergence))
    return 0 if result.lossless else EXIT_DIFFERENT


def _describe(divergence: Any) -> str:
    reason = "rounding" if divergence.within_rounding else "NOT rounding: this is a defect, please report it"
    return (
        f"first difference at output token {divergence.index}: plain {divergence.plain_token}, speculative "
        f"{divergence.speculative_token}; lead of the plain choice {divergence.gap:.2e}, logits of the two runs "
        f"differ by at most {divergence.logit_difference:.2e}: {reason}"
    )


@cli.command()
@bundle_argument
@click.option(
    "--set",
    "prompt_sets",
    multiple=True,
    help="chat, code-editing, summarizing or a file; default: all three.",
)
@click.option("--proposer", "proposers", multiple=True, help="May be repeated; default: all that the bundle has.")
@click.option("--k", "ks", type=int, multiple=True, help="May be repeated; default: as built.")
@click.option("--nodes", "nodes", type=int, multiple=True, help="Of trees; may be repeated; default: as built.")
@click.option("--p-min", type=float, help="What a draft finds less likely is not proposed; default: as built.")
@click.option("--temperature", "temperatures", type=float, multiple=True, help="May be repeated; default: 0.")
@filter_options
@click.option("--seed", type=int, default=0, show_default=True)
@click.option("--max-tokens", type=int, default=128, show_default=True)
@click.option("--repeats", type=int, default=3, show_default=True, help="Timed runs per prompt; medians are taken.")
@click.option("--report", type=click.Path(path_type=Path), help="Also write an HTML page with plots to this file.")
@json_option
def bench(
    bundle: Path,
    prompt_sets: tuple[str, ...],
    temperatures: tuple[float, ...],
    max_tokens: int,
    repeats: int,
    report: Path | None,
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
    samplings = [_sampling(options | {"temperature": temperature}) for temperature in temperatures or (0.0,)]
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
                click.echo(f"{row.prompt_set}: {_describe(divergence)}")
    if report is not None and write_report is not None:
        write_report(rows, runner.bundle, report)
    return 0 if all(row.lossless for row in rows) else EXIT_DIFFERENT


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


@cli.command()
@bundle_argument
@click.option("--set", "prompt_set", help="chat, code-editing, summarizing or a file; default: one prompt of each.")
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
                click.echo(f"{report.proposer}: {_describe(divergence)}")
    return 0 if result.passed else EXIT_DIFFERENT


def _report_writer() -> "Callable[[Sequence[Row], Bundle, Path], None]":
    """Before the long measurement: whether its result can be drawn."""
    try:
        from specrun.runner.report import write_report
    except ModuleNotFoundError as error:
        raise UnfitError(
            f"a report needs {error.name}, which is not installed: pip install 'specrun[report]'"
        ) from error
    return write_report


@cli.command()
def doctor() -> int:
    """Say what this machine can build and run."""
    from specrun.runner.doctor import can_run, examine

    for finding in examine():
        click.echo(f"{'ok' if finding.usable else '--'}  {finding.what:<27}{finding.found}")
    return 0 if can_run() else EXIT_REFUSED


@contextlib.contextmanager
def _export_packages() -> Iterator[None]:
    """Imports inside need the export packages; say so where they are not installed."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise UnfitError(
            f"exporting and building need {error.name}, which is not installed: pip install 'specrun[export]'"
        ) from error


def _downloads() -> Path:
    """Where built-in models are kept between builds."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "specrun" / "models"


if __name__ == "__main__":
    main()

"""What a bundle holds, and what this machine can do."""

import json
from pathlib import Path

import click

from specrun.runner.commands.exit_codes import EXIT_REFUSED
from specrun.runner.commands.options import bundle_argument, json_option


@click.command()
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
        click.echo(f"{'GPUs':<11}{', '.join(manifest.gpus)}")
    size = sum(file.bytes for file in manifest.files.values())
    click.echo(f"{'files':<11}{len(manifest.files)}, {size / 2**20:.0f} MiB, hashes correct")
    click.echo(f"{'built with':<11}{', '.join(f'{name} {value}' for name, value in manifest.versions.items())}")


@click.command()
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


@click.command()
def doctor() -> int:
    """Say what this machine can build and run."""
    from specrun.runner.doctor import can_run, examine

    for finding in examine():
        click.echo(f"{'ok' if finding.usable else '--'}  {finding.what:<27}{finding.found}")
    return 0 if can_run() else EXIT_REFUSED

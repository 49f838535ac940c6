"""Triton Inference Server: write a model repository, check a running server."""

import importlib.util
from pathlib import Path

import click

from specrun.engines.errors import UnfitError
from specrun.runner.commands.exit_codes import EXIT_DIFFERENT


@click.command()
@click.argument("bundle", type=click.Path(path_type=Path), required=False)
@click.argument("repository", type=click.Path(path_type=Path), required=False)
@click.option("--slots", type=click.IntRange(min=1), help="Requests that run at the same time; default: as `serve`.")
@click.option("--queue", type=click.IntRange(min=0), default=64, show_default=True, help="Requests that may wait.")
@click.option("--prefix-cache", type=click.IntRange(min=0), default=1024, show_default=True, help="MiB; as `serve`.")
@click.option("--device", "gpus", type=int, multiple=True, help="GPU to use; may be repeated: one instance on each.")
@click.option("--copy", is_flag=True, help="Copy the bundle into the repository instead of naming its path.")
@click.option("--engines", is_flag=True, help="Also write its engines as models of their own, to drive yourself.")
@click.option("--check", "check_url", metavar="URL", help="Compare plain and speculative, whole and streamed replies.")
@click.option("--probe", "probe_url", metavar="URL", help="Run one token through the model; for liveness probes.")
def triton(
    bundle: Path | None,
    repository: Path | None,
    slots: int | None,
    queue: int,
    prefix_cache: int,
    gpus: tuple[int, ...],
    copy: bool,
    engines: bool,
    check_url: str | None,
    probe_url: str | None,
) -> int:
    """Write REPOSITORY, from which Triton Inference Server serves BUNDLE; or look at a running server."""
    if check_url or probe_url:
        if bundle is not None:
            raise click.UsageError("--check and --probe look at a running server; leave BUNDLE out")
        return _check(check_url) if check_url else _probe(str(probe_url))
    if bundle is None or repository is None:
        raise click.UsageError("expected BUNDLE and REPOSITORY, or --check URL, or --probe URL")
    from specrun.engines.manifest import Bundle
    from specrun.runner.triton.repository import RepositoryOptions, write_repository

    options = RepositoryOptions(slots, queue, prefix_cache, gpus, copy, engines)
    for name in write_repository(Bundle.open(bundle), repository, options):
        click.echo(f"{repository}/{name}")
    return 0


def _check(url: str) -> int:
    _require_http()
    from specrun.runner.triton.check import check_server

    problems = 0
    for found in check_server(url):
        click.echo(f"{'ok  ' if not found.problem else 'FAIL'}  {found.name}{found.problem and ': ' + found.problem}")
        problems += bool(found.problem)
    return EXIT_DIFFERENT if problems else 0


def _probe(url: str) -> int:
    _require_http()
    from specrun.runner.triton.check import probe

    probe(url)
    click.echo("ok")
    return 0


def _require_http() -> None:
    if importlib.util.find_spec("httpx") is None:
        raise UnfitError("this needs httpx, which is not installed: pip install 'specrun[serve]'")

"""A bundle behind HTTP."""

import logging
import signal
from pathlib import Path

import click

from specrun.engines.errors import UnfitError
from specrun.runner.commands.options import bundle_argument

logger = logging.getLogger(__name__)


@click.command()
@bundle_argument
@click.option("--host", default="127.0.0.1", show_default=True, help="0.0.0.0: reachable from other machines.")
@click.option("--port", type=int, default=8000, show_default=True)
@click.option(
    "--slots",
    type=click.IntRange(min=1),
    help="Requests that run at the same time; default: 8, on a GPU what the bundle was built for.",
)
@click.option(
    "--queue",
    "queue_size",
    type=click.IntRange(min=0),
    default=64,
    show_default=True,
    help="Requests that may wait; then 429.",
)
@click.option(
    "--prefix-cache",
    type=click.IntRange(min=0),
    default=1024,
    show_default=True,
    help="MiB for KV rows of requests that have ended, for requests that begin alike; 0: none.",
)
@click.option("--max-tokens", type=int, help="That a request may ask for; default: what the capacity leaves.")
@click.option("--max-choices", type=int, default=8, show_default=True, help="n that a request may ask for.")
@click.option("--max-body", type=int, default=4, show_default=True, help="MiB of a request's body.")
@click.option("--timeout", type=float, default=600.0, show_default=True, help="Seconds that a request may take.")
@click.option("--drain", type=float, default=30.0, show_default=True, help="Seconds that requests get at shutdown.")
@click.option("--trace", type=click.Path(path_type=Path, dir_okay=False), help="JSON lines: how far it speculates.")
@click.option("--api-key", envvar="SPECRUN_API_KEY", help="That clients must send; also SPECRUN_API_KEY.")
def serve(
    bundle: Path,
    host: str,
    port: int,
    slots: int | None,
    queue_size: int,
    prefix_cache: int,
    max_tokens: int | None,
    max_choices: int,
    max_body: int,
    timeout: float,
    drain: float,
    trace: Path | None,
    api_key: str | None,
) -> None:
    """Serve BUNDLE: OpenAI's API at /v1, a page at /, /health and /metrics. SIGTERM drains and stops."""
    try:
        import uvicorn

        from specrun.runner.serving.app import Limits, make_app
        from specrun.runner.serving.service import Service
        from specrun.runner.serving.trace_file import TraceFile
    except ModuleNotFoundError as error:
        raise UnfitError(f"serving needs {error.name}, which is not installed: pip install 'specrun[serve]'") from error
    writer = None if trace is None else TraceFile(trace)
    service = Service.open(bundle, slots, queue_size, prefix_cache << 20, writer)
    limits = Limits(max_body << 20, max_choices, max_tokens, timeout)
    app = make_app(service, limits, api_key, drain)
    logger.info("serving %s at http://%s:%d", service.bundle.manifest.target.name, host, port)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: None)  # uvicorn raises them once more when it has stopped
    uvicorn.run(
        app,
        host=host,
        port=port,
        log_config=None,
        access_log=False,
        timeout_graceful_shutdown=int(drain) + 5,
        server_header=False,
    )

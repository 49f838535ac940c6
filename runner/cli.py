"""The command line. Each command imports what it needs when it runs."""

import logging
import os
import sys
from collections.abc import Sequence

import click

from specrun.engines.errors import SpecrunError
from specrun.runner.commands.build import build, distill, export
from specrun.runner.commands.exit_codes import EXIT_INTERRUPTED, EXIT_REFUSED, EXIT_USAGE
from specrun.runner.commands.generate import generate
from specrun.runner.commands.inspect import doctor, info, inspect
from specrun.runner.commands.measure import bench, compare, verify
from specrun.runner.commands.serve import serve
from specrun.runner.commands.triton import triton


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


for command in (export, build, distill, info, inspect, generate, serve, triton, verify, bench, compare, doctor):
    cli.add_command(command)


if __name__ == "__main__":
    main()

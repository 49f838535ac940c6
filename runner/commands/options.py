"""Options and arguments that commands share, and what is made of them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from specrun.engines.errors import RequestError
from specrun.runner.grammar import Grammar
from specrun.runner.processors import Processing
from specrun.runner.sampling import Sampling

Command = TypeVar("Command", bound=Callable[..., Any])


def together(*options: Callable[[Command], Command]) -> Callable[[Command], Command]:
    def decorate(command: Command) -> Command:
        for option in reversed(options):
            command = option(command)
        return command

    return decorate


bundle_argument = click.argument("bundle", type=click.Path(path_type=Path))


filter_options = together(
    click.option("--top-p", type=float, default=Sampling.top_p, show_default=True, help="1: off."),
    click.option("--top-k", type=int, default=Sampling.top_k, show_default=True, help="0: off."),
    click.option("--min-p", type=float, default=Sampling.min_p, show_default=True, help="0: off."),
)


processing_options = together(
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


def sampling_of(options: dict[str, Any]) -> Sampling:
    names = ("temperature", "top_k", "top_p", "min_p", "seed", "accept")
    return Sampling(**{name: options[name] for name in names if name in options})


def processing_of(options: dict[str, Any]) -> Processing:
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

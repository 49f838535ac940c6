"""Chat templates: a conversation -> the prompt text that the model was trained on."""

import json
from datetime import datetime
from typing import Any

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from specrun.engines.errors import RequestError


def render(template: str, messages: list[dict[str, str]], special_tokens: dict[str, str]) -> str:
    """The prompt for the assistant's next turn. `special_tokens` by role ("bos_token", ...).

    The environment is the one that transformers' templates are written for. Raises RequestError.
    """
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, GenerationTag]
    )
    environment.filters["tojson"] = lambda value, indent=None: json.dumps(value, ensure_ascii=False, indent=indent)
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    try:
        rendered = environment.from_string(template).render(
            messages=messages, add_generation_prompt=True, **special_tokens
        )
    except TemplateError as error:
        raise RequestError(f"the chat template refuses this conversation: {error}") from error
    return rendered


class GenerationTag(Extension):
    """`{% generation %}` marks what the assistant said, for training; here it stands for its content."""

    tags = {"generation"}  # noqa: RUF012 (jinja2 declares it so)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise(message: str) -> Any:
    raise TemplateError(message)

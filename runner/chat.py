"""Chat templates: a conversation -> the prompt text that the model was trained on."""

from datetime import datetime
from typing import Any

from jinja2 import TemplateError
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment
from specrun.runner.sampling import RequestError


def render(template: str, messages: list[dict[str, str]], special_tokens: dict[str, str]) -> str:
    """The prompt for the assistant's next turn. `special_tokens` by role ("bos_token", ...).

    The environment is the one that transformers' templates are written for. Raises RequestError.
    """
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    try:
        rendered = environment.from_string(template).render(
            messages=messages, add_generation_prompt=True, **special_tokens
        )
    except TemplateError as error:
        raise RequestError(f"the chat template refuses this conversation: {error}") from error
    return rendered


def _raise(message: str) -> Any:
    raise TemplateError(message)

"""Chat templates as they are published."""

import pytest

from specrun.engines.errors import RequestError
from specrun.runner.chat import render

MESSAGES = [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize(
    ("template", "wanted"),
    [
        ("{{ bos_token }}{% for m in messages %}[{{ m['role'] }}] {{ m['content'] }}\n{% endfor %}", "<s>[user] hi\n"),
        ("{% if add_generation_prompt %}\n  {%- set x = 'go' %}\n{{ x }}{% endif %}", "go"),
        ("{% for m in messages %}{% if loop.first %}{% continue %}{% endif %}x{% endfor %}", ""),
        ("{% generation %}{{ messages[0].content }}{% endgeneration %}", "hi"),
        ("{{ messages | tojson }}", '[{"role": "user", "content": "hi"}]'),
        ("{{ strftime_now('%Y')[:2] }}", "20"),
    ],
)
def test_template_features_that_published_models_use(template: str, wanted: str) -> None:
    assert render(template, MESSAGES, {"bos_token": "<s>"}) == wanted


def test_refusal_of_a_template_is_an_error() -> None:
    with pytest.raises(RequestError, match="roles must alternate"):
        render("{{ raise_exception('roles must alternate') }}", MESSAGES, {})
    with pytest.raises(RequestError, match="refuses"):
        render("{{ messages[7].content }}", MESSAGES, {})


def test_template_cannot_reach_out_of_its_sandbox() -> None:
    with pytest.raises(RequestError):
        render("{{ ''.__class__.__mro__[1].__subclasses__() }}", MESSAGES, {})

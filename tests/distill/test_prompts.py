"""Prompts made from text: WordNet's nouns, Python source, documentation; or a file of the user's."""

from itertools import islice
from pathlib import Path

import pytest

from specrun.distill.prompts import PromptError, make_prompts

SYNSETS = (
    "  license\n"
    "00000010 05 n 01 dog 0 000 @ | an animal\n"  # made up, in the columns of wndb(5WN)
    "00000051 13 n 01 soup 0 000 @ | a food\n"
)
FUNCTION = """
def mean_of(values):
    total = 0.0
    for value in values:
        if value is None:
            raise ValueError("a value is missing")
        total += value
    return total / len(values)
"""
PARAGRAPH = "The valve must be closed before the filter is taken out, because water would run into the housing. " * 4


def wordnet(directory: Path) -> None:
    (directory / "data.noun").write_text(SYNSETS)
    offsets = [SYNSETS.index(line) for line in ("00000010", "00000051")]
    lines = [
        "  license",
        f"dog n 1 1 @ 1 9 {offsets[0]:08}",
        f"soup n 1 0 1 4 {offsets[1]:08}",
        f"rare n 1 0 1 0 {offsets[1]:08}",
    ]
    (directory / "index.noun").write_text("\n".join(lines) + "\n")


def test_nouns_in_common_use_are_asked_about(tmp_path: Path) -> None:
    wordnet(tmp_path)
    prompts = list(islice(make_prompts([tmp_path]), 60))
    assert len(set(prompts)) == len(prompts) == 60
    text = " ".join(prompts)
    assert "dog" in text
    assert "recipe with soup" in text  # a question for food, and soup is food
    assert "recipe with dog" not in text
    assert "rare" not in text
    assert list(islice(make_prompts([tmp_path]), 60)) == prompts  # answers to them stay of use


def test_code_and_documentation_are_used(tmp_path: Path) -> None:
    (tmp_path / "code.py").write_text(FUNCTION)
    (tmp_path / "broken.py").write_text("def (:\n")
    (tmp_path / "manual.rst").write_text(f"Title\n=====\n\n{PARAGRAPH}\n\n+---+\n| 1 |\n+---+\n")
    prompts = list(islice(make_prompts([tmp_path]), 10))
    assert len(prompts) == 2
    code = next(prompt for prompt in prompts if "```python" in prompt)
    assert code.split("```python\n")[1] == FUNCTION.strip() + "\n```"
    text = next(prompt for prompt in prompts if prompt != code)
    assert text.endswith(PARAGRAPH.strip())


def test_a_file_of_prompts_is_taken_as_it_is(tmp_path: Path) -> None:
    file = tmp_path / "prompts.txt"
    file.write_text("one\ntwo\nthree\n")
    assert list(islice(make_prompts([file]), 10)) == ["one", "two", "three"]


def test_a_source_that_is_given_twice_counts_twice(tmp_path: Path) -> None:
    wordnet(tmp_path)
    file = tmp_path / "prompts.txt"
    file.write_text("\n".join(f"prompt {index}" for index in range(100)))
    prompts = list(islice(make_prompts([tmp_path, tmp_path, file]), 60))
    assert 15 <= sum(prompt.startswith("prompt ") for prompt in prompts) <= 25


def test_a_directory_without_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "picture.png").write_bytes(b"\x89PNG")
    with pytest.raises(PromptError, match=r"neither index.noun .* nor Python source"):
        list(islice(make_prompts([tmp_path]), 10))

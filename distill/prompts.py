"""Prompts for the target to answer: a file of them, or made from text that lies around on a machine.

A draft learns how its target answers, not facts, so what matters is variety: questions about many things, code
to be edited, text to be summarized. `make_prompts` takes them from a directory tree: WordNet's noun files (Debian
package wordnet-base), Python source, and plain documentation.
"""

import ast
import random
import re
import textwrap
from collections.abc import Iterator, Sequence
from itertools import chain, islice
from pathlib import Path

from specrun.engines.errors import SpecrunError
from specrun.runner.prompt_set import load_prompt_set

WORDNET_NOUNS = "index.noun"
TEXT_SUFFIXES = {".txt", ".rst", ".md"}
FUNCTION_CHARS = (120, 700)  # of source: enough to edit, short enough for a small model
PARAGRAPH_CHARS = (350, 1100)
MIN_TAGGED = 2  # occurrences in WordNet's tagged texts: leaves out words that hardly anybody asks about
MIN_SPACES = 4  # in a sentence that is worth asking about
PATIENCE = 300  # prompts that were there already, before a source counts as used up
MAX_FILES = 4_000  # of one kind in one tree

# What WordNet's lexicographer files hold, and what a person might ask about it.
ANYTHING = [
    "Explain {noun} in simple words.",
    "What is {a_noun}?",
    "Tell me something interesting about {noun}.",
    "Write a short story that begins with {a_noun}.",
    "Write a poem of two stanzas about {noun}.",
    "Give me five ideas for a school project about {noun}.",
    "What are the most important things to know about {noun}?",
    "Why does {noun} matter to people?",
    "Write a short paragraph about {noun} for a newsletter.",
    "What is the difference between {noun} and {other}?",
    "Compare {noun} and {other} in a few sentences.",
    "How would you explain {noun} to a child?",
    "List three questions someone could ask about {noun} and answer each of them.",
    "What should a beginner learn first about {noun}?",
    "Can you give me an example of {noun} from everyday life?",
    "Describe {a_noun} in detail.",
    "Write an e-mail to a friend in which you ask about {noun}.",
    "What are the advantages and disadvantages of {noun}?",
    "I have to give a talk about {noun} tomorrow. Please write an outline for me.",
    "Write a dialogue between two people who disagree about {noun}.",
]
BY_CATEGORY = {
    "04": [  # acts
        "How can I get better at {noun}? Give me some practical tips.",
        "What do I need to know before I start with {noun}?",
        "Write step by step instructions for {noun}.",
        "My friend spends a lot of time on {noun}. What could I give her as a present?",
        "What are common mistakes in {noun}, and how can I avoid them?",
    ],
    "05": [  # animals
        "What does {a_noun} eat, and where does it live?",
        "Write a short story for children about {a_noun} that gets lost. It should end well.",
        "How do I take care of {a_noun}?",
        "Which animals are related to the {noun}?",
    ],
    "06": [  # things people make
        "How does {a_noun} work?",
        "What should I look for when I buy {a_noun}?",
        "My {noun} is broken. What can I do? List the steps.",
        "How do I clean {a_noun}?",
        "Who invented the {noun}, and what was used before it?",
        "Write a polite e-mail to a shop. The {noun} that I ordered has not arrived yet.",
        "Would you choose {a_noun} or {other_a_noun} for a family with little money? Give reasons.",
    ],
    "08": ["What is the {noun} good for in the human body?", "How can I keep my {noun} healthy?"],
    "12": ["How do people deal with {noun}?", "I often feel {noun}. What habits could help me?"],
    "13": [  # food
        "Give me a simple recipe with {noun}.",
        "Is {noun} healthy? Explain why or why not.",
        "What goes well with {noun}? Plan a dinner for four people.",
        "How long can I keep {noun}, and how should I store it?",
    ],
    "15": [  # places
        "Plan a weekend trip to {noun}.",
        "What is {noun} known for?",
        "What is the weather like in {noun}, and what should I pack?",
    ],
    "18": [  # people
        "Write a short story about {a_noun} who finds an old letter.",
        "What does {a_noun} do all day?",
        "Write a letter to {a_noun} and thank them for their help.",
        "What questions would you ask {a_noun} in an interview?",
        "How does one become {a_noun}?",
    ],
    "19": ["What causes {noun}?", "How is {noun} measured?", "What are the main kinds of {noun}?"],
    "20": ["How do I grow {a_noun}? Give me the steps in order.", "Where does the {noun} grow, and how is it used?"],
    "22": ["Describe the stages of {noun}.", "What happens during {noun}?"],
    "26": ["What are the signs of {noun}?", "How can {noun} be prevented?"],
    "27": ["What is {noun} made of?", "What is {noun} used for?"],
    "28": ["What do people usually do during {noun}?", "Help me plan my {noun}."],
}
# Two or three things at once, so that hardly any answer begins like another. {person}, {thing}, {animal}, {food},
# {act} and {place} come from the categories below; a leading a_ gives the article.
SITUATIONS = [
    "Write a short story about {a_person} who loses {a_thing} and meets {a_animal} on the way home.",
    "{A_person} and {a_person2} are waiting for a train. Write down what they talk about.",
    "My neighbour keeps {a_animal}, and it is loud at night. Help me write a friendly note to them.",
    "I want to give {a_person} something useful, but I can only spend twenty euros. I thought of {a_thing}. What "
    "speaks for it and what against it?",
    "Suggest a meal with {food} and {food2} for guests who arrive in an hour.",
    "I started {act} three months ago and make no progress. What am I likely doing wrong?",
    "Which is easier to learn, {act} or {act2}? Explain your choice.",
    "We have {a_thing}, {a_thing2} and a free afternoon. What could we do with them?",
    "Describe a day in the life of {a_person} in {place}.",
    "Write a review of {a_thing} that you are not happy with. Stay polite.",
    "Give {a_person} three reasons to try {act}.",
    "Make up a fable with {a_animal} and {a_animal2}. What does it teach?",
    "Tell me how to get from {food} to a dish that children like, step by step.",
    "I have to explain to {a_person} why {a_thing} was delivered late. Write the e-mail for me.",
    "What would change if nobody had {a_thing} any more?",
    "Write four lines that rhyme about {a_animal} and {a_thing}.",
    "Should schools teach {act}? Give one argument for each side and then your own opinion.",
    "How would {a_person} describe {a_thing} to someone who has never seen one?",
    "Two friends travel to {place}. One of them likes {food}, the other likes {act}. Plan a day for both.",
    "I am afraid of {a_animal}. What can I do about it?",
]
SLOTS = {"person": "18", "thing": "06", "animal": "05", "food": "13", "act": "04", "place": "15"}
SENTENCES = [
    'Write a short story in which somebody says: "{sentence}."',
    'What might have happened before this? "{sentence}."',
    'Say this in three other ways: "{sentence}."',
    "Continue this text with a few sentences: {sentence}.",
    'Someone wrote me: "{sentence}." What could I answer?',
    'Write a letter that contains the words "{sentence}".',
    'Describe the scene in which this was said: "{sentence}."',
    'Ask me three questions about this sentence and answer them yourself: "{sentence}."',
]
DEFINITIONS = [
    "Explain in your own words, with an example: {gloss}.",
    "Which words could mean this: {gloss}?",
    "Write a dialogue about this: {gloss}.",
    "Where does one come across this in everyday life: {gloss}?",
]
EDITS = [
    "Rename the variable `{name}` to `{new}` in this code. Reply with the complete code.",
    "Replace the name `{name}` by `{new}` everywhere and show me the whole function.",
    "Add a docstring to this function and give me back the full code.",
    "Add type annotations to this function. Print the complete result, nothing else.",
    "Add a comment above every step of this function and return the changed code.",
    "Add a print statement at the start of this function that shows its arguments. Return all of the code.",
    "Make this function return None instead of raising an error. Answer with code only.",
    "Rename the function `{function}` to `{function}_{new}`. Write out the whole code again.",
]
QUESTIONS = [
    "What does this function do?",
    "Explain this code line by line.",
    "How could this function be tested? Name three cases.",
]
SUMMARIES = [
    "Summarize this text in two or three sentences.",
    "What is the main point of the following text?",
    "Shorten the following text, but keep its most important statements.",
    "List the key points of this text.",
]
NEW_NAMES = ["amount", "result", "item", "total", "current", "entry", "source", "buffer", "number", "label"]


class PromptError(SpecrunError):
    """A source of prompts has none."""


def make_prompts(sources: Sequence[Path | Iterator[str]]) -> Iterator[str]:
    """Different prompts, from each source in turn, until all are used up; one that is given twice counts twice.

    A file is a list of prompts; from the text in a directory prompts are made; an iterator gives its own. The same
    sources give the same prompts in the same order. Raises PromptError or RequestError.
    """
    streams = [stream for seed, source in enumerate(sources) for stream in _streams(source, seed)]
    found: set[str] = set()
    while streams:
        for stream in list(streams):
            new = next((prompt for prompt in islice(stream, PATIENCE) if prompt not in found), None)
            if new is None:  # at its end, or it only repeats itself
                streams.remove(stream)
            else:
                found.add(new)
                yield new


def _streams(source: Path | Iterator[str], seed: int) -> list[Iterator[str]]:
    """One for each kind of text in `source`."""
    if not isinstance(source, Path):
        return [source]
    if source.is_file():
        return [iter(load_prompt_set(str(source)))]
    streams: list[Iterator[str]] = []
    for kind in (_topic_prompts, _code_prompts, _text_prompts):
        stream = kind(source, seed)
        if (first := next(stream, None)) is not None:
            streams.append(chain([first], stream))
    if not streams:
        raise PromptError(
            f"{source} has neither {WORDNET_NOUNS} (WordNet) nor Python source nor {', '.join(sorted(TEXT_SUFFIXES))} "
            f"files with paragraphs; give a directory that has, or a file with one prompt per line"
        )
    return streams


def _topic_prompts(directory: Path, seed: int) -> Iterator[str]:
    """Questions about the nouns of WordNet that are in everyday use, and about its example sentences, endlessly."""
    nouns = list(_common_nouns(directory))
    by_category: dict[str, list[str]] = {}
    for noun, category in nouns:
        by_category.setdefault(category, []).append(noun)
    examples, glosses = _examples(directory)
    rng = random.Random(seed)
    slots = {slot: by_category.get(category) or [noun for noun, _ in nouns] for slot, category in SLOTS.items()}
    while nouns:
        kind = rng.random()
        if kind < 0.3:
            yield _situation(slots, rng)
        elif kind < 0.5 and examples:
            yield rng.choice(SENTENCES).format(sentence=rng.choice(examples))
        elif kind < 0.6 and glosses:
            yield rng.choice(DEFINITIONS).format(gloss=rng.choice(glosses))
        else:
            (noun, category), (other, _) = rng.choice(nouns), rng.choice(nouns)
            special = BY_CATEGORY.get(category, [])
            template = rng.choice(special if special and rng.random() < 0.6 else ANYTHING)
            yield template.format(noun=noun, a_noun=_article(noun), other=other, other_a_noun=_article(other))


def _situation(slots: dict[str, list[str]], rng: random.Random) -> str:
    chosen = {f"{slot}{number}": rng.choice(nouns) for slot, nouns in slots.items() for number in ("", "2")}
    chosen |= {f"a_{name}": _article(noun) for name, noun in chosen.items()}
    return rng.choice(SITUATIONS).format(**chosen, A_person=chosen["a_person"].capitalize())


def _examples(directory: Path) -> tuple[list[str], list[str]]:
    """Example sentences, and definitions, of all of WordNet's words."""
    examples: list[str] = []
    glosses: list[str] = []
    for part in ("noun", "verb", "adj"):
        if (directory / f"data.{part}").is_file():
            for line in (directory / f"data.{part}").read_text(encoding="utf-8").splitlines():
                gloss = line.partition(" | ")[2].strip()
                examples += [example for example in re.findall(r'"([^"]+)"', gloss) if example.count(" ") >= MIN_SPACES]
                definition = gloss.partition(";")[0]
                if definition.count(" ") >= MIN_SPACES and '"' not in definition:
                    glosses.append(definition)
    return examples, glosses


def _common_nouns(directory: Path) -> Iterator[tuple[str, str]]:
    """(noun, lexicographer file) of WordNet's nouns that are in common use (wndb(5WN))."""
    if not (directory / WORDNET_NOUNS).is_file():
        return
    synsets = (directory / "data.noun").read_bytes()
    for line in (directory / WORDNET_NOUNS).read_text(encoding="ascii").splitlines():
        if line.startswith(" "):  # the license
            continue
        fields = line.split()
        pointers = int(fields[3])
        tagged, offset = int(fields[5 + pointers]), int(fields[6 + pointers])
        noun = fields[0].replace("_", " ")
        if tagged >= MIN_TAGGED and len(noun) > 2 and noun.replace(" ", "").isalpha():
            yield noun, synsets[offset + 9 : offset + 11].decode("ascii")


def _article(noun: str) -> str:
    return f"{'an' if noun[0] in 'aeiou' else 'a'} {noun}"


def _code_prompts(directory: Path, seed: int) -> Iterator[str]:
    """Python functions to be edited or explained."""
    rng = random.Random(seed)
    for file in _files(directory, {".py"}, rng):
        for function, source in _functions(file):
            names = sorted({node.id for node in ast.walk(function) if isinstance(node, ast.Name)} - {"self"})
            template = rng.choice(EDITS if rng.random() < 0.8 else QUESTIONS)
            name = rng.choice(names) if names else function.name
            task = template.format(name=name, new=rng.choice(NEW_NAMES), function=function.name)
            yield f"{task}\n\n```python\n{source}\n```"


def _functions(file: Path) -> Iterator[tuple[ast.FunctionDef, str]]:
    try:
        text = file.read_text(encoding="utf-8")
        tree = ast.parse(text)
    except (SyntaxError, ValueError, OSError, RecursionError):  # test data for other parsers, broken on purpose
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and (source := ast.get_source_segment(text, node)):
            source = textwrap.dedent(" " * node.col_offset + source)
            if FUNCTION_CHARS[0] <= len(source) <= FUNCTION_CHARS[1]:
                yield node, source


def _text_prompts(directory: Path, seed: int) -> Iterator[str]:
    """Paragraphs of documentation to be summarized."""
    rng = random.Random(seed)
    for file in _files(directory, TEXT_SUFFIXES, rng):
        try:
            text = file.read_text(encoding="utf-8")
        except (ValueError, OSError):
            continue
        for paragraph in re.split(r"\n\s*\n", text):
            words = " ".join(paragraph.split())
            prose = sum(character.isalpha() or character == " " for character in words)
            if PARAGRAPH_CHARS[0] <= len(words) <= PARAGRAPH_CHARS[1] and prose > 0.9 * len(words):
                yield f"{rng.choice(SUMMARIES)}\n\n{words}"


def _files(directory: Path, suffixes: set[str], rng: random.Random) -> list[Path]:
    files = sorted(file for file in directory.rglob("*") if file.suffix in suffixes and file.is_file())
    rng.shuffle(files)
    return files[:MAX_FILES]

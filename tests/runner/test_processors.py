"""Logits processors: what they do to a row, and that speculation changes nothing of it."""

import dataclasses
import json
from typing import Any

import numpy as np
import pytest

from specrun.engines.errors import RequestError, SpecrunError
from specrun.runner.compare import compare
from specrun.runner.grammar import Grammar, GrammarError
from specrun.runner.processors import Processing, Processor
from specrun.runner.runner import Request, Runner
from specrun.runner.sampling import Sampling
from tests import tiny
from tests.runner.test_drafts import PROPOSERS

PROMPT = tuple(tiny.make_tokenizer().encode("the serving of serving of serving").ids)
STOP = tiny.VOCABULARY_SIZE - 1
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 4},
        "n": {"type": "integer", "minimum": 0, "maximum": 99},
        "on": {"type": "boolean"},
    },
    "required": ["name", "n", "on"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},  # a random model would write many
}
CLOSED = {"additionalProperties": False}
JSON = Grammar("json_schema", json.dumps(SCHEMA))
SAMPLINGS = [Sampling(seed=1), Sampling(temperature=1.0, seed=2), Sampling(temperature=1.0, top_p=0.9, seed=3)]
PROCESSINGS = {
    "bias": Processing(logit_bias={5: 8.0, 70: 6.0, 100: -100.0, STOP: -100.0}),
    "penalties": Processing(repetition_penalty=1.3, frequency_penalty=0.8, presence_penalty=0.5),
    "rewards": Processing(repetition_penalty=0.9, frequency_penalty=-0.3),
    "ids": Processing(
        min_tokens=12, allowed_token_ids=frozenset(range(40, 90)) | {STOP}, forbidden_token_ids=frozenset([50])
    ),
    "regex": Processing(grammar=Grammar("regex", "([a-m]{2,5} ){3,6}end"), presence_penalty=0.2),
    "JSON": Processing(grammar=JSON),
}


def request(**changes: Any) -> Request:
    return dataclasses.replace(Request(PROMPT, max_tokens=40), **changes)


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
@pytest.mark.parametrize("name", PROCESSINGS)
@pytest.mark.parametrize("proposer", ["ngram", *PROPOSERS])
def test_speculation_changes_nothing(proposer: str, name: str, sampling: Sampling, heads_runner: Runner) -> None:
    for k in (1, 3, 8):
        asked = request(proposer=proposer, k=k, sampling=sampling, processing=PROCESSINGS[name], logprobs=3)
        result = compare(heads_runner, asked, repeats=1)
        assert result.identical, (k, result.divergence)
        plain, speculative = result.plain.logprobs, result.speculative.logprobs
        assert plain is not None
        assert speculative is not None
        for one, other in zip(plain, speculative, strict=True):
            assert one.logprob == pytest.approx(other.logprob, abs=1e-3)
            assert [token for token, _ in one.top] == [token for token, _ in other.top]
        if name == "JSON" and result.speculative.finish_reason == "stop":
            assert set(json.loads(result.speculative.text)) == {"name", "n", "on"}


@pytest.mark.parametrize("proposer", ["draft_model", "draft_model_tree", "ngram+draft_model"])
@pytest.mark.parametrize("k", [1, 2, 4, 8])
def test_json_always_parses_though_the_draft_runs_past_its_end(k: int, proposer: str, twin_runner: Runner) -> None:
    """The draft is the target itself, so whole blocks are accepted, the end of the grammar inside them."""
    accepted = 0
    for seed in range(8):
        asked = request(
            proposer=proposer,
            k=k,
            sampling=Sampling(temperature=1.0, seed=seed),
            processing=PROCESSINGS["JSON"],
            max_tokens=80,
        )
        completion = twin_runner.generate(asked)
        assert completion.finish_reason == "stop"
        value = json.loads(completion.text)
        assert set(value) == {"name", "n", "on"}
        assert completion.ids == twin_runner.generate(asked.plain()).ids
        accepted += completion.statistics.accepted_at.total()
    assert accepted > 50


def test_an_unconstrained_draft_runs_past_the_end_of_the_grammar(twin_runner: Runner) -> None:
    """A lookup knows no grammar: the prompt repeats the document and goes on behind it."""
    document = '{"name":"ab","n":7,"on":true}'
    ids = twin_runner.encode(f"{document} and so on {document} and so on {document} and so on ")
    schema = {"const": {"name": "ab", "n": 7, "on": True}}
    processing = Processing(
        grammar=Grammar("json_schema", json.dumps(schema | {"x-guidance": {"whitespace_flexible": False}}))
    )
    for k in (2, 4, 8):
        asked = Request(ids, max_tokens=60, proposer="ngram", k=k, processing=processing)
        completion = twin_runner.generate(asked)
        assert completion.finish_reason == "stop"
        assert completion.text == document
        assert completion.ids == twin_runner.generate(asked.plain()).ids
        assert completion.statistics.accepted_at.total() > 3
        # It guessed beyond the end, too.
        assert completion.statistics.proposed > completion.statistics.accepted_at.total()


def test_rows_see_the_tokens_of_their_path_and_nothing_stays() -> None:
    processing = Processing(frequency_penalty=0.5, presence_penalty=0.25, repetition_penalty=2.0, logit_bias={3: 1.0})
    processor = Processor(processing, [0], 6, frozenset([5]), None)
    logits = np.array([2.0, -2.0, 4.0, 1.0, 0.0, 3.0], np.float32)
    fresh = [1.0, -2.0, 4.0, 2.0, 0.0, 3.0]
    assert processor.process(logits, []).tolist() == fresh
    assert processor.process(logits, [1, 1, 3]).tolist() == [1.0, -4.0 - 1.25, 4.0, 1.0 - 0.75, 0.0, 3.0]
    assert processor.process(logits, []).tolist() == fresh
    processor.commit(2)
    assert processor.process(logits, [2]).tolist() == [1.0, -2.0, 2.0 - 1.25, 2.0, 0.0, 3.0]
    assert logits.tolist() == [2.0, -2.0, 4.0, 1.0, 0.0, 3.0]


def test_processors_find_their_columns_in_a_reduced_vocabulary() -> None:
    processing = Processing(logit_bias={2: 1.0, 4: 5.0}, forbidden_token_ids=frozenset([9]))
    processor = Processor(processing, [], 12, frozenset(), None)
    got = processor.process(np.zeros(3, np.float32), [], np.array([2, 3, 9]))
    assert got.tolist() == [1.0, 0.0, -np.inf]


def test_stop_tokens_wait_for_min_tokens() -> None:
    processor = Processor(Processing(min_tokens=2), [], 4, frozenset([3]), None)
    logits = np.zeros(4, np.float32)
    assert np.isinf(processor.process(logits, [1])[3])
    assert not np.isinf(processor.process(logits, [1, 1])[3])
    processor.commit(0)
    assert np.isinf(processor.process(logits, [])[3])
    assert not np.isinf(processor.process(logits, [1])[3])


def test_min_tokens_holds_back_stop_tokens_and_stop_strings(heads_runner: Runner) -> None:
    wanting_to_stop = Processing(logit_bias={STOP: 100.0})
    assert len(heads_runner.generate(request(processing=wanting_to_stop)).ids) == 1
    for count in (1, 7, 20):
        patient = dataclasses.replace(wanting_to_stop, min_tokens=count)
        completion = heads_runner.generate(request(processing=patient))
        assert len(completion.ids) == count + 1
        assert completion.finish_reason == "stop"
    text = heads_runner.generate(request(max_tokens=30)).text
    early = heads_runner.generate(request(max_tokens=30, stop=(text[0],)))
    assert len(early.ids) < 5
    late = heads_runner.generate(request(max_tokens=30, stop=(text[0],), processing=Processing(min_tokens=15)))
    assert len(late.ids) >= 15


def test_forbidden_and_allowed_tokens(heads_runner: Runner) -> None:
    processing = PROCESSINGS["ids"]
    assert processing.allowed_token_ids is not None
    for seed in range(5):
        ids = heads_runner.generate(request(processing=processing, sampling=Sampling(temperature=2.0, seed=seed))).ids
        assert set(ids) <= processing.allowed_token_ids - processing.forbidden_token_ids


def test_penalties_and_bias_change_the_output(heads_runner: Runner) -> None:
    outputs = {heads_runner.generate(request(processing=each)).ids for each in (Processing(), *PROCESSINGS.values())}
    assert len(outputs) == 1 + len(PROCESSINGS)


def test_log_probabilities_are_the_models_own(heads_runner: Runner) -> None:
    """Softmax in double precision of the logits that were seen, whatever the processors and the temperature."""
    rows: list[tuple[np.ndarray[Any, Any], int]] = []
    asked = request(processing=PROCESSINGS["penalties"], sampling=Sampling(temperature=2.0, seed=1), logprobs=4)
    completion = heads_runner.generate(asked, lambda position, logits, token: rows.append((logits.copy(), token)))
    assert completion.logprobs is not None
    assert len(completion.logprobs) == len(completion.ids) == len(rows)
    for got, (logits, token) in zip(completion.logprobs, rows, strict=True):
        wanted = logits.astype(np.float64) - np.log(np.exp(logits.astype(np.float64)).sum())
        order = np.argsort(-wanted)[:4]
        assert got.logprob == pytest.approx(wanted[token], abs=2e-6)
        assert [each for each, _ in got.top] == order.tolist()
        assert [each for _, each in got.top] == pytest.approx(wanted[order].tolist(), abs=2e-6)


def test_log_probabilities_end_with_the_stop_string(twin_runner: Runner) -> None:
    """Known fault 7: nothing of the accepted block remains behind the stop string."""
    whole = twin_runner.generate(request(proposer="draft_model", k=8, max_tokens=12))
    stop = whole.text[3]
    asked = request(proposer="draft_model", k=8, max_tokens=12, stop=(stop,), logprobs=0)
    completion = twin_runner.generate(asked)
    assert completion.finish_reason == "stop"
    assert completion.logprobs is not None
    assert len(completion.logprobs) == len(completion.ids) < len(whole.ids)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"logit_bias": {1: 101.0}}, "bias of 101.0 for token 1"),
        ({"frequency_penalty": 2.5}, "frequency_penalty 2.5"),
        ({"presence_penalty": float("nan")}, "presence_penalty nan"),
        ({"repetition_penalty": 0.0}, "repetition_penalty 0.0"),
        ({"min_tokens": -1}, "min_tokens -1"),
        ({"min_tokens": 41}, "min-tokens 41, expected at most max-tokens"),
        ({"allowed_token_ids": frozenset([1]), "forbidden_token_ids": frozenset([1])}, "no token id that is allowed"),
        ({"logit_bias": {300: 1.0}}, "token id 300, expected 0 to 299"),
        ({"grammar": Grammar("regex", "[a-")}, "regex that cannot be used"),
        ({"grammar": Grammar("json_schema", "{")}, "json_schema that cannot be"),
        ({"grammar": Grammar("json_schema", "5")}, "json_schema that cannot be"),
        ({"grammar": Grammar("json_schema", '{"type": "spam"}')}, "json_schema that cannot be used"),
    ],
)
def test_senseless_processing_is_refused(changes: dict[str, Any], reason: str, heads_runner: Runner) -> None:
    with pytest.raises((RequestError, GrammarError), match=reason):
        heads_runner.generate(request(processing=Processing(**changes)))


def test_a_dead_end_is_an_error_not_nonsense(heads_runner: Runner) -> None:
    """No allowed token fits the grammar."""
    processing = Processing(grammar=Grammar("regex", "abc"), allowed_token_ids=frozenset([10]))
    with pytest.raises(SpecrunError, match="no token is left that may be chosen"):
        heads_runner.generate(request(processing=processing))


def test_a_draft_follows_the_grammar_and_the_penalties(twin_runner: Runner) -> None:
    """It chooses under the target's processors, so the target's twin is accepted whole."""
    for name in ("JSON", "regex", "penalties", "ids"):
        asked = request(
            proposer="draft_model", k=4, processing=PROCESSINGS[name], sampling=Sampling(temperature=1.0, seed=3)
        )
        statistics = twin_runner.generate(asked).statistics
        assert statistics.accepted_at == statistics.proposed_at
        assert statistics.proposed_at.total() > 5


def test_blanks_do_not_go_on_for_ever(heads_runner: Runner) -> None:
    """A model that would write nothing but blanks still ends its document."""
    blanks = [heads_runner.encode(blank)[0] for blank in (" ", "\n", "\t", "\r")]
    schema = json.dumps({"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"]} | CLOSED)
    processing = Processing(grammar=Grammar("json_schema", schema), logit_bias=dict.fromkeys(blanks, 50.0))
    completion = heads_runner.generate(request(processing=processing, max_tokens=200))
    assert completion.finish_reason == "stop"
    assert len(completion.ids) > 60
    assert json.loads(completion.text)["a"] in (1, 2)

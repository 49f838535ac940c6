"""Training drafts end to end on a tiny target: answers, training, published layout, bundle."""

import json
import shutil
from dataclasses import replace
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from specrun.distill.collection import CollectionError, collect
from specrun.distill.corpus import Corpus, collate, coverage, frequent_tokens
from specrun.distill.distill import DistillError, DistillOptions, distill
from specrun.distill.method import MethodError
from specrun.distill.objective import Objective, Tally
from specrun.distill.self_prompts import self_prompts
from specrun.distill.teacher import Teacher, TeacherError
from specrun.distill.training import TrainingOptions
from specrun.export.checkpoint import Checkpoint
from specrun.export.contract import recorded_states
from specrun.runner.compare import compare
from specrun.runner.runner import Request, Runner
from tests import tiny

PROMPTS = [f"the serving of {word} and {other}" for word in ("tea", "ale", "rum", "sea") for other in "abcdefghij"]


@pytest.fixture(scope="module")
def prompt_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("prompts") / "prompts.json"
    file.write_text(json.dumps(PROMPTS))
    return file


@pytest.fixture(scope="module")
def options(tmp_path_factory: pytest.TempPathFactory, deep_checkpoint: Path, prompt_file: Path) -> DistillOptions:
    directory = tmp_path_factory.mktemp("distill")
    return DistillOptions(
        model=str(deep_checkpoint),
        method="eagle3",
        data=(str(prompt_file),),
        out=directory / "out",
        work=directory / "work",
        tokens=4_000,
        draft_vocabulary=280,
        training=TrainingOptions(epochs=4, batch=4, learning_rate=2e-3),
    )


@pytest.fixture(scope="module")
def shards(options: DistillOptions, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    teacher = Teacher.prepare(Checkpoint.open(options.model, options.work), options.work / "teacher")
    return collect(teacher, PROMPTS, 4_000, tmp_path_factory.mktemp("answers"))


def test_answers_are_the_targets_own_with_its_states(
    shards: list[Path], options: DistillOptions, deep_checkpoint: Path, tmp_path: Path
) -> None:
    """Decoded side by side with others of other lengths, each as if it were alone."""
    model = Checkpoint.open(str(deep_checkpoint), tmp_path).load(torch.float32)
    corpus = Corpus(shards, validation=False, longest=1_000)
    greedy = 0
    for index in range(0, len(corpus), 7):
        item = corpus[index]
        tokens = item["tokens"]
        with torch.no_grad(), recorded_states(model) as states:
            logits = model(input_ids=tokens[None]).logits[0, :, : tiny.VOCABULARY_SIZE]
        wanted = torch.cat([states[2], states[4], states[5], states[-1]], -1)[0, :-1]
        torch.testing.assert_close(item["hidden"].float(), wanted, rtol=2e-3, atol=2e-3 * float(wanted.abs().max()))
        first = int(item["answer"].nonzero()[0])
        greedy += torch.equal(logits[first - 1 : -1].argmax(-1), tokens[first:])
    assert greedy >= 2  # three in five


def test_collection_goes_on_where_it_stopped(
    shards: list[Path], options: DistillOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    teacher = Teacher.prepare(Checkpoint.open(options.model, options.work), options.work / "teacher")
    monkeypatch.setattr("specrun.distill.collection.Answerer", None)  # nothing is left to answer
    assert collect(teacher, PROMPTS, 4_000, shards[0].parent) == shards
    with pytest.raises(CollectionError, match="none of the 1 prompts"):
        collect(teacher, ["x" * 5_000], 10, options.work / "none")


def test_conversations_are_padded_out_of_the_loss(shards: list[Path]) -> None:
    corpus = Corpus(shards, validation=False, longest=1_000)
    lengths = corpus.lengths()
    short, long = lengths.index(min(lengths)), lengths.index(max(lengths))
    batch = collate([corpus[short], corpus[long]])
    assert batch["tokens"].shape == batch["answer"].shape == (2, max(lengths))
    assert not batch["answer"][0, min(lengths) :].any()
    validation = Corpus(shards, validation=True, longest=1_000)
    assert len(validation) + len(corpus) == len(PROMPTS)
    assert len(validation) > 0


def test_draft_vocabulary_is_what_the_target_writes(shards: list[Path]) -> None:
    corpus = Corpus(shards, validation=False, longest=1_000)
    written = np.concatenate(list(corpus.answers()))
    ids = frequent_tokens(corpus, 20, [299])
    assert len(ids) == 20
    assert 299 in ids
    assert (np.diff(ids) > 0).all()
    assert coverage(corpus, ids) == pytest.approx(np.isin(written, ids).mean())
    counts = np.bincount(written, minlength=300)
    assert counts[ids].sum() >= np.sort(counts)[-19:].sum()


def test_tally_counts_chains() -> None:
    """Row t guesses token t + 2, then t + 3; a later guess counts only where the earlier one was right."""
    tokens = torch.tensor([[0, 1, 2, 3, 4, 5]])
    answer = torch.tensor([[False, False, True, True, True, True]])
    tally = Tally(Objective(torch.eye(6), torch.arange(6)), tokens, answer, torch.zeros(1, 5, 6))
    guesses = torch.nn.functional.one_hot(torch.tensor([[2, 3, 0, 5]]), 6).float()  # the third is wrong
    tally.add(guesses, torch.nn.Identity())
    tally.add(torch.nn.functional.one_hot(torch.tensor([[3, 0, 5, 0]]), 6).float(), torch.nn.Identity())
    result = tally.result()
    assert result["tries"].tolist() == [4, 2]  # of rows 0, 1 and 3, the last has no further token to guess
    assert result["hits"].tolist() == [3, 1]


@pytest.mark.parametrize("method", ["medusa", "eagle3", "draft"])
def test_trained_draft_is_published_built_and_accepted(
    method: str, options: DistillOptions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = replace(options, method=method, out=tmp_path / "draft")
    distill(mine, tmp_path)
    card = (mine.out / "README.md").read_text()
    assert f"# {method} draft for" in card
    assert "| accepted |" in card

    bundle = tiny.make_bundle(tmp_path, Path(options.model), mine.out)
    runner = Runner(bundle)
    accepted = proposed = 0
    for prompt in PROMPTS[::8]:
        request = Request(
            runner.encode_chat(prompt), max_tokens=40, proposer=runner.proposers[1], k=2
        )  # the draft alone
        result = compare(runner, request, repeats=1)
        assert result.identical
        accepted += result.speculative.statistics.accepted_at[0]
        proposed += result.speculative.statistics.proposed_at[0]
    assert accepted / proposed > 0.04  # a random target is hard to learn, but chance is 1 in 300

    # A run that is called again has nothing left to train; its checkpoint says the same.
    weights = next(file for file in mine.out.iterdir() if file.suffix == ".safetensors").read_bytes()
    distill(replace(mine, out=tmp_path / "again"), tmp_path)
    assert (
        next(file for file in (tmp_path / "again").iterdir() if file.suffix == ".safetensors").read_bytes() == weights
    )


def ids(weights: dict[str, torch.Tensor]) -> list[int]:
    """The target's id of each row of a draft's head."""
    offsets = weights["d2t"]
    return [int(token) for token in torch.arange(len(offsets)) + offsets]


def test_training_goes_on_from_a_trained_draft(options: DistillOptions, tmp_path: Path, prompt_file: Path) -> None:
    first = replace(options, out=tmp_path / "first", training=TrainingOptions(epochs=1, batch=4))
    distill(first, tmp_path)
    other = tmp_path / "other.txt"
    other.write_text("\n".join(reversed(PROMPTS)))
    still = TrainingOptions(epochs=1, batch=4, learning_rate=0)
    second = replace(
        options,
        draft_vocabulary=200,
        data=(str(other),),
        start=first.out,
        out=tmp_path / "second",
        work=tmp_path / "w",
        training=still,
    )
    distill(second, tmp_path)
    before, after = load_file(first.out / "model.safetensors"), load_file(second.out / "model.safetensors")
    assert before.keys() == after.keys()
    # The vocabulary is chosen anew. Without a learning rate nothing else moves.
    rows = [dict(zip(ids(weights), weights["lm_head.weight"], strict=True)) for weights in (before, after)]
    assert len(rows[1]) == 200
    assert all(torch.equal(row, rows[0][token]) for token, row in rows[1].items() if token in rows[0])
    for name in before.keys() - {"lm_head.weight", "d2t", "t2d"}:
        torch.testing.assert_close(after[name], before[name], msg=name)
    card = (second.out / "README.md").read_text()
    assert "| started from | first |" in card
    assert "## first, from which it started" in card
    with pytest.raises(MethodError, match="it holds eagle3, expected a draft of the method medusa"):
        distill(replace(second, method="medusa"), tmp_path)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"method": "oracle"}, "method 'oracle', expected one of medusa, eagle3, draft"),
        ({"data": ()}, "no --data"),
        ({"tokens": 0}, "at least one token"),
    ],
)
def test_senseless_training_is_refused(change: dict[str, object], reason: str, options: DistillOptions) -> None:
    with pytest.raises(DistillError, match=reason):
        replace(options, **change)  # type: ignore[arg-type]


def test_target_without_three_taps_is_refused(target_checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(TeacherError, match="2 layers, too few"):
        Teacher.prepare(Checkpoint.open(str(target_checkpoint), tmp_path), tmp_path / "teacher")


def test_target_writes_prompts_itself(options: DistillOptions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What follows the opening of a chat, up to the token that ends the user's turn."""
    teacher = Teacher.prepare(Checkpoint.open(options.model, options.work), options.work / "teacher")
    monkeypatch.setattr("specrun.distill.self_prompts.PROMPTS_PER_FILE", 24)
    monkeypatch.setattr("specrun.distill.self_prompts.LONGEST", 600)  # a random model seldom ends a turn
    prompts = list(islice(self_prompts(teacher, tmp_path / "prompts"), 30))
    assert len(set(prompts)) > 20
    tokenizer = teacher.tokenizer()
    opening, end = teacher.user_turn(tokenizer)
    for prompt in prompts:
        ids = teacher.encode(tokenizer, prompt)
        assert ids[: len(opening)] == opening
        assert ids.index(end, len(opening)) > len(opening)
    monkeypatch.setattr("specrun.distill.self_prompts.Answerer", None)  # nothing is left to write
    assert list(islice(self_prompts(teacher, tmp_path / "prompts"), 30)) == prompts


def test_target_that_never_ends_a_prompt_is_refused(
    options: DistillOptions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    teacher = Teacher.prepare(Checkpoint.open(options.model, options.work), options.work / "teacher")
    monkeypatch.setattr("specrun.distill.self_prompts.PROMPTS_PER_FILE", 4)
    monkeypatch.setattr("specrun.distill.self_prompts.LONGEST", 3)
    with pytest.raises(TeacherError, match="wrote no prompt of 4 to 3 tokens in 4 attempts"):
        next(self_prompts(teacher, tmp_path / "prompts"))
    assert not list((tmp_path / "prompts").iterdir())


def test_target_without_chat_cannot_write_prompts(options: DistillOptions, tmp_path: Path) -> None:
    teacher = Teacher.prepare(Checkpoint.open(options.model, options.work), options.work / "teacher")
    bare = shutil.copytree(teacher.directory, tmp_path / "bare")
    (bare / "chat_template.jinja").unlink()
    with pytest.raises(TeacherError, match="no chat template"):
        next(self_prompts(Teacher(bare, teacher.model), tmp_path / "prompts"))

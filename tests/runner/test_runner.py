"""Bundles end to end on ONNX Runtime: every proposer, k and temperature against plain decoding."""

import dataclasses
import json
import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

from specrun.engines.errors import RequestError
from specrun.engines.manifest import MANIFEST, Bundle, BundleError, file_entries
from specrun.engines.schema import to_json
from specrun.engines.vocabulary import Vocabulary, VocabularyMismatchError
from specrun.export.checkpoint import Checkpoint
from specrun.runner.compare import compare
from specrun.runner.runner import Request, Runner
from specrun.runner.sampling import Sampling
from tests import tiny

PROMPT = tiny.make_tokenizer().encode("the serving of serving of serving").ids
SAMPLINGS = [
    Sampling(seed=1),
    Sampling(temperature=0.7, seed=1),
    Sampling(temperature=1.0, top_p=0.9, seed=2),
    Sampling(temperature=1.0, top_k=20, min_p=0.02, seed=3),
]


def request(**changes: object) -> Request:
    return dataclasses.replace(Request(tuple(PROMPT), max_tokens=40), **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
@pytest.mark.parametrize("k", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("proposer", ["ngram", "draft_model"])
def test_output_equals_plain_decoding(proposer: str, k: int, sampling: Sampling, runner: Runner) -> None:
    """Known faults 1, 12, 13, 22 and 23: a random draft with another padding of the vocabulary."""
    result = compare(runner, request(sampling=sampling, k=k, proposer=proposer), repeats=1)
    assert result.identical, result.divergence
    assert result.speculative.text == result.plain.text
    assert max(result.plain.ids) < tiny.VOCABULARY_SIZE


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
@pytest.mark.parametrize("k", range(1, 9))
def test_twin_draft_is_accepted_whole(k: int, sampling: Sampling, twin_runner: Runner) -> None:
    """Known fault 3."""
    result = compare(twin_runner, request(sampling=sampling, k=k, proposer="draft_model"), repeats=1)
    assert result.identical, result.divergence
    assert result.speculative.statistics.proposed_at.total() > 0
    assert result.speculative.statistics.accepted_at == result.speculative.statistics.proposed_at


@pytest.mark.parametrize("sampling", SAMPLINGS[:3], ids=str)
@pytest.mark.parametrize("k", [2, 4])
def test_accepted_path_through_a_tree_is_kept_in_the_cache(k: int, sampling: Sampling, twin_runner: Runner) -> None:
    """A perfect draft's path skips the siblings beside it, so its rows must be moved together after each round."""
    asked = request(sampling=sampling, k=k, nodes=14, proposer="draft_model_tree", max_tokens=60)
    result = compare(twin_runner, asked, repeats=1)
    assert result.identical, result.divergence
    statistics = result.speculative.statistics
    assert statistics.accepted_at[1] > 5
    assert statistics.proposed > statistics.proposed_at.total()  # it did branch


def test_plain_decoding_equals_pytorch(runner: Runner, target_checkpoint: Path, tmp_path: Path) -> None:
    """Greedy, without a cache, across the first growth of the KV cache."""
    model = Checkpoint.open(str(target_checkpoint), tmp_path).load(torch.float32)
    tokens = list(PROMPT)
    with torch.no_grad():
        for _ in range(30):
            logits = model(input_ids=torch.tensor([tokens])).logits[0, -1, : tiny.VOCABULARY_SIZE]
            tokens.append(int(logits.argmax()))
    got = runner.generate(request(proposer="none", max_tokens=30)).ids
    wanted = tuple(tokens[len(PROMPT) :])
    stop = tiny.VOCABULARY_SIZE - 1
    assert got == (wanted[: wanted.index(stop) + 1] if stop in wanted else wanted)


def test_cache_grows_without_changing_the_output(target_checkpoint: Path, tmp_path: Path) -> None:
    """From 256 rows to the capacity of 500, in the middle of a generation."""
    grown = Runner(tiny.make_bundle(tmp_path / "large", target_checkpoint, capacity=500))
    long = dataclasses.replace(request(), prompt_ids=tuple(PROMPT * 9)[:250], max_tokens=60)
    for proposer in ("none", "ngram"):
        completion = grown.generate(dataclasses.replace(long, proposer=proposer))
        tail = dataclasses.replace(long, prompt_ids=long.prompt_ids + completion.ids[:30], max_tokens=30)
        assert grown.generate(tail).ids == completion.ids[30:60]


def test_prompt_beyond_the_drafts_context_gives_the_same_text(runner: Runner) -> None:
    """Known fault 5: the draft has 96 positions, the target 256."""
    for length in (85, 94, 95, 96, 97, 150):
        long = dataclasses.replace(request(proposer="draft_model"), prompt_ids=tuple((PROMPT * 20)[:length]))
        assert runner.generate(long).ids == runner.generate(long.plain()).ids


@pytest.mark.parametrize("room", range(1, 7))
@pytest.mark.parametrize("proposer", ["none", "ngram", "draft_model"])
def test_generation_fills_the_context_exactly(proposer: str, room: int, twin_runner: Runner) -> None:
    """Known fault 4."""
    prompt = tuple((PROMPT * 20)[: 256 - room])
    completion = twin_runner.generate(Request(prompt, max_tokens=1_000, proposer=proposer, k=4))
    assert len(completion.ids) == room or completion.finish_reason == "stop"
    assert completion.finish_reason == "length" or completion.ids[-1] == tiny.VOCABULARY_SIZE - 1


def test_prompt_without_room_is_refused(runner: Runner) -> None:
    with pytest.raises(RequestError, match="got a prompt of 256 tokens, the bundle's capacity is 256"):
        runner.generate(Request(tuple((PROMPT * 20)[:256])))


def test_same_seed_same_tokens(runner: Runner) -> None:
    """Known fault 12."""
    sampled = request(sampling=Sampling(temperature=1.0, seed=5))
    first = runner.generate(sampled)
    for _ in range(9):
        runner.generate(request(sampling=Sampling(temperature=1.0)))  # neighbours
        assert runner.generate(sampled).ids == first.ids
    assert first.ids != runner.generate(request(sampling=Sampling(temperature=1.0, seed=6))).ids


def test_seed_is_drawn_and_reported(runner: Runner) -> None:
    first = runner.generate(request(sampling=Sampling(temperature=1.0)))
    second = runner.generate(request(sampling=Sampling(temperature=1.0)))
    assert first.seed != second.seed
    repeated = runner.generate(request(sampling=Sampling(temperature=1.0, seed=first.seed)))
    assert repeated.ids == first.ids


@pytest.mark.parametrize("max_tokens", [1, 2, 5, 12])
def test_stop_string_inside_a_block(max_tokens: int, twin_runner: Runner) -> None:
    """Known fault 7: ids and text end with the stop string even where the block crosses max_tokens."""
    for seed in range(20):  # until the last token is a whole character
        sampled = request(sampling=Sampling(temperature=1.0, seed=seed), k=8, proposer="draft_model")
        text = twin_runner.generate(dataclasses.replace(sampled, max_tokens=max_tokens)).text
        if not text.endswith("\ufffd"):
            break
    whole = twin_runner.generate(dataclasses.replace(sampled, max_tokens=12))
    stop = text[-1]
    assert stop != "\ufffd"
    completion = twin_runner.generate(dataclasses.replace(sampled, max_tokens=max_tokens, stop=(stop,)))
    assert completion.finish_reason == "stop"
    assert completion.text == text[: text.index(stop)]
    assert completion.ids == whole.ids[: len(completion.ids)]
    assert completion.statistics.emitted == len(completion.ids)
    assert twin_runner.tokenizer.decode(completion.ids).startswith(completion.text + stop)


def test_events_tell_origin_and_join_to_the_text(twin_runner: Runner) -> None:
    events = list(twin_runner.stream(request(k=4, proposer="draft_model", max_tokens=10)))
    assert [event.token.origin for event in events] == (["drafted"] * 4 + ["bonus"]) * 2
    plain = twin_runner.generate(request(proposer="none", max_tokens=10))
    assert "".join(event.text for event in events) == plain.text


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"max_tokens": 0}, "max-tokens 0"),
        ({"k": 0}, "k = 0"),
        ({"stop": ("",)}, "empty stop"),
        ({"prompt_ids": ()}, "empty prompt"),
        ({"proposer": "oracle"}, "proposer 'oracle'"),
        ({"prompt_ids": (1, 320)}, "token ids outside"),
    ],
)
def test_senseless_request_is_refused(changes: dict[str, object], reason: str, runner: Runner) -> None:
    with pytest.raises(RequestError, match=reason):
        runner.generate(request(**changes))


def test_chat_template_is_rendered(runner: Runner) -> None:
    ids = runner.encode_chat("hi")
    assert runner.tokenizer.decode(ids, skip_special_tokens=False) == f"<user>hi{tiny.END}"
    assert ids[-1] == tiny.VOCABULARY_SIZE - 1


def test_exchanged_tokenizer_is_refused_at_load(bundle: Bundle, tmp_path: Path) -> None:
    """Known fault 14, at load: the manifest was made to fit, the vocabularies still differ."""
    copy = Path(shutil.copytree(bundle.path, tmp_path / "copy"))
    other = tiny.make_tokenizer(changed={"a": "q!"})
    other.save(str(copy / "draft" / "tokenizer.json"))
    data = json.loads((copy / MANIFEST).read_text())
    data["files"] = {name: to_json(entry) for name, entry in file_entries(copy).items()}
    (copy / MANIFEST).write_text(json.dumps(data))
    with pytest.raises(BundleError, match=r"the tokenizer of draft.* is not the one"):
        Runner.open(copy)
    data["draft"]["vocabulary_sha256"] = Vocabulary.of(other).digest()
    (copy / MANIFEST).write_text(json.dumps(data))
    with pytest.raises(VocabularyMismatchError, match="'q!' in the draft"):
        Runner.open(copy)


def test_runner_needs_no_training_library(bundle: Bundle) -> None:
    """In a process where importing torch, transformers or onnx fails."""
    script = """
        import importlib, pkgutil, sys
        for name in ("torch", "transformers", "onnx", "onnxscript", "onnx_ir", "safetensors", "gguf"):
            sys.modules[name] = None
        for name in ("cuda", "llguidance"):  # extras
            sys.modules[name] = None
        import specrun.runner
        for module in pkgutil.walk_packages(specrun.runner.__path__, "specrun.runner."):
            if module.name != "specrun.runner.triton.model_file":  # imports what only Triton's stub process has
                importlib.import_module(module.name)
        from specrun.runner.cli import run
        for proposer in ("ngram", "draft_model"):
            code = run(["generate", sys.argv[1], "--prompt", "the serving", "--compare", "--proposer", proposer])
            assert code == 0, code
        assert run(["info", sys.argv[1]]) == 0
        assert run(["build", "somewhere", "--out", "nowhere"]) == 3
        assert run(["generate", sys.argv[1], "--prompt", "the", "--regex", "[a-z]+"]) == 3
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script), str(bundle.path)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "pip install 'specrun[export]'" in done.stderr
    assert "pip install 'specrun[grammar]'" in done.stderr


def test_half_precision_bundle_is_lossless(target_checkpoint: Path, tmp_path: Path) -> None:
    half = Runner(tiny.make_bundle(tmp_path, target_checkpoint, precision="fp16"))
    for sampling in SAMPLINGS[:2]:
        result = compare(half, request(sampling=sampling, k=4), repeats=1)
        assert result.lossless, result.divergence


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads the resident size from /proc")
def test_memory_is_flat_over_requests(runner: Runner) -> None:
    """Known fault 19: prompts of all lengths, so that every width of a call occurs."""

    def resident_bytes() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    def serve(requests: int) -> None:
        for length in range(1, requests):
            prompt = tuple((PROMPT * 20)[: length % 200 + 1])
            runner.generate(Request(prompt, max_tokens=3, proposer=("ngram", "draft_model")[length % 2]))

    serve(250)
    before = resident_bytes()
    serve(500)
    assert resident_bytes() - before < 8 << 20

"""The command line: what it prints, its exit codes, and one clear line for every bad input."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import transformers

from specrun.engines.errors import RequestError
from specrun.engines.manifest import MANIFEST, Bundle
from specrun.runner import cli
from specrun.runner.commands import exit_codes
from specrun.runner.compare import compare_all
from specrun.runner.prompt_set import PROMPT_SETS, load_prompt_set
from tests import tiny, tiny_heads

PROMPT = "the serving of serving of serving"


@pytest.fixture
def specrun(capfd: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Run the command line in this process: exit code, stdout, stderr."""

    def run(*arguments: object) -> tuple[int, str, str]:
        code = cli.run([str(argument) for argument in arguments])
        out, err = capfd.readouterr()
        return code, out, err

    return run


Specrun = Callable[..., tuple[int, str, str]]


def test_generate_streams_text(specrun: Specrun, bundle: Bundle) -> None:
    code, out, err = specrun("generate", bundle.path, "--prompt", PROMPT, "--max-tokens", 12)
    assert code == 0
    assert out.strip()
    assert "12 tokens" in err


def test_generate_json_equals_streamed_text(specrun: Specrun, bundle: Bundle) -> None:
    arguments = (
        "generate",
        bundle.path,
        "--prompt",
        PROMPT,
        "--max-tokens",
        12,
        "--temperature",
        1,
        "--seed",
        3,
    )
    _, streamed, _ = specrun(*arguments)
    code, out, _ = specrun(*arguments, "--json")
    result = json.loads(out)
    assert code == 0
    assert result["text"] + "\n" == streamed
    assert result["seed"] == 3
    assert len(result["ids"]) == 12


def test_generate_follows_a_schema_and_reports_log_probabilities(
    specrun: Specrun, bundle: Bundle, tmp_path: Path
) -> None:
    schema = tmp_path / "schema.json"
    schema.write_text('{"enum": [[1, 2], {"the": "nose"}]}')
    options = (
        "--json-schema",
        schema,
        "--logprobs",
        2,
        "--presence-penalty",
        0.5,
        "--logit-bias",
        "7=-1.5",
        "--max-tokens",
        200,
    )
    code, out, _ = specrun("generate", bundle.path, "--prompt", PROMPT, *options, "--json")
    result = json.loads(out)
    assert code == 0
    assert json.loads(result["text"]) in ([1, 2], {"the": "nose"})
    assert len(result["logprobs"]) == len(result["ids"])
    for token in result["logprobs"]:
        assert token["logprob"] < 0
        assert len(token["top"]) == 2


def test_generate_by_the_rejection_rule(specrun: Specrun, bundle: Bundle) -> None:
    options = ("--prompt", PROMPT, "--temperature", 1, "--seed", 3, "--accept", "rejection", "--json")
    outputs = [specrun("generate", bundle.path, *options)[1] for _ in range(2)]
    assert json.loads(outputs[0])["ids"] == json.loads(outputs[1])["ids"]
    code, _, err = specrun("generate", bundle.path, *options, "--compare")
    assert code == exit_codes.EXIT_REFUSED
    assert "other tokens" in err


def test_compare_json_has_the_promised_keys(specrun: Specrun, bundle: Bundle) -> None:
    code, out, _ = specrun("generate", bundle.path, "--prompt", PROMPT, "--max-tokens", 12, "--compare", "--json")
    result = json.loads(out)
    assert code == 0
    assert {"plain", "speculative", "identical", "speedup"} <= set(result)
    assert {"ids", "text", "tok_s"} <= set(result["plain"])
    assert {"ids", "text", "tok_s"} <= set(result["speculative"])
    assert result["identical"] is True
    assert result["plain"]["ids"] == result["speculative"]["ids"]
    assert result["speedup"] == pytest.approx(result["speculative"]["tok_s"] / result["plain"]["tok_s"])


def test_compare_prints_the_proof(specrun: Specrun, bundle: Bundle) -> None:
    code, out, _ = specrun("generate", bundle.path, "--chat", "--prompt", PROMPT, "--max-tokens", 12, "--compare")
    assert code == 0
    assert "identical output: yes" in out


def test_difference_is_an_exit_code(specrun: Specrun, bundle: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    """A lossy acceptor is exposed: output differs, not by rounding."""
    from specrun.runner import logits as logits_module
    from specrun.runner.types import Verdict

    def lossy(proposal, logits, chooser, position):  # type: ignore[no-untyped-def]
        return Verdict(tuple(range(len(proposal.tokens))), chooser.choose(logits[-1], position + len(proposal.tokens)))

    monkeypatch.setattr(logits_module, "accept", lossy)
    arguments = (
        "generate",
        bundle.path,
        "--prompt",
        PROMPT,
        "--max-tokens",
        24,
        "--proposer",
        "draft_model",
        "--compare",
    )
    code, out, _ = specrun(*arguments)
    assert code == exit_codes.EXIT_DIFFERENT
    assert "identical output: NO" in out
    assert "first difference at output token" in out
    code, out, _ = specrun(*arguments, "--json")
    assert code == exit_codes.EXIT_DIFFERENT
    assert json.loads(out)["divergence"]["index"] >= 0


def test_bench_json_has_the_promised_rows(specrun: Specrun, bundle: Bundle, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.json"
    prompts.write_text(json.dumps([PROMPT, "the nose"]))
    arguments = (
        "bench",
        bundle.path,
        "--set",
        prompts,
        "--k",
        2,
        "--k",
        3,
        "--temperature",
        0,
        "--temperature",
        1,
    )
    code, out, _ = specrun(*arguments, "--max-tokens", 10, "--repeats", 1, "--json")
    rows = json.loads(out)
    assert code == 0
    assert len(rows) == 5 * 2 * 2  # n-gram, draft as chain and tree, these after n-gram; k; temperatures
    promised = "prompt_set proposer k temperature plain_tok_s tok_s speedup acceptance_length round_cost identical"
    for row in rows:
        assert set(promised.split()) <= set(row)
        assert row["identical"] is True
        assert row["speedup"] == pytest.approx(row["tok_s"] / row["plain_tok_s"])
        assert row["tokens"] == 20
        assert row["nodes"] == (16 if row["proposer"].endswith("_tree") else row["k"])
        assert len(row["acceptance_per_position"]) <= row["k"]
    report = tmp_path / "report.html"
    code, out, _ = specrun(
        "bench", bundle.path, "--set", prompts, "--max-tokens", 5, "--repeats", 1, "--report", report
    )
    assert code == 0
    assert out.splitlines()[0].split()[:3] == ["prompt", "set", "proposer"]
    assert len(out.splitlines()) == 6
    page = report.read_text()
    assert page.count("<svg") == 3  # speed-up, acceptance per position, time per stage
    assert "draft_model_tree, 16 nodes" in page
    assert not any(source in page for source in ("<script", "<link", 'src="', "@import"))  # nothing from elsewhere
    assert sorted(file.name for file in tmp_path.iterdir()) == ["prompts.json", "report.html"]


def test_prompt_sets() -> None:
    assert sum(len(load_prompt_set(name)) for name in PROMPT_SETS) >= 20
    assert all(prompt.strip() for name in PROMPT_SETS for prompt in load_prompt_set(name))


def test_prompt_file_of_lines(tmp_path: Path) -> None:
    (tmp_path / "prompts.txt").write_text("one\n\ntwo\n")
    assert load_prompt_set(str(tmp_path / "prompts.txt")) == ["one", "two"]
    (tmp_path / "empty.txt").write_text("\n")
    with pytest.raises(RequestError, match="no prompts"):
        load_prompt_set(str(tmp_path / "empty.txt"))


def test_info(specrun: Specrun, bundle: Bundle) -> None:
    code, out, _ = specrun("info", bundle.path)
    assert code == 0
    assert "target" in out
    assert "hashes correct" in out
    code, out, _ = specrun("info", bundle.path, "--json")
    assert json.loads(out) == json.loads((bundle.path / MANIFEST).read_text())


def test_doctor(specrun: Specrun) -> None:
    code, out, _ = specrun("doctor")
    assert code == 0
    assert "ok  run on ONNX Runtime (CPU)" in out
    assert "ok  export and build" in out
    assert "ok  output after a grammar" in out
    assert "ok  kernels for GPUs" in out


def test_export_then_build_then_generate(specrun: Specrun, target_checkpoint: Path, tmp_path: Path) -> None:
    """The three commands a user chains; the build does not export again."""
    code, out, err = specrun("export", target_checkpoint, "--out", tmp_path / "export")
    assert (code, out.strip()) == (0, str(tmp_path / "export"))
    assert "logits equal PyTorch's" in err
    code, out, err = specrun("build", tmp_path / "export", "--out", tmp_path / "bundle", "--capacity", 128)
    assert (code, out.strip()) == (0, str(tmp_path / "bundle"))
    assert "tracing" not in err
    code, _, err = specrun("build", tmp_path / "export", "--out", tmp_path / "bundle", "--capacity", 128)
    assert "up to date" in err
    code, out, _ = specrun("generate", tmp_path / "bundle", "--prompt", PROMPT, "--compare", "--json")
    assert json.loads(out)["identical"] is True


def save_bert(directory: Path) -> Path:
    transformers.BertConfig(architectures=["BertForMaskedLM"]).save_pretrained(directory)
    return directory


def truncated(directory: Path) -> Path:
    tiny.save_checkpoint(directory, tiny.make_model(tiny.llama()))
    weights = directory / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:5000])
    return directory


def corrupt_manifest(bundle: Bundle, directory: Path) -> Path:
    directory.mkdir()
    (directory / MANIFEST).write_text((bundle.path / MANIFEST).read_text()[:-40])
    return directory


def edited_graph(bundle: Bundle, directory: Path) -> Path:
    for file in bundle.path.rglob("*"):
        if file.is_file():
            copy = directory / file.relative_to(bundle.path)
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_bytes(file.read_bytes())
    graph = directory / "target" / "model.onnx"
    graph.write_bytes(graph.read_bytes().replace(b"Attention", b"Attentiom", 1))
    return directory


def other_family(directory: Path) -> Path:
    return tiny.save_checkpoint(
        directory, tiny.make_model(tiny.llama()), tiny.make_tokenizer(changed={"a": "q!", "e": "q?"})
    )


LONG = "serving " * 300
PROMPT_SET_FILE = Path(cli.__file__).parent / "prompts" / "chat.json"  # a file that is there
Case = Callable[[Bundle, Path, Path], list[object]]


def other_target(path: Path) -> Path:
    """Medusa heads for a target with another number of hidden units."""
    weights = {name: value[..., :32] for name, value in tiny_heads.medusa_weights().items() if "bias" not in name}
    weights |= {name: value for name, value in tiny_heads.medusa_weights().items() if "bias" in name}
    return tiny_heads.write(path, {"medusa_num_heads": 3}, weights)


def generating(*options: object) -> Case:
    return lambda bundle, target, path: ["generate", bundle.path, "--prompt", "x", *options]


BAD_INPUTS: dict[str, tuple[Case, str]] = {
    "missing model": (lambda b, t, p: ["build", p / "nowhere", "--out", p / "out"], "does not exist"),
    "wrong architecture": (
        lambda b, t, p: ["build", save_bert(p / "bert"), "--out", p / "out"],
        "BertForMaskedLM",
    ),
    "truncated weights": (lambda b, t, p: ["build", truncated(p / "cut"), "--out", p / "out"], "truncated"),
    "capacity beyond training": (
        lambda b, t, p: ["build", t, "--out", p / "out", "--capacity", 4096],
        "trained for 512 positions",
    ),
    "draft of another family": (
        lambda b, t, p: [
            "build",
            t,
            "--draft",
            other_family(p / "other"),
            "--out",
            p / "out",
            "--capacity",
            256,
        ],
        "another family",
    ),
    "two drafts of a kind": (
        lambda b, t, p: ["build", t, "--out", p / "out", "--draft", "early-exit:1", "--draft", "skip:1"],
        "two drafts of the kind early_exit",
    ),
    "early exit after the last layer": (
        lambda b, t, p: ["build", t, "--out", p / "out", "--capacity", 256, "--draft", "early-exit:2"],
        "layers 0 to 1",
    ),
    "head of another target": (
        lambda b, t, p: ["build", t, "--out", p / "out", "--capacity", 256, "--draft", other_target(p / "head")],
        "does not fit",
    ),
    "no tree nodes": (lambda b, t, p: ["build", t, "--out", p / "out", "--nodes", 0], "0 tree nodes"),
    "build with k = 0": (lambda b, t, p: ["build", t, "--out", p / "out", "--k", 0], "k = 0"),
    "unknown precision": (lambda b, t, p: ["export", t, "--out", p / "out", "--precision", "fp7"], "fp7"),
    "foreign output": (lambda b, t, p: ["build", t, "--out", t, "--capacity", 256], "not written by specrun"),
    "missing bundle": (lambda b, t, p: ["generate", p / "nowhere", "--prompt", "x"], "not a directory"),
    "corrupt manifest": (
        lambda b, t, p: ["generate", corrupt_manifest(b, p / "corrupt"), "--prompt", "x"],
        "not JSON",
    ),
    "edited graph": (lambda b, t, p: ["generate", edited_graph(b, p / "edited"), "--prompt", "x"], "SHA-256"),
    "prompt too long": (lambda b, t, p: ["generate", b.path, "--prompt", LONG], "capacity is 256"),
    "empty prompt": (lambda b, t, p: ["generate", b.path, "--prompt", ""], "empty prompt"),
    "negative temperature": (
        lambda b, t, p: ["generate", b.path, "--prompt", "x", "--temperature", -1],
        "temperature -1",
    ),
    "k = 0": (lambda b, t, p: ["generate", b.path, "--prompt", "x", "--k", 0], "k = 0"),
    "unknown proposer": (
        lambda b, t, p: ["generate", b.path, "--prompt", "x", "--proposer", "oracle"],
        "oracle",
    ),
    "p-min = 2": (lambda b, t, p: ["generate", b.path, "--prompt", "x", "--p-min", 2], "p-min 2.0"),
    "nodes = 0": (lambda b, t, p: ["generate", b.path, "--prompt", "x", "--nodes", 0], "0 tree nodes"),
    "training method": (
        lambda b, t, p: ["distill", t, "--method", "oracle", "--data", p, "--out", p / "out"],
        "method 'oracle'",
    ),
    "unknown option": (lambda b, t, p: ["generate", b.path, "--propmt", "x"], "--propmt"),
    "missing option": (lambda b, t, p: ["generate", b.path], "--prompt"),
    "not a number": (lambda b, t, p: ["generate", b.path, "--prompt", "x", "--k", "two"], "two"),
    "bias without a number": (generating("--logit-bias", "5=much"), "--logit-bias 5=much"),
    "bias of an unknown token": (generating("--logit-bias", "5000=1"), "token id 5000"),
    "penalty": (generating("--frequency-penalty", 3), "frequency_penalty 3.0"),
    "min-tokens": (generating("--min-tokens", 500), "min-tokens 500"),
    "two grammars": (generating("--regex", "a", "--json-schema", PROMPT_SET_FILE), "--json-schema and --regex"),
    "regular expression": (generating("--regex", "[a-"), "regex that cannot be used"),
    "log-probabilities without JSON": (generating("--logprobs", 2), "--logprobs without --json"),
    "too many log-probabilities": (generating("--logprobs", 21, "--json"), "21 log-probabilities"),
    "accept rule": (generating("--accept", "always"), "accept rule 'always'"),
    "tree under the rejection rule": (
        generating("--accept", "rejection", "--temperature", 1, "--proposer", "draft_model_tree"),
        "judges chains",
    ),
    "calibration text": (
        lambda b, t, p: ["build", t, "--out", p / "out", "--precision", "int8", "--text", p / "nowhere"],
        "does not exist",
    ),
    "quality": (
        lambda b, t, p: ["build", t, "--out", p / "out", "--capacity", 256, "--precision", "int4-weights"],
        "loses too much at int4-weights",
    ),
    "GPU": (lambda b, t, p: ["build", t, "--out", p / "out", "--gpu", "sm70"], "GPU 'sm70'"),
    "nothing to verify": (lambda b, t, p: ["verify", b.path, "--max-tokens", 0], "max-tokens 0"),
    "unknown prompt set": (lambda b, t, p: ["bench", b.path, "--set", "poems"], "poems"),
}


@pytest.mark.parametrize("case", BAD_INPUTS)
def test_bad_input_gives_one_line(
    case: str, specrun: Specrun, bundle: Bundle, target_checkpoint: Path, tmp_path: Path
) -> None:
    arguments, reason = BAD_INPUTS[case]
    code, out, err = specrun(*arguments(bundle, target_checkpoint, tmp_path))
    assert code in (exit_codes.EXIT_USAGE, exit_codes.EXIT_REFUSED)
    assert out == ""
    errors = [line for line in err.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1
    assert err.splitlines()[-1] == errors[0]
    assert reason in errors[0]
    assert "Traceback" not in err
    assert not (tmp_path / "out").exists()


def test_installed_command_runs(bundle: Bundle) -> None:
    command = Path(sys.executable).with_name("specrun")
    done = subprocess.run([command, "info", bundle.path], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    done = subprocess.run([command, "info", bundle.path / "no"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (exit_codes.EXIT_REFUSED, "")
    assert done.stderr.startswith("error: ")


def test_difference_in_a_later_repeat_is_reported(bundle: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    """Exact in the warm-up and the first repeat, lossy in the second."""
    from specrun.runner import logits as logits_module
    from specrun.runner.acceptor import accept
    from specrun.runner.runner import Request, Runner
    from specrun.runner.types import Verdict

    finished: list[int] = []

    def lossy_later(proposal, logits, chooser, position):  # type: ignore[no-untyped-def]
        if len(finished) >= 2 and proposal.tokens:
            return Verdict(tuple(range(len(proposal.tokens))), 0)
        return accept(proposal, logits, chooser, position)

    monkeypatch.setattr(logits_module, "accept", lossy_later)
    runner = Runner(bundle)
    request = Request((1, 2, 3), max_tokens=12, proposer="draft_model")
    (result,) = compare_all(runner, [request], repeats=2, progress=lambda: finished.append(1))
    assert not result.identical
    assert not result.lossless


def test_compare_warms_up_both_ways(bundle: Bundle) -> None:
    """Medians over repeats, each plain run beside its speculative one."""
    from specrun.runner.runner import Request, Runner

    calls = []
    requests = [Request((1, 2, 3), max_tokens=4, proposer=proposer) for proposer in ("ngram", "draft_model")]
    results = compare_all(Runner(bundle), requests, repeats=2, progress=lambda: calls.append(1))
    assert len(calls) == 2 * 3
    assert results[0].plain is results[1].plain  # one plain run beside each way to speculate
    assert all(result.plain_seconds > 0 and result.speculative_seconds > 0 for result in results)

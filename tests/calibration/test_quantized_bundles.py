"""Bundles with a quantized target: lossless within themselves, measured, refused where they lost too much."""

import dataclasses
from pathlib import Path

import onnx
import pytest

from specrun.calibration.quality import QualityError
from specrun.engines.errors import RequestError
from specrun.engines.manifest import QUANTIZATION_REPORT, Bundle
from specrun.engines.whole_text import WholeTextModel
from specrun.runner.cli import run
from specrun.runner.compare import compare
from specrun.runner.runner import Request, Runner
from specrun.runner.sampling import Sampling
from specrun.runner.session import feed
from tests import tiny, tiny_heads
from tests.runner.test_runner import PROMPT, SAMPLINGS

PRECISIONS = ["int8", "int8-weights", "int4-weights"]
PROPOSERS = ["ngram", "medusa", "eagle", "eagle3", "early_exit", "draft_model", "ngram+eagle3", "ngram+draft_model"]


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("text") / "text.txt"
    file.write_text("".join(f"the serving number {number} of the nose and the tide\n" for number in range(150)))
    return file


@pytest.fixture(scope="module", params=PRECISIONS)
def quantized(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    deep_checkpoint: Path,
    draft_checkpoint: Path,
    text: Path,
) -> Bundle:
    """A target with one draft of every kind."""
    directory = tmp_path_factory.mktemp("quantized")
    return tiny.make_bundle(
        directory,
        deep_checkpoint,
        tiny_heads.medusa(directory / "medusa"),
        tiny_heads.eagle1(directory / "eagle1"),
        tiny_heads.eagle3(directory / "eagle3"),
        "early-exit:6",
        draft_checkpoint,
        precision=request.param,
        text=text,
        accept_quality_loss=True,
    )


@pytest.fixture(scope="module")
def quantized_runner(quantized: Bundle) -> Runner:
    return Runner(quantized)


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
@pytest.mark.parametrize("k", [1, 3, 8])
@pytest.mark.parametrize("proposer", PROPOSERS)
def test_output_equals_plain_decoding(proposer: str, k: int, sampling: Sampling, quantized_runner: Runner) -> None:
    """Known faults 1, 2 and 22: a rounding that quantization enlarges would show here."""
    request = Request(tuple(PROMPT), max_tokens=60, sampling=sampling, proposer=proposer, k=k)
    result = compare(quantized_runner, request, repeats=1)
    assert result.identical, result.divergence
    assert result.speculative.statistics.proposed > 0


def test_a_perfect_draft_is_accepted(target_checkpoint: Path, text: Path, tmp_path: Path) -> None:
    """Whole blocks are kept, so rows of wide calls stay in the cache that plain decoding fills one by one."""
    twin = Runner(
        tiny.make_bundle(
            tmp_path, target_checkpoint, target_checkpoint, precision="int8", text=text, accept_quality_loss=True
        )
    )
    for sampling in SAMPLINGS:
        request = Request(tuple(PROMPT), max_tokens=60, sampling=sampling, proposer="draft_model", k=4)
        result = compare(twin, request, repeats=1)
        assert result.identical, result.divergence
        statistics = result.speculative.statistics
        assert statistics.accepted_at.total() > 0.8 * statistics.proposed_at.total()


def test_rows_do_not_depend_on_each_other(quantized: Bundle) -> None:
    signature = quantized.manifest.target.signature
    model = WholeTextModel(quantized.model_file("target", "model.onnx"), signature)
    wide = model.logits(PROMPT[:9])
    for width in (2, 3, 5):
        assert (model.logits(PROMPT[:width]) == wide[:width]).all()


@pytest.mark.parametrize("room", [1, 2, 3])
@pytest.mark.parametrize("proposer", ["none", "ngram", "draft_model", "early_exit"])
def test_generation_fills_the_context_exactly(proposer: str, room: int, quantized_runner: Runner) -> None:
    """Known fault 4: a call of one token takes two rows, the last one beyond the capacity."""
    prompt = tuple((PROMPT * 20)[: 256 - room])
    completion = quantized_runner.generate(Request(prompt, max_tokens=1_000, proposer=proposer, k=4))
    assert len(completion.ids) == room or completion.finish_reason == "stop"


def test_trees_are_not_offered(quantized_runner: Runner) -> None:
    assert quantized_runner.bundle.manifest.proposer == "ngram+medusa"
    assert not any(name.endswith("_tree") for name in quantized_runner.proposers)
    with pytest.raises(RequestError, match="got proposer 'eagle3_tree', this bundle has ngram"):
        quantized_runner.generate(Request(tuple(PROMPT), proposer="eagle3_tree"))


def test_weights_are_quantized_everywhere(quantized: Bundle) -> None:
    for model in ("target", "draft", "medusa", "eagle", "eagle3"):
        graph = onnx.load(quantized.model_file(model, "model.onnx"), load_external_data=False).graph
        kinds = [node.op_type for node in graph.node]
        constants = {initializer.name for initializer in graph.initializer}
        left = [node.name for node in graph.node if node.op_type == "MatMul" and node.input[1] in constants]
        assert not left
        assert "MatMulNBits" in kinds or "MatMulIntegerToFloat" in kinds
    early_exit = onnx.load(quantized.model_file("target", "early_exit.onnx"), load_external_data=False)
    shared = [
        entry.value
        for initializer in early_exit.graph.initializer
        for entry in initializer.external_data
        if entry.key == "location"
    ]
    assert shared.count("model.onnx.data") > 0.9 * len(shared)  # on the target's quantized weights


def test_activations_are_quantized_where_the_plan_says_so(quantized: Bundle) -> None:
    graph = onnx.load(quantized.model_file("target", "model.onnx"), load_external_data=False).graph
    kinds = [node.op_type for node in graph.node]
    assert ("MatMulIntegerToFloat" in kinds) == (quantized.manifest.precision == "int8")


def test_what_was_lost_is_in_the_bundle(quantized: Bundle, capsys: pytest.CaptureFixture[str]) -> None:
    quality = quantized.manifest.quality
    assert quality is not None
    assert 0 < quality.agreement <= 1
    assert quality.tokens > 1000
    page = (quantized.path / QUANTIZATION_REPORT).read_text()
    assert f"{100 * quality.agreement:.1f} %" in page
    assert page.count("<rect") == (33 if quantized.manifest.precision == "int8" else 0)  # 8 layers of 4, and the head
    assert run(["info", str(quantized.path)]) == 0
    assert "% of the unquantized model's choices" in capsys.readouterr().out


def test_a_model_that_lost_too_much_is_refused(target_checkpoint: Path, text: Path, tmp_path: Path) -> None:
    """Known faults 24 and 25. Random weights do not survive 4 bits."""
    with pytest.raises(QualityError, match=r"loses too much at int4-weights: .* expected at least 92 %"):
        tiny.make_bundle(tmp_path, target_checkpoint, precision="int4-weights", text=text)
    assert [path.name for path in tmp_path.iterdir()] in ([], ["downloads"])


def test_eight_bit_weights_pass(target_checkpoint: Path, text: Path, tmp_path: Path) -> None:
    bundle = tiny.make_bundle(tmp_path, target_checkpoint, precision="int8-weights", text=text)
    assert bundle.manifest.quality is not None
    assert bundle.manifest.quality.agreement > 0.92
    plain = dataclasses.replace(Request(tuple(PROMPT)), proposer="none")
    assert Runner(bundle).generate(plain).ids


def test_a_call_of_one_token_gives_the_bits_of_a_wider_one(quantized_runner: Runner) -> None:
    """ONNX Runtime's one-token kernels round otherwise; one level of an activation would hang on that."""
    session = quantized_runner._target
    session.truncate(0)
    feed(session, (PROMPT * 10)[:101])
    wide = session.grow(PROMPT[:4], range(-1, 3)).logits.row(0).copy()
    session.truncate(101)
    assert (session.grow(PROMPT[:1], [-1]).logits.row(0) == wide).all()
    session.truncate(0)


def test_calibration_is_deterministic(target_checkpoint: Path, text: Path, tmp_path: Path) -> None:
    options = {"precision": "int8", "text": text, "accept_quality_loss": True}
    first, second = (
        tiny.make_bundle(tmp_path / name, target_checkpoint, **options).manifest.files for name in ("one", "two")
    )
    assert first == second

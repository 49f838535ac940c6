"""Engines for ONNX Runtime's CPU provider: fewer operators than the exported graph, the same numbers, and logits of the
tokens that are asked for."""

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from specrun.engines import ort
from specrun.engines.backend import LEAST_ROWS
from specrun.engines.card import ExportCard
from specrun.engines.compiler import Compiler
from specrun.engines.manifest import ENGINE_FILE, TARGET
from specrun.engines.precision import find_precision
from specrun.engines.signature import LOGIT_ROWS, Signature
from specrun.engines.whole_text import WholeTextModel
from specrun.export.checkpoint import Checkpoint
from specrun.export.graph import export_model
from specrun.runner.call_costs import CallCosts
from specrun.runner.kv_cache import KVCache
from specrun.runner.serving.batch import BatchCache, BatchEngine
from specrun.runner.session import feed
from specrun.runner.session_ort import OrtSession
from specrun.runner.slot_session import SlotCall
from tests import tiny

FAMILIES = tiny.family_configs()
TEXT = [5, 17, 203, 44, 44, 90, 121, 7, 66, 250]
# What is left of a layer's products and rotations, where the pattern is known: attention's three products are one, and
# so are the rotations of queries and keys; gate and up are one.
PRODUCTS = {"llama": 4, "smollm2": 4, "mistral": 4, "qwen2": 4, "qwen3": 4, "phi3": 4, "granite": 4}
# Where attention, rotation and cache update are one operator for calls of one sequence.
ONE_OPERATOR = {"llama", "smollm2", "mistral", "qwen2", "granite", "smollm3"}
ONE_ROTATION = {"llama", "smollm2", "mistral", "qwen2", "granite"}


def compile_for_cpu(graph: Path, engine: Path, precision: str = "fp32") -> None:
    engine.parent.mkdir(exist_ok=True)
    widths, cache = (1, 5, 17, 128), engine.parent / "cache"
    Compiler("ort", find_precision("ort", precision), widths, 1, (), cache).compile(graph, engine, capacity=256)


def kinds(graph: Path) -> Counter[str]:
    return Counter(node.op_type for node in onnx.load(graph, load_external_data=False).graph.node)


def slot_call(slot: int, tokens: list[int], before: int) -> SlotCall:
    """`tokens` after `before` committed ones."""
    count = len(tokens)
    return SlotCall(slot, tokens, np.arange(count), np.tril(np.ones((count, count), bool)), before, 0, None, count)


def logits_of(engine: BatchEngine, tokens: list[int], before: int) -> list[Any]:
    """Of both slots, [tokens, vocabulary] each."""
    outputs = engine.call([slot_call(slot, tokens, before) for slot in range(2)])
    return [np.stack([each.logits.row(index) for index in range(len(tokens))]) for each in outputs]


@pytest.fixture(scope="module", params=FAMILIES)
def exported(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path, Signature]:
    directory = tmp_path_factory.mktemp(request.param)
    checkpoint = tiny.save_checkpoint(directory / "model", tiny.make_model(FAMILIES[request.param]))
    export_model(Checkpoint.open(str(checkpoint), directory), directory / "export", "fp32", None, None)
    return request.param, directory / "export" / ENGINE_FILE, ExportCard.read(directory / "export").model.signature


def test_joined_products_give_the_same_numbers(exported: tuple[str, Path, Signature], tmp_path: Path) -> None:
    family, graph, signature = exported
    ort.compile_graph(graph, tmp_path / "reference.onnx")
    compile_for_cpu(graph, tmp_path / "engine" / "model.onnx")
    wanted = WholeTextModel(tmp_path / "reference.onnx", signature).logits(TEXT)
    got = WholeTextModel(tmp_path / "engine" / "model.onnx", signature).logits(TEXT)
    assert np.abs(got - wanted).max() <= 1e-5 * np.abs(wanted).max()
    before, after = kinds(tmp_path / "reference.onnx"), kinds(tmp_path / "engine" / "model.onnx")
    if family in PRODUCTS:
        assert after["MatMul"] + after["Gemm"] == signature.num_layers * PRODUCTS[family] + 1
    if family in ONE_ROTATION:
        assert after["RotaryEmbedding"] == signature.num_layers
        assert sum(after.values()) < sum(before.values())
    if before["RMSNormalization"] and family not in ("gemma2", "gemma3_text", "olmo2", "cohere"):
        assert after["SkipSimplifiedLayerNormalization"] > signature.num_layers
    files = {file.name for file in (tmp_path / "engine").iterdir()}
    wanted_files = {"model.onnx", "model.onnx.data", "model.onnx.layers.json"}
    if family in ONE_OPERATOR:
        wanted_files |= {"model.one.onnx", "model.one.onnx.layers.json"}  # all its weights are the other's
        assert kinds(tmp_path / "engine" / "model.one.onnx")["GroupQueryAttention"] == signature.num_layers
    assert files == wanted_files


def test_the_engine_for_one_sequence_gives_the_same_numbers(
    exported: tuple[str, Path, Signature], tmp_path: Path
) -> None:
    """In pieces, rolled back, and for a tree; each row has the bits that it has in a call of another width."""
    family, graph, signature = exported
    compile_for_cpu(graph, tmp_path / "engine" / "model.onnx")
    general = tmp_path / "engine" / "general.onnx"
    (tmp_path / "engine" / "model.onnx").rename(general)
    if family not in ONE_OPERATOR:
        assert not (tmp_path / "engine" / "model.one.onnx").exists()
        return
    (tmp_path / "engine" / "model.one.onnx").rename(tmp_path / "engine" / "one.onnx")
    found = []
    for engine in (general, tmp_path / "engine" / "one.onnx"):
        session = OrtSession(engine, signature, KVCache(signature, "float32", 256), "float32", tiny.VOCABULARY_SIZE)
        feed(session, TEXT)
        session.truncate(len(TEXT) - 3)
        feed(session, TEXT[2:])
        committed = session.length
        rows = []
        for parents in ([-1, 0, 1, 2, 3, 4, 5], [-1, -1, 0, 0, 1, 3, 3]):
            wide = session.grow(TEXT[: len(parents)], parents).logits
            rows += [wide.row(index).copy() for index in range(len(parents))]
            session.truncate(committed)
        narrow = session.grow(TEXT[:2], [-1, 0]).logits
        assert all((narrow.row(index) == rows[index]).all() for index in range(2))
        session.grow(TEXT[2:4], [0, 1])  # a tree, level by level
        rows.append(session.grow(TEXT[:2], [2, 3]).logits.row(1).copy())
        found.append(np.array(rows))
    assert np.abs(found[0] - found[1]).max() <= 1e-5 * np.abs(found[0]).max()


@pytest.mark.parametrize("precision", ["fp32", "int8-weights"])
def test_a_single_token_gets_the_same_bits_as_several(
    exported: tuple[str, Path, Signature], precision: str, tmp_path: Path
) -> None:
    """In a batch, where another sequence keeps the products of all tokens from having a single row."""
    _, graph, signature = exported
    engine = tmp_path / "engine" / "model.onnx"
    compile_for_cpu(graph, engine, precision)
    cache = BatchCache(signature, "float32", 256, slots=2, spare_rows=0)
    batch = BatchEngine(engine, signature, cache, "float32", tiny.VOCABULARY_SIZE, None, CallCosts(), TARGET)
    for tokens in (TEXT, TEXT[:1]):
        batch.call([slot_call(slot, tokens, before=0) for slot in range(2)])
        several = np.stack([rows.copy() for rows in logits_of(batch, TEXT[1:6], len(tokens))])
        for count in (1, 2, 4):
            assert (np.stack(logits_of(batch, TEXT[1 : 1 + count], len(tokens))) == several[:, :count]).all()


def test_a_single_token_of_one_sequence_gets_the_same_bits_as_several(
    exported: tuple[str, Path, Signature], tmp_path: Path
) -> None:
    """In quantized engines, up to the last row of the cache."""
    _, graph, signature = exported
    engine = tmp_path / "engine" / "model.onnx"
    compile_for_cpu(graph, engine, "int8-weights")
    cache = KVCache(signature, "float32", len(TEXT), spare_rows=LEAST_ROWS - 1)
    session = OrtSession(engine, signature, cache, "float32", tiny.VOCABULARY_SIZE, least_rows=LEAST_ROWS)
    logits = session.grow(TEXT, range(-1, len(TEXT) - 1)).logits
    several = [logits.row(index).copy() for index in range(len(TEXT))]
    session.truncate(0)
    for token, wanted in zip(TEXT, several, strict=True):
        assert (session.grow([token], [-1]).logits.row(0) == wanted).all()
        session.keep([0])


@pytest.mark.parametrize("exported", ["smollm2", "gemma2", "gpt2"], indirect=True)
@pytest.mark.parametrize("precision", ["fp32", "int8-weights"])
def test_logits_of_the_tokens_that_are_wanted(
    exported: tuple[str, Path, Signature], precision: str, tmp_path: Path
) -> None:
    """With a tied head, capped logits, and other normalizations."""
    _, graph, signature = exported
    engine = tmp_path / "engine" / "model.onnx"
    compile_for_cpu(graph, engine, precision)
    assert LOGIT_ROWS in {value.name for value in ort.load_engine(engine).get_inputs()}
    session = OrtSession(engine, signature, KVCache(signature, "float32", 256), "float32", tiny.VOCABULARY_SIZE)
    chain: Any = range(-1, len(TEXT) - 1)
    everything = session.grow(TEXT, chain).logits
    rows = [everything.row(index).copy() for index in range(len(TEXT))]
    for wanted in (len(TEXT), 3, 2, 1, 0):
        session.truncate(0)
        logits = session.grow(TEXT, chain, wanted=wanted).logits
        assert len(logits) == wanted
        for index, row in enumerate(rows[len(TEXT) - wanted :]):
            # A product with one row rounds otherwise.
            assert np.allclose(logits.row(index), row, rtol=0, atol=0 if wanted > 1 else 2e-2 * np.abs(row).max())
    session.truncate(0)
    assert len(feed(session, TEXT[:-1], wanted=0).logits) == 0
    last = feed(session, TEXT[-1:]).logits.row(0)
    assert np.allclose(last, rows[-1], rtol=0, atol=2e-2 * np.abs(last).max())

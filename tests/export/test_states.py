"""Hidden states inside an exported graph: taps and early exits are made from them."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
import torch

from specrun.engines.exit_choice import EarlyExitError, parse_early_exit, skipped_layers
from specrun.engines.signature import HIDDEN_STATES, LOGITS, Signature, past
from specrun.export.contract import decoder_layers, recorded_states
from specrun.export.early_exit import skip_layers
from specrun.export.taps import add_taps
from specrun.export.trace import save, signature_of, trace
from specrun.export.validate import StateValuesError, open_session, validate_states
from tests import tiny

FAMILIES = {
    name: config for name, config in tiny.family_configs().items() if name in ("llama", "gemma2", "gpt2", "opt")
}
IDS = np.arange(1, 8)[None]


def feeds(signature: Signature) -> dict[str, Any]:
    shape = (1, signature.kv_heads, 8, signature.head_dim)
    return {
        "input_ids": IDS,
        "position_ids": np.arange(7)[None],
        "cache_length": np.zeros(1, np.int64),
        "tree_mask": np.tri(7, dtype=bool)[None],
        **{past(*part): np.zeros(shape, np.float32) for part in signature.cache_parts()},
    }


@pytest.mark.parametrize("family", FAMILIES)
def test_taps_and_early_exit_equal_pytorch(family: str, tmp_path: Path) -> None:
    """Known fault 16."""
    model = tiny.make_model(FAMILIES[family])
    signature = signature_of(model)
    path = tmp_path / "model.onnx"
    save(trace(model, signature), path)
    with torch.no_grad(), recorded_states(model) as states:
        model(input_ids=torch.from_numpy(IDS), use_cache=False)

    tapped = replace(signature, taps=(1, 2))
    graph = ir.load(path)
    add_taps(graph, tapped)
    ir.save(graph, tmp_path / "tapped.onnx")
    (hidden,) = open_session(tmp_path / "tapped.onnx").run([HIDDEN_STATES], feeds(tapped))
    wanted = torch.cat([states[1], states[-1]], -1).numpy()  # the last tap has passed the final norm
    np.testing.assert_allclose(hidden, wanted, rtol=1e-4, atol=1e-4 * np.abs(wanted).max())

    exit_signature = replace(signature, skipped=(1,))
    graph = ir.load(path)
    skip_layers(graph, exit_signature)
    ir.save(graph, tmp_path / "exit.onnx")
    session = open_session(tmp_path / "exit.onnx")
    assert [value.name for value in session.get_inputs()] == list(exit_signature.inputs())
    (logits,) = session.run([LOGITS], feeds(exit_signature))
    # A layer that hands on what it is given: its outputs are replaced, whatever the family calls its parts.
    second = decoder_layers(model)[1]
    second.register_forward_hook(
        lambda module, arguments, output: arguments[0] if isinstance(output, torch.Tensor) else (arguments[0],)
    )
    with torch.no_grad():
        wanted = model(input_ids=torch.from_numpy(IDS), use_cache=False).logits.numpy()
    np.testing.assert_allclose(logits, wanted, rtol=1e-4, atol=1e-4 * np.abs(wanted).max())


def test_swapped_states_are_noticed(tmp_path: Path) -> None:
    """The check of every export can fail."""
    model = tiny.make_model(tiny.llama(num_hidden_layers=3))
    signature = signature_of(model)
    graph = trace(model, signature)
    values = {value.name: value for node in graph.graph for value in node.outputs}
    values["state.1"].name, values["state.2"].name = "state.2", "state.1"
    save(graph, tmp_path / "model.onnx")
    with pytest.raises(StateValuesError, match="state 1"):
        validate_states(tmp_path / "model.onnx", model, signature)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["model.onnx", "model.onnx.data"]


@pytest.mark.parametrize(
    ("option", "parsed"),
    [
        ("early-exit", 0),
        ("early-exit:8", 8),
        ("skip:3", (3,)),
        ("skip:7,3-5", (3, 4, 5, 7)),
        ("some/model", None),
        ("skip", None),
    ],
)
def test_early_exit_option(option: str, parsed: object) -> None:
    assert parse_early_exit(option) == parsed


@pytest.mark.parametrize("option", ["early-exit:x", "early-exit:-1", "skip:a", "skip:3-"])
def test_senseless_early_exit_is_refused(option: str) -> None:
    with pytest.raises(EarlyExitError, match="expected"):
        parse_early_exit(option)


@pytest.mark.parametrize("asked", [8, 9, (8,), tuple(range(8)), ()])
def test_early_exit_must_leave_out_some_layers_and_keep_some(asked: object) -> None:
    with pytest.raises(EarlyExitError, match="layers 0 to 7"):
        skipped_layers(asked, 8)  # type: ignore[arg-type]

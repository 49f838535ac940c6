"""A real Triton server runs the repository: HTTP and gRPC, streams side by side, cancellation, bad input, shutdown."""

import asyncio
import dataclasses
import json
import os
import queue
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import tritonclient.grpc as grpc
import tritonclient.grpc.aio as grpc_aio
from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2

from specrun.engines.backend import ORT_CUDA
from specrun.engines.manifest import Bundle
from specrun.engines.ort import load_engine
from specrun.runner.cli import run
from specrun.runner.commands.exit_codes import EXIT_REFUSED
from specrun.runner.runner import Completion, Request, Runner
from specrun.runner.sampling import Sampling
from specrun.runner.serving.app import Limits, make_app
from specrun.runner.serving.service import Service
from specrun.runner.triton.repository import MODEL, RepositoryOptions, write_repository
from specrun.runner.triton.tensors import INPUTS
from tests.serving.conftest import running
from tests.serving.triton_server import ENVIRONMENT, Triton, packages

PROMPT = "the sun rose over the sea and the sun"
KINDS = {"STRING": ("BYTES", object), "INT32": ("INT32", np.int32), "UINT64": ("UINT64", np.uint64)}
KINDS |= {"FP32": ("FP32", np.float32), "BOOL": ("BOOL", np.bool_)}
SECONDS = 60.0
SLOTS = 6


@pytest.fixture(scope="module")
def bundle(served_bundle: Bundle) -> Bundle:
    """A tiny one, or the one that SPECRUN_BUNDLE names."""
    named = os.environ.get("SPECRUN_BUNDLE")
    return Bundle.open(Path(named)) if named else served_bundle


@pytest.fixture(scope="module")
def solo(bundle: Bundle) -> Runner:
    return Runner(bundle)


@pytest.fixture(scope="module")
def repository(bundle: Bundle, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("triton") / "repository"
    write_repository(bundle, out, RepositoryOptions(slots=SLOTS, queue=32))
    return out


@pytest.fixture(scope="module")
def start_triton(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[Path], Triton]]:
    if not packages().joinpath("pytriton").is_dir():
        pytest.fail(f"no Triton in {ENVIRONMENT}: run `make test`, which installs it there")
    started: list[Triton] = []

    def start(repository: Path) -> Triton:
        for attempt in range(3):  # another process may take a port between the choice and the bind
            started.append(Triton(repository, tmp_path_factory.mktemp("server")))
            try:
                return started[-1].wait_ready()
            except RuntimeError as error:
                if attempt == 2 or "already in use" not in str(error):
                    raise
        raise AssertionError

    yield start
    for triton in started:
        triton.stop()


@pytest.fixture(scope="module")
def triton(start_triton: Callable[[Path], Triton], repository: Path) -> Triton:
    return start_triton(repository)


def plain(solo: Runner, prompt: str = PROMPT, temperature: float = 0.0, seed: int = 0, count: int = 24) -> Completion:
    request = Request(solo.encode(prompt), max_tokens=count, sampling=Sampling(temperature, seed=seed))
    return solo.generate(request.plain())


def inputs(**values: Any) -> list[grpc.InferInput]:
    made = []
    for tensor in INPUTS:
        if tensor.name not in values:
            continue
        given = values[tensor.name]
        given = list(given) if isinstance(given, (list, tuple)) else [given]
        name, kind = KINDS[tensor.kind]
        given = [each.encode() if isinstance(each, str) else each for each in given]
        made.append(grpc.InferInput(tensor.name, [len(given)], name))
        made[-1].set_data_from_numpy(np.array(given, kind))
    return made


def is_final(result: Any) -> bool:
    return bool(result.get_response().parameters["triton_final_response"].bool_param)


def wait_until(happened: Callable[[], bool]) -> None:
    end = time.monotonic() + SECONDS
    while not happened():
        assert time.monotonic() < end, "it did not happen"


def ids(piece: dict[str, Any]) -> list[int]:
    found = piece["output_ids"]
    return found if isinstance(found, list) else [found]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_generate(temperature: float, triton: Triton, solo: Runner) -> None:
    wanted = plain(solo, temperature=temperature, seed=5)
    body = {"text_input": PROMPT, "max_tokens": 24, "temperature": temperature, "random_seed": 5}
    status, (reply,) = triton.generate(body)
    assert status == 200
    assert (reply["text_output"], tuple(ids(reply))) == (wanted.text, wanted.ids)
    assert reply["finish_reason"] == wanted.finish_reason
    assert json.loads(reply["statistics"])["tokens"] == len(wanted.ids)
    status, pieces = triton.generate(body | {"stream": True}, stream=True)
    assert status == 200
    assert "".join(piece["text_output"] for piece in pieces) == wanted.text
    assert [ids(piece) for piece in pieces] == [[token] for token in wanted.ids]
    assert [piece["finish_reason"] for piece in pieces[:-1]] == [""] * (len(pieces) - 1)


def test_token_ids_go_in_as_well(triton: Triton, solo: Runner) -> None:
    wanted = plain(solo)
    body = {"input_ids": list(solo.encode(PROMPT)), "max_tokens": 24, "temperature": 0.0}
    status, (reply,) = triton.generate(body)
    assert (status, tuple(ids(reply))) == (200, wanted.ids)


def test_grpc_streaming(triton: Triton, solo: Runner) -> None:
    wanted, answers = plain(solo), queue.Queue[Any]()
    with grpc.InferenceServerClient(triton.grpc) as client:
        client.start_stream(lambda result, error: answers.put(error or result))
        client.async_stream_infer(
            MODEL,
            inputs(text_input=PROMPT, max_tokens=24, temperature=0.0, stream=True),
            enable_empty_final_response=True,
        )
        got: list[int] = []
        while True:
            result = answers.get(timeout=SECONDS)
            assert not isinstance(result, Exception), result
            if (found := result.as_numpy("output_ids")) is not None:
                got += found.tolist()
            if is_final(result):
                break
        client.stop_stream()
    assert tuple(got) == wanted.ids


def test_sixteen_streams_side_by_side(triton: Triton, solo: Runner) -> None:
    """Lengths, seeds and temperatures differ; each is what it is alone."""

    async def one(client: Any, index: int) -> list[int]:
        async def ask() -> AsyncIterator[dict[str, Any]]:
            values = inputs(
                text_input=f"{PROMPT} {index}",
                max_tokens=10 + 2 * index,
                temperature=float(index % 2),
                random_seed=index,
                stream=True,
            )
            yield {"model_name": MODEL, "inputs": values}

        got: list[int] = []
        async for result, error in client.stream_infer(ask()):
            assert error is None, error
            if (found := result.as_numpy("output_ids")) is not None:
                got += found.tolist()
            if is_final(result):
                break
        return got

    async def all_of_them() -> list[list[int]]:
        async with grpc_aio.InferenceServerClient(triton.grpc) as client:
            return await asyncio.gather(*(one(client, index) for index in range(16)))

    for index, got in enumerate(asyncio.run(all_of_them())):
        wanted = plain(solo, f"{PROMPT} {index}", float(index % 2), index, 10 + 2 * index)
        assert tuple(got) == wanted.ids, index


LONG = {"max_tokens": 300, "min_length": 300, "temperature": 0.0, "stream": True, "text_input": PROMPT}


def test_a_grpc_client_cancels_its_stream(triton: Triton) -> None:
    before, answers = triton.metric("cancelled_total"), queue.Queue[Any]()
    client = grpc.InferenceServerClient(triton.grpc)
    client.start_stream(lambda result, error: answers.put(error or result))
    client.async_stream_infer(MODEL, inputs(**LONG))
    assert answers.get(timeout=SECONDS) is not None
    client.stop_stream(cancel_requests=True)
    client.close()
    wait_until(lambda: triton.metric("cancelled_total") == before + 1)


def test_an_aio_client_cancels_its_stream(triton: Triton) -> None:
    before = triton.metric("cancelled_total")

    async def start_and_cancel() -> None:
        async with grpc_aio.InferenceServerClient(triton.grpc) as client:

            async def ask() -> AsyncIterator[dict[str, Any]]:
                yield {"model_name": MODEL, "inputs": inputs(**LONG)}

            stream = client.stream_infer(ask())
            async for _ in stream:
                stream.cancel()
                break

    asyncio.run(start_and_cancel())
    wait_until(lambda: triton.metric("cancelled_total") == before + 1)


def test_an_http_client_hangs_up(triton: Triton) -> None:
    before = triton.metric("cancelled_total")
    url = f"http://{triton.http}/v2/models/{MODEL}/generate_stream"
    with httpx.Client(trust_env=False, timeout=SECONDS) as client, client.stream("POST", url, json=LONG) as reply:
        assert next(reply.iter_lines()).startswith("data: ")
    wait_until(lambda: triton.metric("cancelled_total") == before + 1)
    assert triton.generate({"text_input": "a", "max_tokens": 1})[0] == 200


@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        ({"text_input": PROMPT, "max_tokens": 0}, 400, "got max-tokens 0"),
        ({"text_input": PROMPT, "temperature": -1.0}, 400, "temperature"),
        ({"text_input": PROMPT, "top_p": 2.0}, 400, "top"),
        ({"text_input": ""}, 400, "got an empty prompt"),
        ({"text_input": PROMPT, "input_ids": [1, 2]}, 400, "got both text_input and input_ids, or neither"),
        ({"max_tokens": 3}, 400, "got both text_input and input_ids, or neither"),
        ({"text_input": "sun " * 9000}, 400, "the bundle's capacity is"),
        ({"text_input": PROMPT, "best_of": 3}, 400, "got the parameter 'best_of', which is not supported"),
        ({"text_input": PROMPT, "proposer": "oracle"}, 400, "got proposer 'oracle'"),
        ({"input_ids": [1, -5]}, 400, "token ids outside"),
        ({"text_input": PROMPT, "json_schema": "no schema"}, 400, ""),
        ({"text_input": PROMPT, "max_tokens": "many"}, 400, ""),
    ],
)
def test_bad_input_is_refused(body: dict[str, Any], status: int, message: str, triton: Triton) -> None:
    got, (reply,) = triton.generate(body)
    assert got >= status
    assert message in reply["error"]
    assert "Traceback" not in reply["error"]
    assert triton.generate({"text_input": "a", "max_tokens": 1})[0] == 200


@pytest.mark.parametrize("text", ["🙂🙂", "안녕하세요", "🦙é"])
def test_characters_that_several_tokens_make_up_arrive_whole(text: str, triton: Triton, solo: Runner) -> None:
    tokens = list(solo.encode_text(text))
    bias_schema = json.dumps({"const": text})
    status, pieces = triton.generate(
        {"text_input": PROMPT, "json_schema": bias_schema, "max_tokens": 60, "temperature": 0.0, "stream": True},
        stream=True,
    )
    assert status == 200
    assert len(tokens) > 1
    assert "".join(piece["text_output"] for piece in pieces) == json.dumps(text, ensure_ascii=False)
    assert not any("\N{REPLACEMENT CHARACTER}" in piece["text_output"] for piece in pieces)


def test_the_same_seed_gives_the_same_tokens_as_specrun_serve(triton: Triton, bundle: Bundle) -> None:
    sampling = {"temperature": 0.9, "top_p": 0.95, "top_k": 40, "frequency_penalty": 0.3}
    body = {"model": bundle.manifest.target.name, "prompt": PROMPT, "max_tokens": 30, "seed": 11, **sampling}
    app = make_app(Service.open(bundle.path, 2, 4), Limits(), None, drain_seconds=5)
    with running(app) as url:
        wanted = httpx.post(f"{url}/v1/completions", json=body, timeout=SECONDS).json()["choices"][0]["text"]
    status, (reply,) = triton.generate({"text_input": PROMPT, "max_tokens": 30, "random_seed": 11, **sampling})
    assert (status, reply["text_output"]) == (200, wanted)


def test_metrics(triton: Triton) -> None:
    before = {name: triton.metric(f"{name}_total") for name in ("requests", "generation_tokens", "prompt_tokens")}
    status, (reply,) = triton.generate({"text_input": PROMPT, "max_tokens": 9, "temperature": 0.0})
    assert status == 200
    assert triton.metric("requests_total") == before["requests"] + 1
    assert triton.metric("generation_tokens_total") == before["generation_tokens"] + len(ids(reply))
    assert triton.metric("prompt_tokens_total") > before["prompt_tokens"]


def test_the_gauges_say_what_goes_on(triton: Triton) -> None:
    url = f"http://{triton.http}/v2/models/{MODEL}/generate_stream"
    with httpx.Client(trust_env=False, timeout=SECONDS) as client, client.stream("POST", url, json=LONG) as reply:
        assert next(reply.iter_lines()).startswith("data: ")
        wait_until(lambda: triton.metric("num_requests_running") == 1)
    wait_until(lambda: triton.metric("num_requests_running") == 0)


def test_the_check_and_the_probe_of_a_running_server(triton: Triton, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["triton", "--check", triton.http]) == 0
    said = capsys.readouterr().out
    assert said.count("ok  ") == len(said.splitlines()) == 16
    assert run(["triton", "--probe", f"http://{triton.http}"]) == 0
    assert run(["triton", "--probe", "http://127.0.0.1:9"]) == EXIT_REFUSED


def test_sigterm_unloads_and_exits_with_zero(start_triton: Callable[[Path], Triton], repository: Path) -> None:
    own = start_triton(repository)
    assert own.generate({"text_input": PROMPT, "max_tokens": 2})[0] == 200
    assert own.stop() == 0
    assert f"successfully unloaded '{MODEL}'" in own.log.read_text()


def test_a_bundle_that_is_not_there_is_said(
    start_triton: Callable[[Path], Triton], bundle: Bundle, tmp_path: Path
) -> None:
    out = tmp_path / "repository"
    assert run(["triton", str(bundle.path), str(out)]) == 0
    config = out / MODEL / "configs" / "cpu.pbtxt"
    config.write_text(config.read_text().replace(str(bundle.path.resolve()), "/nowhere"))
    with pytest.raises(RuntimeError, match=r"(?s)exit code 1.*/nowhere"):
        start_triton(out)


def test_when_all_is_full_clients_are_told(
    start_triton: Callable[[Path], Triton], bundle: Bundle, tmp_path: Path
) -> None:
    write_repository(bundle, tmp_path / "repository", RepositoryOptions(slots=1, queue=0))
    own = start_triton(tmp_path / "repository")
    url = f"http://{own.http}/v2/models/{MODEL}/generate_stream"
    for _ in range(10):  # a busy machine may have written the long answer before the other one asks
        with httpx.Client(trust_env=False, timeout=SECONDS) as client, client.stream("POST", url, json=LONG) as reply:
            lines = reply.iter_lines()
            assert next(lines).startswith("data: ")
            status, (answer,) = own.generate({"text_input": PROMPT, "max_tokens": 1})
            assert next(line for line in lines if line).startswith("data: ")
        if status != 200:
            break
    # Over HTTP Triton knows no other status for the first response of a decoupled model.
    assert (status, "all slots are busy" in answer.get("error", "")) == (400, True)


def test_a_dead_stub_is_noticed_by_the_probe(start_triton: Callable[[Path], Triton], repository: Path) -> None:
    """Triton itself goes on to call the model ready."""
    own = start_triton(repository)
    assert run(["triton", "--probe", own.http]) == 0
    own.kill_stub()
    assert run(["triton", "--probe", own.http]) == EXIT_REFUSED


def parsed(file: Path) -> Any:
    """A config.pbtxt by Triton's own schema, which refuses unknown fields."""
    return text_format.Parse(file.read_text(), model_config_pb2.ModelConfig())


def test_the_repository_for_gpus(bundle: Bundle, tmp_path: Path) -> None:
    """An instance of the bundle on each device; on a machine without one the configuration for the CPU is there."""
    manifest = dataclasses.replace(bundle.manifest, backend=ORT_CUDA, gpus=("sm89",))
    out = tmp_path / "repository"
    names = write_repository(
        dataclasses.replace(bundle, manifest=manifest), out, RepositoryOptions(gpus=(0, 2), prefix_cache=7)
    )
    assert names == [MODEL]
    config = parsed(out / MODEL / "config.pbtxt")
    (group,) = config.instance_group
    assert (group.kind, list(group.gpus)) == (group.KIND_GPU, [0, 2])
    assert config.model_transaction_policy.decoupled
    assert config.parameters["prefix_cache"].string_value == "7"
    assert [each.name for each in config.input] == [tensor.name for tensor in INPUTS]
    assert all(each.optional for each in config.input)
    assert "slots" not in config.parameters, "as many as the engines serve"
    (group,) = parsed(out / MODEL / "configs" / "cpu.pbtxt").instance_group
    assert group.kind == group.KIND_CPU


def test_engines_as_plain_models(served_bundle: Bundle, tmp_path: Path) -> None:
    """For those who make the rounds themselves: caches go in and out. What Triton is told is what the engine has."""
    out = tmp_path / "repository"
    assert run(["triton", str(served_bundle.path), str(out), "--engines", "--copy"]) == 0
    names = {folder.name for folder in out.iterdir()}
    assert names == {MODEL, *(f"{MODEL}_{name}" for name in ("target", "draft", "eagle3"))}
    assert Bundle.open(out / MODEL / "1" / "bundle").manifest == served_bundle.manifest
    for name in sorted(names - {MODEL}):
        config = parsed(out / name / "config.pbtxt")
        engine = load_engine(out / name / "1" / "model.onnx")
        for told, there in ((config.input, engine.get_inputs()), (config.output, engine.get_outputs())):
            wanted = {each.name: [axis if isinstance(axis, int) else -1 for axis in each.shape] for each in there}
            assert {each.name: list(each.dims) for each in told} == wanted, name
    assert run(["triton", str(served_bundle.path), str(out)]) == EXIT_REFUSED  # it is there already
    assert (
        run(["triton", str(served_bundle.path), str(tmp_path / "other"), "--device", "1"]) == EXIT_REFUSED
    )  # on a CPU
    assert not (tmp_path / "other").exists()

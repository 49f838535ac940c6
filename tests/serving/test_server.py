"""`specrun serve` over HTTP: what the openai client sees, side by side requests, and what is refused."""

import asyncio
import concurrent.futures
import json
import threading
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from specrun.engines.manifest import Bundle
from specrun.runner.cli import run
from specrun.runner.commands.exit_codes import EXIT_REFUSED
from specrun.runner.filters import LogitsError
from specrun.runner.runner import Request, Runner
from specrun.runner.sampling import Sampling
from specrun.runner.serving.app import Handover, Limits, make_app
from specrun.runner.serving.service import Service
from specrun.runner.serving.trace_file import TraceFile
from tests.serving.conftest import API_KEY, MAX_TOKENS, Server, running

MESSAGES: list[Any] = [{"role": "user", "content": "the sun rose over the sea and the sun"}]


def solo_text(solo: Runner, **settings: Any) -> str:
    prompt = solo.encode_messages(MESSAGES)
    return solo.generate(Request(prompt, **settings).plain()).text


def test_a_receiver_that_fails_ends_its_own_request_only(server: Server, solo: Runner) -> None:
    service, ended = server.service, threading.Event()
    request = Request(solo.encode_messages(MESSAGES), max_tokens=60)
    got: list[Any] = []

    def fail(event: Any) -> None:
        raise OSError("the pipe is broken")

    def take(event: Any) -> None:
        got.append(event)
        if event.finish_reason is not None:
            ended.set()

    broken, good = service.submit(request, fail, 60), service.submit(request, take, 60)
    assert ended.wait(60)
    assert tuple(event.token.id for event in got) == solo.generate(request.plain()).ids
    assert broken.ended
    assert good.statistics.emitted > broken.statistics.emitted
    assert service.alive


def test_all_that_is_handed_over_arrives_in_order_however_rarely_the_loop_is_woken() -> None:
    async def take(count: int) -> tuple[list[list[int]], int]:
        handover, queues = Handover(), [asyncio.Queue[int]() for _ in range(3)]
        loop, woken = asyncio.get_running_loop(), 0
        wake = loop.call_soon_threadsafe

        def counted(*call: Any) -> Any:
            nonlocal woken
            woken += 1
            return wake(*call)

        loop.call_soon_threadsafe = counted  # type: ignore[assignment, method-assign]  # to count
        for number in range(2):  # before the loop has a chance to look
            for queue in queues:
                handover.put(queue, number)
        at_once = woken
        rest = [(queue, number) for number in range(2, count) for queue in queues]

        def put_rest() -> None:
            for queue, number in rest:
                handover.put(queue, number)

        thread = threading.Thread(target=put_rest)
        thread.start()
        got = [[await queue.get() for _ in range(count)] for queue in queues]
        thread.join()
        return got, at_once

    got, woken = asyncio.run(asyncio.wait_for(take(2000), 60))
    assert got == [list(range(2000))] * 3
    assert woken == 1


def test_the_openai_client_gets_what_plain_decoding_writes(server: Server, solo: Runner) -> None:
    for temperature, seed in ((0.0, 1), (1.0, 7)):
        got = server.client().chat.completions.create(
            model=server.model, messages=MESSAGES, temperature=temperature, seed=seed, max_tokens=40
        )
        wanted = solo_text(solo, max_tokens=40, sampling=Sampling(temperature, seed=seed))
        assert got.choices[0].message.content == wanted
        assert got.choices[0].finish_reason in ("stop", "length")
        assert got.usage is not None
        assert got.usage.prompt_tokens == len(solo.encode_messages(MESSAGES))
        assert got.usage.total_tokens == got.usage.prompt_tokens + got.usage.completion_tokens


def test_a_stream_is_the_whole_in_pieces(server: Server, solo: Runner) -> None:
    stream = server.client().chat.completions.create(
        model=server.model,
        messages=MESSAGES,
        temperature=1,
        seed=3,
        max_tokens=30,
        stream=True,
        stream_options={"include_usage": True},
    )
    pieces = list(stream)
    assert pieces[0].choices[0].delta.role == "assistant"
    text = "".join(piece.choices[0].delta.content or "" for piece in pieces if piece.choices)
    assert text == solo_text(solo, max_tokens=30, sampling=Sampling(1.0, seed=3))
    assert pieces[-1].usage is not None
    assert pieces[-1].usage.completion_tokens == sum(bool(piece.choices) for piece in pieces) - 1
    assert [piece.choices[0].finish_reason for piece in pieces if piece.choices][-1] is not None


def test_text_completions(server: Server, solo: Runner) -> None:
    got = server.client().completions.create(model=server.model, prompt="the sun", temperature=0, logprobs=2)
    wanted = solo.generate(Request(solo.encode("the sun"), max_tokens=16, logprobs=2).plain())
    assert got.choices[0].text == wanted.text
    assert got.choices[0].logprobs is not None
    assert wanted.logprobs is not None
    assert got.choices[0].logprobs.token_logprobs == pytest.approx([each.logprob for each in wanted.logprobs], abs=1e-4)
    by_ids = server.client().completions.create(model=server.model, prompt=list(solo.encode("the sun")), temperature=0)
    assert by_ids.choices[0].text == wanted.text


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("proposer", [None, "none", "ngram", "draft_model_tree", "eagle3", "medusa_tree", "early_exit"])
def test_requests_side_by_side_write_what_each_writes_alone(
    proposer: str | None, temperature: float, server: Server, solo: Runner
) -> None:
    """Lengths, prompts and seeds differ; they join and leave while others run."""

    def body(index: int) -> dict[str, Any]:
        words = " ".join(["the sun rose", "and the tide", "over the sea"][index % 3] for _ in range(1 + 2 * index))
        extra: dict[str, Any] = {} if proposer is None else {"proposer": proposer}
        return {
            "model": server.model,
            "prompt": words,
            "max_tokens": 10 + 7 * index,
            "temperature": temperature,
            "seed": index,
            **extra,
        }

    def ask(index: int) -> Any:
        with server.http() as client:
            reply = client.post("/v1/completions", json=body(index))
            assert reply.status_code == 200, reply.text
            return reply.json()

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        got = list(pool.map(ask, range(8)))
    for index, reply in enumerate(got):
        asked = body(index)
        request = Request(
            solo.encode(asked["prompt"]),
            max_tokens=asked["max_tokens"],
            sampling=Sampling(temperature, seed=index),
        )
        wanted = solo.generate(request.plain())
        assert reply["choices"][0]["text"] == wanted.text, index
        assert reply["usage"]["completion_tokens"] == len(wanted.ids)


def test_choices_have_seeds_of_their_own(server: Server, solo: Runner) -> None:
    got = server.client().chat.completions.create(
        model=server.model, messages=MESSAGES, temperature=1, seed=5, n=3, max_tokens=12
    )
    texts = [choice.message.content for choice in got.choices]
    assert texts == [solo_text(solo, max_tokens=12, sampling=Sampling(1.0, seed=5 + index)) for index in range(3)]


def test_a_good_prediction_is_accepted_and_counted(server: Server, solo: Runner) -> None:
    written = solo_text(solo, max_tokens=40, sampling=Sampling(0.0, seed=0))
    got = server.client().chat.completions.create(
        model=server.model,
        messages=MESSAGES,
        temperature=0,
        max_tokens=40,
        prediction={"type": "content", "content": written},
        extra_body={"proposer": "ngram", "k": 8},
    )
    assert got.choices[0].message.content == written
    assert got.usage is not None
    assert got.usage.completion_tokens_details is not None
    accepted = got.usage.completion_tokens_details.accepted_prediction_tokens
    rejected = got.usage.completion_tokens_details.rejected_prediction_tokens
    assert accepted is not None
    assert accepted >= 8
    assert accepted + (rejected or 0) == len(solo.encode_text(written))


def test_output_follows_a_schema(server: Server) -> None:
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}
    got = server.client().chat.completions.create(
        model=server.model,
        messages=MESSAGES,
        max_tokens=60,
        seed=1,
        response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": schema}},
    )
    if got.choices[0].finish_reason == "stop":
        assert json.loads(got.choices[0].message.content or "")["a"] in (1, 2)


def test_log_probabilities_of_chat(server: Server) -> None:
    got = server.client().chat.completions.create(
        model=server.model, messages=MESSAGES, temperature=0, max_tokens=5, logprobs=True, top_logprobs=3
    )
    assert got.choices[0].logprobs is not None
    content = got.choices[0].logprobs.content
    assert content is not None
    assert [len(each.top_logprobs) for each in content] == [3] * 5
    assert all(each.logprob == each.top_logprobs[0].logprob for each in content)  # greedy


def test_stop_strings_and_ids_end_the_text(server: Server, solo: Runner) -> None:
    text = solo_text(solo, max_tokens=60)
    stop = text[10:13]
    got = server.client().chat.completions.create(
        model=server.model, messages=MESSAGES, temperature=0, max_tokens=60, stop=[stop]
    )
    assert got.choices[0].message.content == text[: text.index(stop)]
    assert got.choices[0].finish_reason == "stop"
    first = solo.generate(Request(solo.encode_messages(MESSAGES), max_tokens=1).plain()).ids[0]
    got = server.client().chat.completions.create(
        model=server.model, messages=MESSAGES, temperature=0, max_tokens=60, extra_body={"stop_token_ids": [first]}
    )
    assert got.usage is not None
    assert (got.choices[0].finish_reason, got.usage.completion_tokens) == ("stop", 1)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"tools": []}, "tools: unknown field, which is not supported"),
        ({"functions": []}, "functions: unknown field"),
        ({"temperature": -1}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"n": 5}, "got n = 5, expected at most 4"),
        ({"max_tokens": MAX_TOKENS + 1}, "expected at most 300"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "role"),
        ({"logit_bias": {"x": 1}}, "expected a token id"),
        ({"stop_token_ids": [123456], "min_tokens": 2}, "got stop token id 123456, expected 0 to 299"),
        ({"messages": [{"role": "user", "content": "x", "name": "me"}]}, "unknown field"),
        ({"logit_bias": {"99999999": 1}}, "99999999"),
        ({"stream_options": {"include_usage": True}}, "stream_options without stream"),
        ({"proposer": "oracle"}, "got proposer 'oracle'"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": 5}}}}, ""),
        ({"messages": [{"role": "user", "content": "sun " * 1000}]}, "the bundle's capacity is 384"),
        ({"prediction": {"type": "content", "content": "x"}, "proposer": "eagle3"}, "looks nothing up"),
    ],
    ids=str,
)
def test_bad_requests_are_refused_with_the_reason(change: dict[str, Any], reason: str, server: Server) -> None:
    body = {"model": server.model, "messages": MESSAGES, "max_tokens": 4, **change}
    with server.http() as client:
        reply = client.post("/v1/chat/completions", json=body)
    error = reply.json()["error"]
    assert reply.status_code == 400, error
    assert reason in error["message"]
    assert error["type"] == "invalid_request_error"


def test_other_errors_are_well_formed(server: Server) -> None:
    with server.http() as client:
        assert (
            client.post("/v1/chat/completions", content=b"{", headers={"content-type": "application/json"}).status_code
            == 400
        )
        assert client.post("/v1/chat/completions", json={"model": "gpt-9", "messages": MESSAGES}).status_code == 404
        assert client.get("/v1/nothing").json()["error"]["type"] == "not_found_error"
        big = {"model": server.model, "messages": [{"role": "user", "content": "x" * 300_000}]}
        assert client.post("/v1/chat/completions", json=big).status_code == 413
        assert client.get("/v1/chat/completions").status_code == 405
    with pytest.raises(openai.AuthenticationError):
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="wrong", max_retries=0).models.list()


def test_the_next_turn_of_a_chat_reads_what_is_new(server: Server, solo: Runner) -> None:
    """Unless the client does not want that."""
    client = server.client()
    said: list[Any] = [{"role": "user", "content": "a question about the harbour, told at some length"}]

    def ask(cache_prompt: bool) -> Any:
        return client.chat.completions.create(
            model=server.model,
            messages=said,
            temperature=0,
            max_tokens=24,
            extra_body={"cache_prompt": cache_prompt},
        )

    first = ask(True)
    said += [
        {"role": "assistant", "content": first.choices[0].message.content},
        {"role": "user", "content": "and then?"},
    ]
    fresh, second = ask(False), ask(True)
    assert fresh.usage.prompt_tokens_details.cached_tokens == 0
    assert 0 < second.usage.prompt_tokens_details.cached_tokens < second.usage.prompt_tokens
    assert second.choices[0].message.content == fresh.choices[0].message.content
    metrics = httpx.get(f"{server.url}/metrics").text
    assert "specrun:prefix_cache_hits_total 0.0" not in metrics
    assert "specrun:prefix_cache_bytes 0.0" not in metrics


def test_decisions_are_in_the_metrics_and_in_a_trace(served_bundle: Bundle, solo: Runner, tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"
    service = Service.open(served_bundle.path, 2, 4, trace=TraceFile(file))
    app = make_app(service, Limits(), None, drain_seconds=5)
    with running(app) as url:
        body = {"model": served_bundle.manifest.target.name, "prompt": "the sun rose over the sea and the sun rose"}
        httpx.post(f"{url}/v1/completions", json={**body, "max_tokens": 60}, timeout=60).raise_for_status()
        metrics = httpx.get(f"{url}/metrics").text
    assert "specrun:drafted_rounds{positions=" in metrics
    assert "specrun:verified_rounds{nodes=" in metrics
    events = [json.loads(line) for line in file.read_text().splitlines()]
    assert {event["event"] for event in events} == {"draft", "verify"}
    assert all({"time", "running"} <= set(event) for event in events)


def test_models_health_metrics_and_page(server: Server) -> None:
    assert [model.id for model in server.client().models.list()] == [server.model]
    assert httpx.get(f"{server.url}/health", timeout=30).json() == {"status": "ok"}
    metrics = httpx.get(f"{server.url}/metrics").text
    for name in ("spec_decode_num_drafts_total", "spec_decode_num_accepted_tokens_total", "num_requests_running"):
        assert f"specrun:{name}" in metrics
    assert "specrun:generation_tokens_total 0.0" not in metrics
    assert "<title>specrun</title>" in httpx.get(server.url).text


def test_a_client_that_goes_away_frees_its_slot(server: Server) -> None:
    """Known fault 18; more clients than slots, one after the other."""
    for _ in range(12):
        with server.http() as client:
            body = {"model": server.model, "messages": MESSAGES, "max_tokens": MAX_TOKENS, "stream": True}
            with client.stream("POST", "/v1/chat/completions", json=body) as stream:
                assert next(stream.iter_lines()).startswith("data: ")
    got = server.client().chat.completions.create(model=server.model, messages=MESSAGES, max_tokens=2)
    assert got.usage is not None
    for _ in range(600):
        if server.service.load.running == 0:
            break
        server.client().chat.completions.create(model=server.model, messages=MESSAGES, max_tokens=1)
    assert server.service.load.running == 0


def test_when_all_is_full_clients_are_told_to_come_back(server: Server) -> None:
    body = {"model": server.model, "messages": MESSAGES, "max_tokens": MAX_TOKENS, "min_tokens": MAX_TOKENS, "n": 4}
    statuses: list[int] = []
    retry: list[str | None] = []
    lock = threading.Lock()

    def ask(_: int) -> None:
        with server.http() as client:
            reply = client.post("/v1/chat/completions", json=body)
        with lock:
            statuses.append(reply.status_code)
            if reply.status_code == 429:
                retry.append(reply.headers.get("retry-after"))
                assert reply.json()["error"]["type"] == "rate_limit_error"

    with concurrent.futures.ThreadPoolExecutor(6) as pool:
        list(pool.map(ask, range(6)))
    assert set(statuses) == {200, 429}
    assert set(retry) == {"1"}


@pytest.mark.parametrize(
    ("error", "message"),
    [(RuntimeError("a defect"), "internal error"), (LogitsError("no finite number"), "no finite number")],
    ids=["defect", "engine"],
)
def test_an_error_in_one_request_leaves_the_others_alone(
    error: Exception, message: str, server: Server, solo: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A defect in one generation, or an engine that fails: the server's fault, not the client's; it goes on."""
    from specrun.runner.slot_session import SlotSession

    real = SlotSession.grow
    broken = [False]

    def grow(self: Any, tokens: Any, parents: Any, features: Any = None) -> Any:
        if not broken[0] and len(tokens) == 1:
            broken[0] = True
            raise error
        return real(self, tokens, parents, features)

    monkeypatch.setattr(SlotSession, "grow", grow)
    with server.http() as client:
        body = {"model": server.model, "messages": MESSAGES, "max_tokens": 5, "temperature": 0, "proposer": "none"}
        first = client.post("/v1/chat/completions", json=body)
        assert (first.status_code, first.json()["error"]["message"]) == (500, message)
        second = client.post("/v1/chat/completions", json=body)
    assert second.json()["choices"][0]["message"]["content"] == solo_text(solo, max_tokens=5)


def test_keys_are_not_asked_for_health(server: Server) -> None:
    assert httpx.get(f"{server.url}/v1/models").status_code == 401
    assert httpx.get(f"{server.url}/v1/models", headers={"Authorization": f"Bearer {API_KEY}"}).status_code == 200


def test_the_load_test_measures_both_modes(server: Server, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("the sun rose\nthe tide came\n")
    options = ["--set", str(prompts), "--clients", "1", "--clients", "3", "--max-tokens", "6", "--repeats", "1"]
    assert run(["bench", "--server", server.url, "--api-key", API_KEY, *options, "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [(row["clients"], row["mode"]) for row in rows] == [
        *((1, "plain"), (1, "speculative"), (3, "plain"), (3, "speculative"))
    ]
    assert all(row["tokens_per_second"] > 0 and row["first_token"][1] > 0 for row in rows)
    assert run(["bench", "--server", server.url, "--api-key", "wrong", *options]) == EXIT_REFUSED
    assert "401" in capsys.readouterr().err
    assert run(["bench"]) == run(["bench", "somewhere", "--server", server.url]) == EXIT_REFUSED

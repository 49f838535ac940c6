"""Many clients, some of whom leave or ask nonsense; and the process from start to SIGTERM."""

import asyncio
import os
import random
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import httpx

from specrun.engines.manifest import Bundle
from tests.serving.conftest import API_KEY, Server, free_port

REQUESTS = int(os.environ.get("SPECRUN_LOAD_REQUESTS", "200"))
CLIENTS = 16


def resident_bytes() -> int:
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(fields["VmRSS"].split()[0]) * 1024


async def storm(server: Server, count: int, seed: int) -> dict[str, int]:
    """`count` requests: 60 % are good, 30 % go away in the middle, 10 % are nonsense. What became of them."""
    outcomes: dict[str, int] = {}
    todo = iter(range(count))
    rng = random.Random(seed)
    headers = {"Authorization": f"Bearer {API_KEY}"}

    async def one(client: httpx.AsyncClient, kind: float) -> str:
        body: dict[str, Any] = {
            "model": server.model,
            "prompt": "the sun " * rng.randint(1, 40),
            "max_tokens": rng.randint(1, 24),
            "temperature": rng.choice([0, 1]),
        }
        if kind < 0.1:
            reply = await client.post("/v1/completions", json={**body, "top_p": rng.choice([-1, 0, "x", 7])})
            assert reply.status_code == 400
            assert reply.json()["error"]["type"] == "invalid_request_error"
            return "refused"
        if kind < 0.4:
            body |= {"stream": True, "max_tokens": 200}
            async with client.stream("POST", "/v1/completions", json=body) as reply:
                if reply.status_code == 429:
                    return "busy"
                assert reply.status_code == 200
                async for line in reply.aiter_lines():
                    assert line.startswith("data: ") or not line
                    if rng.random() < 0.5:
                        return "left"
            return "left too late"
        reply = await client.post("/v1/completions", json=body)
        if reply.status_code == 429:
            assert reply.headers["retry-after"]
            return "busy"
        assert reply.status_code == 200, reply.text
        assert reply.json()["usage"]["completion_tokens"] <= body["max_tokens"]
        return "answered"

    async def client_loop() -> None:
        async with httpx.AsyncClient(base_url=server.url, headers=headers, timeout=120) as client:
            for _ in todo:
                outcome = await one(client, rng.random())
                while outcome == "busy":
                    outcomes["busy"] = outcomes.get("busy", 0) + 1
                    await asyncio.sleep(0.05)
                    outcome = await one(client, 0.9)
                outcomes[outcome] = outcomes.get(outcome, 0) + 1

    await asyncio.gather(*(client_loop() for _ in range(CLIENTS)))
    return outcomes


def test_a_storm_of_requests_loses_none_and_leaves_nothing(server: Server) -> None:
    """Known faults 18 and 19."""
    asyncio.run(storm(server, REQUESTS // 4, 0))
    before = resident_bytes()
    outcomes = asyncio.run(storm(server, REQUESTS, 1))
    assert sum(count for outcome, count in outcomes.items() if outcome != "busy") == REQUESTS
    assert outcomes["answered"] > REQUESTS // 3
    assert outcomes["refused"] > 0
    assert outcomes["left"] > 0
    assert resident_bytes() - before < 200 << 20
    # The slots of those who left are free: as many requests as there are slots run at once, and all end.
    asyncio.run(storm(server, CLIENTS, 2))
    assert httpx.get(f"{server.url}/health", timeout=60).status_code == 200
    assert server.service.load.waiting == 0


def test_sigterm_lets_running_requests_finish(served_bundle: Bundle) -> None:
    port = str(free_port())
    command = [
        sys.executable,
        "-m",
        "specrun.runner.cli",
        "serve",
        str(served_bundle.path),
        "--port",
        port,
        "--slots",
        "2",
    ]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        ready = next(line for line in process.stderr if "serving" in line)
        assert f"http://127.0.0.1:{port}" in ready
        url = f"http://127.0.0.1:{port}"
        while True:  # the line comes before the socket listens
            try:
                model = httpx.get(f"{url}/v1/models").json()["data"][0]["id"]
                break
            except httpx.ConnectError:
                continue
        body = {
            "model": model,
            "prompt": "the sun",
            "max_tokens": 300,
            "min_tokens": 300,
            "temperature": 0,
            "stream": True,
        }
        text: list[str] = []
        with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=120) as reply:
            for line in reply.iter_lines():
                if not text:
                    process.send_signal(signal.SIGTERM)
                text.append(line)
        assert text[-2] == "data: [DONE]"
        assert len(text) > 2 * 300
        log = threading.Thread(target=process.stderr.read)
        log.start()
        assert process.wait(60) == 0
        log.join()
    finally:
        process.kill()

"""Whatever is sent to what the OpenAPI description describes, well-formed or not, the answer is never a 5xx."""

from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis import GenerationMode

from tests.serving.conftest import API_KEY, Server

PATHS = {"/v1/chat/completions", "/v1/completions", "/v1/models", "/health", "/metrics"}
SETTINGS = settings(max_examples=40, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))


def operations(server: Server) -> dict[str, Any]:
    api = schemathesis.openapi.from_url(f"{server.url}/openapi.json")
    return {operation.path: operation for operation in (result.ok() for result in api.get_all_operations())}


def test_the_description_has_every_path(server: Server) -> None:
    assert set(operations(server)) == PATHS


@pytest.mark.parametrize("mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE], ids=str)
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_nothing_breaks_the_server(path: str, mode: GenerationMode, server: Server) -> None:
    statuses = []

    @SETTINGS
    @given(case=operations(server)[path].as_strategy(generation_mode=mode))
    def check(case: Any) -> None:
        reply = case.call(headers={"Authorization": f"Bearer {API_KEY}"}, timeout=60)
        statuses.append(reply.status_code)
        assert reply.status_code < 500, reply.text
        if reply.status_code >= 400:
            assert reply.json()["error"]["message"]

    check()
    assert len(statuses) >= 20

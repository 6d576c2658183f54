"""The loopback provider's memory and faults, seen through the official SDK."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests.loopback_provider import (
    Hook,
    Provider,
    echoing_400,
    hang_up,
    html,
    huge,
    provider,
    rate_limited,
    server_error,
    slow,
    truncated,
)
from tests.unit_tests.test_loopback_provider import client

openai = pytest.importorskip("openai")
pytestmark = pytest.mark.loopback


@pytest.fixture(scope="module")
def one() -> Iterator[Provider]:
    with provider() as served:
        yield served


@pytest.fixture
def openai_like(one: Provider) -> Provider:
    one.clear()
    return one


class TestRequests:
    def test_are_kept_with_headers_and_body(self, openai_like: Provider) -> None:
        client(openai_like).completions.create(model="loopback", prompt="red", max_tokens=1)
        (request,) = openai_like.received
        assert (request.method, request.path) == ("POST", "/v1/completions")
        assert request.body == {"model": "loopback", "prompt": "red", "max_tokens": 1}
        assert request.headers["authorization"] == "Bearer none"
        openai_like.clear()
        assert openai_like.received == []


class TestFaults:
    def ask(self, served: Provider, prompt: str = "red", **options: Any) -> Any:
        return client(served, **options).completions.create(model="loopback", prompt=prompt, max_tokens=1)

    @pytest.mark.parametrize(
        ("hook", "error"),
        [
            (rate_limited(retry_after="3"), "RateLimitError"),
            (server_error(), "InternalServerError"),
            (server_error(status=503), "InternalServerError"),
            (echoing_400(), "BadRequestError"),
            (html(status=403), "PermissionDeniedError"),
            (truncated(), "JSONDecodeError"),
            (hang_up(), "APIConnectionError"),
        ],
        ids=["429", "500", "503", "400", "html", "truncated", "hang-up"],
    )
    def test_reach_the_caller_as_what_they_are(self, openai_like: Provider, hook: Hook, error: str) -> None:
        openai_like.script(hook, times=1)
        with pytest.raises(Exception, match=r".") as caught:
            self.ask(openai_like)
        assert type(caught.value).__name__ == error
        assert self.ask(openai_like).choices

    def test_are_met_by_the_requests_they_are_meant_for(self, openai_like: Provider) -> None:
        openai_like.script(server_error(), when="blue")
        assert self.ask(openai_like).choices
        for _ in range(2):
            with pytest.raises(openai.InternalServerError):
                self.ask(openai_like, "blue")

    def test_tell_the_time_to_wait(self, openai_like: Provider) -> None:
        openai_like.script(rate_limited(retry_after="3"))
        with pytest.raises(openai.RateLimitError) as caught:
            self.ask(openai_like)
        assert caught.value.response.headers["retry-after"] == "3"

    def test_show_the_prompt_where_servers_do(self, openai_like: Provider) -> None:
        openai_like.script(echoing_400())
        with pytest.raises(openai.BadRequestError, match="a special prompt"):
            self.ask(openai_like, "a special prompt")

    def test_may_be_ten_megabytes_long(self, openai_like: Provider) -> None:
        openai_like.script(huge())
        raw = client(openai_like).completions.with_raw_response.create(model="loopback", prompt="red", max_tokens=1)
        assert len(raw.content) > 10 * 2**20
        assert "choices" not in raw.text

    def test_may_be_a_page(self, openai_like: Provider) -> None:
        openai_like.script(html())
        raw = client(openai_like).completions.with_raw_response.create(model="loopback", prompt="red", max_tokens=1)
        assert raw.headers["content-type"] == "text/html"
        assert "<h1>Sign in</h1>" in raw.text

    def test_may_be_slow_and_end_with_the_server(self) -> None:
        started = time.monotonic()
        with provider() as served:
            served.script(slow(600.0), when="late")
            with pytest.raises(openai.APITimeoutError):
                self.ask(served, "late", timeout=0.2)
            assert self.ask(served).choices
        assert time.monotonic() - started < 300.0

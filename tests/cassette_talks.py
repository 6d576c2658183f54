"""The cassettes of this checkout, read for tests: what was asked, what was answered."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from functools import cache
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.cassettes import FOLDER, load

FILES = {f"{path.parent.name}/{path.stem}": path for path in sorted(FOLDER.rglob("*.yaml"))}
LOCAL = {name: path for name, path in FILES.items() if not name.startswith("real/")}
every_cassette = pytest.mark.parametrize("name", FILES)


class Talk:
    """One interaction of a cassette."""

    def __init__(self, one: Mapping[str, Any]) -> None:
        self.path = urlsplit(one["request"]["uri"]).path
        self.uri: str = one["request"]["uri"]
        self.headers: dict[str, Any] = {**one["request"]["headers"], **one["response"]["headers"]}
        self.asked: dict[str, Any] = one["request"]["body"]
        self.answer: dict[str, Any] = one["response"]["body"]

    @property
    def events(self) -> list[Any]:
        """The data of a stream's events, without its end; of an answer in one piece, that."""
        data = [event["data"] for event in self.answer["events"]] if "events" in self.answer else [self.answer]
        return [item for item in data if item != "[DONE]"]

    def reported(self) -> dict[bytes, float]:
        """Probabilities of the first token by bytes; control tokens of the tiny model (ids 0 to 4) are the end."""
        found: Counter[bytes] = Counter()
        for entry in self.answer["choices"][0]["logprobs"]["content"][0]["top_logprobs"]:
            key = b"" if entry.get("id", 5) < 5 else bytes(entry["bytes"])
            found[key] += math.exp(entry["logprob"])  # type: ignore[assignment]
        return dict(found)

    def text(self) -> str:
        """The prompt, or the messages' texts."""
        return str(self.asked.get("prompt") or [message["content"] for message in self.asked.get("messages", [])])


@cache
def talks(name: str) -> list[Talk]:
    return [Talk(one) for one in load(FILES[name])["interactions"]]


def of_scenario(name: str) -> str:
    return name.partition("/")[2]

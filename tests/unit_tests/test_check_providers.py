"""The judge of `make providers` can fail, its table says what was run, and its server speaks the formats it stands for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from langchain_dpicl.backends.langchain.logprobs import first_position, next_token
from langchain_dpicl.backends.private_calls.call import SPELLINGS
from tests import check_providers
from tests.canary import RECORD
from tests.check_providers import END, START, Run, faults, known_runs, table, write_page
from tests.loopback_answers import Manners, RejectedError
from tests.loopback_formats import answer_to
from tests.providers.listed import CASES, one_hot

PROMPT = "My card\ncard\n\nMy transfer\ntransfer\n\nMy card\n"
CASE = next(case for case in CASES if case.name == "ChatOllama")
GOOD: dict[str, Any] = {
    "release": "1.1.0",
    "votes": "first tokens",
    "writes": "prefill",
    "refusals": [],
    "leaked": [],
    "control": ["logs"],
    "unlimited": [],
    "readme": "card\nepsilon left: 0 of 1\n",
}


def asked(path: str, body: Any) -> Any:
    """Returns what the server answers, as read; the last line where there are several."""
    answer = answer_to(path)
    assert answer is not None
    return [json.loads(line) for line in answer(body, Manners())[1].decode().splitlines()]


class TestTheJudge:
    def test_a_class_that_does_what_is_expected_passes(self) -> None:
        assert list(faults(CASE, GOOD, 9, "", is_floor=False)) == []
        assert list(faults(CASE, {**GOOD, "votes": "refused", "writes": ""}, 1, "", is_floor=True)) == []

    @pytest.mark.parametrize(
        ("changed", "num_private", "said", "expected"),
        [
            ({"votes": "text"}, 9, "", "expected it to vote by first tokens, found text"),
            ({"writes": ""}, 9, "", "expected it to write by prefill, found nothing"),
            ({"leaked": ["logs"]}, 9, "", "a record shows in logs"),
            ({"unlimited": ["a redirect, awaited"]}, 9, "", "hostile server counted: a redirect, awaited"),
            ({}, 9, f"DEBUG {RECORD}", "what the process prints"),
            ({}, 1, "", "no private call arrived"),
            ({"readme": "card\n"}, 9, "", "first program did not run to its end"),
            ({"control": []}, 9, "", "proves nothing"),
        ],
    )
    def test_anything_else_is_wrong(self, changed: Any, num_private: int, said: str, expected: str) -> None:
        (found,) = faults(CASE, {**GOOD, **changed}, num_private, said, is_floor=False)
        assert expected in found


class TestTheTable:
    def test_a_row_says_what_the_releases_did(self) -> None:
        floor = {**GOOD, "release": "1.0.0", "votes": "refused", "writes": ""}
        found = table([Run("ChatOllama", False, GOOD), Run("ChatOllama", True, floor)])
        (row,) = [line for line in found.splitlines() if line.startswith("| `ChatOllama` |")]
        assert "| 1.1.0, 1.0.0 |" in row
        assert "| first tokens (1.0.0: refused) | prefill (1.0.0: no) |" in row

    def test_what_was_not_run_says_so_and_why(self) -> None:
        found = table([Run("ChatXAI", False, trouble="not installed: no network")])
        assert "| `ChatXAI` | not run (not installed: no network) |" in found
        assert "| `ChatGroq` | not run |" in found

    def test_the_page_keeps_everything_but_the_table(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(check_providers, "PAGE", tmp_path / "page.md")
        (tmp_path / "page.md").write_text(f"before\n\n{START}\nold\n{END}\n\nafter\n")
        write_page("new \\1")
        assert (tmp_path / "page.md").read_text() == f"before\n\n{START}\nnew \\1\n{END}\n\nafter\n"

    def test_the_last_run_of_every_other_class_is_kept(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(check_providers, "OUT", tmp_path / "out" / "providers.json")
        known_runs([Run("ChatXAI", False, GOOD), Run("ChatOllama", False, GOOD)])
        again = known_runs([Run("ChatXAI", False, trouble="not installed")])
        assert [(one.name, one.trouble) for one in again] == [("ChatXAI", "not installed"), ("ChatOllama", "")]

    def test_every_class_with_a_spelling_of_its_own_is_run(self) -> None:
        run = {case.name.partition(" ")[0].rstrip(",") for case in CASES}
        assert {name for _, name in SPELLINGS} - run == {"AnthropicLLM"}

    def test_the_page_has_a_row_for_every_class(self) -> None:
        page = check_providers.PAGE.read_text()
        assert all(f"| `{case.name}` |" in page.partition(START)[2].partition(END)[0] for case in CASES)


class TestTheFormats:
    def test_ollama_streams_a_token_a_line_with_its_logprobs(self) -> None:
        options = {"num_predict": 1}
        chat = {"model": "m", "messages": [{"role": "user", "content": PROMPT}], "options": options}
        first, last = asked("/api/chat", {**chat, "logprobs": True, "top_logprobs": 3})
        assert len(first_position(first["logprobs"])) == 3
        assert (last["done"], last["done_reason"], last["message"]["content"]) == (True, "length", "")
        assert max(next_token(first["logprobs"]).values()) > 0.5
        assert "logprobs" not in asked("/api/chat", chat)[0]
        (whole,) = asked("/api/generate", {"model": "m", "prompt": PROMPT, "stream": False, "options": options})
        assert whole["response"] == first["message"]["content"] != ""

    def test_ollama_continues_an_assistant_message(self) -> None:
        asks = {"model": "m", "options": {"num_predict": 2}, "stream": False}
        user = {"role": "user", "content": PROMPT}
        (whole,) = asked("/api/chat", {**asks, "messages": [user]})
        written = whole["message"]["content"]
        asks["options"] = {"num_predict": 1}
        (first,) = asked("/api/chat", {**asks, "messages": [user]})
        begun = {"role": "assistant", "content": first["message"]["content"]}
        (rest,) = asked("/api/chat", {**asks, "messages": [user, begun]})
        assert begun["content"] + rest["message"]["content"] == written

    def test_gemini_reports_what_it_is_asked_for(self) -> None:
        content = {"contents": [{"role": "user", "parts": [{"text": PROMPT}]}]}
        (found,) = asked("/v1beta/models/m:generateContent", {**content, "generationConfig": {"maxOutputTokens": 1}})
        (candidate,) = found["candidates"]
        assert (candidate["finishReason"], "logprobsResult" in candidate) == ("MAX_TOKENS", False)
        config = {"maxOutputTokens": 1, "responseLogprobs": True, "logprobs": 4}
        (found,) = asked("/v1beta/models/m:generateContent", {**content, "generationConfig": config})
        assert len(found["candidates"][0]["logprobsResult"]["topCandidates"][0]["candidates"]) == 4

    def test_tgi_rejects_temperature_zero(self) -> None:
        with pytest.raises(RejectedError, match="strictly positive"):
            asked("/tgi", {"inputs": PROMPT, "parameters": {"temperature": 0.0}})
        ((text,),) = asked("/tgi", {"inputs": PROMPT, "parameters": {"max_new_tokens": 2}})
        assert text["generated_text"]

    def test_bedrock_says_why_it_ended(self) -> None:
        messages = [{"role": "user", "content": [{"text": PROMPT}]}]
        (found,) = asked("/model/m/converse", {"messages": messages, "inferenceConfig": {"maxTokens": 1}})
        assert found["stopReason"] == "max_tokens"
        assert found["output"]["message"]["content"][0]["text"]

    def test_a_server_can_write_zero_and_minus_9999_in_the_place_of_logprobs(self) -> None:
        body = {"messages": [{"role": "user", "content": PROMPT}], "max_tokens": 1, "logprobs": True, "top_logprobs": 3}
        answer = answer_to("/api/v1/chat/completions")
        assert answer is not None
        spoilt = json.loads(one_hot(answer(body, Manners())[1]))
        numbers = [number for _, number in first_position(spoilt["choices"][0]["logprobs"])]
        assert sorted(numbers) == [-9999.0, -9999.0, 0.0]  # type: ignore[type-var]

    def test_paths_of_openai_are_left_to_the_usual_answers(self) -> None:
        assert [answer_to(path) for path in ("/v1/chat/completions", "/v1/completions", "/chat/completions")] == [
            None
        ] * 3

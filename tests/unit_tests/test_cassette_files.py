"""The cassettes as files: shapes, secrets, size, and the command that records them. Nothing is replayed here."""

from __future__ import annotations

import base64
import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

pytest.importorskip("vcr")
pytest.importorskip("langchain_openai.decisions")
pytest.importorskip("langchain_anthropic")

from tests.canary import RECORD, VOTE
from tests.cassette_scenarios import SCENARIOS
from tests.cassette_talks import FILES, LOCAL, every_cassette, of_scenario, talks
from tests.cassettes import FOLDER, NEUTRAL, REAL, Readable, jobs, load
from tests.sdk_types import check_request, check_response
from tests.secret_words import found_in

KEYS = {"OPENAI_API_KEY": "planted", "ANTHROPIC_API_KEY": "planted"}

# What servers add to the types of the SDKs, which let it through.
ADDED_TO_REQUESTS = ("cache_prompt", "temperature")  # llama.cpp's; the newest Anthropic types have no temperature
ADDED_TO_RESPONSES = {
    "llama_cpp": ("choices.logprobs.content.id", "choices.logprobs.content.top_logprobs.id", "choices.logprobs.content")
}


class TestShapes:
    @every_cassette
    def test_recorded_bodies_are_those_of_the_official_sdks(self, name: str) -> None:
        added = ADDED_TO_RESPONSES.get(name.partition("/")[0], ())
        for talk in talks(name):
            check_request(talk.path, talk.asked, added=ADDED_TO_REQUESTS)
            is_stream = "events" in talk.answer
            assert is_stream == bool(talk.asked.get("stream"))
            for event in talk.events:
                check_response(talk.path, event, is_stream=is_stream, added=added)

    @pytest.mark.parametrize(
        ("name", "change"),
        [
            ("llama_cpp/openai_chat", {"messages": [{"role": "nobody", "content": "text"}]}),
            ("llama_cpp/openai_chat", {"top_logprobs": "twenty"}),
            ("llama_cpp/openai_chat", {"top_logprob": 20}),
            ("llama_cpp/openai_completions", {"prompt": {"text": "a"}}),
            ("llama_cpp/anthropic_text", {"messages": [{"role": "user", "content": [{"type": "text"}]}]}),
            ("loopback/openai_decisions", {"questions": [{"type": "choice", "instructions": "Which?"}]}),
        ],
    )
    def test_a_wrong_request_is_refused(self, name: str, change: dict[str, Any]) -> None:
        talk = talks(name)[0]
        with pytest.raises(ValidationError):
            check_request(talk.path, {**talk.asked, **change}, added=ADDED_TO_REQUESTS)

    @pytest.mark.parametrize(
        ("name", "change"),
        [
            ("llama_cpp/openai_chat", {"choices": [{"index": 0, "finish_reason": "length"}]}),
            ("llama_cpp/openai_chat", {"usage": {"prompt_tokens": "9", "completion_tokens": 1, "total_tokens": 10}}),
            ("llama_cpp/openai_chat", {"timings": {}}),
            ("llama_cpp/openai_completions", {"object": "chat.completion"}),
            ("llama_cpp/anthropic_text", {"content": [{"type": "text"}]}),
            ("loopback/openai_decisions", {"answers": [{"type": "choice", "choice": "a", "probabilities": []}]}),
        ],
    )
    def test_a_wrong_answer_is_refused(self, name: str, change: dict[str, Any]) -> None:
        talk = talks(name)[0]
        added = ADDED_TO_RESPONSES.get(name.partition("/")[0], ())
        with pytest.raises(ValidationError):
            check_response(talk.path, {**talk.answer, **change}, added=added)

    def test_what_servers_add_is_refused_unless_it_is_named(self) -> None:
        talk = talks("llama_cpp/openai_chat")[0]
        with pytest.raises(ValidationError, match="cache_prompt"):
            check_request(talk.path, talk.asked)
        with pytest.raises(ValidationError, match=r"top_logprobs\.0\.id"):
            check_response(talk.path, talk.answer)


class TestFiles:
    @every_cassette
    def test_nothing_in_them_is_secret(self, name: str) -> None:
        text = FILES[name].read_text()
        assert found_in(text) == set()
        assert found_in(json.dumps(load(FILES[name]))) == set()

    def test_nor_in_what_is_said_about_them(self) -> None:
        others = [path for path in FOLDER.rglob("*") if path.is_file() and path.suffix != ".yaml"]
        assert [path.name for path in others] == ["README.md"]
        assert found_in(others[0].read_text()) == set()

    @pytest.mark.parametrize(
        "secret",
        [
            "sk-" + "a1B2c3D4e5",
            "Authorization: Bearer abc",
            "hf_" + "a1B2c3D4e5",
            "AKIA" + "A1B2C3D4E5F6",
            "x-api-key",
            "org-" + "a1B2c3D4e5",
            RECORD,
            VOTE,
            "https://api.example.com/v1",
            "http://127.0.0.1:8080/v1",
            "/home" + "/somebody/model.gguf",
        ],
        ids=["sk", "bearer", "hf", "aws", "header", "org", "record", "vote", "host", "address", "path"],
    )
    def test_a_planted_secret_is_found_however_it_is_packed(self, secret: str) -> None:
        text, raw = FILES["llama_cpp/openai_stream"].read_text(), f"before {secret} after".encode()
        packed = [
            raw.decode(),
            base64.b64encode(raw).decode(),
            base64.urlsafe_b64encode(gzip.compress(raw)).decode(),
            str(list(raw)),
            base64.b64encode(base64.b64encode(raw)).decode(),
        ]
        for spelling in packed:
            assert found_in(f"{text}\nplanted: {spelling}\n"), spelling

    @every_cassette
    def test_they_are_small_and_say_who_answered(self, name: str) -> None:
        assert FILES[name].stat().st_size <= 60_000
        state, folder = load(FILES[name]), name.partition("/")[0]
        said = {"llama_cpp": "llama.cpp server", "loopback": "NOT the real service", "real": "the real service"}
        assert said[folder] in state["answered_by"]
        assert state["scenario"] == of_scenario(name)
        for talk in talks(name):
            assert talk.uri.startswith(f"{NEUTRAL}/v1/")
            assert set(talk.headers) <= {"content-type", "anthropic-version"}


class TestCommand:
    def test_everything_here_is_recorded_unless_told_otherwise(self, tmp_path: Path) -> None:
        pytest.importorskip("xllamacpp")
        found = {f"{job.path.parent.name}/{job.path.stem}": job.scenario for job in jobs([], {})}
        assert found == {name: of_scenario(name) for name in LOCAL}
        (one,) = jobs(["--only", "openai_stream", "--into", str(tmp_path)], {})
        assert one.path == tmp_path / "llama_cpp" / "openai_stream.yaml"

    def test_every_scenario_has_a_real_service(self) -> None:
        found = [jobs(["--real", service, "--model", "named"], KEYS) for service in sorted(REAL)]
        assert sorted(job.scenario for jobs_ in found for job in jobs_) == sorted(SCENARIOS)

    @pytest.mark.parametrize("service", sorted(REAL))
    def test_the_real_service_is_asked_on_request_with_a_key(self, service: str, tmp_path: Path) -> None:
        for job in jobs(["--real", service, "--model", "named", "--into", str(tmp_path)], KEYS):
            assert job.path.parent == tmp_path / "real"
            with job.serve() as target:
                assert (target.model, target.api_key, target.continuation) == ("named", "planted", "instruct")
                assert target.url.startswith("https://api.")
                assert "planted" not in f"{target!r} {target.public()} {job!r}"

    @pytest.mark.parametrize(
        ("arguments", "said"),
        [
            (["--real", "openai", "--model", "named"], "the key in OPENAI_API_KEY"),
            (["--real", "anthropic", "--model", "named"], "the key in ANTHROPIC_API_KEY"),
            (["--real", "openai"], "expected --model NAME"),
            (["--model", "named"], "--model goes with --real"),
            (["--real", "somebody", "--model", "named"], "invalid choice: 'somebody'"),
            (["--only", "no_such_scenario"], "invalid choice: 'no_such_scenario'"),
        ],
    )
    def test_without_key_or_model_nothing_is_asked(
        self, arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        with pytest.raises(SystemExit) as stopped:
            jobs(arguments, {"OPENAI_API_KEY": "planted"} if arguments[-1] == "openai" else {})
        assert stopped.value.code == 2
        assert said in capsys.readouterr().err


def test_a_file_reads_back_as_it_was_written() -> None:
    strange = {
        "token": "\u0004\x85\ufffd: [DONE]\n- 'x'",
        "logprob": -1e-05,
        "none": None,
        "deep": [[1, 2], {"a": True}],
    }
    sent = {"request": {"body": json.dumps(strange)}, "response": {"body": {"string": json.dumps([strange])}}}
    events = f"event: one\ndata: {json.dumps(strange)}\n\ndata: [DONE]\n\n"
    streamed = {"request": {"body": "{}"}, "response": {"body": {"string": events}}}
    text = Readable({"scenario": "s"}).serialize({"version": 1, "interactions": [sent, streamed]})
    back = Readable({}).deserialize(text)["interactions"]
    assert text.isascii()
    assert json.loads(back[0]["request"]["body"]) == strange
    assert json.loads(back[0]["response"]["body"]["string"]) == [strange]
    assert back[1]["response"]["body"]["string"] == events

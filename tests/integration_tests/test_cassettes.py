"""Recorded providers, replayed through our code with sockets closed; `make cassettes` records them again.

Expected numbers are read off the recorded bodies here, by a few lines of their own.
"""

from __future__ import annotations

import json
import math
import socket
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pytest_socket import SocketBlockedError

pytest.importorskip("vcr")
pytest.importorskip("langchain_openai.decisions")
pytest.importorskip("langchain_anthropic")

from tests.cassette_scenarios import (
    INPUTS,
    LABELS,
    LETTERS_OF,
    QUESTION,
    QUESTIONS,
    RECORDS,
    SCENARIOS,
    SPEAKING,
    TAUGHT,
    Target,
    template,
)
from tests.cassette_talks import FILES, LOCAL, Talk, every_cassette, of_scenario, talks
from tests.cassettes import CassetteError, Job, jobs, load, record, replay
from tests.loopback_provider import provider, server_error
from tests.secret_words import found_in

pytestmark = [
    pytest.mark.filterwarnings("ignore:The class `OpenAIDecisions` is in beta"),
    # langchain-openai asks the system which socket options it knows; it connects to nothing.
    pytest.mark.filterwarnings("ignore:A test tried to use socket.socket"),
]

# vcrpy says so itself where the call is public; a provider's SDK may say "connection", and a probe what it makes of it.
NOT_ANSWERED = r"(?s)Can't overwrite existing cassette|^Connection error|could not be reached|rejected a public probe"


def check_top(found: Sequence[tuple[bytes, float]], talk: Talk) -> None:
    expected = sorted(talk.reported().items(), key=lambda item: (-item[1], item[0]))[: len(found)]
    assert [token for token, _ in found] == [token for token, _ in expected]
    assert [probability for _, probability in found] == pytest.approx([p for _, p in expected], rel=1e-12)


def check_rows(rows: np.ndarray, domain: Sequence[bytes], asked: Sequence[Talk]) -> None:
    assert rows == pytest.approx(np.array([[talk.reported().get(token, 0.0) for token in domain] for talk in asked]))
    assert (rows.sum(axis=1) > 0.0).all()
    assert (rows[:, -1] == 0.0).all()  # the token that no model has
    for record_, talk in zip(RECORDS, asked, strict=True):
        assert record_ in talk.text()


def check_walk(result: Mapping[str, Any], made: Sequence[Talk]) -> None:
    """Probes, one public call, then each record twice: without and with a released token."""
    first, second = made[-6:-3], made[-3:]
    check_top(result["top"], made[-7])
    check_rows(result["rows"][0], result["domain"], first)
    check_rows(result["rows"][1], result["domain"], second)
    released = next(token for token in result["domain"] if token).decode()
    for before, after in zip(first, second, strict=True):
        if "prompt" in before.asked:
            assert after.asked["prompt"] == [before.asked["prompt"][0] + released]
        else:
            assert after.asked["messages"][:2] == [
                *before.asked["messages"],
                {"role": "assistant", "content": released},
            ]


def check_stream(result: Mapping[str, Any], made: Sequence[Talk]) -> None:
    (talk,) = made
    choices = [event["choices"][0] for event in talk.events if event["choices"]]
    deltas = [choice["delta"].get("content") or "" for choice in choices]
    message = result["message"]
    assert len(talk.events) > len([delta for delta in deltas if delta]) > 2
    assert message.text == "".join(deltas)
    entries = [entry for choice in choices for entry in (choice.get("logprobs") or {}).get("content") or []]
    assert [dict(entry) for entry in message.response_metadata["logprobs"]["content"]] == entries
    assert message.usage_metadata["output_tokens"] == talk.events[-1]["usage"]["completion_tokens"]
    assert talk.asked["messages"] == [{"role": "user", "content": template().format(input=QUESTION)}]


def check_async(result: Mapping[str, Any], made: Sequence[Talk]) -> None:
    assert result["message"].text == made[0].answer["choices"][0]["message"]["content"] != ""
    check_top(result["top"], made[-4])
    check_rows(result["rows"][0], result["domain"], made[-3:])


def check_messages(result: Mapping[str, Any], made: Sequence[Talk]) -> None:
    whole, stream = made
    assert result["message"].text == whole.answer["content"][0]["text"] != ""
    assert result["message"].usage_metadata["output_tokens"] == whole.answer["usage"]["output_tokens"]
    deltas = [event["delta"]["text"] for event in stream.events if event["type"] == "content_block_delta"]
    assert result["streamed"] == "".join(deltas)
    assert len(deltas) > 2
    prompt = template().format(input=QUESTION)
    assert prompt in str(whole.asked["messages"]) or prompt == whole.asked["messages"][0]["content"]


def check_text(result: Mapping[str, Any], made: Sequence[Talk]) -> None:
    said = [talk.answer["content"][0]["text"] for talk in made]
    texts, votes, last = said[-7:-4], said[-4:-1], said[-1]
    assert result["texts"] == texts
    assert last == texts[0]
    assert result["rows"][0].tolist() == [[0.0, -math.inf]]  # it names what it said
    expected = [[0.0 if text.strip(" .\n").lower() == label else -math.inf for label in LABELS] for text in votes]
    assert np.concatenate(result["votes"]).tolist() == expected


def check_decisions(result: Mapping[str, Any], made: Sequence[Talk]) -> None:
    rows, asked = np.concatenate(result["rows"]), made[-3:]
    listed = [talk.answer["answers"][0]["probabilities"] for talk in asked]
    found = [{entry["value"]: entry["probability"] for entry in entries} for entries in listed]
    assert np.exp(rows) == pytest.approx(np.array([[row[label] for label in LABELS] for row in found]), rel=1e-12)
    assert np.exp(rows).sum(axis=1) == pytest.approx(1.0)
    assert np.abs(rows[0] - rows[1]).max() > 1e-3
    assert [talk.asked["input"] for talk in asked] == result["prompts"]


def check_voting(result: Mapping[str, Any], made: Sequence[Talk]) -> None:
    """Each query is asked in public and of every record; letters of its labels' halves of the alphabet are its votes."""
    for answers, query in enumerate(QUESTIONS):
        asked = [talk for talk in made if f"text: {query}\nqueue:" in talk.asked["messages"][0]["content"]]
        private = [talk for talk in asked if any(record_ in talk.text() for record_ in RECORDS)]
        assert [sum(record_ in talk.text() for talk in private) for record_ in RECORDS] == [1] * len(RECORDS)
        assert len(asked) == len(private) + 1
        favourites = [_favourite(talk) for talk in private]
        assert result["votes"][answers].tolist() == [favourites.count(label) for label in LABELS]
    assert [answer.receipt.source for answer in result["answers"]] == ["release", "release", "memo"]
    assert result["answers"][2].scores == result["answers"][0].scores


def _mass(talk: Talk, letters: str) -> float:
    found = talk.reported().items()
    return sum(mass for token, mass in found if token.decode("utf-8", "replace").strip().lower() in set(letters))


def check_pate(result: Mapping[str, Any], made: Sequence[Talk]) -> None:
    """The student's prompt, tried on what was held back, is served as stock templates write it."""
    check_labels(result, made, said=_favourite, names=LABELS)
    tried, served = _student(result, made)
    (shown,) = result["student"].demonstrations
    assert result["student"].right == (_favourite(tried) == result["pool"].entries[1 - shown].label)
    text, label = result["pool"].examples[shown].values()
    assert _asked(served) == f"text: {text}\nqueue: {label}\n\ntext: {QUESTION}\nqueue:"
    assert result["message"].text == served.answer["choices"][0]["message"]["content"] != ""


def check_pate_in_words(result: Mapping[str, Any], made: Sequence[Talk]) -> None:
    check_labels(result, made, said=_named, names=(*LABELS, "other"))
    tried, served = _student(result, made)
    (shown,) = result["student"].demonstrations
    assert result["student"].right == (_named(tried) == result["pool"].entries[1 - shown].label)
    text, label = result["pool"].examples[shown].values()
    turns = (("user", text), ("assistant", label), ("user", QUESTION))
    assert served.asked["messages"] == [{"role": role, "content": content} for role, content in turns]
    assert result["message"].text == served.answer["content"][0]["text"] != ""


def check_labels(
    result: Mapping[str, Any], made: Sequence[Talk], *, said: Callable[[Talk], str], names: Sequence[str]
) -> None:
    """Every input was asked about in public and of each record; what more than half of them say is its label."""
    pool = result["pool"]
    for entry, votes in zip(pool.entries, result["votes"], strict=True):
        asked = [talk for talk in made if _asked(talk).endswith(f"text: {entry.fields['text']}\nqueue:")]
        blocks = [f"text: {r}\nqueue: {pool.shown[label]}\n\n" for r, label in zip(RECORDS, TAUGHT, strict=True)]
        found = [[talk for talk in asked if block in _asked(talk)] for block in blocks]
        assert [len(talks_) for talks_ in found] == [1] * len(RECORDS)
        assert any(not any(record_ in _asked(talk) for record_ in RECORDS) for talk in asked)
        heard = [said(talk) for (talk,) in found]
        assert votes == [heard.count(name) for name in names]
        label = next((name for name in LABELS if heard.count(name) > len(RECORDS) / 2), None)
        assert (entry.label, entry.status) == (label, "labelled" if label else "rejected")


def _student(result: Mapping[str, Any], made: Sequence[Talk]) -> tuple[Talk, Talk]:
    """The calls that tried the student's prompt and used it, of which neither has a record in it."""
    pool, student = result["pool"], result["student"]
    text, label = pool.examples[student.demonstrations[0]].values()
    held_back = pool.entries[student.held_back[0]].fields["text"]
    end = f"text: {text}\nqueue: {label}\n\ntext: {held_back}\nqueue:"
    (tried,) = [talk for talk in made if _asked(talk).endswith(end)]
    (served,) = [talk for talk in made if QUESTION in _asked(talk)]
    assert not any(record_ in talk.text() for record_ in RECORDS for talk in (tried, served))
    return tried, served


def _asked(talk: Talk) -> str:
    return str(talk.asked["messages"][-1]["content"])


def _favourite(talk: Talk) -> str:
    return max(LABELS, key=lambda label: _mass(talk, LETTERS_OF[label]))


def _named(talk: Talk) -> str:
    """The label that stands on the first written line of an answer; "other": none does."""
    said = str(talk.answer["content"][0]["text"]).strip().split("\n")[0].strip(" .")
    return said if said in LABELS else "other"


CHECKS: Mapping[str, Callable[[Mapping[str, Any], Sequence[Talk]], None]] = {
    "openai_chat": check_walk,
    "openai_completions": check_walk,
    "openai_stream": check_stream,
    "openai_async": check_async,
    "anthropic_messages": check_messages,
    "anthropic_text": check_text,
    "openai_decisions": check_decisions,
    "openai_voting": check_voting,
    "openai_pate": check_pate,
    "anthropic_pate": check_pate_in_words,
}


class TestReplay:
    def test_no_connection_can_be_made_here(self) -> None:
        with pytest.raises(SocketBlockedError):
            socket.socket()

    def test_every_scenario_is_recorded(self) -> None:
        assert {of_scenario(name) for name in LOCAL} == set(SCENARIOS) == set(CHECKS)

    @every_cassette
    async def test_our_code_reads_what_was_recorded(self, name: str) -> None:
        CHECKS[of_scenario(name)](await replay(FILES[name]), talks(name))

    def test_an_input_is_rejected_for_want_of_a_majority_and_one_for_want_of_a_label(self) -> None:
        for name, given, said, count in (
            ("llama_cpp/openai_pate", INPUTS[2], _favourite, len(RECORDS)),
            ("loopback/anthropic_pate", SPEAKING[2], _named, 1),
        ):
            asked = [talk for talk in talks(name) if _asked(talk).endswith(f"text: {given}\nqueue:")]
            heard = [said(talk) for talk in asked if any(record_ in _asked(talk) for record_ in RECORDS)]
            assert (len(heard), len(set(heard))) == (len(RECORDS), count)
            assert count > 1 or heard[0] == "other"

    @every_cassette
    async def test_another_request_is_not_answered(self, name: str) -> None:
        with pytest.raises(Exception, match=NOT_ANSWERED):
            await replay(FILES[name], model="another-model")

    @pytest.mark.parametrize(
        "name", [name for name in FILES if of_scenario(name) not in {"openai_stream", "anthropic_messages"}]
    )
    async def test_a_record_that_differs_by_a_letter_is_noticed(self, name: str) -> None:
        with pytest.raises(CassetteError, match=r"expected .* recorded answers"):
            await replay(FILES[name], records=[RECORDS[0], RECORDS[1].upper(), RECORDS[2]])

    async def test_an_answer_that_nobody_asked_for_is_noticed(self, tmp_path: Path) -> None:
        state = load(FILES["llama_cpp/openai_stream"])
        longer = tmp_path / "longer.yaml"
        longer.write_text(json.dumps({**state, "interactions": state["interactions"] * 2}))
        with pytest.raises(CassetteError, match=r"expected 2 .* found 1"):
            await replay(longer)

    async def test_other_recorded_numbers_are_other_results(self, tmp_path: Path) -> None:
        name = "llama_cpp/openai_chat"
        text = FILES[name].read_text()
        logprob = load(FILES[name])["interactions"][-1]["response"]["body"]["choices"][0]["logprobs"]["content"][0]
        old = str(logprob["top_logprobs"][0]["logprob"])
        planted = tmp_path / "planted.yaml"
        planted.write_text(text.replace(old, "-0.25"))
        with pytest.raises(AssertionError):
            check_walk(await replay(planted), talks(name))


@pytest.mark.loopback
class TestRecording:
    @pytest.mark.parametrize("name", LOCAL)
    def test_recording_again_gives_the_same_conversation(self, name: str, tmp_path: Path) -> None:
        pytest.importorskip("xllamacpp")
        pytest.importorskip("gguf")
        (job,) = jobs(["--only", of_scenario(name), "--into", str(tmp_path)], {})
        record(job)
        old, new = load(FILES[name]), load(job.path)
        assert [one["request"] for one in new["interactions"]] == [one["request"] for one in old["interactions"]]
        is_same_server = old["answered_by"] == new["answered_by"]
        for before, after in zip(old["interactions"], new["interactions"], strict=True):
            assert _differences(before["response"], after["response"], values=is_same_server) == []

    def test_keys_are_sent_and_not_kept(self, tmp_path: Path) -> None:
        secret = "sk-" + "planted1234567890"
        with provider() as served:
            job = Job(
                "openai_decisions",
                tmp_path / "new.yaml",
                "here",
                lambda: _Given(Target(served.root, model="m", api_key=secret)),
            )
            record(job)
            assert served.received[0].headers["authorization"] == f"Bearer {secret}"
            assert "user-agent" in served.received[0].headers
        assert found_in(job.path.read_text()) == set()
        assert secret not in job.path.read_text()

    def test_a_call_that_failed_is_not_kept(self, tmp_path: Path) -> None:
        kept = tmp_path / "old.yaml"
        kept.write_text("old")
        with provider() as served:
            served.script(server_error(status=400), when=RECORDS[1])
            job = Job("openai_decisions", kept, "here", lambda: _Given(Target(served.root, model="m")))
            with pytest.raises(CassetteError, match="nothing was kept"):
                record(job)
        assert kept.read_text() == "old"

    @pytest.mark.parametrize(
        "words", ["sk-" + "planted1234567890", "a-key-of-no-known-shape"], ids=["known", "unknown"]
    )
    def test_a_conversation_with_a_key_in_it_is_not_kept(self, words: str, tmp_path: Path) -> None:
        records = [RECORDS[0], f"my key is {words}", RECORDS[2]]
        with provider() as served:
            target = Target(served.root, model="m", api_key="a-key-of-no-known-shape", records=records)
            job = Job("openai_decisions", tmp_path / "new.yaml", "here", lambda: _Given(target))
            with pytest.raises(CassetteError, match=r"holds .*key; nothing was kept"):
                record(job)
        assert not job.path.exists()


class _Given:
    """A target that needs no serving."""

    def __init__(self, target: Target) -> None:
        self._target = target

    def __enter__(self) -> Target:
        return self._target

    def __exit__(self, *args: object) -> None:
        return None


def _differences(old: Any, new: Any, *, values: bool, at: str = "") -> list[str]:
    """Where a response lacks what was recorded; numbers may move a little, as on another processor.

    Another version of the server may add fields and sample otherwise: there, only the recorded fields are looked for.
    """
    if isinstance(old, dict) and isinstance(new, dict):
        lost = [f"{at}.{name}" for name in old if name not in new]
        kept = [name for name in old if name in new]
        return lost + [d for name in kept for d in _differences(old[name], new[name], values=values, at=f"{at}.{name}")]
    if isinstance(old, list) and isinstance(new, list):
        lengths = [f"{at}: {len(old)} or {len(new)}"] if values and len(old) != len(new) else []
        pairs = enumerate(zip(old, new, strict=False))
        return lengths + [d for i, (a, b) in pairs for d in _differences(a, b, values=values, at=f"{at}.{i}")]
    is_same = math.isclose(old, new, abs_tol=1e-3) if isinstance(old, float) and isinstance(new, float) else old == new
    return [f"{at}: {old!r} or {new!r}"] if values and not is_same else []


def test_a_lost_field_and_another_number_are_seen() -> None:
    old = {"a": [{"b": 1.0, "c": "x"}], "d": None}
    assert _differences(old, {"a": [{"b": 1.0004, "c": "x", "new": 1}], "d": None}, values=True) == []
    assert _differences(old, {"a": [{"b": 1.01, "c": "x"}], "d": None}, values=True) == [".a.0.b: 1.0 or 1.01"]
    assert _differences(old, {"a": [{"b": 1.01, "c": "x"}], "d": None}, values=False) == []
    assert _differences(old, {"a": [{"c": "y"}], "d": None}, values=False) == [".a.0.b"]
    assert _differences(old, {"a": []}, values=True) == [".d", ".a: 1 or 0"]

"""Tokenizers of users: they count public text, and turn the ids that a server reports into exact bytes."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import tiktoken
from hypothesis import given
from hypothesis import strategies as st

from langchain_dpicl.backends.langchain.backend import LangChainBackend, PublicTokenizer, Tokenizer
from langchain_dpicl.backends.langchain.logprobs import EOS, LOST, next_token
from langchain_dpicl.backends.langchain.tokenizer import CONTROL
from langchain_dpicl.backends.rows.label_rows import LabelRows
from langchain_dpicl.exceptions import CapabilityError, ConfigurationError
from tests.local_encoding import END, MERGED, OTHER_CONTROL, UNKNOWN, local_encoding
from tests.scripted_models import ScriptedChat, ScriptedLLM, chat_payload, legacy_payload
from tests.tiny_gguf import byte_alphabet


class ByteLevel:
    """A tokenizer with the methods of transformers, writing tokens as GPT-2 does: one character for each byte."""

    unk_token_id = None
    unk_token = None
    all_special_ids = (END,)

    def __init__(self) -> None:
        letters = byte_alphabet()
        self.tokens = dict(enumerate(letters))
        self.tokens |= {n: "".join(letters[byte] for byte in text.encode()) for text, n in MERGED.items()}
        self.tokens |= {END: "<|im_end|>", OTHER_CONTROL: "<tool>", 302: "né e", 303: "\u65e5"}
        self.added_tokens_decoder = {302: type("Added", (), {"special": False})()}
        self.added_tokens_decoder[OTHER_CONTROL] = type("Added", (), {"special": True})()

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return [*([END] if add_special_tokens else []), *text.encode()]

    def convert_ids_to_tokens(self, number: int) -> str | None:
        if number > 10**6:
            raise OverflowError("number too large to fit in target type")
        return self.tokens.get(number)


class Pieces(ByteLevel):
    """The same, writing tokens as SentencePiece does; ids that it does not know are its unknown token."""

    unk_token_id = 0
    unk_token = "<unk>"

    def __init__(self) -> None:
        self.tokens = {number + 1: f"<0x{number:02X}>" for number in range(255)}
        self.tokens |= {n: text.replace(" ", "\u2581") for text, n in MERGED.items()}
        self.tokens |= {0: "<unk>", END: "</s>", OTHER_CONTROL: "<s>", 302: "né e"}
        self.added_tokens_decoder = {302: type("Added", (), {"special": False})()}
        self.added_tokens_decoder[OTHER_CONTROL] = type("Added", (), {"special": True})()

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return [byte + 1 for byte in text.encode()]

    def convert_ids_to_tokens(self, number: int) -> str | None:
        return super().convert_ids_to_tokens(number) or "<unk>"


class Words:
    """Only counts."""

    def encode(self, text: str) -> list[str]:
        return text.split()


KINDS = {"tiktoken": local_encoding, "byte-level": ByteLevel, "pieces": Pieces}


@pytest.fixture(params=KINDS)
def tokenizer(request: pytest.FixtureRequest) -> PublicTokenizer:
    return PublicTokenizer(KINDS[request.param]())


class TestSpelling:
    def test_is_exact_for_words_and_for_parts_of_characters(self, tokenizer: PublicTokenizer) -> None:
        for text, number in MERGED.items():
            assert tokenizer.spelled(number) == text.encode()
        offset = 0 if tokenizer.spelled(0x41) == b"A" else 1
        assert [tokenizer.spelled(byte + offset) for byte in (0x41, 0x20, 0x0A, 0xC3, 0xE6)] == [
            b"A",
            b" ",
            b"\n",
            b"\xc3",
            b"\xe6",
        ]

    def test_of_control_tokens_is_the_end(self, tokenizer: PublicTokenizer) -> None:
        assert tokenizer.spelled(END) == tokenizer.spelled(OTHER_CONTROL) == CONTROL == EOS

    @pytest.mark.parametrize("number", [UNKNOWN, -1, 2**31, 2**40, 10**400, True])
    def test_of_an_unknown_id_is_nothing(self, tokenizer: PublicTokenizer, number: int) -> None:
        tokenizer.spelled(1)
        assert tokenizer.spelled(number) is None

    @given(st.integers())
    def test_never_raises(self, number: int) -> None:
        for made in KINDS.values():
            found = PublicTokenizer(made()).spelled(number)
            assert found is None or isinstance(found, bytes)

    def test_of_added_words_is_their_text(self) -> None:
        for kind in (ByteLevel, Pieces):
            assert PublicTokenizer(kind()).spelled(302) == "né e".encode()

    def test_is_not_known_of_a_tokenizer_that_only_counts(self) -> None:
        assert PublicTokenizer(Words()).spelled(1) is None

    def test_is_not_guessed(self) -> None:
        """A character that stands for no byte, a token that is no text, and a way of writing that is not known."""
        assert PublicTokenizer(ByteLevel()).spelled(303) is None

        class Odd(ByteLevel):
            def decode_single_token_bytes(self, number: int) -> Any:
                return "text" if number == 7 else b"x"

        assert [PublicTokenizer(Odd()).spelled(number) for number in (7, 8)] == [None, b"x"]

        class WordPieces(ByteLevel):
            def convert_ids_to_tokens(self, number: int) -> str:
                return "##a"

        assert PublicTokenizer(WordPieces()).spelled(1) is None
        assert PublicTokenizer(WordPieces()).count("ab") == 2

    def test_agrees_with_real_tokenizers_of_transformers(self) -> None:
        transformers = pytest.importorskip("transformers")
        tokenizers = pytest.importorskip("tokenizers")
        byte_level = tokenizers.Tokenizer(
            tokenizers.models.BPE({letter: n for n, letter in enumerate(byte_alphabet())} | {"<|im_end|>": 256}, [])
        )
        byte_level.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
        pieces = {"<unk>": 0, "</s>": 1, "\u2581": 2, **{f"<0x{byte:02X}>": byte + 3 for byte in range(256)}}
        fallback = tokenizers.Tokenizer(tokenizers.models.BPE(pieces, [], byte_fallback=True, unk_token="<unk>"))
        fallback.normalizer = tokenizers.normalizers.Replace(" ", "\u2581")
        text = "why é \u65e5 \U0001f600 ?"
        for made, specials in (
            (byte_level, {"eos_token": "<|im_end|>"}),
            (fallback, {"eos_token": "</s>", "unk_token": "<unk>"}),
        ):
            real = transformers.PreTrainedTokenizerFast(tokenizer_object=made, **specials)
            mine = PublicTokenizer(real)
            numbers = real.encode(text, add_special_tokens=False)
            assert b"".join(mine.spelled(number) or b"?" for number in numbers) == text.encode()
            assert mine.count(text) == len(numbers)
            assert mine.spelled(real.eos_token_id) == CONTROL
            assert mine.spelled(len(real)) is None


class TestCounting:
    def test_counts_ids(self) -> None:
        assert PublicTokenizer(local_encoding()).count(" card card") == 2
        assert PublicTokenizer(Words()).count("a b c") == 3

    def test_reads_spelled_control_tokens_as_text_and_adds_none(self) -> None:
        assert PublicTokenizer(local_encoding()).count("<|endoftext|>") > 1
        assert PublicTokenizer(ByteLevel()).count("ab") == 2

    def test_takes_any_text(self, tokenizer: PublicTokenizer) -> None:
        for text in ("", "\ud800", "\x00", "é" * 100):
            assert tokenizer.count(text) >= (1 if text else 0)

    def test_is_what_the_engine_counts_by(self) -> None:
        model = ScriptedChat(answer=lambda text: {" card": 0.5, " c": 0.25})
        assert LangChainBackend(model, tokenizer=local_encoding()).count_tokens(" card card") == 2
        assert LangChainBackend(model, tokenizer=Words()).count_tokens("a b c") == 3
        assert LangChainBackend(model).count_tokens(" card card") == 10


class TestTokens:
    def test_are_spelled_and_unknown_ones_replaced(self) -> None:
        class Unknown(ByteLevel):
            def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
                return [UNKNOWN if byte == ord("?") else byte for byte in text.encode()]

        assert PublicTokenizer(local_encoding()).tokens(" card é") == [b" card", b" ", "é".encode()]
        assert PublicTokenizer(Pieces()).tokens("aé") == [b"a", b"\xc3", b"\xa9"]
        assert PublicTokenizer(Unknown()).tokens("A?") == [b"A", "\ufffd".encode()]

    def test_of_any_text_are_its_bytes(self, tokenizer: PublicTokenizer) -> None:
        for text in ("", "\x00", "24h é"):
            assert b"".join(tokenizer.tokens(text)) == text.encode()
        assert b"".join(tokenizer.tokens("\ud800")) == b"?"

    def test_are_unknown_where_a_tokenizer_only_counts_and_without_one(self) -> None:
        model = ScriptedChat(answer=lambda text: {" card": 0.5, " c": 0.25})
        with pytest.raises(CapabilityError, match=r"found Words, which only counts.*tiktoken\.Encoding"):
            LangChainBackend(model, tokenizer=Words()).spell("a b")
        with pytest.raises(CapabilityError, match=r"give LangChainBackend\(llm, tokenizer=\.\.\.\)"):
            LangChainBackend(model).spell("a b")

    @pytest.mark.parametrize("tokenizer", [None, Words()], ids=["unknown", "only counts"])
    def test_that_labels_begin_with_are_asked_of_a_tokenizer_that_is_known(self, tokenizer: Any) -> None:
        model = ScriptedChat(answer=lambda text: {" card": 0.5, " c": 0.25})
        known = LangChainBackend(model, tokenizer=local_encoding())
        assert LabelRows(known, [["card"], ["fee"]], calibrate=False).kind == "first tokens"
        with pytest.raises(ConfigurationError, match=r"no first token of its own for \[\('card',\), \('cash',\)\]"):
            LabelRows(known, [["card"], ["cash"]], calibrate=False)  # " card" is a token, "card" is none
        guessed = LangChainBackend(model, tokenizer=tokenizer)
        assert LabelRows(guessed, [["card"], ["cash"], ["coin"]], calibrate=False).kind == "first tokens"


class TestNames:
    def test_of_encodings_are_loaded_when_they_are_needed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        asked: list[str] = []

        def get_encoding(name: str) -> tiktoken.Encoding:
            asked.append(name)
            return local_encoding()

        monkeypatch.setattr(tiktoken, "get_encoding", get_encoding)
        model = ScriptedChat(answer=lambda text: {" card": 0.5, " c": 0.25})
        backend = LangChainBackend(model, tokenizer="o200k_base")
        assert backend.open(["x"], []).score([b" card"])[0, 0] == pytest.approx(0.5)
        assert asked == []
        assert [backend.count_tokens(" card") for _ in range(2)] == [1, 1]
        assert asked == ["o200k_base"]

    @pytest.mark.parametrize("name", ["o200k_base", "cl100k_base"])
    def test_that_cannot_be_loaded_offline_say_what_to_do(
        self, name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
    ) -> None:
        monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path))
        monkeypatch.setattr("tiktoken.load.read_file", lambda path: (_ for _ in ()).throw(ConnectionError(path)))
        monkeypatch.setattr("tiktoken.registry.ENCODINGS", {})
        backend = LangChainBackend(ScriptedChat(answer=lambda text: {" a": 0.5, " b": 0.25}), tokenizer=name)
        assert backend.open(["x"], []).score([b" a"])[0, 0] == pytest.approx(0.5)
        with pytest.raises(
            ConfigurationError, match=r"network.*TIKTOKEN_CACHE_DIR.*tiktoken\.Encoding.*leave tokenizer"
        ):
            backend.count_tokens("a")

    def test_of_no_encoding_are_refused(self) -> None:
        model = ScriptedChat(answer=lambda text: {" card": 0.5, " c": 0.25})
        with pytest.raises(ConfigurationError, match=r"one of tiktoken's encodings.*found 'gpt9'"):
            LangChainBackend(model, tokenizer="gpt9")
        assert model.seen == []

    @pytest.mark.parametrize("wrong", [7, None, str.split, b"o200k_base"])
    def test_and_objects_that_do_not_encode_are_refused(self, wrong: Any) -> None:
        with pytest.raises(ConfigurationError, match=r"expected tokenizer as an object with encode"):
            PublicTokenizer(wrong)

    def test_are_shown_and_the_rest_is_not(self) -> None:
        assert repr(PublicTokenizer("o200k_base")) == "PublicTokenizer('o200k_base')"
        assert repr(PublicTokenizer(Words())) == "PublicTokenizer(Words)"
        assert isinstance(Words(), Tokenizer)


TOPS = {" card": 0.5, "é": 0.25, "<|endoftext|>": 0.125}
NUMBERS = {" card": 256, "é": 258, "<|endoftext|>": END}
BY_ID = {f"token_id:{NUMBERS[text]}": p for text, p in TOPS.items()} | {f"token_id:{UNKNOWN}": 0.0625}
DOMAIN = [b" card", "é".encode(), EOS, f"token_id:{NUMBERS[' card']}".encode()]


class TestIdsFromAServer:
    @pytest.mark.parametrize("kind", [ScriptedChat, ScriptedLLM])
    def test_become_the_rows_that_texts_become(self, kind: type) -> None:
        """The chat shape spells the placeholder in its bytes as well, as vLLM does."""
        by_id = LangChainBackend(kind(answer=lambda text: BY_ID), tokenizer=local_encoding())
        by_text = LangChainBackend(kind(answer=lambda text: TOPS), max_top_k=3)
        rows = by_id.open(["x"], []).score(DOMAIN)
        assert rows.tolist() == [[pytest.approx(0.5), pytest.approx(0.25), pytest.approx(0.125), 0.0]]
        assert np.array_equal(rows, by_text.open(["x"], []).score(DOMAIN))
        assert by_id.top_tokens("x", [], top_k=4) == by_text.top_tokens("x", [], top_k=3)

    def test_are_unread_without_a_tokenizer_that_knows_them(self) -> None:
        assert next_token(chat_payload(BY_ID)) == {}
        with pytest.raises(CapabilityError, match="spells tokens as ids"):
            LangChainBackend(ScriptedChat(answer=lambda text: BY_ID), tokenizer=Words())

    def test_load_a_named_encoding_while_everything_is_still_public(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(tiktoken, "get_encoding", lambda name: local_encoding())
        backend = LangChainBackend(ScriptedLLM(answer=lambda text: BY_ID), tokenizer="o200k_base")
        assert backend.open(["x"], []).score(DOMAIN)[0, 0] == pytest.approx(0.5)

        def offline(name: str) -> None:
            raise ConnectionError(name)

        monkeypatch.setattr(tiktoken, "get_encoding", offline)
        with pytest.raises(ConfigurationError, match="TIKTOKEN_CACHE_DIR"):
            LangChainBackend(ScriptedLLM(answer=lambda text: BY_ID), tokenizer="o200k_base")

    @pytest.mark.parametrize("name", ["id", "token_id"])
    @pytest.mark.parametrize("lost", [{}, {"bytes": None}, {"bytes": list("\ufffd".encode())}])
    def test_of_entries_stand_in_for_bytes_that_a_server_lost(self, name: str, lost: dict[str, Any]) -> None:
        spell = PublicTokenizer(local_encoding()).spelled
        entry = {"token": "\ufffd", "logprob": math.log(0.5), **lost}
        payload = {"content": [{"top_logprobs": [{**entry, name: NUMBERS["é"]}]}]}
        assert next_token(payload) == {LOST: pytest.approx(0.5)}
        assert next_token(payload, spell=spell) == {"é".encode(): pytest.approx(0.5)}
        half = {"content": [{"top_logprobs": [{**entry, name: 0xC3}]}]}  # the first byte of a character
        assert next_token(half, spell=spell) == {b"\xc3": pytest.approx(0.5)}

    def test_of_entries_give_way_to_bytes_that_the_server_reports(self) -> None:
        spell = PublicTokenizer(local_encoding()).spelled
        entry = {"token": "x", "bytes": list(b" cash"), "id": NUMBERS[" card"], "logprob": math.log(0.5)}
        assert next_token({"content": [{"top_logprobs": [entry]}]}, spell=spell) == {b" cash": pytest.approx(0.5)}

    @pytest.mark.parametrize("number", ["7", 1.0, True, None, -1, 2**70, [256]])
    def test_of_the_wrong_kind_leave_the_text(self, number: Any) -> None:
        spell = PublicTokenizer(local_encoding()).spelled
        payload = {"content": [{"top_logprobs": [{"token": "a", "id": number, "logprob": math.log(0.5)}]}]}
        assert next_token(payload, spell=spell) == {b"a": pytest.approx(0.5)}

    @pytest.mark.parametrize(
        "text", ["token_id:", "token_id:x", "token_id:-1", "token_id:7 ", " token_id:7", "token_id:٣"]
    )
    def test_are_read_off_exact_placeholders_only(self, text: str) -> None:
        assert next_token(legacy_payload({text: 0.5}), spell=lambda number: b"read") == {
            text.encode(): pytest.approx(0.5)
        }
        huge = legacy_payload({"token_id:" + "9" * 5000: 0.5})
        assert next_token(huge, spell=lambda number: b"read") == {}

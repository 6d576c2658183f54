"""Tasks of trained prompts: what goes together, how texts are read, and what can never be read as something else."""

from __future__ import annotations

from typing import Any

import pytest

from langchain_dpicl.backends.base import TrainingExample
from langchain_dpicl.backends.tuning.tasks import PromptTask, TaskReader
from langchain_dpicl.exceptions import ConfigurationError
from tests import tiny_hf, tiny_tuning

LABELS = ("bad", "good")
SPACED = (" bad", " good")
CAUSAL = PromptTask("causal_lm", "Review: {text}\nIt was", LABELS, (" blue", " red"), 24)
FREE = PromptTask("causal_lm", "Q: {text} A: ", max_input_tokens=24, max_target_tokens=6)
MASKED = PromptTask("masked_lm", "{text} It was{mask}.", LABELS, (" bad", " good"), 24)
HEAD = PromptTask("sequence_classification", "", ("a", "b", "c"), max_input_tokens=24)
TASKS = (CAUSAL, FREE, MASKED, HEAD)


def shown(reader: TaskReader, ids: list[int]) -> str:
    return reader.tokens._tokenizer.decode(ids, clean_up_tokenization_spaces=False)


class TestATask:
    @pytest.mark.parametrize("task", TASKS, ids=lambda task: task.kind)
    def test_is_read_from_what_it_wrote(self, task: PromptTask) -> None:
        import json

        assert PromptTask.from_dict(json.loads(json.dumps(task.to_dict()))) == task

    @pytest.mark.parametrize(
        ("given", "named"),
        [
            ({"kind": "seq2seq"}, "kind"),
            ({"template": "no field"}, "template"),
            ({"template": "{text} {text}"}, "template"),
            ({"template": "{text} {other}"}, "template"),
            (
                {"template": "{text} {mask}"},
                "template: .* at most one {pair}, and no other field, found .* has no mask$",
            ),
            ({"template": "{text!r}"}, "template"),
            ({"template": "{text:>9}"}, "template"),
            ({"template": "{text"}, "template"),
            ({"template": "{}"}, "template"),
            ({"template": 3}, "template"),
            ({"labels": ("bad", "bad")}, "labels"),
            ({"labels": ("bad",), "words": (" bad",)}, "labels"),
            ({"labels": "bad"}, "labels"),
            ({"words": (" bad",)}, "words"),
            (
                {"words": (" bad", " bad")},
                r"words: expected one for each of the 2 labels, all different",
            ),
            ({"words": (" bad", " ")}, "words"),
            ({"labels": ()}, "words"),
            ({"max_input_tokens": 0}, "max_input_tokens"),
            ({"max_input_tokens": True}, "max_input_tokens"),
            ({"max_target_tokens": 1.5}, "max_target_tokens"),
            ({"kind": "masked_lm"}, "template"),
            ({"kind": "masked_lm", "template": "{mask}{text}{mask}"}, "template"),
            ({"kind": "masked_lm", "template": "{text}{mask}", "labels": (), "words": ()}, "labels"),
            ({"kind": "sequence_classification"}, "template"),
            ({"kind": "sequence_classification", "template": ""}, "words"),
            (
                {"kind": "sequence_classification", "template": "", "words": (), "labels": ()},
                "labels: .*outputs, in their",
            ),
        ],
    )
    def test_refuses_parts_that_do_not_go_together(self, given: dict[str, Any], named: str) -> None:
        with pytest.raises(ConfigurationError, match=f"^{named}" if ":" in named else rf"^{named}( \(.*\))?: expected"):
            PromptTask(**(CAUSAL.to_dict() | given))

    def test_template_and_words_have_the_defaults_of_their_kind(self) -> None:
        assert PromptTask("causal_lm", labels=LABELS) == PromptTask("causal_lm", "{text}\nLabel:", LABELS, SPACED)
        assert PromptTask("masked_lm", labels=LABELS) == PromptTask("masked_lm", "{text} {mask}", LABELS, SPACED)
        assert PromptTask("causal_lm") == PromptTask("causal_lm", "{text}\nLabel:", (), ())
        assert PromptTask("sequence_classification", labels=LABELS).words == ()

    @pytest.mark.parametrize("state", [None, [], {"kind": "causal_lm"}, CAUSAL.to_dict() | {"more": 1}])
    def test_refuses_another_form(self, state: Any) -> None:
        with pytest.raises(ConfigurationError, match="task: expected"):
            PromptTask.from_dict(state)

    def test_braces_of_a_template_can_be_written(self) -> None:
        assert PromptTask("causal_lm", "{{ {text} }}.").pieces == (("{ ", "text"), (" }.", None))

    def test_an_example_shows_nothing(self) -> None:
        example = TrainingExample("zxcanaryzx", "zxcanaryzx", "zxcanaryzx")
        assert "zxcanaryzx" not in repr(example) + str(example) + f"{example}"


class TestACausalTask:
    def test_the_answer_follows_right_behind_the_input(self) -> None:
        reader = TaskReader(tiny_hf.byte_tokenizer(), CAUSAL)
        assert shown(reader, reader.input("the apple").ids) == "Review: the apple\nIt was"
        assert [shown(reader, [id_]) for id_ in reader.word_ids] == [" blue", " red"]
        assert reader.answer("good") == [1]

    def test_spaces_belong_to_what_follows_them(self) -> None:
        reader = TaskReader(tiny_hf.byte_tokenizer(), FREE)
        apart = reader.tokens.encode
        assert reader.input("the sea is").ids == [*apart("Q:"), *apart(" the sea is"), *apart(" A:")]
        assert reader.answer("blue")[:-1] == apart(" blue")

    def test_a_free_text_ends_with_the_end_of_the_text_unless_it_is_cut(self) -> None:
        reader = TaskReader(tiny_hf.byte_tokenizer(), FREE)
        assert reader.answer("blue")[-1] == reader.eos == 1
        assert reader.answer("") == [1]
        assert len(reader.answer("the apple is red and the rose is red")) == 6

    def test_a_tokenizer_that_begins_with_a_start_begins_with_one(self) -> None:
        from tokenizers import processors

        tokenizer = tiny_hf.byte_tokenizer()
        tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
            "<s> $A </s>", None, [("<s>", 0), ("</s>", 1)]
        )
        ids = TaskReader(tokenizer, CAUSAL).input("the apple").ids
        assert ids[0] == 0
        assert 1 not in ids

    def test_a_tokenizer_of_pieces_reads_a_template_as_one_text(self) -> None:
        tokenizer = tiny_hf.piece_tokenizer()
        task = PromptTask("causal_lm", "the sea: {text} is", LABELS, (" blue", " red"), 24)
        reader = TaskReader(tokenizer, task)
        assert reader.input("a lake").ids == tokenizer("the sea: a lake is", add_special_tokens=False)["input_ids"]

    def test_a_tokenizer_without_an_end_writes_no_free_text(self) -> None:
        with pytest.raises(ConfigurationError, match="eos_token"):
            TaskReader(tiny_hf.byte_tokenizer(eos_token=None), FREE)


class TestAMaskedTask:
    def test_the_mask_stands_where_the_template_says(self) -> None:
        tokenizer = tiny_tuning.roberta_tokenizer()
        reader = TaskReader(tokenizer, MASKED)
        read = reader.input("the film")
        assert shown(reader, read.ids) == "<s>the film It was<mask>.</s>"
        assert read.ids[read.at] == tokenizer.mask_token_id
        assert read.ids == tokenizer("the film It was<mask>.")["input_ids"]

    def test_a_mask_in_a_private_text_is_plain_text(self) -> None:
        tokenizer = tiny_tuning.roberta_tokenizer()
        reader = TaskReader(tokenizer, MASKED)
        read = reader.input("<mask></s> the film <mask>")
        assert read.ids.count(tokenizer.mask_token_id) == 1
        assert read.ids.count(tokenizer.eos_token_id) == 1
        assert read.ids[read.at] == tokenizer.mask_token_id

    def test_needs_a_tokenizer_with_a_mask(self) -> None:
        with pytest.raises(ConfigurationError, match="a tokenizer with a mask"):
            TaskReader(tiny_hf.byte_tokenizer(), MASKED)

    def test_word_pieces_do(self) -> None:
        tokenizer = tiny_tuning.bert_tokenizer()
        task = PromptTask("masked_lm", "{text} it was {mask}.", LABELS, ("bad", "good"), 24)
        reader = TaskReader(tokenizer, task)
        assert reader.input("the film").ids == tokenizer("the film it was [MASK].")["input_ids"]
        assert tokenizer.convert_ids_to_tokens(list(reader.word_ids)) == ["bad", "good"]


class TestAHead:
    @pytest.mark.parametrize("kind", ["roberta", "bert"])
    def test_reads_texts_and_pairs_as_the_tokenizer_joins_them(self, kind: str) -> None:
        tokenizer = getattr(tiny_tuning, f"{kind}_tokenizer")()
        reader = TaskReader(tokenizer, HEAD)
        for texts in (("the film was good",), ("the film", "was bad, a bad play")):
            told = tokenizer(*texts, return_token_type_ids=True)
            read = reader.input(*texts)
            assert read.ids == told["input_ids"]
            assert read.types == told["token_type_ids"]
        assert reader.has_types is (kind == "bert")

    def test_two_texts_share_the_room_and_one_takes_what_the_other_leaves(self) -> None:
        tokenizer = tiny_tuning.bert_tokenizer()
        reader = TaskReader(tokenizer, HEAD)
        long, short = "the film was good " * 20, "bad"
        for texts in ((long, long), (long, short), (short, long), (long,)):
            assert len(reader.input(*texts).ids) == 24
        both = reader.input(long, long)
        assert [both.types.count(kind) for kind in (0, 1)] == [13, 11]  # [CLS] a [SEP] b [SEP]: 11 tokens and 10
        assert tokenizer.decode(reader.input(long, short).ids[-2:-1]) == "bad"

    def test_a_tokenizer_that_joins_no_pair_gets_one_text(self) -> None:
        reader = TaskReader(_Alone(tiny_tuning.bert_tokenizer()), HEAD)
        assert reader.input("the film", "was bad").ids == reader.input("the film was bad").ids


class _Alone:
    """A tokenizer that takes one text only."""

    def __init__(self, tokenizer: Any) -> None:
        self._own = tokenizer

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "_own":
            raise AttributeError(name)
        return getattr(self._own, name)

    def __call__(self, text: str, **options: Any) -> Any:
        return self._own(text, **options)


class TestAnyTask:
    @pytest.mark.parametrize(
        ("task", "tokenizer"),
        [
            (CAUSAL, tiny_hf.byte_tokenizer),
            (FREE, tiny_hf.byte_tokenizer),
            (MASKED, tiny_tuning.roberta_tokenizer),
            (HEAD, tiny_tuning.bert_tokenizer),
        ],
        ids=["words", "free", "masked", "head"],
    )
    def test_what_is_too_long_loses_its_end_and_never_the_template(self, task: PromptTask, tokenizer: Any) -> None:
        reader = TaskReader(tokenizer(), task)
        long = reader.input("the sea is blue and wide " * 99)
        bare = reader.input("")
        assert len(long.ids) == task.max_input_tokens
        assert [id_ for id_ in long.ids if id_ in bare.ids] != []
        left = len(long.ids) - len(bare.ids)
        cut = next(place for place, (a, b) in enumerate(zip(long.ids, [*bare.ids, None], strict=False)) if a != b)
        assert [*long.ids[:cut], *long.ids[cut + left :]] == bare.ids

    @pytest.mark.parametrize(
        "text", ["", "\ud800", "\x00", "e\u0301" * 50, "\u202e{text}{mask}", "<|im_start|>", " " * 300]
    )
    @pytest.mark.parametrize(
        ("task", "tokenizer"),
        [(CAUSAL, tiny_hf.byte_tokenizer), (MASKED, tiny_tuning.roberta_tokenizer), (HEAD, tiny_tuning.bert_tokenizer)],
        ids=["words", "masked", "head"],
    )
    def test_strange_texts_are_read_and_bring_no_special_token(
        self, task: PromptTask, tokenizer: Any, text: str
    ) -> None:
        reader = TaskReader(tokenizer(), task)
        special = reader.tokens.markers
        read = reader.input(text, text)
        assert len(read.ids) == len(read.types) <= task.max_input_tokens
        expected = [id_ for id_ in reader.input("a", "a").ids if id_ in special]
        assert [id_ for id_ in read.ids if id_ in special] == expected

    def test_a_word_of_several_tokens_is_refused_by_its_label(self) -> None:
        task = PromptTask("causal_lm", "{text} is", LABELS, (" blue", " marvellous"), 24)
        with pytest.raises(ConfigurationError, match=r"^words: .*found \d+ for label 'good' \(' marvellous'\)"):
            TaskReader(tiny_hf.byte_tokenizer(), task)

    def test_a_space_that_stands_in_the_template_and_in_the_word_is_named(self) -> None:
        task = PromptTask("causal_lm", "{text} is ", LABELS, (" blue", " red"), 24)
        with pytest.raises(ConfigurationError, match=r"for label 'bad' \('  blue'\).* a space at the template's end"):
            TaskReader(tiny_hf.byte_tokenizer(), task)

    def test_a_word_that_the_tokenizer_does_not_know_is_refused(self) -> None:
        task = PromptTask("masked_lm", "{text} {mask}", LABELS, ("bad", "\u5b57\u5b57"), 24)
        with pytest.raises(ConfigurationError, match="found 0 for label 'good'"):
            TaskReader(tiny_tuning.bert_tokenizer(), task)

    def test_words_that_are_the_same_token_are_refused(self) -> None:
        task = PromptTask("masked_lm", "{text} {mask}", LABELS, ("Good", "good"), 24)  # the tokenizer lowers
        with pytest.raises(ConfigurationError, match=r"found one for \['Good', 'good'\]"):
            TaskReader(tiny_tuning.bert_tokenizer(), task)

    def test_a_template_that_leaves_no_room_is_refused(self) -> None:
        task = PromptTask("causal_lm", CAUSAL.template, LABELS, CAUSAL.words, 8)
        with pytest.raises(ConfigurationError, match="max_input_tokens: expected room for a text"):
            TaskReader(tiny_hf.byte_tokenizer(), task)

    def test_an_undeclared_label_is_a_fault_that_does_not_name_it(self) -> None:
        reader = TaskReader(tiny_hf.byte_tokenizer(), CAUSAL)
        with pytest.raises(ValueError, match=r"^no declared label$"):
            reader.answer("zxcanaryzx")

    def test_the_callers_tokenizer_stays_as_it_is(self) -> None:
        tokenizer = tiny_tuning.roberta_tokenizer()
        tokenizer.backend_tokenizer.enable_truncation(3)
        tokenizer.backend_tokenizer.enable_padding(length=9)
        reader = TaskReader(tokenizer, HEAD)
        assert (
            reader.input("the film was good").ids == tiny_tuning.roberta_tokenizer()("the film was good")["input_ids"]
        )
        assert tokenizer.backend_tokenizer.truncation["max_length"] == 3
        assert tokenizer.backend_tokenizer.padding["length"] == 9

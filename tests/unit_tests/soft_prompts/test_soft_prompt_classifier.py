"""Released soft prompts as a Runnable that labels: words of causal and masked models, heads, several prompts at once."""

from __future__ import annotations

import asyncio
import copy
import functools
import math
import pickle
import threading
import time
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import torch
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.documents import Document
from langchain_core.messages import AIMessage
from langchain_core.prompts import ChatPromptTemplate, PromptTemplate
from langchain_core.runnables import RunnableLambda

from langchain_dpicl.backends.base import TrainingExample
from langchain_dpicl.backends.hf import loading
from langchain_dpicl.backends.hf.backend import HuggingFaceBackend
from langchain_dpicl.backends.tuning.engine import PromptEngine
from langchain_dpicl.backends.tuning.prompted_model import PromptedModel
from langchain_dpicl.backends.tuning.tasks import PromptTask
from langchain_dpicl.exceptions import CapabilityError, ConfigurationError, ModelCallError, PrivateAccessError
from langchain_dpicl.released.soft_prompt import ARRAY, SoftPrompt
from langchain_dpicl.soft_prompts.serving import SoftPromptClassifier
from tests import tiny_tuning
from tests.durable import until

pytestmark = pytest.mark.usefixtures("own_hooks", "one_thread")

REPORT = {"epsilon": 1.0}
TEXTS = ["the film was good", "a bad play, a terrible meal, it is what it was", "my card"]
CAUSAL = PromptTask("causal_lm", "Text: {text}\nIt was", ("bad", "good"), (" blue", " red"), max_input_tokens=64)
MASKED = PromptTask("masked_lm", "{text} it was {mask}", ("bad", "good"), (" bad", " good"), max_input_tokens=64)
PAIRS = PromptTask("masked_lm", "{text} {mask} {pair}", ("same", "other"), (" the", " a"), max_input_tokens=64)
HEAD = PromptTask("sequence_classification", "", ("bad", "good", "neither"), max_input_tokens=64)


MADE: dict[str, tuple[Any, Any]] = {
    "llama": (tiny_tuning.llama, tiny_tuning.causal_tokenizer),
    "roberta": (tiny_tuning.roberta, tiny_tuning.roberta_tokenizer),
    "roberta head": (
        functools.partial(tiny_tuning.roberta, "RobertaForSequenceClassification", num_labels=3),
        tiny_tuning.roberta_tokenizer,
    ),
    "bert head": (functools.partial(tiny_tuning.bert, num_labels=3), tiny_tuning.bert_tokenizer),
    "roformer head": (functools.partial(tiny_tuning.roformer, num_labels=3), tiny_tuning.bert_tokenizer),
}
CASES = [
    ("llama", "soft_prompt", CAUSAL),
    ("llama", "prefix", CAUSAL),
    ("roberta", "soft_prompt", MASKED),
    ("roberta", "soft_prompt", PAIRS),
    ("roberta head", "soft_prompt", HEAD),
    ("bert head", "soft_prompt", HEAD),
    ("bert head", "prefix", HEAD),
]


@functools.cache
def parts(name: str) -> tuple[Any, Any]:
    return MADE[name][0](), MADE[name][1]()


@functools.cache
def engine(name: str, method: Any, task: PromptTask, count: int = 3) -> PromptEngine:
    model, tokenizer = parts(name)
    return PromptEngine(model, tokenizer, method=method, num_virtual_tokens=count, task=task)


def numbers(name: str, method: str, task: PromptTask, *, count: int = 3, seed: int = 0) -> Any:
    return np.random.default_rng(seed).normal(size=engine(name, method, task, count).width)


@functools.cache
def prompt(name: str, method: str, task: PromptTask, *, count: int = 3, seed: int = 0) -> SoftPrompt:
    parameters = numbers(name, method, task, count=count, seed=seed)
    return SoftPrompt.of(engine(name, method, task, count), parameters, report=REPORT)


def classifier(name: str, prompts: Any, **options: Any) -> SoftPromptClassifier:
    model, tokenizer = parts(name)
    return SoftPromptClassifier(model, prompts, tokenizer=tokenizer, **options)


def asked(task: PromptTask) -> list[Any]:
    if task is PAIRS:
        return [{"text": text, "pair": TEXTS[0]} for text in TEXTS]
    if task is HEAD:
        return [*TEXTS, {"text": TEXTS[0], "pair": TEXTS[1]}]
    return TEXTS


def case(value: Any) -> str | None:
    return f"{value.kind} {value.template}" if isinstance(value, PromptTask) else None


@pytest.mark.parametrize(("name", "method", "task"), CASES, ids=case)
def test_scores_are_those_of_training(name: str, method: str, task: PromptTask) -> None:
    served = classifier(name, prompt(name, method, task))
    inputs = asked(task)
    found = served.scores(inputs)
    for given, scores in zip(inputs, found, strict=True):
        said = {"text": given} if isinstance(given, str) else given
        assert tuple(scores) == task.labels
        examples = [TrainingExample(said["text"], said.get("pair"), label) for label in task.labels]
        losses = engine(name, method, task).losses(numbers(name, method, task), examples)
        assert np.allclose(np.exp(-losses), list(scores.values()), atol=1e-5)
    assert served.batch(inputs) == [max(scores, key=scores.__getitem__) for scores in found]


@pytest.mark.parametrize(("name", "method", "task"), [CASES[place] for place in (0, 1, 2, 4, 5)], ids=case)
def test_scores_are_those_of_peft(name: str, method: str, task: PromptTask, tmp_path: Path) -> None:
    prompt(name, method, task).save(tmp_path / "prompt")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        wrapped = peft.PeftModel.from_pretrained(MADE[name][0](), str(tmp_path / "prompt")).eval()
    tokenizer = parts(name)[1]
    shown = task.template.replace("{mask}", str(tokenizer.mask_token)) if task.template else "{text}"
    shown = shown.replace(" <mask>", "<mask>")  # the space in front of a mask is no token
    for text in TEXTS:
        ids = tokenizer(shown.replace("{text}", text), return_tensors="pt")["input_ids"]
        with torch.inference_mode():  # no longer than this: other tests train the models that `parts` keeps
            logits = wrapped(input_ids=ids, attention_mask=torch.ones_like(ids)).logits[0]
        if task.kind == "masked_lm":
            at = int((ids[0] == tokenizer.mask_token_id).nonzero()[0]) + 3
            logits = logits[at]
        elif task.kind == "causal_lm":
            logits = logits[-1]
        if task.words:
            words = [tokenizer.encode(word, add_special_tokens=False)[-1] for word in task.words]
            logits = logits[words]
        expected = logits.double().softmax(dim=0).tolist()
        found = list(classifier(name, prompt(name, method, task)).scores([text])[0].values())
        assert np.allclose(found, expected, atol=1e-5)


@pytest.mark.parametrize("name", ["llama", "bert head", "roformer head"])
def test_prompts_of_both_methods_and_any_length_share_a_model_and_a_batch(name: str) -> None:
    task = CAUSAL if name == "llama" else HEAD
    other = (
        replace(task, template="{text} is", labels=("a", "b", "c"), words=(" red", " blue", " green"))
        if name == "llama"
        else replace(task, labels=("a", "b", "c"))
    )
    prompts = {
        "one": prompt(name, "soft_prompt", task),
        "long": prompt(name, "soft_prompt", task, count=7, seed=1),
        "deep": prompt(name, "prefix", task, count=4, seed=2),
        "short": prompt(name, "prefix", task, count=1, seed=3),
        "other": prompt(name, "soft_prompt", other, seed=4),
    }
    served = classifier(name, prompts, default="deep")
    inputs = [{"text": text, "prompt": given} for text in TEXTS for given in prompts] + [TEXTS[0]]
    runs: list[int] = []
    forward = PromptedModel.forward

    def counted(self: PromptedModel, rows: Any, *args: Any, **options: Any) -> torch.Tensor:
        runs.append(len(rows))
        return forward(self, rows, *args, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PromptedModel, "forward", counted)
        found = served.scores(inputs)
    assert sorted(runs) == [3, 3, 4, 6]  # one forward per method and length
    for given, scores in zip(inputs, found, strict=True):
        said = {"text": given, "prompt": "deep"} if isinstance(given, str) else given
        alone = classifier(name, prompts[said["prompt"]]).scores([said["text"]])[0]
        assert list(alone) == list(scores)
        assert np.allclose(list(alone.values()), list(scores.values()), atol=1e-5)
    assert len({tuple(np.round(list(scores.values()), 4)) for scores in found}) == 15  # the last has been asked before
    assert served.batch(inputs) == [max(scores, key=scores.__getitem__) for scores in found]


def test_a_large_batch_runs_in_parts_of_a_size_that_is_given() -> None:
    runs: list[int] = []
    forward = PromptedModel.forward
    served = classifier("llama", prompt("llama", "soft_prompt", CAUSAL), batch_size=2)
    whole = classifier("llama", prompt("llama", "soft_prompt", CAUSAL)).scores(TEXTS * 2)

    def counted(self: PromptedModel, rows: Any, *args: Any, **options: Any) -> torch.Tensor:
        runs.append(len(rows))
        return forward(self, rows, *args, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PromptedModel, "forward", counted)
        found = served.scores(TEXTS * 2)
    assert runs == [2, 2, 2]
    assert all(math.isclose(a["bad"], b["bad"], abs_tol=1e-6) for a, b in zip(found, whole, strict=True))


async def test_it_is_a_runnable() -> None:
    served = classifier("llama", prompt("llama", "soft_prompt", CAUSAL))
    alone = [served.invoke(text) for text in TEXTS]
    assert set(alone) <= {"bad", "good"}
    assert served.batch(TEXTS) == alone
    assert await served.abatch(TEXTS) == alone
    assert await served.ainvoke({"text": TEXTS[0]}) == alone[0]
    assert await served.ascores(TEXTS) == served.scores(TEXTS)
    chain = RunnableLambda(lambda text: {"text": text}) | served | RunnableLambda(str.upper)
    assert chain.invoke(TEXTS[1]) == alone[1].upper()
    assert list(served.stream(TEXTS[0])) == [alone[0]]
    assert served.batch([]) == []
    assert served.scores([]) == []


async def test_a_cancelled_call_ends_with_the_work_of_its_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    served = classifier("llama", prompt("llama", "soft_prompt", CAUSAL))
    begun, ended = threading.Event(), threading.Event()

    def slow(asked: object) -> list[Any]:
        begun.set()
        time.sleep(0.2)
        ended.set()
        return []

    monkeypatch.setattr(served._scorer, "scores", slow)
    for ask in (served.ascores, served.abatch):
        begun.clear()
        ended.clear()
        task = asyncio.create_task(ask(TEXTS))
        await until(begun.is_set)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert ended.is_set()


def test_a_part_of_the_model_in_training_mode_changes_no_score() -> None:
    served = classifier("bert head", prompt("bert head", "soft_prompt", HEAD))
    before = served.scores(TEXTS)
    parts("bert head")[0].bert.encoder.train()
    assert served.scores(TEXTS) == before


def test_a_part_of_the_model_in_training_mode_refuses_no_prompt() -> None:
    taught = prompt("bert head", "soft_prompt", HEAD)
    scorer = classifier("bert head", taught)._scorer
    parts("bert head")[0].bert.encoder.train()
    assert scorer.put("other", "soft_prompt", taught.arrays[ARRAY], task=HEAD, heads=None, head={})


def test_what_a_chain_hands_on_is_taken_for_its_text() -> None:
    served = classifier("llama", prompt("llama", "soft_prompt", CAUSAL))
    filled = {"what": TEXTS[1]}
    given = [
        PromptTemplate.from_template("{what}").invoke(filled),
        ChatPromptTemplate.from_messages([("human", "{what}")]).invoke(filled),
        AIMessage(TEXTS[1]),
        Document(TEXTS[1]),
    ]
    assert served.scores(given) == served.scores([TEXTS[1]] * len(given)) != served.scores([TEXTS[0]] * len(given))  # type: ignore[arg-type]
    assert (PromptTemplate.from_template("{what}") | served).invoke(filled) == served.invoke(TEXTS[1])


def test_what_is_asked_and_answered_is_traced_once_per_input() -> None:
    class Log(BaseCallbackHandler):
        def __init__(self) -> None:
            self.seen: list[Any] = []

        def on_chain_start(self, serialized: Any, inputs: Any, **kwargs: Any) -> None:
            self.seen.append((kwargs.get("name"), inputs))

        def on_chain_end(self, outputs: Any, **kwargs: Any) -> None:
            self.seen.append(outputs)

    log = Log()
    served = classifier("llama", prompt("llama", "soft_prompt", CAUSAL))
    labels = served.batch(TEXTS[:2], {"callbacks": [log]})
    assert log.seen == [*(("SoftPromptClassifier", text) for text in TEXTS[:2]), *labels]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (3, "a text, or a dict .* found 'int'"),
        ({"pair": "a"}, "a text, or a dict"),
        ({"text": "a", "label": "b"}, r"found \['label', 'text'\]"),
        ({"text": 3}, r"something else under \['text'\]"),
        ({"text": "a", "prompt": None}, r"something else under \['prompt'\]"),
        ({"text": "a", "prompt": "other"}, r"one of \['default'\], found 'other'"),
        ({"text": "a", "pair": "b"}, 'no "pair"'),
    ],
    ids=["number", "no text", "unknown key", "text that is none", "no name", "unknown name", "pair"],
)
def test_an_input_that_is_none_is_refused_and_the_others_are_answered(given: Any, said: str) -> None:
    served = classifier("llama", prompt("llama", "soft_prompt", CAUSAL))
    with pytest.raises(ConfigurationError, match=said):
        served.invoke(given)
    with pytest.raises(ConfigurationError, match=said):
        served.scores([given])
    found = served.batch([TEXTS[0], given, TEXTS[1]], return_exceptions=True)
    assert isinstance(found[1], ConfigurationError)
    assert [found[0], found[2]] == served.batch(TEXTS[:2])


def test_one_input_is_no_list() -> None:
    served = classifier("llama", prompt("llama", "soft_prompt", CAUSAL))
    with pytest.raises(ConfigurationError, match="inputs: expected a list, found 'str'"):
        served.scores("a text")
    with pytest.raises(ConfigurationError, match="inputs: expected a list"):
        served.scores({"text": "a"})  # type: ignore[arg-type]


def test_a_template_with_a_pair_wants_one() -> None:
    served = classifier("roberta", prompt("roberta", "soft_prompt", PAIRS))
    with pytest.raises(ConfigurationError, match='a "pair", as the template shows'):
        served.invoke("a text")


def test_several_prompts_without_a_default_must_be_named() -> None:
    one = prompt("llama", "soft_prompt", CAUSAL)
    served = classifier("llama", {"a": one, "b": one})
    with pytest.raises(ConfigurationError, match=r'under "prompt" one of \[\'a\', \'b\'\]'):
        served.invoke("a text")
    assert served.invoke({"text": TEXTS[0], "prompt": "b"}) in CAUSAL.labels


def test_a_mask_in_a_text_is_plain_text() -> None:
    served = classifier("roberta", prompt("roberta", "soft_prompt", MASKED))
    plain, marked = served.scores(["the film was good", "the film <mask> was good </s>"])
    assert plain != marked
    losses = engine("roberta", "soft_prompt", MASKED).losses(
        numbers("roberta", "soft_prompt", MASKED), [TrainingExample("the film <mask> was good </s>", None, "bad")]
    )
    assert math.isclose(math.exp(-losses[0]), marked["bad"], abs_tol=1e-5)


def test_an_engine_and_a_folder_do_too(tmp_path: Path) -> None:
    model, tokenizer = parts("llama")
    one = prompt("llama", "soft_prompt", CAUSAL)
    expected = classifier("llama", one).scores(TEXTS)
    local = HuggingFaceBackend(model, tokenizer, max_prompt_tokens=16, max_new_tokens=4)
    assert SoftPromptClassifier(local, one).scores(TEXTS) == expected
    with pytest.raises(ConfigurationError, match="tokenizer: expected None with an engine"):
        SoftPromptClassifier(local, one, tokenizer=tokenizer)
    head, words = parts("bert head")
    head.save_pretrained(tmp_path)
    words.save_pretrained(tmp_path)
    labelled = prompt("bert head", "soft_prompt", HEAD)
    read = SoftPromptClassifier(str(tmp_path), labelled, device="cpu")
    assert read.scores(TEXTS) == classifier("bert head", labelled).scores(TEXTS)


def test_a_prompt_of_other_weights_is_refused(tmp_path: Path) -> None:
    one, (model, tokenizer) = prompt("roberta", "soft_prompt", MASKED), parts("roberta")
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    low = SoftPromptClassifier(str(tmp_path), one, device="cpu", dtype="bfloat16")
    assert low.scores(TEXTS)[0]["bad"] == pytest.approx(classifier("roberta", one).scores(TEXTS)[0]["bad"], abs=0.1)
    other = tiny_tuning.roberta()
    with torch.no_grad():
        other.lm_head.bias.add_(1.0)
    with pytest.raises(ConfigurationError, match=r"'default': expected the weights that it was trained on .*'Roberta"):
        SoftPromptClassifier(other, one, tokenizer=tokenizer)


def test_a_model_whose_parts_are_made_at_random_when_it_is_read_is_refused(tmp_path: Path) -> None:
    """A masked model has no pooler: under a head it is another one each time, and no prompt brings it along."""
    body, words = tiny_tuning.bert("BertForMaskedLM"), tiny_tuning.bert_tokenizer()
    body.save_pretrained(tmp_path)
    words.save_pretrained(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        task = replace(HEAD, labels=("bad", "good"))
        made = PromptEngine(str(tmp_path), method="soft_prompt", num_virtual_tokens=3, task=task, device="cpu")
        one = SoftPrompt.of(made, np.zeros(made.width), report=REPORT)
        with pytest.raises(ConfigurationError, match="Parts that a folder lacks are initialised at random"):
            SoftPromptClassifier(str(tmp_path), one, device="cpu")
    made.prompted.model.save_pretrained(tmp_path)
    assert SoftPromptClassifier(str(tmp_path), one, device="cpu").batch(TEXTS)


def test_what_does_not_belong_together_is_refused() -> None:
    causal, masked = prompt("llama", "soft_prompt", CAUSAL), prompt("roberta", "soft_prompt", MASKED)
    with pytest.raises(ConfigurationError, match="tasks of one kind, because they share a model"):
        classifier("llama", {"a": causal, "b": masked})
    with pytest.raises(
        ConfigurationError, match=r"tasks with labels, found \['default'\]. Serve tasks that write text"
    ):
        classifier("llama", replace(causal, task=PromptTask("causal_lm", "{text}")))
    with pytest.raises(ConfigurationError, match="fingerprint 0"):
        classifier("llama", replace(causal, base={"name": "x", "tokenizer": "0"}))
    with pytest.raises(ConfigurationError, match="batch_size"):
        classifier("llama", causal, batch_size=0)
    with pytest.raises(ConfigurationError, match="default: expected one of"):
        classifier("llama", causal, default="b")
    with pytest.raises(ConfigurationError, match="a tokenizer with a model object"):
        SoftPromptClassifier(parts("llama")[0], causal)


def test_a_prompt_of_another_model_is_refused() -> None:
    causal = prompt("llama", "soft_prompt", CAUSAL)
    config = {**causal.peft_config, "token_dim": 40}
    wide = replace(causal, arrays={ARRAY: np.zeros((3, 40), np.float32)}, peft_config=config)
    with pytest.raises(ConfigurationError, match=r"prompt 'default': expected, for LlamaForCausalLM, 32 numbers .*40"):
        classifier("llama", wide)
    deep = prompt("llama", "prefix", CAUSAL)
    with pytest.raises(ConfigurationError, match="2 heads with keys, found 4"):
        classifier("llama", replace(deep, peft_config={**deep.peft_config, "num_attention_heads": 4}))
    with pytest.raises(ConfigurationError, match=r"at most 512 tokens, its context, found 3 virtual ones and 510"):
        classifier("llama", replace(causal, task=replace(CAUSAL, max_input_tokens=510)))
    head = prompt("bert head", "soft_prompt", HEAD)
    with pytest.raises(CapabilityError, match="with 3 outputs"):
        classifier("bert head", replace(head, task=replace(HEAD, labels=("a", "b"))))


def headless(name: str, *, seed: int = 5) -> Any:
    """A model whose head was made of other random numbers."""
    model = MADE[name][0]()
    with torch.no_grad():
        for at, parameter in enumerate(model.classifier.parameters()):
            parameter.copy_(torch.from_numpy(np.random.default_rng(seed + at).normal(size=tuple(parameter.shape))))
    return model


@pytest.mark.parametrize("name", ["bert head", "roberta head"])
def test_a_prompt_brings_the_head_that_it_was_trained_with(name: str, tmp_path: Path) -> None:
    tokenizer = parts(name)[1]
    one, deep = prompt(name, "soft_prompt", HEAD), prompt(name, "soft_prompt", HEAD, seed=3)
    expected = classifier(name, one).scores(TEXTS)
    with pytest.raises(ConfigurationError, match=r"a model with the head that it was trained with, found .* another"):
        SoftPromptClassifier(headless(name), one, tokenizer=tokenizer)
    headless(name).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    served = SoftPromptClassifier(str(tmp_path / "model"), {"a": one, "b": deep}, default="a", device="cpu")
    assert served.scores(TEXTS) == expected
    other = replace(deep, head={key: array + 1 for key, array in deep.head.items()})
    with pytest.raises(ConfigurationError, match="prompt 'b': expected a model with the head"):
        SoftPromptClassifier(str(tmp_path / "model"), {"a": one, "b": other}, default="a", device="cpu")
    one.save(tmp_path / "prompt")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        wrapped = peft.PeftModel.from_pretrained(headless(name), str(tmp_path / "prompt")).eval()
    ids = tokenizer(TEXTS[0], return_tensors="pt")["input_ids"]
    with torch.inference_mode():
        shares = wrapped(input_ids=ids, attention_mask=torch.ones_like(ids)).logits[0].double().softmax(dim=0)
    assert np.allclose(shares.tolist(), list(expected[0].values()), atol=1e-5)


def test_a_head_keeps_its_own_precision() -> None:
    name = "bert head"
    model = parts(name)[0]
    narrow = MADE[name][0]().to(torch.bfloat16)
    one = prompt(name, "soft_prompt", HEAD)
    assert set(one.head) == {"base_model.classifier.weight", "base_model.classifier.bias"}
    assert (one.head["base_model.classifier.weight"] == model.classifier.weight.detach().numpy()).all()
    assert SoftPromptClassifier(narrow, one, tokenizer=parts(name)[1]).invoke(TEXTS[0]) in HEAD.labels
    assert not prompt("llama", "soft_prompt", CAUSAL).head


def test_numbers_that_are_none_are_a_failed_call() -> None:
    model, tokenizer = tiny_tuning.llama(), parts("llama")[1]
    served = SoftPromptClassifier(model, prompt("llama", "soft_prompt", CAUSAL), tokenizer=tokenizer)
    with torch.no_grad():
        model.lm_head.weight[5] = torch.nan  # a word that no label has
        assert served.invoke(TEXTS[0]) in CAUSAL.labels
        model.lm_head.weight[:] = torch.nan
    with pytest.raises(ModelCallError, match="the model gave no numbers"):
        served.invoke(TEXTS[0])


@pytest.mark.parametrize(
    ("raised", "said"),
    [(torch.OutOfMemoryError("x"), "out of memory with 3 texts; lower batch_size"), (ValueError("x"), "ValueError")],
    ids=["memory", "fault"],
)
def test_a_model_that_fails_is_a_failed_public_call(raised: Exception, said: str) -> None:
    model, tokenizer = tiny_tuning.llama(), parts("llama")[1]
    served = SoftPromptClassifier(model, prompt("llama", "soft_prompt", CAUSAL), tokenizer=tokenizer)

    def breaks(*_: Any) -> None:
        raise raised

    model.register_forward_pre_hook(breaks)
    with pytest.raises(ModelCallError, match=said):
        served.batch(TEXTS)


def test_serving_changes_nothing_of_the_model() -> None:
    digest = engine("bert head", "soft_prompt", HEAD).weights_digest()
    model = parts("bert head")[0]
    learning = [parameter.requires_grad for parameter in model.parameters()]
    classifier("bert head", prompt("bert head", "soft_prompt", HEAD)).batch(TEXTS)
    assert engine("bert head", "soft_prompt", HEAD).weights_digest() == digest
    assert [parameter.requires_grad for parameter in model.parameters()] == learning
    assert all(parameter.grad is None for parameter in model.parameters())


def test_without_torch_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> None:
        raise ConfigurationError("expected the packages of local models, found no torch; install langchain-dpicl[hf]")

    monkeypatch.setattr(loading, "check_installed", missing)
    with pytest.raises(ConfigurationError, match=r"install langchain-dpicl\[hf\]"):
        classifier("llama", prompt("llama", "soft_prompt", CAUSAL))


def test_it_shows_names_and_no_numbers() -> None:
    served = classifier("llama", prompt("llama", "soft_prompt", CAUSAL))
    assert repr(served) == "SoftPromptClassifier('LlamaForCausalLM', prompts=['default'], default='default')"


def test_its_copies_are_itself_and_pickles_are_refused() -> None:
    served = classifier("llama", prompt("llama", "soft_prompt", CAUSAL))
    assert copy.copy(served) is served
    assert copy.deepcopy([served])[0] is served
    with pytest.raises(PrivateAccessError, match="SoftPromptClassifier cannot be pickled: it holds a whole model"):
        pickle.dumps(served)

"""Released soft prompts in front of a local model that writes: LangChain's doors, and several prompts in one batch.

What they are held against is the peft package, which reads the saved folder and is asked for one token at a time.
"""

from __future__ import annotations

import copy
import functools
import itertools
import pickle
import warnings
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import torch
from langchain_core.caches import InMemoryCache
from langchain_core.messages import AIMessage, HumanMessage
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import PromptTemplate
from tokenizers import normalizers

from langchain_dpicl.backends.hf import loading
from langchain_dpicl.backends.hf.backend import HuggingFaceBackend
from langchain_dpicl.backends.tuning.engine import PromptEngine
from langchain_dpicl.backends.tuning.prompted_model import PromptedBatch, PromptRegistry, parts_of
from langchain_dpicl.backends.tuning.tasks import PromptTask
from langchain_dpicl.exceptions import CapabilityError, ConfigurationError, ModelCallError, PrivateAccessError
from langchain_dpicl.released.soft_prompt import ARRAY, SoftPrompt
from langchain_dpicl.serving import ChatLocal, LocalLLM
from langchain_dpicl.soft_prompts.serving import SoftPromptBackend
from tests import tiny_tuning
from tests.unit_tests.backends.hf_doubles import Narrow

pytestmark = pytest.mark.usefixtures("own_hooks", "one_thread")

TEXT = "why was my card charged twice?"
LENGTH = 9
REPORT = {"epsilon": 1.0, "made": "up"}
WRITES = PromptTask("causal_lm", "Question: {text}\nAnswer:", max_input_tokens=40, max_target_tokens=8)
LABELS = PromptTask("causal_lm", "{text}\nIt was", ("bad", "good"), (" blue", " red"), max_input_tokens=40)
MODELS = {"gpt2": tiny_tuning.gpt2, "llama": tiny_tuning.llama}


@functools.cache
def model(name: str) -> Any:
    return MODELS[name]()


@functools.cache
def tokenizer() -> Any:
    return tiny_tuning.causal_tokenizer()


@functools.cache
def engine(name: str, method: Any, count: int, task: PromptTask) -> PromptEngine:
    return PromptEngine(model(name), tokenizer(), method=method, num_virtual_tokens=count, task=task)


@functools.cache
def prompt(name: str, method: str, count: int = 3, *, task: PromptTask = WRITES, seed: int = 0) -> SoftPrompt:
    """A prompt as training leaves it, but for its numbers."""
    made = engine(name, method, count, task)
    return SoftPrompt.of(made, np.random.default_rng(seed).normal(size=made.width), report=REPORT)


@functools.cache
def base(name: str = "llama") -> HuggingFaceBackend:
    return HuggingFaceBackend(model(name), tokenizer(), max_prompt_tokens=64, max_new_tokens=32)


def backend(name: str = "llama", method: str = "soft_prompt", **options: Any) -> SoftPromptBackend:
    return SoftPromptBackend(base(name), prompt(name, method), **options)


def said(served: SoftPromptBackend, text: str = TEXT, *, most: int = LENGTH) -> str:
    return LocalLLM(backend=served, max_tokens=most).invoke(text)


def said_together(
    served: SoftPromptBackend, texts: Sequence[str], names: Sequence[str | None], *, most: int = LENGTH
) -> list[str]:
    """What the rows of one batch say, each behind a prompt of its own."""
    steps = itertools.islice(served.generate(texts, names=names), most)
    rows = zip(*(tokens.tolist() for tokens, _ in steps), strict=True)
    return [base().decode(list(itertools.takewhile(lambda token: token != served.eos, row))) for row in rows]


def by_peft(name: str, served: SoftPrompt, ids: Sequence[int], folder: Path, *, steps: int = LENGTH) -> list[int]:
    """Greedy tokens of PEFT's own model, without any cache; up to the end of the text."""
    served.save(folder)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        wrapped = peft.PeftModel.from_pretrained(MODELS[name](), str(folder)).eval()
    allowed = torch.zeros(420, dtype=torch.bool)
    allowed[list(base(name).vocabulary())] = True
    written: list[int] = []
    for _ in range(steps):
        with torch.inference_mode():  # no longer than this: other tests train the models that `base` keeps
            logits = wrapped(input_ids=torch.tensor([[*ids, *written]])).logits[0, -1]
        token = int(logits.masked_fill(~allowed, -torch.inf).argmax())
        if token == base(name).eos:
            break
        written.append(token)
    return written


def read(text: str, *, template: str = "Question: {}\nAnswer:") -> list[int]:
    """Ids as training shows a text: the start, and the template around it."""
    before, behind = template.split("{}")
    plain = functools.partial(tokenizer().encode, add_special_tokens=False)
    return [*plain(before.rstrip(" ")), *plain(" " * before.endswith(" ") + text), *plain(behind)]


def test_a_part_of_the_model_in_training_mode_changes_no_prompt() -> None:
    made, taught = MODELS["gpt2"](), prompt("gpt2", "soft_prompt")
    served = SoftPromptBackend(HuggingFaceBackend(made, tokenizer(), max_prompt_tokens=64, max_new_tokens=32), taught)
    made.transformer.h[0].train()
    expected = LocalLLM(backend=backend("gpt2"), max_tokens=LENGTH).invoke(TEXT)
    assert LocalLLM(backend=served, max_tokens=LENGTH).invoke(TEXT) == expected


@pytest.mark.parametrize("method", ["soft_prompt", "prefix"])
@pytest.mark.parametrize("name", sorted(MODELS))
def test_what_is_written_is_what_peft_writes(name: str, method: str, tmp_path: Path) -> None:
    expected = by_peft(name, prompt(name, method), read(TEXT), tmp_path / "prompt")
    llm = LocalLLM(backend=backend(name, method), max_tokens=LENGTH)
    assert llm.invoke(TEXT) == base(name).decode(expected)
    assert len(expected) > 2
    assert llm.invoke(TEXT) != LocalLLM(backend=base(name), max_tokens=LENGTH).invoke(f"Question: {TEXT}\nAnswer:")


def test_rows_of_one_batch_have_prompts_of_either_method_and_any_length(tmp_path: Path) -> None:
    prompts = {
        "short": prompt("llama", "soft_prompt", 1),
        "long": prompt("llama", "soft_prompt", 6, seed=1),
        "deep": prompt("llama", "prefix", 4, seed=2),
        "other": prompt("llama", "soft_prompt", 3, task=LABELS, seed=3),
    }
    served = SoftPromptBackend(base(), prompts, default="deep")
    texts = [TEXT, "my transfer is late", TEXT, "the sea is blue and wide, a lake is blue", "red"]
    names = ["short", "long", None, "other", "long"]
    runs: list[int] = []
    forward = PromptedBatch.step

    def counted(self: PromptedBatch, tokens: torch.Tensor) -> torch.Tensor:
        runs.append(len(tokens))
        return forward(self, tokens)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PromptedBatch, "step", counted)
        found = said_together(served, texts, names)
    assert set(runs) == {5}  # one batch, and no row apart
    assert len(runs) <= LENGTH
    for text, given, answer in zip(texts, names, found, strict=True):
        name = given or "deep"
        ids = read(text, template="{}\nIt was" if name == "other" else "Question: {}\nAnswer:")
        expected = base().decode(by_peft("llama", prompts[name], ids, tmp_path / name))
        assert answer == expected, name
    assert len(set(found)) > 3


def test_one_engine_per_prompt_shares_the_model() -> None:
    served = SoftPromptBackend(base(), {"a": prompt("llama", "soft_prompt"), "b": prompt("llama", "prefix", seed=5)})
    first, second = (LocalLLM(backend=served.named(name), max_tokens=LENGTH) for name in ("a", "b"))
    assert first.invoke(TEXT) != second.invoke(TEXT)
    assert [first.invoke(TEXT)] == said_together(served, [TEXT], ["a"])
    with pytest.raises(ConfigurationError, match=r"names: expected one of \['a', 'b'\], found None"):
        LocalLLM(backend=served).invoke(TEXT)
    with pytest.raises(ConfigurationError, match=r"default: expected one of \['a', 'b'\], found 'c'"):
        served.named("c")


def test_copies_of_a_model_on_it_share_the_engine_and_pickles_are_refused() -> None:
    llm = LocalLLM(backend=backend(), max_tokens=LENGTH)
    assert llm.model_copy(deep=True).backend is llm.backend
    with pytest.raises(PrivateAccessError, match="SoftPromptBackend cannot be pickled: it holds a whole model"):
        pickle.dumps(llm)


def test_a_cache_of_langchain_tells_prompts_apart() -> None:
    cache = InMemoryCache()
    made = [backend(), SoftPromptBackend(base(), prompt("llama", "prefix", seed=5)), backend(fills_template=False)]
    assert made[0].name != made[1].name
    texts = [LocalLLM(backend=one, max_tokens=LENGTH, cache=cache).invoke(TEXT) for one in (*made, *made)]
    assert texts[:3] == texts[3:]
    assert len(set(texts)) == len(cache._cache) == 3
    reads = copy.deepcopy(tokenizer())
    reads.backend_tokenizer.normalizer = normalizers.Lowercase()
    other = HuggingFaceBackend(model("llama"), reads, max_prompt_tokens=64, max_new_tokens=32)
    for same in (SoftPromptBackend(other, prompt("llama", "soft_prompt")), backend(max_new_tokens=400)):
        LocalLLM(backend=same, max_tokens=LENGTH, cache=cache).invoke(TEXT)
    assert len(cache._cache) == 5


def test_it_streams_stops_and_samples() -> None:
    llm = LocalLLM(backend=backend(), max_tokens=LENGTH)
    whole = llm.invoke(TEXT)
    pieces = list(llm.stream(TEXT))
    assert "".join(pieces) == whole
    assert len(pieces) > 2
    assert llm.invoke(TEXT, stop=[whole[4:6]]) == whole[: whole.index(whole[4:6])]
    drawn = [llm.bind(temperature=1.5, seed=seed).invoke(TEXT) for seed in (1, 1, 2)]
    assert drawn[0] == drawn[1] != drawn[2]
    assert llm.bind(temperature=1.5, top_k=1).invoke(TEXT) == whole
    told = llm.generate([TEXT], logprobs=True, top_logprobs=2).generations[0][0].generation_info
    assert len(told["logprobs"]["content"][0]["top_logprobs"]) == 2


async def test_batches_chat_and_async_say_the_same() -> None:
    llm = LocalLLM(backend=backend(), max_tokens=LENGTH)
    texts = [TEXT, "my transfer is late", "red"]
    alone = [llm.invoke(text) for text in texts]
    assert llm.batch(texts) == alone
    assert await llm.abatch(texts) == alone
    chat = ChatLocal(backend=backend(), max_tokens=LENGTH)
    said = chat.invoke([HumanMessage(TEXT)])
    assert said.text == alone[0]
    assert said.response_metadata["model_name"] == backend().name
    assert said.usage_metadata["output_tokens"] <= LENGTH
    assert "".join(piece.text for piece in chat.stream(TEXT)) == alone[0]
    assert isinstance(await chat.ainvoke(TEXT), AIMessage)
    assert (PromptTemplate.from_template("{q}") | llm | StrOutputParser()).invoke({"q": TEXT}) == alone[0]


def test_a_task_of_pairs_is_put_into_its_template_by_the_chain() -> None:
    task = PromptTask("causal_lm", "One: {text}\nTwo: {pair}\nSame:", max_input_tokens=40, max_target_tokens=4)
    served = SoftPromptBackend(base(), prompt("llama", "soft_prompt", task=task))
    assert not served.fills_template
    chain = PromptTemplate.from_template(task.template) | LocalLLM(backend=served, max_tokens=LENGTH)
    alone = SoftPromptBackend(base(), prompt("llama", "soft_prompt"), fills_template=False)
    assert chain.invoke({"text": "red", "pair": "blue"}) == LocalLLM(backend=alone, max_tokens=LENGTH).invoke(
        "One: red\nTwo: blue\nSame:"
    )
    with pytest.raises(ConfigurationError, match=r"None or False where a template shows a pair"):
        SoftPromptBackend(base(), prompt("llama", "soft_prompt", task=task), fills_template=True)


def test_a_prompt_of_pairs_leaves_the_templates_of_others_on() -> None:
    spaced = replace(WRITES, template="Question: {text}\nAnswer: ")
    pair = PromptTask("causal_lm", "One: {text}\nTwo: {pair}\nSame:", max_input_tokens=40, max_target_tokens=4)
    both = {name: prompt("llama", "soft_prompt", task=task) for name, task in {"one": spaced, "pair": pair}.items()}
    alone = SoftPromptBackend(base(), both["one"])
    served = SoftPromptBackend(base(), both, default="one")
    assert served.fingerprint == alone.fingerprint
    assert served.ends_in_space("a")
    assert not served.named("pair").ends_in_space("a")
    assert said(served) == said(alone) == said(served.named("pair").named("one"))
    raw = SoftPromptBackend(base(), both["pair"], fills_template=False)
    assert said_together(served, [TEXT] * 2, ["one", "pair"]) == [*said_together(alone, [TEXT], [None]), said(raw)]


def test_a_space_in_front_of_the_answer_is_dropped_where_the_template_ends_in_one() -> None:
    task = replace(WRITES, template="Question: {text}\nAnswer: ")
    names = [str(seed) for seed in range(40)]
    plain, spaced = (
        SoftPromptBackend(
            base(),
            {name: prompt("llama", "soft_prompt", task=one, seed=int(name)) for name in names},
            default="0",
        )
        for one in (WRITES, task)
    )
    found = said_together(plain, [TEXT] * 40, names, most=4)
    begun = next(name for name, text in zip(names, found, strict=True) if text.startswith(" "))
    for name in (*names[:8], begun):
        assert said(spaced.named(name), most=4) == found[int(name)].removeprefix(" ")
    llm = LocalLLM(backend=spaced.named(begun), max_tokens=4)
    assert llm.invoke(TEXT) == "".join(llm.stream(TEXT)) == found[int(begun)][1:]
    raw = SoftPromptBackend(base(), plain.prompts, default=begun, fills_template=False)
    assert raw.ends_in_space("a ")
    assert not raw.ends_in_space("a")
    assert not plain.ends_in_space("a ")


def test_a_long_text_is_cut_as_in_training(tmp_path: Path) -> None:
    text = "the sea is blue and wide, a lake is blue " * 9
    ids = tokenizer().encode(" " + text, add_special_tokens=False)
    front, back = (tokenizer().encode(part, add_special_tokens=False) for part in ("Question:", "\nAnswer:"))
    room = 40 - len(front) - len(back)
    expected = by_peft("llama", prompt("llama", "soft_prompt"), [*front, *ids[:room], *back], tmp_path / "prompt")
    assert said(backend(), text) == base().decode(expected)
    assert len(ids) > room


@pytest.mark.parametrize(("task", "num_tokens"), [(WRITES, 6), (replace(LABELS, max_input_tokens=45), 1)])
def test_a_filled_template_is_read_whole_where_the_context_has_room_for_it(task: PromptTask, num_tokens: int) -> None:
    """Training reads as many tokens behind the prompt; no room that an answer may not need takes them away."""
    text, served = "the sea is blue and wide, a lake is blue " * 9, prompt("llama", "soft_prompt", task=task)
    small = HuggingFaceBackend(tiny_tuning.llama(context=48), tokenizer(), max_prompt_tokens=24, max_new_tokens=8)
    wide = SoftPromptBackend(base(), served, max_new_tokens=8).generate([text])
    steps = list(SoftPromptBackend(small, served).generate([text]))
    assert len(steps) == num_tokens
    assert [tokens.tolist() for tokens, _ in steps] == [next(wide)[0].tolist() for _ in steps]


def test_a_text_that_fits_is_not_cut_for_tokens_that_an_answer_may_not_need() -> None:
    small = HuggingFaceBackend(tiny_tuning.llama(context=48), tokenizer(), max_prompt_tokens=24, max_new_tokens=8)
    engines = [
        SoftPromptBackend(small, prompt("llama", "soft_prompt"), fills_template=False, max_new_tokens=n)
        for n in (8, 99)
    ]
    text = "the sea is blue and wide"
    few, many = (list(engine.generate([text])) for engine in engines)
    assert [tokens.tolist() for tokens, _ in few] == [tokens.tolist() for tokens, _ in many]
    assert len(many) == 48 - 3 - len(engines[0].encode(text)) + 1


@pytest.mark.parametrize(("max_new_tokens", "room"), [(8, 8), (99, 22)])
def test_a_text_that_does_not_fit_leaves_the_room_that_is_asked_for(max_new_tokens: int, room: int) -> None:
    small = HuggingFaceBackend(tiny_tuning.llama(context=48), tokenizer(), max_prompt_tokens=24, max_new_tokens=8)
    given = {"fills_template": False, "max_new_tokens": max_new_tokens}
    engine = SoftPromptBackend(small, prompt("llama", "soft_prompt"), **given)
    assert len(list(engine.generate(["the sea is blue and wide, a lake is blue " * 9]))) == room + 1


def test_texts_are_plain_text_and_the_context_is_kept() -> None:
    small = tiny_tuning.llama(context=48)
    served = SoftPromptBackend(
        HuggingFaceBackend(small, tokenizer(), max_prompt_tokens=24, max_new_tokens=8),
        prompt("llama", "soft_prompt", task=replace(WRITES, max_input_tokens=32)),
        max_new_tokens=4,
    )
    texts = ["the sea is blue " * 20, "red"]
    steps = list(served.generate(texts))
    assert all(shares.shape == (2, 420) for _, shares in steps)
    assert len(list(served.generate(texts[:1]))) == 48 - 3 - 32 + 1 < len(steps)
    for place, text in enumerate(texts):  # each to its own end
        own = [int(tokens[0]) for tokens, _ in served.generate([text])]
        assert [int(tokens[place]) for tokens, _ in steps] == own + [-1] * (len(steps) - len(own))
    assert served._ids("a </s> <s> b", "default").count(1) == 0
    assert isinstance(said(served, "a </s> <s> b", most=3), str)
    long = served.generate([list(range(10, 100))])
    assert next(long)[0].shape == (1,)


def test_no_texts_give_no_answers() -> None:
    tokens, shares = next(backend().generate([]))
    assert tokens.shape == (0,)
    assert shares.shape[0] == 0


def test_an_empty_text_is_answered() -> None:
    raw = backend(fills_template=False)
    assert isinstance(said(raw, "", most=2), str)


def test_a_folder_or_a_model_object_makes_an_engine(tmp_path: Path) -> None:
    model("llama").save_pretrained(tmp_path)
    tokenizer().save_pretrained(tmp_path)
    served = prompt("llama", "soft_prompt")
    expected = said(backend())
    assert said(SoftPromptBackend(str(tmp_path), served)) == expected
    made = SoftPromptBackend(model("llama"), served, tokenizer=tokenizer())
    assert said(made) == expected
    with pytest.raises(ConfigurationError, match="tokenizer: expected None with an engine"):
        SoftPromptBackend(base(), served, tokenizer=tokenizer())


def test_an_engine_of_a_chat_model_serves_a_prompt_as_it_was_trained() -> None:
    talking = tiny_tuning.causal_tokenizer(chat=True)
    talks = HuggingFaceBackend(model("llama"), talking, max_prompt_tokens=64, max_new_tokens=32)
    assert talks.chat
    served = SoftPromptBackend(talks, prompt("llama", "soft_prompt"))
    assert said(served) == ChatLocal(backend=served, max_tokens=LENGTH).invoke(TEXT).text == said(backend())


def test_what_does_not_belong_together_is_refused() -> None:
    fits = prompt("llama", "soft_prompt")
    with pytest.raises(ConfigurationError, match=r"the tokenizer that it was trained with .*fingerprint 0.*, found"):
        SoftPromptBackend(base(), replace(fits, base={"name": "tiny", "tokenizer": "0"}))
    with pytest.raises(ConfigurationError, match="a SoftPrompt, or several by name"):
        SoftPromptBackend(base(), {})
    with pytest.raises(ConfigurationError, match="a SoftPrompt, or several by name"):
        SoftPromptBackend(base(), {"": fits})
    with pytest.raises(ConfigurationError, match="a SoftPrompt, or several by name"):
        SoftPromptBackend(base(), "folder")  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="SoftPromptClassifier serves it"):
        masked = PromptTask("masked_lm", "{text} {mask}", ("a", "b"), (" a", " b"))
        SoftPromptBackend(base(), replace(fits, task=masked))
    with pytest.raises(ConfigurationError, match="names: expected one for each of 1 prompts, found 2"):
        backend().generate([TEXT], names=["default", "default"])
    with pytest.raises(ConfigurationError, match=r"names: expected one of \['default'\], found 'b'"):
        backend().generate([TEXT], names=["b"])
    with pytest.raises(ConfigurationError, match="max_new_tokens"):
        backend(max_new_tokens=0)


def test_a_prompt_of_another_model_is_refused() -> None:
    fits = prompt("llama", "soft_prompt")
    wide = replace(
        fits, arrays={ARRAY: np.zeros((3, 40), np.float32)}, peft_config={**fits.peft_config, "token_dim": 40}
    )
    with pytest.raises(ConfigurationError, match=r"prompt 'default': expected 32 numbers per virtual token.* found 40"):
        SoftPromptBackend(base(), wide)
    with pytest.raises(ConfigurationError, match=r"expected 64 numbers per virtual token.* found 128"):
        SoftPromptBackend(base(), prompt("gpt2", "prefix"))
    deep = prompt("llama", "prefix")
    heads = replace(deep, peft_config={**deep.peft_config, "num_attention_heads": 4})
    with pytest.raises(ConfigurationError, match=r"expected 64 numbers .* found 64 of 4 heads"):
        SoftPromptBackend(base(), heads)
    short = HuggingFaceBackend(tiny_tuning.llama(context=16), tokenizer(), max_prompt_tokens=8, max_new_tokens=8)
    with pytest.raises(ConfigurationError, match="fewer virtual tokens than the model's context, 16"):
        SoftPromptBackend(short, prompt("llama", "soft_prompt", 15))


def test_a_prompt_of_other_weights_is_refused_and_of_the_same_in_another_precision_is_not() -> None:
    fits = prompt("llama", "soft_prompt")
    moved = model("llama").__class__(model("llama").config)
    moved.load_state_dict(model("llama").state_dict())
    same = HuggingFaceBackend(moved.to(torch.bfloat16), tokenizer(), max_prompt_tokens=64, max_new_tokens=32)
    assert said(SoftPromptBackend(same, fits), most=1)
    with torch.no_grad():
        moved.model.layers[1].mlp.up_proj.weight.mul_(1.01)
    other = HuggingFaceBackend(moved, tokenizer(), max_prompt_tokens=64, max_new_tokens=32)
    with pytest.raises(
        ConfigurationError, match=r"weights that it was trained on \(those of 'Llama.*pass the same mod"
    ):
        SoftPromptBackend(other, {"a": fits})
    known = {key: value for key, value in fits.base.items() if key != "weights"}
    for base_of_it in (known, {**known, "weights": "another form:1"}):
        assert said(SoftPromptBackend(other, replace(fits, base=base_of_it)), most=1)


@pytest.mark.parametrize("calls", [0, 1, 3])
def test_rows_are_read_anew_where_memory_runs_out_and_private_sessions_give_way(calls: int) -> None:
    made = tiny_tuning.llama()
    local = HuggingFaceBackend(made, tokenizer(), max_prompt_tokens=16, max_new_tokens=8, row_batch=2)
    served = SoftPromptBackend(local, {"a": prompt("llama", "soft_prompt"), "b": prompt("llama", "prefix")})
    expected = said_together(served, [TEXT, "my card"], ["a", "b"], most=4)
    session = local.open_full(["the sea is", "a lake is", "the rose"] * 3, (), public="the", num_rows=None)
    rows = session.logits(None)
    narrow = Narrow(made)
    narrow.fail_in(calls)
    assert said_together(served, [TEXT, "my card"], ["a", "b"], most=4) == expected
    assert narrow.failures == 1
    assert np.array_equal(session.logits(None), rows)


def test_a_model_that_cannot_begin_with_what_was_read_is_refused() -> None:
    from tests import tiny_hf

    alone = HuggingFaceBackend(tiny_hf.alibi(), tokenizer(), max_prompt_tokens=16, max_new_tokens=8)
    with pytest.raises(CapabilityError, match="found BloomForCausalLM; serve the prompt with PeftModel"):
        SoftPromptBackend(alone, prompt("llama", "soft_prompt"))


def test_a_prompt_is_read_once_however_often_it_is_served() -> None:
    runner, _ = parts_of(base())
    shelf = PromptRegistry(runner)
    numbers = prompt("llama", "soft_prompt").arrays[ARRAY]
    shelf.put("a", "soft_prompt", numbers, heads=0)
    runs: list[int] = []
    hook = runner.body.model.register_forward_pre_hook(lambda *_: runs.append(1))
    try:
        with runner.lock, torch.inference_mode():
            first, second = shelf.take(["a", "a"])
            shelf.take(["a"])
    finally:
        hook.remove()
    assert runs == [1]
    assert first is second


def test_a_model_that_fails_is_a_failed_public_call() -> None:
    served = SoftPromptBackend(model("llama"), prompt("llama", "soft_prompt"), tokenizer=tokenizer())

    def breaks(*_: Any) -> None:
        raise RuntimeError("secret of the model")

    hook = model("llama").register_forward_pre_hook(breaks)
    try:
        with pytest.raises(ModelCallError, match="the model failed on a public prompt: RuntimeError"):
            said(served, most=2)
    finally:
        hook.remove()


def test_without_torch_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> None:
        raise ConfigurationError("expected the packages of local models, found no torch; install langchain-dpicl[hf]")

    monkeypatch.setattr(loading, "check_installed", missing)
    with pytest.raises(ConfigurationError, match=r"install langchain-dpicl\[hf\]"):
        SoftPromptBackend("somewhere", prompt("llama", "soft_prompt"))


def test_it_shows_names_and_no_numbers() -> None:
    served = SoftPromptBackend(base(), {"b": prompt("llama", "prefix"), "a": prompt("llama", "soft_prompt")})
    assert repr(served) == "SoftPromptBackend('LlamaForCausalLM', prompts=['a', 'b'], default=None)"
    assert served.count_tokens(TEXT) == base().count_tokens(TEXT)

"""A released soft prompt keeps its numbers, its task and its report in a folder that PEFT reads."""

from __future__ import annotations

import copy
import json
import math
import pickle
import struct
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import safetensors.numpy
import torch
from transformers.cache_utils import DynamicCache

from langchain_dpicl.backends.tuning.tasks import PromptTask
from langchain_dpicl.exceptions import ConfigurationError
from langchain_dpicl.released import soft_prompt
from langchain_dpicl.released.soft_prompt import (
    ARRAY,
    OURS,
    PEFT_ARRAYS,
    PEFT_CONFIG,
    SoftPrompt,
    array_bytes,
    arrays_in,
    write_folder,
)
from langchain_dpicl.reports.report import verify_report
from tests import tiny_hf
from tests.sealed_files import resealed

TASK = PromptTask("causal_lm", "Review: {text}\nIt was", ("bad", "good"), (" blue", " red"))
HEAD = PromptTask("sequence_classification", "", ("bad", "good"))
REPORT = {"epsilon": "infinity", "private": False, "baseline": "made up", "words": "\u00e4 {brace}"}
BASE = {"name": "tiny", "tokenizer": "0123"}


def numbers(rows: int, width: int, *, seed: int = 0) -> Any:
    return np.random.default_rng(seed).normal(size=(rows, width)).astype(np.float32)


def soft(*, rows: int = 3, width: int = 32, seed: int = 0, **changes: Any) -> SoftPrompt:
    given: dict[str, Any] = {
        "arrays": {ARRAY: numbers(rows, width, seed=seed)},
        "method": "soft_prompt",
        "num_virtual_tokens": rows,
        "task": TASK,
        "peft_config": {
            "peft_type": "PROMPT_TUNING",
            "task_type": "CAUSAL_LM",
            "num_virtual_tokens": rows,
            "token_dim": width,
            "num_transformer_submodules": 1,
            "base_model_name_or_path": "tiny",
        },
        "base": BASE,
        "report": REPORT,
    }
    return SoftPrompt(**(given | changes))


def prefix(*, rows: int = 3, layers: int = 2, kv_width: int = 16, heads: int = 2, seed: int = 1) -> SoftPrompt:
    config = {
        "peft_type": "PREFIX_TUNING",
        "task_type": "CAUSAL_LM",
        "num_virtual_tokens": rows,
        "token_dim": kv_width,
        "num_layers": layers,
        "num_attention_heads": heads,
        "num_transformer_submodules": 1,
        "prefix_projection": False,
    }
    arrays = {ARRAY: numbers(rows, 2 * layers * kv_width, seed=seed)}
    return soft(rows=rows, arrays=arrays, method="prefix", peft_config=config)


class Engine:
    """What `of` asks of an engine."""

    name, tokenizer_fingerprint, method, num_virtual_tokens, task = "tiny", "0123", "soft_prompt", 3, TASK

    def arrays(self, parameters: Any) -> Any:
        return {ARRAY: parameters.reshape(3, 32).astype(np.float32)}

    def peft_config(self) -> Any:
        return soft().peft_config


def from_peft(model: Any, folder: Path) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # of missing or unexpected keys
        for stale in (DeprecationWarning, FutureWarning):
            warnings.filterwarnings("ignore", category=stale)
        return peft.PeftModel.from_pretrained(model, str(folder)).eval()


def test_a_folder_that_was_saved_is_read_back(tmp_path: Path) -> None:
    for number, prompt in enumerate((soft(), prefix())):
        prompt.save(tmp_path / f"{number}")
        found = SoftPrompt.load(str(tmp_path / f"{number}"))
        assert found == prompt
        assert found.arrays[ARRAY].tobytes() == prompt.arrays[ARRAY].tobytes()
        assert (found.task, found.report, found.base) == (TASK, REPORT, BASE)
        assert found.fingerprint == prompt.fingerprint
        assert hash(found) == hash(prompt)


@torch.inference_mode()
def test_peft_loads_a_soft_prompt_and_gives_the_same_logits(tmp_path: Path) -> None:
    model, prompt = tiny_hf.gpt2(), soft()
    prompt.save(tmp_path / "prompt")
    ids = torch.arange(40, 52).reshape(2, 6)
    embedded = model.get_input_embeddings()(ids)
    numbers = torch.from_numpy(prompt.arrays[ARRAY].copy()).expand(2, -1, -1)
    expected = model(inputs_embeds=torch.cat([numbers, embedded], dim=1)).logits
    found = from_peft(model, tmp_path / "prompt")(input_ids=ids).logits
    assert float((found - expected).abs().max()) < 1e-5
    assert float((found[:, 3:] - model(input_ids=ids).logits).abs().max()) > 1e-2


@torch.inference_mode()
def test_peft_loads_a_prefix_and_gives_the_same_logits(tmp_path: Path) -> None:
    model, prompt = tiny_hf.llama(), prefix()  # 2 of 4 heads have keys and values, of 8 numbers each
    prompt.save(tmp_path / "prompt")
    ids = torch.arange(40, 52).reshape(2, 6)
    stored = torch.from_numpy(prompt.arrays[ARRAY].copy()).reshape(3, 4, 2, 8)  # positions, 2 per layer, heads, size
    cache = DynamicCache()
    for layer in range(2):
        keys, values = (stored[:, 2 * layer + one].transpose(0, 1).expand(2, -1, -1, -1) for one in range(2))
        cache.update(keys.contiguous(), values.contiguous(), layer)
    expected = model(input_ids=ids, past_key_values=cache).logits
    found = from_peft(model, tmp_path / "prompt")(input_ids=ids).logits
    assert float((found - expected).abs().max()) < 1e-5
    assert float((found - model(input_ids=ids).logits).abs().max()) > 1e-2


def test_the_file_of_numbers_is_the_one_that_safetensors_writes_and_reads(tmp_path: Path) -> None:
    arrays = {ARRAY: numbers(2, 5)}
    (tmp_path / "ours").write_bytes(array_bytes(arrays))
    found = safetensors.numpy.load_file(tmp_path / "ours")
    assert list(found) == [ARRAY]
    assert found[ARRAY].dtype == np.float32
    assert (found[ARRAY] == arrays[ARRAY]).all()
    two = {"b": numbers(2, 5), "a": numbers(4, 1, seed=3)}
    safetensors.numpy.save_file(two, tmp_path / "theirs")
    read = arrays_in(tmp_path / "theirs")
    assert set(read) == set(two)
    assert all((read[name] == two[name]).all() for name in two)


def test_the_head_of_a_classifier_goes_with_the_prompt(tmp_path: Path) -> None:
    head = {
        "base_model.classifier.weight": numbers(2, 32, seed=4),
        "base_model.classifier.bias": np.ones(2, np.float32),
    }
    prompt = soft(task=HEAD, head=head)
    prompt.save(tmp_path / "prompt")
    found = SoftPrompt.load(tmp_path / "prompt")
    assert found == prompt
    assert set(found.head) == set(head)
    assert all((found.head[name] == head[name]).all() for name in head)
    assert not found.head["base_model.classifier.bias"].flags.writeable
    other = replace(prompt, head={**head, "base_model.classifier.bias": np.zeros(2, np.float32)})
    assert other != prompt
    assert other.fingerprint != prompt.fingerprint


def test_its_report_is_verified_from_the_object_or_the_file(tmp_path: Path) -> None:
    soft().save(tmp_path / "prompt")
    for given in (
        soft(),
        soft().report,
        (tmp_path / "prompt" / OURS).read_text(),
        (tmp_path / "prompt" / OURS).read_bytes(),
    ):
        found = verify_report(given)
        assert not found.ok
        assert found.epsilon == math.inf
        assert found.problems[0] == "not private: baseline 'made up', epsilon is infinite"


def test_of_takes_everything_from_the_engine() -> None:
    parameters = np.linspace(-1, 1, 96)
    prompt = SoftPrompt.of(Engine(), parameters, report=REPORT)
    assert (prompt.arrays[ARRAY] == parameters.reshape(3, 32).astype(np.float32)).all()
    assert (prompt.base, prompt.task, prompt.method) == (BASE, TASK, "soft_prompt")
    with pytest.raises(ConfigurationError, match="finite numbers"):
        SoftPrompt.of(Engine(), parameters * np.inf, report=REPORT)


def test_nobody_holds_a_second_handle_on_what_was_released() -> None:
    given, report = {ARRAY: numbers(3, 32)}, {"epsilon": 1.0, "list": [1]}
    prompt = soft(arrays=given, report=report)
    given[ARRAY][0, 0] = 7
    report["list"].append(2)
    assert prompt.arrays[ARRAY][0, 0] != 7
    assert prompt.report["list"] == [1]
    with pytest.raises(ValueError, match="read-only"):
        prompt.arrays[ARRAY][0, 0] = 7
    with pytest.raises(AttributeError):
        prompt.method = "prefix"  # type: ignore[misc]


def test_it_is_public_and_can_be_copied_pickled_and_shown() -> None:
    prompt = soft(report={"epsilon": 3.25})
    assert pickle.loads(pickle.dumps(prompt)) == copy.deepcopy(prompt) == prompt  # noqa: S301
    assert repr(prompt) == "SoftPrompt('soft_prompt', 3 x 'tiny', epsilon=3.25)"
    assert prompt.epsilon == 3.25
    assert soft().epsilon == math.inf
    assert prompt != soft()
    assert soft(seed=1).fingerprint != soft().fingerprint != prefix().fingerprint
    assert prompt != "another"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"method": "lora"}, "method: expected one of 'soft_prompt', 'prefix', found 'lora'"),
        ({"num_virtual_tokens": 0}, "num_virtual_tokens"),
        ({"num_virtual_tokens": 4}, "peft_config: expected .*4.* found .*3"),
        ({"task": TASK.to_dict()}, "task: expected a PromptTask, found 'dict'"),
        ({"arrays": {"other": numbers(3, 32)}}, "arrays: expected exactly 'prompt_embeddings'"),
        ({"arrays": {ARRAY: numbers(3, 31)}}, r"float32 of shape \(3, 32\), found .*\(3, 31\)"),
        ({"arrays": {ARRAY: numbers(3, 32).astype(np.float64)}}, "float32 numbers, found 'float64"),
        ({"head": {"base_model.score.weight": numbers(2, 2)}}, "head: expected none with a task of kind 'causal_lm'"),
        ({"task": HEAD, "head": [1]}, "head: expected arrays by name"),
        ({"task": HEAD, "head": {"score": numbers(2, 2)}}, "names that begin with 'base_model.'"),
        ({"task": HEAD, "head": {"base_model.a": numbers(2, 2) * np.float32("inf")}}, "finite numbers"),
        ({"task": HEAD, "head": {"base_model.a": [1, 2]}}, "float32 numbers, found 'int64'"),
        ({"arrays": {ARRAY: numbers(3, 32) * np.float32("nan")}}, "finite numbers"),
        ({"base": {"name": "tiny"}}, "base: expected texts under 'name', 'tokenizer' and"),
        ({"base": {"name": "tiny", "tokenizer": 3}}, "base"),
        ({"base": {**BASE, "weights": 3}}, "base"),
        ({"base": {**BASE, "more": "3"}}, "base"),
        ({"base": {"name": "tiny", "weights": "3"}}, "base"),
        ({"report": {}}, 'report\\["epsilon"\\]'),
        ({"report": {"epsilon": 1.0, "of": object()}}, "report: expected JSON values"),
        ({"report": [1]}, "report: expected a JSON object"),
        ({"peft_config": {"peft_type": "PROMPT_TUNING", "num_virtual_tokens": 3}}, "token_dim"),
        ({"peft_config": {"peft_type": "LORA", "num_virtual_tokens": 3, "token_dim": 32}}, "PROMPT_TUNING"),
        (
            {
                "method": "prefix",
                "peft_config": {"peft_type": "PREFIX_TUNING", "num_virtual_tokens": 3, "token_dim": 8},
            },
            "num_layers",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_what_does_not_go_together_is_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        soft(**changes)


def changed(**changes: Any) -> Callable[[bytes], bytes]:
    return lambda content: json.dumps(json.loads(content) | changes).encode()


def forged(**changes: Any) -> Callable[[bytes], bytes]:
    """As somebody changes it who writes the digest anew."""
    return lambda content: resealed(content, **changes).encode()


def header(**changes: Any) -> Callable[[bytes], bytes]:
    def change(content: bytes) -> bytes:
        size = int.from_bytes(content[:8], "little")
        said = json.loads(content[8 : 8 + size])
        said[ARRAY] |= changes
        text = json.dumps(said).encode()
        return struct.pack("<Q", len(text)) + text + content[8 + size :]

    return change


BAD: dict[str, tuple[str, Callable[[bytes], bytes], str]] = {
    "no JSON": (OURS, lambda content: content[:-3], "soft prompt: expected JSON text"),
    "another format": (OURS, changed(format="other"), "'format'"),
    "a later version": (OURS, changed(version=2), "expected version 1"),
    "an unknown key": (OURS, changed(more=1), "exactly the keys"),
    "another task, the digest left": (OURS, changed(task=None), "content_digest: the content was changed"),
    "another task": (OURS, forged(task={"kind": "causal_lm"}), "task: expected a JSON object"),
    "no task": (OURS, forged(task=None), "task: expected a JSON object"),
    "another method": (OURS, forged(method="prefix"), "PREFIX_TUNING"),
    "a method that is a list": (OURS, forged(method=["prefix"]), "method: expected one of"),
    "tokens that are true": (OURS, forged(num_virtual_tokens=True), "num_virtual_tokens"),
    "base that is text": (OURS, forged(base="tiny"), "base: expected a JSON object"),
    "an epsilon below zero": (OURS, forged(report={"private": False, "epsilon": -1}), "no baseline"),
    "another digest": (OURS, forged(arrays="00"), "expected the content with the digest in soft_prompt.json"),
    "text that is none": (OURS, lambda content: b"\xff\xfe" + content, "expected JSON text"),
    "nested beyond the stack": (OURS, lambda _: b"[" * 100_000, "expected JSON text"),
    "a configuration that is none": (PEFT_CONFIG, lambda _: b"[1]", "adapter_config.json: expected a JSON object"),
    "a configuration that is no JSON": (PEFT_CONFIG, lambda _: b"{", "adapter_config.json: expected JSON text"),
    "a configuration with NaN": (PEFT_CONFIG, changed(token_dim=math.nan), "expected JSON values with finite"),
    "a configuration of another size": (
        PEFT_CONFIG,
        changed(token_dim=16),
        "content with the digest in soft_prompt.json",
    ),
    "a configuration of another method": (
        PEFT_CONFIG,
        changed(peft_type="LORA"),
        "content with the digest in soft_prompt.json",
    ),
    "numbers cut off": (PEFT_ARRAYS, lambda content: content[:-4], "float32 numbers, each stored once"),
    "numbers left over": (PEFT_ARRAYS, lambda content: content + b"0000", "no bytes beside"),
    "other numbers": (PEFT_ARRAYS, lambda content: content[:-4] + b"\0\0\0\0", "expected the content with"),
    "half precision": (PEFT_ARRAYS, header(dtype="F16"), "as float32 numbers"),
    "a shape that lies": (PEFT_ARRAYS, header(shape=[3, 33]), "as float32 numbers"),
    "a shape below zero": (PEFT_ARRAYS, header(shape=[-3, -32]), "as float32 numbers"),
    "a huge shape": (PEFT_ARRAYS, header(shape=[1 << 40, 1 << 40]), "as float32 numbers"),
    "a shape of more dimensions than an array has": (
        PEFT_ARRAYS,
        header(shape=[1] * 100 + [3, 32]),
        "as float32 numbers",
    ),
    "a huge shape of nothing": (PEFT_ARRAYS, header(shape=[0, *[1 << 30] * 3], data_offsets=[0, 0]), "as float32 numb"),
    "a shape that is text": (PEFT_ARRAYS, header(shape="96"), "as float32 numbers"),
    "a place behind the end": (PEFT_ARRAYS, header(data_offsets=[4, 388]), "as float32 numbers"),
    "a place before the begin": (PEFT_ARRAYS, header(data_offsets=[-4, 380]), "as float32 numbers"),
    "a header that is none": (PEFT_ARRAYS, lambda _: struct.pack("<Q", 3) + b"[1]", "expected a safetensors file"),
    "a header without end": (
        PEFT_ARRAYS,
        lambda c: struct.pack("<Q", 1 << 62) + c[8:],
        "expected a safetensors file",
    ),
    "a pickle": (PEFT_ARRAYS, lambda _: pickle.dumps({ARRAY: 1}), "expected a safetensors file"),
    "nothing": (PEFT_ARRAYS, lambda _: b"", "expected a safetensors file"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_folder_that_was_changed_is_refused(name: str, tmp_path: Path) -> None:
    file, change, said = BAD[name]
    soft().save(tmp_path / "prompt")
    path = tmp_path / "prompt" / file
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(ConfigurationError, match=said):
        SoftPrompt.load(tmp_path / "prompt")


def test_two_arrays_in_one_place_are_refused(tmp_path: Path) -> None:
    said = {name: {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]} for name in ("a", "b")}
    text = json.dumps(said).encode()
    (tmp_path / "file").write_bytes(struct.pack("<Q", len(text)) + text + b"\0" * 4)
    with pytest.raises(ConfigurationError, match="each stored once"):
        arrays_in(tmp_path / "file")


def test_files_that_are_too_large_are_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    soft().save(tmp_path / "prompt")
    monkeypatch.setattr(soft_prompt, "MAX_ARRAYS", 100)
    with pytest.raises(ConfigurationError, match="at most 100 bytes"):
        SoftPrompt.load(tmp_path / "prompt")
    monkeypatch.undo()
    with (tmp_path / "prompt" / OURS).open("r+b") as file:
        file.truncate(1 << 25)  # sparse
    with pytest.raises(ConfigurationError, match=r"soft_prompt.json: expected at most .* bytes"):
        SoftPrompt.load(tmp_path / "prompt")


def test_a_missing_file_is_an_error_of_the_system(tmp_path: Path) -> None:
    for name in (OURS, PEFT_CONFIG, PEFT_ARRAYS):
        soft().save(tmp_path / "prompt")
        (tmp_path / "prompt" / name).unlink()
        with pytest.raises(FileNotFoundError):
            SoftPrompt.load(tmp_path / "prompt")


def test_saving_again_replaces_the_whole_folder_and_leaves_nothing_else(tmp_path: Path) -> None:
    soft().save(tmp_path / "prompt")
    soft(seed=5).save(tmp_path / "prompt")
    assert SoftPrompt.load(tmp_path / "prompt") == soft(seed=5)
    assert [one.name for one in tmp_path.iterdir()] == ["prompt"]
    (tmp_path / "empty").mkdir()
    soft().save(tmp_path / "empty")
    assert SoftPrompt.load(tmp_path / "empty") == soft()


def test_a_link_to_a_folder_stays_one(tmp_path: Path) -> None:
    soft().save(tmp_path / "prompt")
    (tmp_path / "current").symlink_to(tmp_path / "prompt", target_is_directory=True)
    soft(seed=5).save(tmp_path / "current")
    assert (tmp_path / "current").is_symlink()
    assert SoftPrompt.load(tmp_path / "prompt") == soft(seed=5)


def test_a_folder_of_somebody_else_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "thesis.tex").write_text("long")
    with pytest.raises(ConfigurationError, match=r"found \['thesis.tex'\] in it; give another path"):
        soft().save(tmp_path / "work")
    with pytest.raises(ConfigurationError, match=r"found the file 'thesis\.tex'"):
        soft().save(tmp_path / "work" / "thesis.tex")
    assert (tmp_path / "work" / "thesis.tex").read_text() == "long"
    with pytest.raises(ConfigurationError, match=r"found '.*nowhere.prompt'; create that folder first"):
        soft().save(tmp_path / "nowhere" / "prompt")
    with pytest.raises(ConfigurationError, match="create that folder first"):
        soft().save(tmp_path / "work" / "thesis.tex" / "prompt")


@pytest.mark.parametrize("fails_at", ["fsync", "rename"])
def test_a_write_that_fails_leaves_the_old_folder(
    fails_at: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    soft().save(tmp_path / "prompt")
    calls = 0
    if fails_at == "fsync":

        def full(_: int) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(soft_prompt.os, "fsync", full)
    else:
        rename = Path.rename

        def second_fails(self: Path, target: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == 2:
                raise OSError(16, "Device or resource busy")
            return rename(self, target)

        monkeypatch.setattr(Path, "rename", second_fails)
    with pytest.raises(OSError, match=r"space|busy"):
        soft(seed=5).save(tmp_path / "prompt")
    monkeypatch.undo()
    assert SoftPrompt.load(tmp_path / "prompt") == soft()
    assert [one.name for one in tmp_path.iterdir()] == ["prompt"]


def test_a_folder_that_cannot_be_written_is_named_as_it_was_given() -> None:
    with pytest.raises(OSError, match=r": '/proc/prompt'$"):
        soft().save("/proc/prompt")


def test_a_folder_is_never_seen_with_some_of_its_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[set[str]] = []
    fsync = soft_prompt.os.fsync

    def look(number: int) -> None:
        seen.append({one.name for one in (tmp_path / "new").iterdir()} if (tmp_path / "new").exists() else set())
        fsync(number)

    monkeypatch.setattr(soft_prompt.os, "fsync", look)
    write_folder(tmp_path / "new", {"a": b"1", "b": b"2"})
    write_folder(tmp_path / "new", {"a": b"3", "b": b"4"})
    assert seen == [set(), set(), {"a", "b"}, {"a", "b"}]
    assert (tmp_path / "new" / "b").read_bytes() == b"4"


def test_a_copy_with_another_report_is_checked_anew() -> None:
    assert replace(soft(), report={"epsilon": 2}).epsilon == 2.0
    with pytest.raises(ConfigurationError, match="epsilon"):
        replace(soft(), report={"epsilon": "none"})

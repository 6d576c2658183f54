"""`dpicl plan` shows the plan of the component that a run of the same settings builds, whatever its kind."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from langchain_core.language_models import FakeListLLM

from langchain_dpicl.backends.embedded import EmbeddedModel
from langchain_dpicl.backends.langchain.texts import TextVoteBackend
from langchain_dpicl.cli.inputs import private_examples, settings_of, toml_text
from langchain_dpicl.cli.main import main
from langchain_dpicl.cli.spending import budget_of, share_of
from tests.gradient_doubles import LABELS, LogisticEngine

SIZE, RECORDS = 2_000, 30
BUDGET = {"epsilon": 2.0, "delta": 1e-6}
INPUTS = ["why was it declined?", "where is my money?", "it has not arrived"]
NEAR = {"retrieval": {"participations": 4, "similarity_threshold": 0.5}}
STEPS = {"training": {"expected_batch_size": 50, "steps": 20}}
CLIPPED = {"mechanism": "difference_clip"}
TABLES: dict[str, dict[str, Any]] = {
    "generation": {"max_tokens": 5},
    "generation of fewer units than rows": {"data": {"public_size": {"good": 20, "bad": 500}}},
    "generation with words": {"max_tokens": 5, "decoding": {"released_words": True, "candidates": 50}},
    "generation, disjoint": {"rows": {"slots": 10, "shots": 2, "sampling": "disjoint"}, "shots_per_label": 2},
    "generation, one sample": {"rows": {"slots": 10, "redraw_every": "run"}, "max_tokens": 5, "epsilon": 1.0},
    "generation at a given noise": {"noise": {"multiplier": 2.0, "delta": 5e-7}},
    "generation, logits": {"noise": CLIPPED, "decoding": {"temperature": 1.3}, "max_tokens": 5},
    "generation, open label": {
        "task": {"open_label": {"key": "label", "max_tokens": 4}},
        "data": {"fields": ["label"]},
        "max_tokens": 5,
    },
    "documents": {"documents_per_topic": 2, "max_tokens": 5, "topics": {"words": 8, "pairs": True, "num_topics": 4}},
    "documents of words": {"documents_per_topic": 0, "component": "notes"},
    "documents of keywords": {"documents_per_topic": 0, "topics": {"vocabulary": ["card", "loan"]}, "epsilon": 1.0},
    "evolution": {},
    "evolution of candidates": {
        "evolution": {"rounds": 3, "num_survivors": 5, "candidates": ["my card", "my loan", "my account"]},
        "shots_per_label": 3,
        "noise": {"multiplier": 8.0},
    },
    "voting": {"max_queries": 100},
    "voting by soft votes": {"max_queries": 100, "answers": {"votes": "soft"}, "rows": {"slots": 9, "fill": 1.5}},
    "voting in text": {"max_queries": 100, "answers": {"votes": "text"}},
    "voting of a provider that writes": {"max_queries": 100, "model": {"name": "anthropic:none"}},
    "voting with abstention": {"max_queries": 100, "answers": {"abstain_below": 0.3}, "rows": {"units": 30}},
    "voting, scores": {"max_queries": 100, "answers": {"scores": True, "calibrate": False}},
    "pate": {},
    "pate in text": {"answers": {"votes": "text"}},
    "pate by soft votes": {"answers": {"votes": "soft"}, "noise": "gaussian"},
    "pate, two thresholds": {"noise": {"threshold": 9.0, "test_stddev": 40.0, "vote_stddev": 30.0}},
    "pate, one sample": {"rows": {"redraw_every": "run"}, "max_queries": 9},
    "pate, fixed teachers": {
        "rows": {"sampling": "partition"},
        "budget": {**BUDGET, "adjacency": "replace_one"},
        "answers": {"abstain_below": "never"},
        "data": {"public_size": RECORDS},  # their exact number, as replace_one wants it
    },
    "retrieval": NEAR,
    "retrieval, a row for each": {"retrieval": {**NEAR["retrieval"], "slots": "per_unit"}, "max_queries": 9},
    "retrieval in text": {**NEAR, "answers": {"votes": "text"}},
    "training": STEPS,
    "training at a given noise": {**STEPS, "noise": {"multiplier": 9.0}},
}


METHODS = {kind: kind.split()[0].rstrip(",") for kind in TABLES}


def tables(kind: str, records: Path) -> dict[str, Any]:
    """Returns a settings file with records, budget and method."""
    given, method = TABLES[kind], METHODS[kind]
    labelled = {} if method == "documents" or "open label" in kind else {"label_key": "label", "labels": list(LABELS)}
    data = {"file": str(records), "public_size": SIZE, **labelled, **given.get("data", {})}
    guess = {"pate": {"public_inputs": len(INPUTS)}, "training": {"parameters": LogisticEngine().width}}
    return {"method": method, "budget": BUDGET, "guess": guess.get(method, {}), **given, "data": data}


def component(given: dict[str, Any]) -> Any:
    """Returns what a run builds of a settings file, over its records."""
    settings = settings_of(given)
    models = {"training": LogisticEngine, "text": lambda: TextVoteBackend(FakeListLLM(responses=["good"]))}
    more = {"public_inputs": INPUTS} if settings.method == "pate" else {}
    is_text = settings.answers.votes == "text" or settings.model.name != "embedded"
    model = models.get("text" if is_text else settings.method, EmbeddedModel)()
    own = {"budget": budget_of(settings), **share_of(settings), **more}
    return settings.door(private_examples(settings), llm=model, **own)


def cost_of(made: Any, given: dict[str, Any]) -> dict[str, Any]:
    """Returns what the calls of a component cost, as `dpicl plan` counts them without settings of its own."""
    method, caps = given["method"], {"record_tokens": 60}
    if method == "training":
        cost = made.plan.cost(**caps)
        return {"gradients": cost.private_calls, "tokens": cost.tokens_in}
    if method == "evolution":
        caps |= {"writes_first": "candidates" not in given.get("evolution", {})}
    if hasattr(made, "task"):
        caps |= {"query_tokens": 60, "answer_tokens": 1, "calls_per_row": 1 + len(made.task.content_free)}
    if method == "retrieval":
        caps |= {"participants": 30}
    return dataclasses.asdict(made.plan.cost(**caps))


@pytest.mark.parametrize("kind", TABLES)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_run_of_the_same_file_has_the_plan_that_is_shown(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (records := tmp_path / "records.jsonl").write_text(RECORDS * '{"text": "a good film", "label": "good"}\n')
    given = tables(kind, records)
    (config := tmp_path / "task.toml").write_text("\n".join(f"{name} = {toml_text(given[name])}" for name in given))
    assert main(["plan", "--config", str(config), "--no-compare", "--json"]) == 0
    said = capsys.readouterr()
    shown, made = json.loads(said.out), component(given)
    ran = json.loads(json.dumps(made.plan.to_dict()))
    if "logits" in kind:  # of all tokens of the model, which a plan does not ask; their number moves no noise
        del ran["candidates"], ran["implementation_delta"]
    assert {name: shown["plan"].get(name) for name in ran} == ran
    assert shown["plan"]["epsilon"] <= BUDGET["epsilon"]
    if "cost" in shown:
        own = cost_of(made, given)
        assert {name: shown["cost"][name] for name in own} == own


def test_two_thresholds_are_compared_with_a_single_noise(capsys: pytest.CaptureFixture[str]) -> None:
    terms = ["--epsilon", "1", "--delta", "1e-6", "--public-size", "2000", "--public-inputs", "9"]
    noise = ["noise.threshold=10.0", "noise.test_stddev=25.0", "noise.vote_stddev=13.0", "guess.labels=2"]
    assert (
        main(["plan", "--method", "pate", *terms, *(part for one in noise for part in ("--set", one)), "--json"]) == 0
    )
    shown = json.loads(capsys.readouterr().out)
    assert shown["plan"]["mechanism"] == "confident_gnmax"
    assert {option["mechanism"] for option in shown["options"]} == {"gaussian", "gumbel", "permute_and_flip"}


REFUSED: dict[str, tuple[str, str]] = {
    "a temperature without effect": ("decoding.temperature=1.3", "Decoding: temperature"),
    "a label of no field": ("task.open_label.key=queue", "OpenLabel.key: expected a declared field"),
    "a field of labels, without them": ("data.label_key=queue", "labels: expected the declared labels of 'queue'"),
    "rows where no text is written": ("rows.slots=9", "Rows: expected none with documents_per_topic=0"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_a_run_refuses_before_it_spends_is_refused(case: str, capsys: pytest.CaptureFixture[str]) -> None:
    given, said = REFUSED[case]
    method = ["--method", "documents", "--documents-per-topic", "0"] if given.startswith("rows") else []
    terms = ["--epsilon", "1", "--delta", "1e-6", "--public-size", "1000", "--no-compare", *method]
    assert main(["plan", *terms]) == 0
    assert main(["plan", *terms, "--set", given]) == 2
    assert said in capsys.readouterr().err


def test_guesses_and_noise_are_told_once(capsys: pytest.CaptureFixture[str]) -> None:
    terms = ["--epsilon", "0.1", "--delta", "1e-6", "--public-size", "1000", "--no-compare"]
    for method in ([], ["--method", "voting", "--max-queries", "900", "--set", "guess.labels=2"]):
        assert main(["plan", *terms, *method]) == 0
        said = capsys.readouterr()
        assert said.out.count("do not spend like this") == 1
        assert not said.err


def test_two_thresholds_that_cost_too_much_are_named_by_their_own_keys(capsys: pytest.CaptureFixture[str]) -> None:
    command = "plan --method pate --public-inputs 100 --public-size 2000 --epsilon 1 --delta 1e-6 --set guess.labels=2"
    noise = "--set noise.threshold=10.0 --set noise.test_stddev=2.0 --set noise.vote_stddev=1.0"
    assert main(f"{command} {noise}".split()) == 2
    assert "noise.vote_stddev, noise.test_stddev: expected noise that costs at most" in capsys.readouterr().err


def test_texts_may_stand_under_label(capsys: pytest.CaptureFixture[str]) -> None:
    command = "plan --method voting --public-size 2000 --max-queries 10 --epsilon 1 --delta 1e-6 --set guess.labels=3"
    assert main(f"{command} --no-compare --set data.text_key=label".split()) == 0
    assert "epsilon" in capsys.readouterr().out


def test_a_sample_of_fixed_size_is_planned_without_a_record(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """However many units are declared, and whatever names them."""
    monkeypatch.setattr("langchain_dpicl.privacy.private_examples.read_record", lambda *_, **__: pytest.fail("read"))
    terms = "plan --public-size 3000000 --epsilon 1 --delta 1e-8 --no-compare --adjacency replace_one"
    given = "--set rows.sampling=fixed --set data.unit_key=user --set data.records_per_unit=3"
    assert main(f"{terms} {given}".split()) == 0
    assert "3000000 declared units" in capsys.readouterr().out


TERMS = "--public-size 2000 --epsilon 1 --delta 1e-6"


def command(method: str, *sets: str) -> list[str]:
    """Returns the command that plans a method with settings of its own."""
    return [*f"plan --method {method} {TERMS}".split(), *(part for one in sets for part in ("--set", one))]


def test_a_template_with_an_undeclared_label_is_told_how_to_declare_it(capsys: pytest.CaptureFixture[str]) -> None:
    given = ["guess.labels=3", "example_prompt=T: {text} Q: {queue}"]
    assert main(command("voting --max-queries 10 --no-compare", *given)) == 2
    assert "the label's with label_key" in capsys.readouterr().err
    assert main(command("voting --max-queries 10 --no-compare", *given, "data.label_key=queue")) == 0


def test_made_up_labels_are_not_the_answer_of_who_abstains() -> None:
    given = ["guess.labels=3", "answers.abstain_label=label 1"]
    assert main(command("voting --max-queries 10 --no-compare", *given)) == 0


def test_a_plan_has_the_name_of_the_share_on_a_ledger(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ledger = tmp_path / "ledger.db"
    given = ["data.dataset_id=notes", f"budget.ledger={ledger}"]
    assert main(command("documents --documents-per-topic 0 --json", *given)) == 0
    assert " of documents-notes," in json.loads(capsys.readouterr().out)["plan"]["dataset_id"]
    assert not ledger.exists()


def test_a_plan_opens_no_file_of_balances(tmp_path: Path) -> None:
    balances = tmp_path / "balances.db"
    near = ["retrieval.participations=4", "retrieval.similarity_threshold=0.5", "guess.labels=3"]
    given = [*near, f"retrieval.balances={balances}", "data.unit_key=document"]
    assert main(command("retrieval --no-compare", *given)) == 0
    assert not balances.exists()

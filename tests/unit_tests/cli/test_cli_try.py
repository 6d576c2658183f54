"""`dpicl try`: what is free beside what a private budget would buy."""

from __future__ import annotations

import functools
import json
import random
import re
import shlex
import shutil
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from langchain_dpicl import EmbeddedLLM
from langchain_dpicl.cli import rehearse as commands
from langchain_dpicl.cli.inputs import settings_of
from langchain_dpicl.cli.main import main
from langchain_dpicl.exceptions import ModelCallError
from langchain_dpicl.rehearsal import (
    FreeRival,
    Rehearsal,
    choice,
    propose_rows,
    rehearsal_cost,
    rehearse,
    rehearse_generation,
    try_components,
)
from langchain_dpicl.retrieval import plan_retrieval
from tests.unit_tests.rehearsal.test_trying import rehearsed as made

TOPICS = Path(commands.__file__).parent / "data" / "topics.jsonl"
TERMS = ("--public-size", "3000", "--max-queries", "200", "--delta", "1e-6")


@pytest.fixture(scope="module")
def rehearsed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A rehearsal in which eight-shot rows of private records beat what is free."""
    path = tmp_path_factory.mktemp("try") / "rehearsal.json"
    made(zero_shot=0.25, rows={1: 0.3, 8: 0.45}, questions=24).save(path)
    return path


@functools.cache
def proposed(digest: str, public_size: int, terms: tuple[tuple[str, Any], ...]) -> Any:
    return propose_rows(REHEARSALS[digest], public_size, **dict(terms))


REHEARSALS: dict[str, Rehearsal] = {}


@pytest.fixture
def proposed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets the command and Python share proposals, which take seconds: they are of the same numbers, and not drawn."""

    def propose(rehearsal: Rehearsal, public_size: int, **terms: Any) -> Any:
        REHEARSALS[rehearsal.digest] = rehearsal
        return proposed(rehearsal.digest, public_size, tuple(sorted(terms.items())))

    monkeypatch.setattr(choice, "propose_rows", propose)


@pytest.mark.usefixtures("proposed_once")
def test_it_prints_the_table_of_python(rehearsed: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["try", "--rehearsal", str(rehearsed), *TERMS]) == 0
    printed = capsys.readouterr().out
    trial = try_components(Rehearsal.load(rehearsed), 3000, delta=1e-6, max_queries=200)
    assert printed.startswith(trial.table())
    assert len(re.findall(r"^recommended: ", printed, re.MULTILINE)) == 1
    assert trial.recommended is not None
    settings = settings_of({"method": "voting", **tomllib.loads(printed.partition(trial.advice)[2])})
    assert settings.get("max_queries") == 200
    assert settings.get("epsilon") == trial.recommended.epsilon


@pytest.mark.usefixtures("proposed_once")
def test_it_says_which_settings_it_has_no_use_for(rehearsed: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["--set", "rows.slots=10", "--set", "noise=gumbel", "--set", "answers.abstain_below=0.6"]
    assert main(["try", "--rehearsal", str(rehearsed), *TERMS, *asked]) == 0
    said, _, rest = capsys.readouterr().out.partition("\n")
    assert said.startswith("not used: rows, noise, answers.abstain_below of the settings")
    assert "not used" not in rest


@pytest.mark.usefixtures("proposed_once")
def test_recommended_settings_have_the_other_answers_as_asked(
    rehearsed: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    named = ["--set", "answers.votes=text", "--set", "answers.abstain_label=unsure"]
    asked = [*named, "--set", "answers.scores=true", "--set", "answers.min_votes=3"]
    given = ["try", "--rehearsal", str(rehearsed), *TERMS, *asked]
    assert main(given) == 0
    said, _, rest = capsys.readouterr().out.partition("\n")
    assert said.startswith("not used: answers.min_votes, answers.scores of the settings")
    answers = tomllib.loads(rest.partition("recommended: ")[2].partition("\n")[2])["answers"]
    assert answers == {"votes": "text", "abstain_label": "unsure", "calibrate": False}
    assert main([*given, "--documents", "30", "--json"]) == 0
    found = [one["settings"]["answers"]["votes"] for one in json.loads(capsys.readouterr().out)["options"]]
    assert found == ["text"] * 8


def test_rows_are_those_that_read_the_wordings_of_the_task(
    rehearsed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[int] = []

    def propose(rehearsal: Rehearsal, public_size: int, *, wordings: int, **terms: Any) -> Any:
        asked.append(wordings)
        return propose_rows(rehearsal, public_size, wordings=wordings, **terms)

    monkeypatch.setattr(choice, "propose_rows", propose)
    task = tmp_path / "task.toml"
    task.write_text('[[task.wordings]]\nprefix = "Sort."\n')
    given = ["try", "--rehearsal", str(rehearsed), *TERMS, "--config", str(task)]
    assert main(given) == 0
    assert asked == [2] * 4
    capsys.readouterr()
    assert main([*given, "--documents", "30"]) == 2
    assert "FewShotTask.wordings: expected none" in capsys.readouterr().err


def test_a_rehearsal_in_the_place_of_examples_is_shown_its_option(
    rehearsed: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["try", str(rehearsed), *TERMS]) != 0
    assert "A rehearsal goes to --rehearsal" in capsys.readouterr().err


@pytest.mark.usefixtures("proposed_once")
def test_json_is_the_trial(rehearsed: Path, capsys: pytest.CaptureFixture[str]) -> None:
    priced = ["--set", "cost.price_in=3.0", "--set", "cost.price_out=9.0", "--set", "cost.record_tokens=80"]
    assert main(["try", "--rehearsal", str(rehearsed), *TERMS, *priced, "--public-inputs", "500", "--json"]) == 0
    out = json.loads(capsys.readouterr().out)
    given: dict[str, Any] = {"price_in": 3.0, "price_out": 9.0, "record_tokens": 80, "public_inputs": 500}
    trial = try_components(Rehearsal.load(rehearsed), 3000, delta=1e-6, max_queries=200, **given)
    assert out == json.loads(json.dumps(trial.to_dict()))
    assert {one["component"] for one in out["options"]} == {"votes", "labels"}


@pytest.mark.usefixtures("proposed_once")
def test_retrieval_is_tried_for_a_number_of_documents(rehearsed: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["--documents", "30", "--participations", "5", "--set", "cost.price_in=1.0", "--json"]
    assert main(["try", "--rehearsal", str(rehearsed), *TERMS, *asked]) == 0
    options = json.loads(capsys.readouterr().out)["options"]
    found = [one for one in options if one["component"] == "retrieval"]
    assert [one["epsilon"] for one in found] == [1.0, 2.0, 4.0, 8.0]
    plan = plan_retrieval(3000, epsilon=4.0, delta=1e-6, participations=5, width=4)
    expected = plan.expected(participants=30, source=Rehearsal.load(rehearsed))
    assert found[2]["right"] == expected["right_label_prob"]
    assert found[2]["at_most"] == expected["ceiling_high"]
    cost = plan.cost(participants=30, num_queries=200)
    assert found[2]["calls"] == cost.private_calls + cost.public_calls
    assert found[2]["money"] == pytest.approx(cost.tokens_in / 1e6)
    assert "beats what is free" not in {one["verdict"] for one in found}


def test_retrieval_is_not_tried_where_no_ledger_takes_it(
    rehearsed: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    terms = ["--documents", "30", "--adjacency", "replace_one"]
    assert main(["try", "--rehearsal", str(rehearsed), *TERMS, *terms]) == 2
    assert "adjacency: expected 'add_remove'" in capsys.readouterr().err
    monkeypatch.setattr(commands, "load_model", lambda _: pytest.fail("a model was loaded"))
    assert main(["try", *TERMS, *terms]) == 2
    assert "adjacency: expected 'add_remove'" in capsys.readouterr().err


def test_labels_that_mean_nothing_are_not_worth_a_budget(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = [json.loads(line) for line in TOPICS.read_text().splitlines()]
    labels = [line["label"] for line in lines]
    random.Random(3).shuffle(labels)
    path = tmp_path / "shuffled.jsonl"
    path.write_text(
        "".join(json.dumps({**line, "label": label}) + "\n" for line, label in zip(lines, labels, strict=True))
    )
    assert main(["try", str(path), "--shots", "1,4", "--public-size", "2000"]) == 0
    printed = capsys.readouterr().out
    assert "recommended: do not spend: " in printed
    assert "rows = " not in printed


def pairs(path: Path, rows: int = 24) -> Path:
    """Premises and hypotheses, and no field that is called text."""
    kinds = ("yes", "no")
    lines = [{"premise": f"it is {n}", "hypothesis": f"is it {n}", "answer": kinds[n % 2]} for n in range(rows)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.mark.parametrize("command", ["try", "rehearse"])
def test_a_file_of_other_fields_is_refused_by_their_names_before_a_cost_is_shown(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([command, str(pairs(tmp_path / "pairs.jsonl")), "--yes"]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "expected text under 'text', found ['premise', 'hypothesis', 'answer']" in printed.err
    assert "--text-key" in printed.err


def test_templates_of_two_texts_need_no_text_key(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    task = tmp_path / "task.toml"
    shown = "example_prompt = '{premise} {hypothesis} {answer}'\nsuffix = '{premise} {hypothesis}'"
    task.write_text(f"[data]\nlabel_key = 'answer'\n[task]\n{shown}\n")
    asked = [str(pairs(tmp_path / "pairs.jsonl")), "--config", str(task), "--shots", "1", "--examples", "12"]
    assert main(["try", *asked, "--public-size", "3000"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("12 of 24 examples (--examples): ")
    assert lines[1].startswith("assumed: 100 answers (--max-queries), the embedded model")
    assert lines[2].startswith("not tried: instruction only")
    assert "calibrated" in lines[2]


def test_a_single_variable_of_the_query_is_a_field_where_no_text_is_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    templates = ["--set", "example_prompt={premise}: {answer}", "--set", "suffix={premise}:"]
    asked = [str(pairs(tmp_path / "pairs.jsonl")), "--label-key", "answer", "--shots", "1", *templates]
    assert main(["rehearse", *asked, "--yes"]) == 0
    assert "zero-shot" in capsys.readouterr().out
    assert main(["rehearse", *asked[:-1], "suffix={nothing}:", "--yes"]) == 2
    assert "the fields that example_prompt shows, ['premise', 'answer']" in capsys.readouterr().err


def test_the_exit_code_and_the_recommendation_follow_the_numbers(
    rehearsed: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["try", "--rehearsal", str(rehearsed), "--public-size", "100000", "--max-queries", "50"]) == 0
    assert "recommended: private votes at epsilon " in capsys.readouterr().out
    assert main(["try", "--rehearsal", str(rehearsed), "--public-size", "200", "--max-queries", "100000"]) == 0
    assert "recommended: do not spend: " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["x.jsonl", "--rehearsal", "r.json"], "FILE, --rehearsal: expected one of the two, found 'both'"),
        (["--rehearsal", "nowhere.json"], "nowhere.json"),
        (["nowhere.jsonl"], "dpicl: nowhere.jsonl: No such file or directory."),
        (["--max-queries", "0"], "max_queries: expected an integer >= 1"),
        (["--public-inputs", "0"], "guess.public_inputs: expected a number greater than or equal to 1"),
        (["--delta", "1e-3", "--public-size", "5000"], "delta: expected at most"),
    ],
)
def test_what_cannot_be_tried_is_refused(given: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["try", *given, "--examples", "16", "--shots", "1"]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["--delta", "1e-5", "--public-size", "20000"], "delta: expected at most 1/(10 * public_size) = 5e-06"),
        (["--max-queries", "0"], "max_queries: expected an integer >= 1, found 0"),
        (["--delta", "0"], "delta: expected a number above 0 and below 1, found 0"),
        (["--documents", "-1"], "--documents: expected an integer >= 0, found -1"),
        (["--demonstrations", "0"], "--demonstrations: expected an integer >= 1, found 0"),
    ],
)
def test_what_cannot_be_tried_is_refused_before_the_first_call(
    given: list[str], said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def load(_: Any) -> None:
        raise AssertionError("a model was made")

    monkeypatch.setattr(commands, "load_model", load)
    assert main(["try", *given]) == 2
    assert said in capsys.readouterr().err


def test_the_shipped_examples_are_four_topics_of_varied_sentences() -> None:
    lines = [json.loads(line) for line in TOPICS.read_text().splitlines()]
    assert len(lines) == len({line["text"] for line in lines}) == 64
    labels = [line["label"] for line in lines]
    assert {label: labels.count(label) for label in labels} == dict.fromkeys(
        ("sport", "cooking", "weather", "music"), 16
    )
    assert all(8 <= len(line["text"].split()) <= 20 for line in lines)
    assert not any(re.search(r"\b(bank|credit|account|transfer)\b", line["text"]) for line in lines)


PRINTED = """\
2,176 to 6,272 calls, at most 1,764,992 tokens, no price given; nothing private is read.
a rehearsal of 64 public examples; 4 labels, 2,000 declared units, delta 1e-06
                                                              right  range      at most      calls    money
always 'cooking', the most frequent label                      25 %  free, epsilon 0
zero-shot                                                      95 %  free, epsilon 0
zero-shot, calibrated                                          95 %  free, epsilon 0
instruction only: a prompt of examples that the model wrote    92 %  free, epsilon 0
votes of 40 rows of your public examples, 4-shot               98 %  free, epsilon 0
private votes, epsilon 1, 100 queries                          95 %  88 to 100    100 %      4,200        -
  no better than what is free; 20 x 4, fill 1.5, gaussian, calibrated
private votes, epsilon 2, 100 queries                          96 %  89 to 100    100 %      4,100        -
  no better than what is free; 40 x 8, fill 1, gaussian
private votes, epsilon 4, 100 queries                          98 %  91 to 100    100 %      4,100        -
  no better than what is free; 40 x 4, fill 1.5, gaussian
private votes, epsilon 8, 100 queries                          98 %  92 to 100    100 %      4,100        -
  no better than what is free; 40 x 8, fill 1, gaussian
right: of answers; range: nine times in ten; at most: without noise, at the upper end of its range;
40 x 4: 40 votes of prompts of 4 records, fill: records drawn for each place of a prompt;
what is free is the best of several on these questions: on others expect a few points less
recommended: do not spend: votes of 40 rows of your public examples, 4-shot says 98 % for nothing
"""


def test_a_file_of_too_few_examples_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    public = tmp_path / "public.jsonl"
    public.write_text('{"text": "a", "label": "x"}\n{"text": "b", "label": "y"}\n')
    assert main(["try", str(public), "--public-size", "3000", "--yes"]) == 2
    assert "FILE: expected at least 3 public examples, found 2" in capsys.readouterr().err


def test_without_a_file_it_shows_the_examples_of_the_package(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["try"]) == 0
    assert capsys.readouterr().out == PRINTED


def test_the_rehearsal_of_the_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (Path(__file__).resolve().parents[3] / "docs" / "cli.md").read_text()
    monkeypatch.chdir(tmp_path)
    shutil.copy(TOPICS, tmp_path)
    rehearsed = re.search(r"^dpicl (rehearse .*)$", page, re.MULTILINE)
    assert rehearsed is not None
    assert main([*shlex.split(rehearsed[1]), "--yes"]) == 0


def test_demonstrations_say_what_noise_leaves_of_them(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["try", str(TOPICS), "--demonstrations", "2", "--shots", "4", "--json", "--quiet", *TERMS]) == 0
    rows = json.loads(capsys.readouterr().out)["demonstrations"]
    assert [row["epsilon"] for row in rows] == [1.0, 2.0, 4.0, 8.0]
    kept = [row["fidelity"] for row in rows]
    assert kept == sorted(kept)
    assert kept[-1] > kept[0] + 0.05
    assert all(row["low"] <= row["fidelity"] <= row["high"] and row["count"] == 2 for row in rows)
    assert all(row["rests_on"] == "a rehearsal of 64 public examples" for row in rows)


@pytest.fixture
def by_label(tmp_path: Path) -> Path:
    """The examples of the package, one label after another, as a sort leaves them."""
    lines = sorted(TOPICS.read_text().splitlines(), key=lambda line: json.loads(line)["label"])
    path = tmp_path / "sorted.jsonl"
    path.write_text("\n".join(lines))
    return path


def test_instruction_only_is_asked_what_the_rehearsal_asks(by_label: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def answered(settings: Any, examples: Sequence[Any], labels: Sequence[str]) -> FreeRival:
        asked.append(examples)
        return FreeRival("instruction only", 0, calibrated=False, right=0.5)

    monkeypatch.setattr(commands, "_instruction_only", answered)
    assert main(["try", str(by_label), "--examples", "16", "--shots", "1", "--public-size", "2000", "--quiet"]) == 0
    lines = [json.loads(line) for line in by_label.read_text().splitlines()]
    measured = rehearse(EmbeddedLLM(), lines, shots=(1,), max_examples=16, progress=False)
    assert [measured.labels.index(example["label"]) for example in asked[0]] == list(measured.gold)


def test_demonstrations_are_tried_on_a_file_sorted_by_label(by_label: Path, capsys: pytest.CaptureFixture[str]) -> None:
    terms = ["--examples", "16", "--shots", "1", "--demonstrations", "1", "--public-size", "2000"]
    assert main(["try", str(by_label), *terms]) == 0
    assert capsys.readouterr().out.count("private demonstrations, epsilon ") == 4


def test_labels_that_are_booleans_are_compared_as_text(by_label: Path, capsys: pytest.CaptureFixture[str]) -> None:
    records = [json.loads(line) for line in by_label.read_text().splitlines()]
    by_label.write_text("\n".join(json.dumps({**record, "label": record["label"] > "n"}) for record in records))
    terms = ["--examples", "16", "--shots", "1", "--demonstrations", "1", "--public-size", "2000", "--json"]
    assert main(["try", str(by_label), *terms]) == 0
    [own] = [one for one in json.loads(capsys.readouterr().out)["free"] if one["name"].startswith("instruction only")]
    assert own["right"] > 0


WITH_TEXTS = ("--demonstrations", "2", "--shots", "4", "--set", "cost.price_in=1000000", "--yes", *TERMS)
# Of four labels: 16 one-shot rows and 20 four-shot ones with a public prompt each, for 16 tokens, or the first alone.
LEAST_OF_TEXTS, MOST_OF_TEXTS = 4 * (17 + 21), 4 * (17 + 21) * 16


def test_calls_of_demonstrations_are_agreed_to_before_the_first_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["try", str(TOPICS), *WITH_TEXTS]) == 0
    printed = capsys.readouterr().out
    votes, tokens = rehearsal_cost(64, shots=(4,)), 4 * 16 * (16 + 20 * 4) * 60
    said = re.match(r"([\d,]+) to ([\d,]+) calls, at most [\d,]+ tokens and ([\d.]+) money; nothing private", printed)
    assert said is not None
    least, most, money = (float(number.replace(",", "")) for number in said.groups())
    assert (least, most) == (votes.least.public_calls + LEAST_OF_TEXTS, votes.most.public_calls + MOST_OF_TEXTS)
    assert votes.most.tokens_in + tokens < money < votes.most.tokens_in + 1.5 * tokens
    lines = [json.loads(line) for line in TOPICS.read_text().splitlines()]
    assert LEAST_OF_TEXTS <= rehearse_generation(EmbeddedLLM(), lines, label_key="label").calls <= MOST_OF_TEXTS


@pytest.mark.parametrize(
    "case",
    [
        (
            64,
            "3000",
            "--max-calls: expected at least the {most:,} calls that this rehearsal and its texts may need, found",
        ),
        (49, "3000", "public_examples: expected at least two examples of label 'weather', found 1"),
        (64, "8", "public_size: expected at least"),
    ],
    ids=["calls", "label", "units"],
)
def test_what_demonstrations_refuse_is_refused_before_the_first_call(
    case: tuple[int, str, str], by_label: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines, size, said = case
    by_label.write_text("\n".join(by_label.read_text().splitlines()[:lines]))
    monkeypatch.setattr(commands, "load_model", lambda _: pytest.fail("a model was loaded"))
    most = rehearsal_cost(64, shots=(4,)).most.public_calls + MOST_OF_TEXTS
    terms = [size if term == "3000" else term for term in WITH_TEXTS]
    assert main(["try", str(by_label), *terms, "--max-calls", str(most - 1)]) == 2
    printed = capsys.readouterr()
    assert said.format(most=most) in printed.err
    assert printed.out == ""


@pytest.mark.parametrize(("more", "said"), [((), "\nzero-shot  "), (("--json",), '"demonstrations": null')])
def test_the_table_is_printed_where_the_model_fails_at_the_texts(
    more: tuple[str, ...], said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(*_: Any, **__: Any) -> Any:
        raise ModelCallError("the provider is out")

    monkeypatch.setattr(commands, "_demonstrations", fails)
    assert main(["try", str(TOPICS), *WITH_TEXTS, *more]) == 4
    printed = capsys.readouterr()
    assert said in printed.out
    assert printed.err.endswith("dpicl: the provider is out\n")
    assert not more or json.loads(printed.out)["options"]


def test_demonstrations_need_texts(rehearsed: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["try", "--rehearsal", str(rehearsed), "--demonstrations", "2", *TERMS]) != 0
    assert "--demonstrations: expected FILE" in capsys.readouterr().err


def test_an_origin_beside_a_rehearsal_is_refused(rehearsed: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["try", "--rehearsal", str(rehearsed), "--origin", "made_up", *TERMS]) != 0
    assert "--origin: expected none beside --rehearsal" in capsys.readouterr().err


def test_a_plan_of_another_method_refuses_a_rehearsal(rehearsed: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = ["--method", "evolution", "--rehearsal", str(rehearsed), "--public-size", "3000", "--epsilon", "1"]
    assert main(["plan", *given, "--delta", "1e-6"]) != 0
    assert "--method: expected one of ['voting', 'retrieval', 'pate'] beside --rehearsal" in capsys.readouterr().err

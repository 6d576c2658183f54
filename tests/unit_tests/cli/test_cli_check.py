"""`dpicl check`: what the owner of a file learns before declaring it."""

from __future__ import annotations

import gzip
import json
import os
from pathlib import Path
from typing import Any

import pytest

from langchain_dpicl.cli.inputs import private_examples, read_records, read_toml, settings_of
from langchain_dpicl.cli.main import main
from langchain_dpicl.exceptions import ConfigurationError, RecordError

PAGE = [
    {"user": 1, "text": "my card was gone", "spam": 0},
    {"user": 1, "text": "where is my transfer", "spam": 0},
    {"user": 2, "text": "", "spam": 0},
    {"user": 3, "text": "you have won", "spam": 1},
    {"user": 4, "spam": 1},
    {"user": 5, "text": "the line was busy", "spam": 0},
]


def written(path: Path, records: list[Any]) -> Path:
    lines = "".join((one if isinstance(one, str) else json.dumps(one)) + "\n" for one in records)
    path.write_bytes(gzip.compress(lines.encode()) if path.suffix == ".gz" else lines.encode())
    return path


@pytest.fixture
def check(capsys: pytest.CaptureFixture[str]) -> Any:
    def run(path: Path, *more: str, code: int = 0) -> str:
        assert main(["check", str(path), *more]) == code
        return capsys.readouterr().out

    return run


PRINTED = """\
For the owner of the records alone, never for sharing: counts, labels and line numbers are private.
file     tickets.jsonl: 6 records
fields   user: integer 6
         text: text 5, none 1
         spam: integer 6
texts    5 of 16 characters in the middle, 20 at most
         empty: 1, taken and of no use (line 3)
labels   '0': 4
         '1': 2
persons  5 values of 'user', 1 of them on several records, at most 2
         records_per_unit = 1 keeps the first 1 of each
refused  1: expected text under 'text'; a record has none. If it has another name, give --text-key (data.text_key). (line 5)
declare  text_key = "text"
         label_key = "spam"
         labels = ["0", "1"]
         labels_as_text = true
         public_size = 5
         unit_key = "user"
         delta = 1e-6 or less; public_size is rounded, a figure known without counting is better
written: task.toml; its labels and size were read off the records: change what is not public
"""


def test_it_prints_counts_faults_and_what_to_declare(
    check: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    written(Path("tickets.jsonl"), PAGE)
    assert (
        check(Path("tickets.jsonl"), "--label-key", "spam", "--unit-key", "user", "--out", "task.toml", code=1)
        == PRINTED
    )


def test_the_first_line_says_whom_it_is_for(check: Any, tmp_path: Path) -> None:
    out = check(written(tmp_path / "r.jsonl", [{"text": "x"}]))
    assert out.startswith("For the owner of the records alone, never for sharing:")


@pytest.mark.parametrize("name", ["r.jsonl", "r.jsonl.gz", "r.csv"])
def test_each_format_is_read_with_its_line_numbers(check: Any, tmp_path: Path, name: str) -> None:
    records = [{"text": "a", "queue": "card"}, {"text": " ", "queue": "card"}, {"text": "b", "queue": "wire"}]
    if name.endswith(".csv"):
        path = tmp_path / name
        path.write_text('text,queue\n"a,\nwith a line break",card\n" ",card\nb,wire\n')
        places = "line 4"
    else:
        path, places = written(tmp_path / name, records), "line 2"
    out = check(path, "--label-key", "queue")
    assert f"{path}: 3 records" in out
    assert f"empty: 1, taken and of no use ({places})" in out
    assert "'card': 2" in out
    assert "refused  nothing" in out


def test_texts_of_several_lines_are_counted_with_where_a_written_one_ends(check: Any, tmp_path: Path) -> None:
    records = [{"text": text} for text in ("Agent: how can I help?\nCustomer: my card", "one line\n", "another")]
    out = check(written(tmp_path / "r.jsonl", records))
    assert "of several lines: 1; written ones end at the first line break, unless decoding.stop" in out
    assert "several lines" not in check(written(tmp_path / "r.jsonl", records[1:]))


@pytest.mark.parametrize(
    "records", [[{"text": "a", "topic": topic, **more} for topic in "xyxy"] for more in ({}, {"label": None})]
)
def test_a_field_of_labels_that_no_record_has_is_a_fault(check: Any, tmp_path: Path, records: list[Any]) -> None:
    out = check(written(tmp_path / "r.jsonl", records), "--label-key", "label", code=1)
    assert "labels   none under 'label'; fields of few values: ['topic']. Give --label-key." in out
    assert "refused  4: expected text under 'label'; a record has none." in out


def test_numbers_that_are_no_labels_are_named_without_declared_ones_too(check: Any, tmp_path: Path) -> None:
    path = written(tmp_path / "r.jsonl", [{"text": "a", "stars": stars} for stars in (1.0, 4.0)])
    out = check(path, "--label-key", "stars", code=1)
    assert "labels   none under 'stars'\n" in out
    assert "2: expected text under 'stars'; a record has another number. Make it an integer: a column with" in out


@pytest.mark.parametrize("name", ["r.jsonl", "r.csv"])
def test_of_a_file_without_a_record_it_says_what_a_run_would_spend_on(check: Any, tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("")
    out = check(tmp_path / name)
    assert "0 records\n         a run on no record is taken, and spends its budget on noise alone" in out
    assert "fields" not in out.partition("texts")[0], "it has none"


def test_settings_of_every_command_are_read_and_max_chars_with_them(check: Any, tmp_path: Path) -> None:
    (config := tmp_path / "task.toml").write_text(
        "max_queries = 4\n[answers]\ncalibrate = false\n[service]\nport = 1\n[data]\ntext_key = 'body'\nmax_chars = 5\n"
    )
    path = written(tmp_path / "r.jsonl", [{"body": "a long text"}, {"body": "short"}])
    out = check(path, "--config", str(config), "--out", str(tmp_path / "read.toml"))
    assert "longer than max_chars = 5: 1, cut there (line 1)" in out
    assert private_examples(settings_of(read_toml(tmp_path / "read.toml"))).max_chars == 5
    for unknown in ("data.labl=a", "label_key=a"):
        assert main(["check", str(path), "--set", unknown]) == 2
    for wrong in ("label_key = 'a'", "[daat]\nlabel_key = 'a'"):
        config.write_text(wrong)
        assert main(["check", str(path), "--config", str(config)]) == 2


def test_labels_of_declared_sizes_are_the_declared_ones(
    check: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = written(tmp_path / "r.jsonl", [{"text": "a"}] * 3)
    sizes = ("--set", "data.public_size={card=50, wire=50}")
    out = check(path, "--label-key", "queue", *sizes, code=1)
    assert (
        "refused  3: expected text under 'queue'; a record has none. If it has another name, give --label-key (data.label_key)."
        in out
    )
    assert 'labels = ["card", "wire"]\n         public_size = {card = 50, wire = 50}' in out
    assert "'card': declared, and no record has it" in out
    assert main(["check", str(path), *sizes]) == 2
    assert "label_key: expected the field that holds the label, since labels are declared" in capsys.readouterr().err


@pytest.mark.parametrize("sign", [";", "\t"])
def test_cells_between_other_signs_than_commas_are_named(check: Any, tmp_path: Path, sign: str) -> None:
    path = tmp_path / "r.csv"
    path.write_text(f"text{sign}queue\na{sign}card\n")
    out = check(path, code=1)
    assert "texts    none: expected cells between commas, found another sign between the names of the first line" in out
    assert "Give --text-key" not in out


def test_a_field_with_a_semicolon_in_its_name_is_a_field(check: Any, tmp_path: Path) -> None:
    path = tmp_path / "r.csv"
    path.write_text("note;text\nwhere is my card; and why\n")
    assert "texts    1 of 25 characters" in check(path, "--text-key", "note;text")


def test_every_reason_for_a_refusal_has_its_lines(check: Any, tmp_path: Path) -> None:
    good = {"text": "a", "queue": "card", "user": "u"}
    records = [
        good,
        {**good, "text": None},
        {**good, "queue": "other"},
        {**good, "user": 1.5},
        {**good, "text": [1]},
        7,
    ]
    labels = ("--label-key", "queue", "--label", "card", "--unit-key", "user")
    out = check(written(tmp_path / "r.jsonl", records), *labels, code=1)
    for line in (
        "1: expected text under 'text'; a record has none. Leave out records without one. (line 2)",
        "a record has another. Declare every label, letter by letter: case and white space count. (line 3)",
        "1: expected text or an integer under 'user'; a record has neither. Make it an integer: a column with gaps holds 1.0 for 1. (line 4)",
        "a record has a value of another type. Put its text, such as 2026-03-02 for a date, into a field of its own. (line 5)",
        "1: expected every record to be text, a mapping or a Document; one is of another type. Make a dict of each,",
        "as dict(row), dataclasses.asdict and model_dump do. (line 6)",
        "'other': 1 (not declared)",
    ):
        assert line in out


@pytest.mark.parametrize("records", [[], [{"text": "a"}] * 30, [{"text": None}], [{"text": "a"}, "no JSON", "[1]"]])
def test_what_it_says_is_refused_is_what_private_examples_refuse(check: Any, tmp_path: Path, records: Any) -> None:
    path = written(tmp_path / "r.jsonl", records)
    code = 0 if all(isinstance(one, dict) and one["text"] for one in records) else 1
    out = check(path, "--out", str(tmp_path / "task.toml"), code=code)
    settings = settings_of(read_toml(tmp_path / "task.toml"))
    if code == 0:
        assert private_examples(settings).public_size == (1 if not records else 30)
    else:
        assert "refused  nothing" not in out
        with pytest.raises(ValueError, match="expected"):
            private_examples(settings)


def test_lines_that_cannot_be_read_are_named(check: Any, tmp_path: Path) -> None:
    lines = [{"text": "a"}, "{nope", '["x"]', '{"text": "a", "user": 1, "user": 2}']
    out = check(written(tmp_path / "r.jsonl", lines), code=1)
    assert "cannot be read: 2, no JSON, or a key twice (line 2, 4)" in out
    assert "cannot be read: 1, a JSON array; write one record per line (line 3)" in out
    broken = tmp_path / "r.csv"
    broken.write_text("text,queue\na,b,c\nd,e\n")
    assert "cannot be read: 1, more cells than the first line has fields" in check(broken, code=1)
    latin = tmp_path / "latin.jsonl"
    latin.write_bytes(b'{"text": "\xe9"}\n{"text": "sound"}\n')
    assert "1, invalid UTF-8; save the file as UTF-8 (line 1)" in check(latin, code=1)


@pytest.mark.parametrize("name", ["tickets.csv", "tickets.csv.gz", "tickets.jsonl"])
def test_lines_in_another_encoding_are_named_and_the_others_are_read(check: Any, tmp_path: Path, name: str) -> None:
    is_table = ".csv" in name
    lines = [b"text,label"] if is_table else []
    for place in range(60):
        text = b"caf\xe9" if place in {30, 50} else b"row"
        lines.append(text + b",a" if is_table else b'{"text": "' + text + b'", "label": "a"}')
    content, path = b"\n".join(lines), tmp_path / name
    path.write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    said = check(path, "--label-key", "label", code=1)
    assert f"{name}: 58 records" in said
    assert f"2, invalid UTF-8; save the file as UTF-8 (line {'32, 52' if is_table else '31, 51'})" in said
    assert "text: text 58" in said
    assert "'a': 58" in said
    assert "Give --text-key" not in said


@pytest.mark.parametrize("rows", ["sound,a\n", ""])
def test_a_first_line_in_another_encoding_is_named(check: Any, tmp_path: Path, rows: str) -> None:
    (path := tmp_path / "tickets.csv").write_bytes(f"text,café\n{rows}".encode("latin-1"))
    said = check(path, code=1)
    assert "1, invalid UTF-8; save the file as UTF-8 (line 1)" in said
    assert ("--text-key" in said) == (not rows)


@pytest.mark.parametrize("rows", ['text;queue\n"a";"b"\n', 'text\tqueue\n"a"\t"b"\n', "text,text\na,b\n"])
def test_what_is_no_csv_says_what_csv_is(check: Any, tmp_path: Path, rows: str) -> None:
    (path := tmp_path / "r.csv").write_text(rows)
    assert "no CSV from here on: expected a first line of distinct names, and cells between commas" in check(
        path, code=1
    )
    with pytest.raises(ConfigurationError, match="found a broken line"):
        list(read_records(path))


def test_columns_without_a_name_at_the_end_of_a_table_are_no_fault(check: Any, tmp_path: Path) -> None:
    (path := tmp_path / "r.csv").write_text("text,queue,,\na,b,,\n")  # as spreadsheets write them
    check(path)
    (record,) = read_records(path)
    assert (record["text"], record["queue"]) == ("a", "b")


def test_fields_that_may_be_labels_or_persons_are_suggested(check: Any, tmp_path: Path) -> None:
    records = [{"text": f"text {n}", "spam": bool(n % 2), "user": n // 2, "id": n} for n in range(80)]
    out = check(written(tmp_path / "r.jsonl", records))
    assert "no --label-key; fields of few values: ['spam']" in out
    assert "fields whose values repeat: ['user']" in out


def test_persons_are_counted_with_what_becomes_of_their_records(check: Any, tmp_path: Path) -> None:
    records = [{"text": "a", "user": user, "queue": queue} for user, queue in ("Ax", "Ay", "ax", "bx")]
    out = check(written(tmp_path / "r.jsonl", records), "--unit-key", "user", "--label-key", "queue")
    assert "3 values of 'user', 1 of them on several records, at most 2" in out
    assert "names that differ from another in case or spaces alone: 1" in out
    assert "with several labels: 1, each keeps" in out
    assert "where several are as frequent, of the one declared first" in out


def test_a_person_counts_for_its_most_frequent_label_alone(check: Any, tmp_path: Path) -> None:
    queues = ["w"] * 2 + ["x"]
    records = [{"text": "a", "user": f"u{user}", "queue": queue} for user in range(40) for queue in queues]
    records += [{"text": "a", "user": f"v{user}", "queue": "x"} for user in range(10)]
    path = written(tmp_path / "r.jsonl", records)
    assert "public_size = {w = 40, x = 10}" in check(path, "--unit-key", "user", "--label-key", "queue")


def test_a_second_text_is_named_until_it_is_declared(check: Any, tmp_path: Path) -> None:
    records = [{"premise": f"it is {n}", "claim": f"is it {n}", "label": "a b", "place": "a town"} for n in range(9)]
    path = written(tmp_path / "r.jsonl", records)
    named = ("--text-key", "premise", "--label-key", "label")
    assert "further texts: ['claim']; dropped, unless declared: data.fields" in check(path, *named)
    assert "further texts" not in check(path, *named, "--set", 'data.fields=["claim"]')


def test_long_texts_are_named_and_other_fields_of_text_where_there_is_none(check: Any, tmp_path: Path) -> None:
    assert "longer than max_chars = 20,000: 1, cut there (line 1)" in check(
        written(tmp_path / "r.jsonl", [{"text": "x" * 20_001}])
    )
    out = check(written(tmp_path / "s.jsonl", [{"body": "x"}]), code=1)
    assert "none under 'text'; fields with text: ['body']. Give --text-key." in out


@pytest.mark.parametrize(
    ("line", "key", "missing"),
    [
        ('{"body": "x", "queue": "a"}', "queue", "a text under 'text'"),
        ('{"text": "x"}', "nope", "a label under 'nope'"),
        ('{"text": "x", "nope": null}', "nope", "a label under 'nope'"),
        ("{", "queue", "a text under 'text' or a label under 'queue'"),
    ],
)
def test_no_declaration_of_what_no_record_has_is_written(
    check: Any, tmp_path: Path, line: str, key: str, missing: str
) -> None:
    source, target = tmp_path / "r.jsonl", tmp_path / "task.toml"
    source.write_text(line + "\n")
    out = check(source, "--label-key", key, "--out", str(target), code=1)
    assert out.endswith(f"not written: {target}; no record has {missing}\n")
    assert not target.exists()


@pytest.mark.parametrize(
    ("count", "size"), [(1, 1), (7, 7), (14, 15), (95, 90), (96, 100), (1_725, 1_500), (1_760, 2_000), (64_300, 60_000)]
)
def test_the_size_is_rounded_so_that_it_is_not_warned_about(
    check: Any, tmp_path: Path, count: int, size: int, recwarn: pytest.WarningsRecorder
) -> None:
    out = check(written(tmp_path / "r.jsonl", [{"text": "a"}] * count), "--out", str(tmp_path / "task.toml"))
    assert f"public_size = {size}\n" in out
    assert private_examples(settings_of(read_toml(tmp_path / "task.toml"))).public_size == size
    assert not recwarn.list


def test_a_value_that_no_declaration_takes_is_a_finding_and_no_end_of_the_check(check: Any, tmp_path: Path) -> None:
    records = [{"text": "a", "label": label} for label in ("good", "x" * 300, "two\nlines")]
    out = check(written(tmp_path / "r.jsonl", records), "--label-key", "label", code=1)
    assert "'two\\nlines': 1 (no label: 1 to 200 printable characters are)" in out
    assert 'labels = ["good"]' in out
    assert "case and white space count. (line 2, 3)" in out


def test_labels_of_very_different_size_are_sized_one_by_one_and_integers_are_read_as_text(
    check: Any, tmp_path: Path
) -> None:
    records = [{"text": "a", "label": int(n < 10)} for n in range(100)]
    path, out = written(tmp_path / "r.jsonl", records), tmp_path / "task.toml"
    check(path, "--label-key", "label", "--out", str(out))
    private = private_examples(settings_of(read_toml(out)))
    assert private.labels == ("0", "1")
    assert private.public_size == {"0": 90, "1": 10}
    with pytest.raises(RecordError, match="labels_as_text=True"):
        private_examples(settings_of({**read_toml(out), "data": {**read_toml(out)["data"], "labels_as_text": False}}))


def test_what_it_writes_is_what_plan_reads(check: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    label = 'a "quoted" {label} é\\'
    path, out = written(tmp_path / "r.jsonl", [{"text": "a", "label": label}] * 400), tmp_path / "task.toml"
    check(path, "--label-key", "label", "--dataset-id", "tickets", "--out", str(out))
    assert read_toml(out)["data"]["labels"] == [label]
    assert main(["plan", "--config", str(out), "--max-tokens", "4"]) == 0
    assert "400 declared units" in capsys.readouterr().out
    assert main(["check", str(path), "--out", str(out)]) == 2
    assert "--out: expected a file that does not exist yet" in capsys.readouterr().err


def test_a_file_whose_name_no_settings_can_hold_leaves_no_settings(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, out = written(tmp_path / os.fsdecode(b"bad\xff.jsonl"), [{"text": "a"}] * 3), tmp_path / "task.toml"
    assert main(["check", str(path), "--out", str(out)]) == 2
    assert "--out: expected names in UTF-8, which a file of settings can hold" in capsys.readouterr().err
    assert not out.exists()


def test_a_name_that_no_prompt_can_show_is_named_where_it_is_declared(check: Any, tmp_path: Path) -> None:
    (tmp_path / "r.csv").write_text("text,queue ,1\na,card,x\nb,login,y\n")
    said = check(tmp_path / "r.csv", "--label-key", "queue ", code=1)
    assert "refused  all where a prompt shows them, for 'queue ': none can show a field of this name; rename it" in said
    assert "queue : text 2; no prompt can show 'queue ': rename the field" in said
    assert "show '1'" not in said


def test_labels_that_differ_in_case_or_spaces_alone_are_counted(check: Any, tmp_path: Path) -> None:
    records = [{"text": "a", "queue": label} for label in ("card", "Card", "card ", "login")]
    said = check(written(tmp_path / "r.jsonl", records), "--label-key", "queue")
    assert "labels that differ from another in case or spaces alone: 2; two spellings are two labels" in said
    assert "in case or spaces" not in check(written(tmp_path / "r.jsonl", records[2:]), "--label-key", "queue")


def test_an_empty_cell_names_no_person(check: Any, tmp_path: Path) -> None:
    (tmp_path / "r.csv").write_text("text,user\na,ann\nb,\nc,ann\n")
    said = check(tmp_path / "r.csv", "--unit-key", "user", code=1)
    assert "1 values of 'user', 1 of them on several records" in said
    assert "with several labels" not in check(
        written(tmp_path / "r.jsonl", [{"text": "a", "user": {}, "label": label} for label in "xyxy"]),
        *("--unit-key", "user", "--label-key", "label"),
        code=1,
    )
    assert "1: expected text or an integer under 'user'; a record has none. Leave out records without" in said
    assert "one unit. (line 3)" in said

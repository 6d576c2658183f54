"""What every released value must do, whatever made it."""

from __future__ import annotations

import copy
import pickle
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat

from langchain_dpicl import (
    LabelledPool,
    ReleasedCounts,
    ReleasedDemonstrations,
    SoftPrompt,
    SyntheticDocuments,
    verify_report,
)
from langchain_dpicl.cli.main import main
from langchain_dpicl.released import ReleasedWords
from langchain_dpicl.released.base import Released
from tests.unit_tests import test_fuzzed_files as made

KINDS: tuple[type[Released], ...] = (
    ReleasedDemonstrations,
    LabelledPool,
    SyntheticDocuments,
    ReleasedCounts,
    ReleasedWords,
    SoftPrompt,
)
TERMS = [
    "format",
    "private",
    "method",
    "component",
    "ledger_id",
    "dataset_id",
    "unit",
    "adjacency",
    "epsilon",
    "delta",
    "plan",
    "budget",
]


def a_second_file_of_weights(folder: Path) -> None:
    (folder / "adapter_model.bin").write_bytes(b"x")


def a_folder_inside(folder: Path) -> None:
    (folder / "inside").mkdir()


def a_changed_header_of_the_weights(folder: Path) -> None:
    path = folder / "adapter_model.safetensors"
    whole = path.read_bytes()
    path.write_bytes(whole.replace(b'"format":"pt"', b'"format":"tf"'))
    assert path.read_bytes() != whole


def a_key_twice_in_the_configuration(folder: Path) -> None:
    path = folder / "adapter_config.json"
    path.write_text('{"peft_type": "LORA",' + path.read_text().removeprefix("{"))


def weights_that_are_missing(folder: Path) -> None:
    (folder / "adapter_model.safetensors").unlink()


FOLDER_HARMS = (
    a_second_file_of_weights,
    a_folder_inside,
    a_changed_header_of_the_weights,
    a_key_twice_in_the_configuration,
    weights_that_are_missing,
)


@pytest.fixture(scope="module")
def values(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Any]:
    folder = tmp_path_factory.mktemp("released")
    targets = {**made.released(), **made.trained(folder)}
    return {
        kind.__name__: targets[kind.__name__].read(made.written(folder / kind.__name__, targets[kind.__name__].files))
        for kind in KINDS
    }


def test_no_released_value_is_left_out() -> None:
    assert set(Released.__subclasses__()) == set(KINDS)


@pytest.mark.parametrize("name", [kind.__name__ for kind in KINDS])
class TestEveryReleasedValue:
    def test_has_the_one_report(self, values: Mapping[str, Any], name: str) -> None:
        report = values[name].report
        assert set(TERMS) <= set(report)
        assert report["format"] == 2
        assert report["private"] is True
        assert values[name].epsilon == report["epsilon"] > 0
        assert values[name].delta == report["delta"] >= 0

    def test_shows_its_plan(self, values: Mapping[str, Any], name: str) -> None:
        assert values[name].plan["method"] == values[name].report["method"]

    def test_is_verified(self, values: Mapping[str, Any], name: str) -> None:
        assert values[name].verify().ok
        assert 0 < verify_report(values[name]).epsilon <= values[name].epsilon

    def test_is_the_same_after_a_file_a_copy_and_a_pickle(
        self, values: Mapping[str, Any], name: str, tmp_path: Path
    ) -> None:
        value = values[name]
        value.save(tmp_path / "file")
        for again in (
            type(value).load(tmp_path / "file"),
            copy.deepcopy(value),
            pickle.loads(pickle.dumps(value)),  # noqa: S301
        ):
            assert again.report == value.report
            assert made.shown(again) == made.shown(value)

    def test_is_signed_and_a_change_is_found(
        self, values: Mapping[str, Any], name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        place = tmp_path / "file"
        values[name].save(place)
        key = Ed25519PrivateKey.generate()
        (tmp_path / "key").write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
        shown = key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
        (tmp_path / "key.pub").write_bytes(shown)
        verify = ["report", "verify", str(place), "--key", str(tmp_path / "key.pub")]
        assert main(["report", "sign", str(place), "--key", str(tmp_path / "key")]) == 0
        assert main(verify) == 0
        assert "that of the given key" in capsys.readouterr().out
        for file in [place] if place.is_file() else sorted(set(place.iterdir()) - set(place.glob("*.signature.json"))):
            kept = file.read_bytes()
            file.write_bytes(kept[:-1] + bytes([kept[-1] ^ 1]))
            assert main(verify) != 0, file.name
            file.write_bytes(kept)
        assert main(verify) == 0

        if place.is_dir():
            for harm in FOLDER_HARMS:
                harmed = tmp_path / harm.__name__
                shutil.copytree(place, harmed)
                harm(harmed)
                assert main([*verify[:2], str(harmed), *verify[3:]]) == 1, harm.__name__
                (harmed / "soft_prompt.json.signature.json").unlink()
                assert main(["report", "sign", str(harmed), "--key", str(tmp_path / "key")]) == 2, harm.__name__

    def test_shows_its_report_as_a_table(self, values: Mapping[str, Any], name: str) -> None:
        assert str(values[name].report["component"]) in values[name]._repr_html_()

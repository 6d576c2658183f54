"""What `make house` counts, on packages written for it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.check_house import Figure, circles, graph_of, lines_by_kind, modules_of, reached, single_importers, upward

FILES = {
    "__init__.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from house.door import Door\n    from house.hall import Hall",
    "door.py": "from house.room import table",
    "hall.py": "def walk():\n    from house.door import Door",
    "room/__init__.py": "",
    "room/table.py": "from importlib import import_module\ndef legs():\n    return import_module('house.room.leg')",
    "room/leg.py": "",
    "alone.py": "",
}


@pytest.fixture
def package(tmp_path: Path) -> Path:
    for name, text in FILES.items():
        (tmp_path / "house" / name).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / "house" / name).write_text(text)
    return tmp_path / "house"


def test_imports_count_wherever_they_stand(package: Path) -> None:
    graph = graph_of(modules_of(package))
    assert graph["house"] == {"house.door", "house.hall"}
    assert graph["house.hall"] == {"house.door"}
    assert graph["house.room.table"] == {"house.room.leg"}
    assert reached(graph, ["house.door"]) == {"house.door", "house.room.table", "house.room.leg"}


def test_a_circle_is_found_and_named_once(package: Path) -> None:
    assert circles(graph_of(modules_of(package))) == []
    (package / "room" / "leg.py").write_text("def up():\n    from house.door import Door")
    assert circles(graph_of(modules_of(package))) == [["house.door", "house.room.leg", "house.room.table"]]


def test_an_import_of_a_higher_layer_goes_up(package: Path) -> None:
    layers = ["house.door : house.hall", "house.room | house.alone"]
    contract = {"type": "layers", "layers": layers}
    inside = {"type": "layers", "containers": ["house.room"], "layers": ["leg", "table"]}
    assert upward(graph_of(modules_of(package)), [contract]) == []
    assert upward(graph_of(modules_of(package)), [contract, inside]) == [("house.room.table", "house.room.leg")]
    assert upward(graph_of(modules_of(package)), [contract | {"layers": layers[::-1]}]) == [
        ("house.door", "house.room.table")
    ]


def test_an_export_is_an_importer_only_where_there_is_no_other(package: Path) -> None:
    modules = modules_of(package)
    assert single_importers(graph_of(modules), modules) == {
        "house.door": "house.hall",
        "house.hall": "house",
        "house.room.leg": "house.room.table",
        "house.room.table": "house.door",
    }


def test_each_line_is_of_one_kind() -> None:
    text = 'import math\n\n\ndef area(\n    r: float,\n) -> float:\n    """Returns it."""\n    # exact\n    return math.pi * r\n'
    assert lines_by_kind(text) == {"import": 1, "blank": 2, "signature": 3, "docstring": 1, "comment": 1, "code": 1}


def test_what_cannot_be_measured_misses_its_goal() -> None:
    assert Figure("files", None, 200).is_missed
    assert Figure("files", 201, 200).is_missed
    assert not Figure("files", 200, 200).is_missed
    assert not Figure("comments", 5.0).is_missed

"""Workers of a real Ray cluster with real models: Hugging Face in each worker, and clients of a llama.cpp server."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest

from langchain_dpicl import Decoding, Rows
from langchain_dpicl.budget.handler import PrivacyBudgetCallbackHandler
from langchain_dpicl.distributed import RayExecutor
from langchain_dpicl.generation.synthesizer import DemonstrationSynthesizer
from langchain_dpicl.reports.report import verify_report
from langchain_dpicl.stores import SQLiteMemo
from tests import ray_places, tiny_hf
from tests.llama_server import running_server

pytest.importorskip("xllamacpp")
pytest.importorskip("gguf")
pytest.importorskip("langchain_openai")
pytestmark = [
    pytest.mark.timeout(1800),  # a cluster starts some ten processes, each of which imports all
    pytest.mark.loopback,
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed (extra `ray`)"),
]


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    """Keeps the cluster of the first executor: starting one takes as long as all else."""
    with RayExecutor("tests.ray_places:place", num_workers=1) as kept:
        kept._connect()
        yield


@pytest.fixture(params=["folder", "url"])
def where(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[dict[str, str]]:
    """Where a model is: a folder that each worker loads, or a server that each worker asks."""
    if request.param == "folder":
        tiny_hf.llama().save_pretrained(tmp_path)
        tiny_hf.byte_tokenizer().save_pretrained(tmp_path)
        yield {"folder": str(tmp_path)}
        return
    with running_server() as server:
        yield {"url": server.url}


def test_a_worker_makes_its_own_model_and_writes_with_it(where: dict[str, str], tmp_path: Path) -> None:
    ledger, memo = tmp_path / "budget.db", tmp_path / "released.db"
    budget = PrivacyBudgetCallbackHandler.create(ledger, epsilon=20.0, delta=1e-5).budget
    SQLiteMemo(memo)
    options = {"ledger": str(ledger), "memo": str(memo), **where}
    with RayExecutor("tests.ray_places:hosted", options=options, num_workers=1) as workers:
        made = DemonstrationSynthesizer.from_private_examples(
            ray_places.records(str(ledger)),
            llm=ray_places.hosted_model(**where),
            budget=budget,
            epsilon=10.0,
            component="texts",
            shots_per_label=2,
            max_tokens=3,
            rows=Rows(units=2, redraw_every="run"),
            decoding=Decoding(candidates=5),
            executor=workers,
        )
        released = made.run(progress=False)
    assert [one["queue"] for one in released.examples] == ["card", "cash"] * 2
    assert any(one["text"] for one in released.examples)
    assert verify_report(released).ok
    found = budget._store.records(0)
    counts = [sum(one.body["count"] for one in found if one.kind == kind) for kind in ("reserve", "commit")]
    assert counts == [4, 4]

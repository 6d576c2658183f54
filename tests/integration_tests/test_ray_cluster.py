"""A real Ray cluster on this machine, worker processes with places of their own, and a ledger in PostgreSQL."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import math
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from langchain_dpicl.callbacks import PrivacyBudgetCallbackHandler
from langchain_dpicl.evolution import PrivateEvolution
from langchain_dpicl.exceptions import LedgerError, PrivacyBudgetExceededError
from langchain_dpicl.labelling import PromptPATELabeler
from langchain_dpicl.privacy.ledger import Budget
from langchain_dpicl.privacy.ledger_state import COMMIT, RESERVE
from langchain_dpicl.ray_executor import RayExecutor
from langchain_dpicl.stores.postgres_memo import PostgresMemo
from langchain_dpicl.synthesis import DemonstrationSynthesizer
from tests.canary import RECORD
from tests.postgres import PostgresServer
from tests.ray_driver import OPTIONS, SHOTS
from tests.ray_places import PUBLIC_SIZE, engine, records

pytestmark = [
    pytest.mark.loopback,
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed (extra `ray`)"),
]
ROOT = Path(__file__).resolve().parents[2]
WORKERS = 2


class Cluster:
    """Workers, and the ledger and memo that they share."""

    def __init__(self, where: str, folder: Path) -> None:
        self.where = where
        self.kill_file = folder / "kill"
        self.fail_file = folder / "fail"
        files = {"kill_file": str(self.kill_file), "fail_file": str(self.fail_file)}
        self.workers = RayExecutor(
            "tests.ray_places:place", options={"ledger": where, "memo": where, **files}, num_workers=WORKERS
        )
        self.budget: Budget = PrivacyBudgetCallbackHandler.create(where, epsilon=1e3, delta=1e-3).budget
        PostgresMemo.new(where).close()

    def synthesizer(self, component: str, **options: Any) -> DemonstrationSynthesizer:
        given = {"llm": engine(), "budget": self.budget, "executor": self.workers, **OPTIONS, **options}
        private = records(self.where, PUBLIC_SIZE)
        return DemonstrationSynthesizer.from_private_examples(private, component=component, **given)

    def lines(self, kind: str, component: str) -> int:
        """Counts tickets by the ledger's lines of one kind."""
        found = self.budget._store.records(0)
        mine = {one.seq for one in found if one.kind == RESERVE and one.body["component"] == component}
        if kind == RESERVE:
            return sum(one.body["count"] for one in found if one.seq in mine)
        return sum(one.body["count"] for one in found if one.kind == kind and one.body["reservation"] in mine)


@pytest.fixture(scope="module")
def cluster(postgres: PostgresServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    where = f"postgresql://owner@/{postgres.new_database()}?host={postgres.folder}&port=5432"
    made = Cluster(where, tmp_path_factory.mktemp("cluster"))
    try:
        yield made
    finally:
        made.workers.close()


NOISE: dict[str, Any] = {"noise_multiplier": 2.0, "redraw_every": 3}


def first_words(texts: Iterable[dict[str, str]]) -> dict[str, float]:
    """Returns the share of each first word."""
    words = [one["text"].split()[0] for one in texts]
    return {word: words.count(word) / len(words) for word in ("paid", "late", "twice")}


def by_one_process(count: int) -> dict[str, float]:
    """Returns the shares in so many texts for each label, written here on a ledger in memory."""
    budget = Budget(epsilon=1e6, delta=1e-3)
    given: dict[str, Any] = {**OPTIONS, **NOISE, "epsilon": 1e5, "shots_per_label": count, "llm": engine()}
    private = records(f"in memory, of {count}", PUBLIC_SIZE)
    made = DemonstrationSynthesizer.from_private_examples(private, budget=budget, **given)
    return first_words(made.run(progress=False).examples)


def furthest(count: int, total: int) -> float:
    """How far shares of `count` and of `total` texts may be apart, with a false alarm below 1e-6 (Hoeffding, 3 words)."""
    return sum(math.sqrt(math.log(2 * 3 * 2 / 1e-6) / (2 * number)) for number in (count, total))


def test_workers_release_what_one_process_does_at_the_same_price(cluster: Cluster) -> None:
    """False alarm below 1e-6: 32 texts of workers against 800 of one process; `make audit` takes more."""
    made = cluster.synthesizer("there", shots_per_label=16, epsilon=20.0, **NOISE)
    there = made.run(progress=False)
    assert (
        there.epsilon
        == cluster.synthesizer("here", executor=None, shots_per_label=16, epsilon=20.0, **NOISE).released().epsilon
    )
    assert Counter(one["queue"] for one in there.examples) == {"card": 16, "cash": 16}
    assert cluster.lines(RESERVE, "there") == cluster.lines(COMMIT, "there") == 32
    here, found = by_one_process(400), first_words(there.examples)
    assert max(abs(here[word] - found[word]) for word in here) < furthest(32, 800)


@pytest.mark.audited
def test_many_texts_of_workers_have_the_law_of_one_process(cluster: Cluster) -> None:
    """False alarm below 1e-6: 800 texts of workers, with one of them killed at times, against 1600 of one process."""
    made = cluster.synthesizer("law", shots_per_label=400, epsilon=90.0, **NOISE)
    with contextlib.suppress(PrivacyBudgetExceededError):
        for number, _ in enumerate(made.stream(progress=False)):
            if number % 200 == 100:
                cluster.kill_file.touch()
    killed = 800 - len(made.demonstrations)
    assert 1 <= killed <= 4
    assert cluster.lines(RESERVE, "law") == 800
    assert cluster.lines(COMMIT, "law") == 800 - killed
    here, found = by_one_process(800), first_words(made.demonstrations)
    assert max(abs(here[word] - found[word]) for word in here) < furthest(800 - killed, 1600)


def test_a_killed_worker_loses_its_burnt_ticket_and_nothing_else(cluster: Cluster) -> None:
    made = cluster.synthesizer("killed", shots_per_label=3, redraw_every=3)
    cluster.kill_file.touch()
    with pytest.raises(PrivacyBudgetExceededError, match="requested 1 more, remaining 0") as refusal:
        made.run(progress=False)
    assert not cluster.kill_file.exists()
    assert refusal.value.synthesizer is made
    assert len(made.demonstrations) == 5
    assert (cluster.lines(RESERVE, "killed"), cluster.lines(COMMIT, "killed")) == (6, 5)
    assert [one.count for one in cluster.budget.dangling() if one.component == "killed"] == [1]
    cluster.budget.verify()


def test_a_killed_driver_loses_nothing_that_was_released(cluster: Cluster, tmp_path: Path) -> None:
    env = {**os.environ, "RAY_ADDRESS": cluster.workers._ray.get_runtime_context().gcs_address}
    command = [sys.executable, "-m", "tests.ray_driver", cluster.where, cluster.where, "driven", "1", "0.1"]
    errors = tmp_path / "errors"
    with (
        errors.open("wb") as said,
        subprocess.Popen(command, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=said) as child,
    ):
        assert child.stdout is not None
        lines = [child.stdout.readline() for _ in range(3)]
        assert all(lines), errors.read_text()
        told = [json.loads(line) for line in lines]
        child.send_signal(signal.SIGKILL)
        told += map(json.loads, child.stdout.read().splitlines())
    again = cluster.synthesizer("driven", shots_per_label=SHOTS, redraw_every=3)
    try:
        found = again.run(progress=False).examples
    except PrivacyBudgetExceededError:  # it was killed between burning and keeping
        found = tuple(again.demonstrations)
        assert len(found) == 2 * SHOTS - 1
    assert not Counter(map(str, told)) - Counter(map(str, found))
    reserved, committed = cluster.lines(RESERVE, "driven"), cluster.lines(COMMIT, "driven")
    assert reserved == 2 * SHOTS
    assert committed in {reserved, reserved - 1}


def test_labels_and_candidates_come_from_workers_too(cluster: Cluster) -> None:
    private = records(cluster.where, PUBLIC_SIZE)
    given: dict[str, Any] = {"llm": engine(), "budget": cluster.budget, "executor": cluster.workers}
    labels = PromptPATELabeler.from_private_examples(
        private, public_inputs=["a", "b", "c"], num_slots=4, rows="units", epsilon=2.0, component="labels", **given
    )
    assert {one.status for one in labels.run(progress=False).entries} <= {"labelled", "rejected"}
    assert cluster.lines(RESERVE, "labels") == cluster.lines(COMMIT, "labels") == 3
    evolution = PrivateEvolution.from_private_examples(
        private,
        hints=["Be brief.", "Be kind."],
        shots_per_label=1,
        rounds=1,
        num_candidates=20,
        num_variations=0,
        generation_prompt="{queue}: {text}",
        epsilon=2.0,
        component="evolution",
        **given,
    )
    with pytest.raises(Exception, match="distinct public texts"):  # the engine always writes the same
        evolution.run(progress=False)
    assert evolution._writer.model._executor is cluster.workers


def test_a_ledger_in_a_file_is_refused_beside_a_cluster_of_others(cluster: Cluster, tmp_path: Path) -> None:
    path = tmp_path / "ledger.db"
    budget = PrivacyBudgetCallbackHandler.create(path, epsilon=4.0, delta=1e-3)
    beside = RayExecutor("tests.ray_places:place", options={"ledger": str(path), "memo": str(path)})
    with pytest.raises(LedgerError, match="in PostgreSQL, found SQLiteStore"):
        DemonstrationSynthesizer.from_private_examples(
            records(str(path), PUBLIC_SIZE), llm=engine(), budget=budget, executor=beside, **OPTIONS
        )


def test_ray_holds_no_record_and_tells_nobody_of_us(cluster: Cluster) -> None:
    """Last: over all logs, spilt objects and events of the runs above, one with an engine that raises its prompt."""
    cluster.fail_file.touch()
    cluster.synthesizer("failing", shots_per_label=1, redraw_every=3).run(progress=False)
    cluster.fail_file.unlink()
    ray = cluster.workers._ray
    session = Path(ray._private.worker.global_worker.node.get_session_dir_path())
    time.sleep(0.5)  # logs are written behind our back
    files = [path for path in session.rglob("*") if path.is_file()]
    assert len(files) > 10
    leaks = [path.name for path in files if RECORD.encode() in path.read_bytes()]
    assert leaks == []
    shm = [path for path in Path("/dev/shm").glob("*plasma*") if RECORD.encode() in path.read_bytes()]  # noqa: S108  Ray's
    assert shm == []
    assert os.environ["RAY_USAGE_STATS_ENABLED"] == "0"
    assert not list(session.rglob("usage_stats.json"))

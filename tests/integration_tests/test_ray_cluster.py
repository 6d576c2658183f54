"""A real Ray cluster on this machine, worker processes with places of their own, and a ledger in PostgreSQL."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import math
import os
import pickle
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from scipy.stats import binom

from langchain_dpicl import Decoding, Noise, Rows, distributed
from langchain_dpicl.budget.budget import Budget
from langchain_dpicl.budget.handler import PrivacyBudgetCallbackHandler
from langchain_dpicl.distributed import RayExecutor
from langchain_dpicl.evolution import PrivateEvolution, PublicTextJob
from langchain_dpicl.exceptions import ConfigurationError, LedgerError, PrivacyBudgetExceededError
from langchain_dpicl.generation.synthesizer import DemonstrationSynthesizer
from langchain_dpicl.options import Evolution, GenerationTask
from langchain_dpicl.pate.labeler import PromptPATELabeler
from langchain_dpicl.privacy.ledger.state import COMMIT, RESERVE
from langchain_dpicl.privacy.private_examples import PrivateExamples
from langchain_dpicl.stores.postgres import PostgresMemo
from tests.canary import RECORD
from tests.postgres import PostgresServer
from tests.ray_driver import OPTIONS, SHOTS
from tests.ray_places import LABELS, LAW, OTHERS, PUBLIC_SIZE, TOP, engine, records

pytestmark = [
    pytest.mark.timeout(1800),  # a cluster starts some ten processes, each of which imports all
    pytest.mark.loopback,
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed (extra `ray`)"),
]
ROOT = Path(__file__).resolve().parents[2]
WORKERS = 2


class Watched(RayExecutor):
    """Keeps what it gives to Ray and gets from it, as it is pickled: small values are in no file of Ray's."""

    crossed: list[bytes]

    def _begin(self, handle: Any, work: Any) -> Any:
        return super()._begin(handle, self._seen(work))

    def _do(self, handle: Any, key: str, job: Any) -> Any:
        return super()._do(handle, *self._seen((key, job)))

    def _answer(self, awaited: Any) -> Any:
        return self._seen(super()._answer(awaited))

    def _seen(self, value: Any) -> Any:
        self.crossed.append(pickle.dumps(value))
        return value


class Cluster:
    """Workers, and the ledger and memo that they share."""

    def __init__(self, where: str, folder: Path) -> None:
        self.where = where
        self.kill_file = folder / "kill"
        self.fail_file = folder / "fail"
        files = {"kill_file": str(self.kill_file), "fail_file": str(self.fail_file)}
        self.workers = Watched(
            "tests.ray_places:place", options={"ledger": where, "memo": where, **files}, num_workers=WORKERS
        )
        self.workers.crossed = [pickle.dumps(self.workers._setup)]
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
        made.workers._connect()  # whichever test is first: some ask about a cluster and start none
        yield made
    finally:
        made.workers.close()


NOISE: dict[str, Any] = {
    "noise": Noise(multiplier=1.0),
    "rows": Rows(units=4, redraw_every=3),
    "instruction": LAW,
    "decoding": Decoding(candidates=OTHERS + 1),
}
ROWS = 4
FALSE_ALARM = 1e-6


def chance_of_top(noise: float) -> float:
    """Returns the chance of the records' word: Gumbel noise on sums chooses by a softmax of them, in its own scale."""
    return 1.0 / (1.0 + OTHERS * math.exp(-ROWS * (TOP - (1.0 - TOP) / OTHERS) / noise))


def has_the_law(texts: Sequence[dict[str, str]], noise: float = 1.0) -> bool:
    """Whether so many texts have the records' word (exact binomial, two sides); a false alarm in 1e6."""
    found, law = sum(one["text"] == "top" for one in texts), (len(texts), chance_of_top(noise))
    return bool(min(binom.cdf(found, *law), binom.sf(found - 1, *law)) > FALSE_ALARM / 2)


def by_one_process(count: int, private: PrivateExamples | None = None, **options: Any) -> Sequence[dict[str, str]]:
    """Returns so many texts for each label, written here on a ledger in memory."""
    budget = Budget(epsilon=1e6, delta=1e-3)
    given: dict[str, Any] = {**OPTIONS, **NOISE, "epsilon": 1e5, "shots_per_label": count, "llm": engine(), **options}
    private = records(f"in memory, {count}, {options}", PUBLIC_SIZE) if private is None else private
    return DemonstrationSynthesizer.from_private_examples(private, budget=budget, **given).run(progress=False).examples


def test_one_process_has_the_law_and_64_texts_a_label_tell_wrong_noise_and_missing_records() -> None:
    """False alarm below 1e-6; double noise passes with a chance of 1e-8, the others below 1e-20 (exact binomials)."""
    assert has_the_law(by_one_process(200))
    for noise in (0.5, 2.0):
        assert not has_the_law(by_one_process(64, noise=Noise(multiplier=noise)))
    others = [{"text": f"somebody {place}", "queue": LABELS[place % 2]} for place in range(8)]
    without = PrivateExamples(others, label_key="queue", labels=LABELS, public_size=PUBLIC_SIZE, dataset_id="others")
    assert not has_the_law(by_one_process(64, without))


def test_workers_release_by_the_law_of_one_process_at_the_same_price(cluster: Cluster) -> None:
    """False alarm below 1e-6: 64 texts of workers, which double noise passes in one run of 80; `make audit` takes more."""
    given: dict[str, Any] = {"shots_per_label": 32, "epsilon": 150.0, **NOISE}
    there = cluster.synthesizer("there", **given).run(progress=False)
    assert there.epsilon == cluster.synthesizer("here", executor=None, **given).result.epsilon
    assert Counter(one["queue"] for one in there.examples) == {"card": 32, "cash": 32}
    assert cluster.lines(RESERVE, "there") == cluster.lines(COMMIT, "there") == 64
    assert has_the_law(there.examples)


@pytest.mark.audited
def test_many_texts_of_workers_have_the_law_of_one_process(cluster: Cluster) -> None:
    """False alarm below 1e-6: 800 texts of workers, with one of them killed at times."""
    made = cluster.synthesizer("law", shots_per_label=400, epsilon=400.0, **NOISE)
    with contextlib.suppress(PrivacyBudgetExceededError):
        for number, _ in enumerate(made.stream(progress=False)):
            if number % 200 == 100:
                cluster.kill_file.touch()
    killed = 800 - len(made.demonstrations)
    assert 1 <= killed <= 4
    assert cluster.lines(RESERVE, "law") == 800
    assert cluster.lines(COMMIT, "law") == 800 - killed
    assert has_the_law(made.demonstrations)


def test_a_killed_worker_loses_its_burnt_ticket_and_nothing_else(cluster: Cluster) -> None:
    made = cluster.synthesizer("killed", shots_per_label=3, rows=Rows(units=4, redraw_every=3))
    cluster.kill_file.touch()
    with pytest.raises(PrivacyBudgetExceededError, match="requested 1 more, remaining 0") as refusal:
        made.run(progress=False)
    assert not cluster.kill_file.exists()
    assert refusal.value.run is made
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
    again = cluster.synthesizer("driven", shots_per_label=SHOTS, rows=Rows(units=4, redraw_every=3))
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
        private, public_inputs=["a", "b", "c"], rows=Rows(units=4), epsilon=2.0, component="labels", **given
    )
    assert {one.status for one in labels.run(progress=False).entries} <= {"labelled", "rejected"}
    assert cluster.lines(RESERVE, "labels") == cluster.lines(COMMIT, "labels") == 3
    evolution = PrivateEvolution.from_private_examples(
        private,
        task=GenerationTask(record_prompt="{queue}: {text}", hints=("Be brief.", "Be kind.")),
        shots_per_label=1,
        evolution=Evolution(rounds=1, num_candidates=20, num_variations=0),
        epsilon=2.0,
        component="evolution",
        **given,
    )
    with pytest.raises(Exception, match="distinct public texts"):  # the engine always writes the same
        evolution.run(progress=False)
    assert evolution._writer.model._executor is cluster.workers


def test_a_ledger_in_a_file_is_refused_beside_a_cluster_of_others(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(distributed, "_STARTED", {})  # somebody else's from now on
    path = tmp_path / "ledger.db"
    budget = PrivacyBudgetCallbackHandler.create(path, epsilon=4.0, delta=1e-3)
    beside = RayExecutor("tests.ray_places:place", options={"ledger": str(path), "memo": str(path)})
    with pytest.raises(LedgerError, match="in PostgreSQL, found SQLiteStore"):
        DemonstrationSynthesizer.from_private_examples(
            records(str(path), PUBLIC_SIZE), llm=engine(), budget=budget, executor=beside, **OPTIONS
        )


def test_ray_holds_no_record_and_tells_nobody_of_us(cluster: Cluster) -> None:
    """Last: over all that crossed, and all logs, spilt objects and events of the runs above, with an engine that raises."""
    cluster.fail_file.touch()
    cluster.synthesizer("failing", shots_per_label=1, rows=Rows(units=4, redraw_every=3)).run(progress=False)
    cluster.fail_file.unlink()
    ray = cluster.workers._ray
    session = Path(ray._private.worker.global_worker.node.get_session_dir_path())
    time.sleep(0.5)  # logs are written behind our back
    files = [path for path in session.rglob("*") if path.is_file()]
    assert len(files) > 10
    crossed = cluster.workers.crossed
    assert [one for one in crossed if RECORD.encode() in one] == []
    with pytest.raises(ConfigurationError, match="planted"):  # what would be seen: of an order, and of an answer
        list(cluster.workers.spread(PublicTextJob("planted", 3, ()), [(0, ("planted too",))]))
    assert sum(b"planted" in one for one in crossed) >= 2
    leaks = [path.name for path in files if RECORD.encode() in path.read_bytes()]
    assert leaks == []
    shm = [path for path in Path("/dev/shm").glob("*plasma*") if RECORD.encode() in path.read_bytes()]  # noqa: S108  Ray's
    assert shm == []
    assert os.environ["RAY_USAGE_STATS_ENABLED"] == "0"
    assert not list(session.rglob("usage_stats.json"))

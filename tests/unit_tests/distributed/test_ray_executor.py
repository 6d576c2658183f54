"""What an executor on Ray gets, is refused and found by, without any cluster."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from langchain_dpicl import distributed
from langchain_dpicl.distributed import WORKERS, WORKPLACE, JobResult, RayExecutor, WorkerFactory, as_executor
from langchain_dpicl.exceptions import ConfigurationError, ModelCallError

WORD = "hunter-two"


class FakeRay(SimpleNamespace):
    """As much of Ray as an executor asks for; remembers what it was given."""

    def __init__(self) -> None:
        super().__init__(
            told=[], up=False, node=0, gpus=0.0, ended=[], exceptions=SimpleNamespace(RayError=ConnectionError)
        )
        mode = int(os.environ.get("RAY_AUTH_MODE") == "token")  # read once, as Ray does
        self.__file__ = "/nowhere/ray/__init__.py"
        self._raylet = SimpleNamespace(
            get_authentication_mode=lambda: mode, AuthenticationMode=SimpleNamespace(TOKEN=1)
        )

    def cluster_resources(self) -> dict[str, float]:
        return {**self.room, "GPU": self.gpus}

    def is_initialized(self) -> bool:
        return self.up

    def init(self, **how: Any) -> None:
        self.told.append(("init", how))
        self.up = True
        self.node += 1
        self.room = {"CPU": how.get("num_cpus", 1), **how.get("resources", {})}

    def get_runtime_context(self) -> SimpleNamespace:
        return SimpleNamespace(get_node_id=lambda: f"node {self.node}", get_job_id=lambda: "01000000")

    def shutdown(self) -> None:
        self.told.append(("shutdown", {}))
        self.up = False

    def kill(self, handle: Any, *, no_restart: bool) -> None:
        assert handle is None or handle.node == self.node, "handles are not valid across sessions"
        self.told.append(("kill", {"handle": handle, "no_restart": no_restart}))

    def wait(self, awaited: Any, **_: Any) -> Any:
        return [one for one in awaited if one in self.ended], awaited

    def remote(self, kind: type[Any]) -> Any:
        def options(**how: Any) -> Any:
            self.told.append(("options", how))
            return SimpleNamespace(remote=start)

        def start(*given: Any, **named: Any) -> SimpleNamespace:
            self.told.append((kind.__name__, (*given, named)))
            return SimpleNamespace(node=self.node, begin=SimpleNamespace(remote=lambda _: object()))

        return SimpleNamespace(options=options)

    def get(self, awaited: Any) -> Any:
        if isinstance(awaited, Exception):
            raise awaited
        return awaited


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> FakeRay:
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    made = FakeRay()
    monkeypatch.setitem(sys.modules, "ray", made)
    monkeypatch.setattr(distributed, "_STARTED", {})
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.delenv("RAY_USAGE_STATS_ENABLED", raising=False)
    return made


class TestAClusterOfItsOwn:
    WORK: Any = SimpleNamespace(key="order")

    def test_is_quiet_and_as_large_as_its_workers(self, ray: FakeRay) -> None:
        ray.gpus = 2.0
        with RayExecutor("app:place", num_workers=3, num_cpus=0.4, num_gpus=1, resources={"tpu": 1, "x": 0.5}) as made:
            assert made.is_one_host
            made._hire()
        (_, started), *_ = ray.told
        assert (started["address"], started["include_dashboard"], started["log_to_driver"]) == ("local", False, False)
        assert (started["num_cpus"], started["resources"]) == (2, {"tpu": 3, "x": 2})  # Ray takes whole numbers
        assert "num_gpus" not in started  # what Ray finds, no more
        assert os.environ["RAY_USAGE_STATS_ENABLED"] == "0"
        assert ray.told[-1][0] == "shutdown"

    def test_is_refused_where_others_could_use_it_whatever_is_set_later(
        self, ray: FakeRay, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.delenv("RAY_AUTH_MODE")
        opened = FakeRay()
        monkeypatch.setitem(sys.modules, "ray", opened)
        beside = RayExecutor("app:place", address="head:6379")
        monkeypatch.setenv("RAY_AUTH_MODE", "token")
        with pytest.raises(ConfigurationError, match="before the process starts"):
            RayExecutor("app:place")
        beside._address = None
        with pytest.raises(ConfigurationError, match="before the process starts"):
            beside._hire()
        assert opened.told == []
        opened.up = True
        RayExecutor("app:place")  # somebody's connection

    @pytest.mark.parametrize("how", ["given", "environment"])
    def test_is_what_local_means(self, ray: FakeRay, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
        if how == "environment":
            monkeypatch.setenv("RAY_ADDRESS", "local")
        made = RayExecutor("app:place", address="local" if how == "given" else None)
        assert made.is_one_host
        made._hire()
        assert made.is_one_host
        made.close()
        assert ray.told[-1][0] == "shutdown"

    def test_serves_all_executors_of_the_process_and_ends_with_the_last(self, ray: FakeRay) -> None:
        first, second = RayExecutor("app:place"), RayExecutor("app:place")
        first._hire()
        assert second.is_one_host
        second._hire()
        assert [name for name, _ in ray.told] == ["init", "options", "Worker", "options", "Worker"]
        assert ray.told[-1][1][-1] == {"is_one_host": True}
        first.close()
        assert ray.up
        second.close()
        assert not ray.up

    def test_is_on_this_host_also_while_another_thread_starts_it(self, ray: FakeRay) -> None:
        first, second, init, told = RayExecutor("app:place"), RayExecutor("app:place"), ray.init, list[bool]()
        asking = threading.Thread(target=lambda: told.append(second.is_one_host))

        def slow(**how: Any) -> None:
            init(**how)  # Ray is connected before it returns
            asking.start()
            asking.join(0.2)

        ray.init = slow
        first._hire()
        asking.join()
        assert told == [True]

    @pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
    def test_is_not_waited_for_by_a_child_that_is_forked_while_a_thread_starts_it(self, ray: FakeRay) -> None:
        first, init, children = RayExecutor("app:place"), ray.init, list[int]()

        def slow(**how: Any) -> None:
            forking.start()
            forking.join()
            init(**how)

        def forks() -> None:
            children.append(os.fork())
            if not children[0]:
                signal.alarm(10)
                os._exit(not first.is_one_host)

        forking, ray.init = threading.Thread(target=forks), slow
        first._hire()
        assert os.waitstatus_to_exitcode(os.waitpid(children[0], 0)[1]) == 0

    @pytest.mark.parametrize(
        ("needs", "said"),
        [
            ({"num_cpus": 3}, r"num_cpus: expected at most 2, .*found 3.*close it first"),
            ({"num_gpus": 1}, r"num_gpus: expected at most 0, .*found 1.*CUDA_VISIBLE_DEVICES"),
            ({"resources": {"y": 1}}, r"resources\['y'\]: expected at most 0, .*found 1.*close it first"),
        ],
    )
    def test_that_never_has_room_for_one_worker_of_another_executor_refuses_it_at_once(
        self, ray: FakeRay, needs: dict[str, Any], said: str
    ) -> None:
        first, second = RayExecutor("app:place", resources={"x": 1}), RayExecutor("app:place", **needs)
        first._hire()
        with pytest.raises(ConfigurationError, match=said):
            second._hire()
        assert ray.up
        RayExecutor("app:place", num_cpus=2, resources={"x": 2})._hire()
        first.close()

    def test_gives_a_worker_the_room_of_those_of_another_executor_that_are_idle(self, ray: FakeRay) -> None:
        busy, idle, also_idle, made = (RayExecutor("app:place", num_workers=1, num_cpus=0.3) for _ in range(4))
        run = busy.spread(self.WORK, ["job"])
        assert next(run) is None
        for one in (idle, also_idle):
            next(one.spread(self.WORK, ["job"]))  # which is left
        assert [len(one._hands) for one in (busy, idle, also_idle)] == [1, 1, 1]  # there is room for all of them
        assert next(made.spread(self.WORK, ["job"])) is None
        assert sorted(len(one._hands) for one in (idle, also_idle)) == [0, 1]  # and for a fourth worker instead of one
        assert len(busy._hands) == 1
        assert "shutdown" not in dict(ray.told)

    def test_ends_no_idle_worker_that_has_none_of_what_is_short(self, ray: FakeRay) -> None:
        ray.gpus = 1.0
        idle = RayExecutor("app:place", num_workers=1, num_cpus=1)
        busy, made = (RayExecutor("app:place", num_workers=1, num_cpus=1, num_gpus=1) for _ in range(2))
        next(idle.spread(self.WORK, ["job"]))  # which is left
        ray.room = {"CPU": 10.0}
        run = busy.spread(self.WORK, ["job"])
        assert next(run) is None
        assert next(made.spread(self.WORK, ["job"])) is None
        assert len(idle._hands) == 1

    def test_gives_a_worker_that_waits_the_room_of_a_run_that_ends_meanwhile(self, ray: FakeRay) -> None:
        busy, made = (RayExecutor("app:place", num_workers=1) for _ in range(2))
        run, waits = busy.spread(self.WORK, ["job"]), made.spread(self.WORK, ["job"])
        assert next(run) is next(waits) is next(waits) is None
        assert len(busy._hands) == 1
        run.close()
        assert next(waits) is None
        assert busy._hands == []

    def test_keeps_the_room_of_a_run_that_was_left_until_its_job_has_ended(self, ray: FakeRay) -> None:
        left, made = (RayExecutor("app:place", num_workers=1) for _ in range(2))
        next(left.spread(self.WORK, ["job"]))
        ((asked, flight),) = left._flights.items()
        flight.job = "job"
        waits = made.spread(self.WORK, ["job"])
        assert next(waits) is next(waits) is None
        assert len(left._hands) == 1
        ray.ended.append(asked)  # nobody takes the answer
        assert next(waits) is None
        assert left._hands == []

    def test_ends_idle_workers_before_a_run_of_theirs_begins_that_comes_meanwhile(self, ray: FakeRay) -> None:
        made, idle = (RayExecutor("app:place", num_workers=1) for _ in range(2))
        next(idle.spread(self.WORK, ["job"]))
        kill, told = ray.kill, list[Any]()

        def run() -> None:
            try:
                told.append(next(idle.spread(self.WORK, ["job"])))
            except ConfigurationError as refusal:
                told.append(refusal)

        def slow(*given: Any, **how: Any) -> None:
            ray.kill = kill
            running.start()
            running.join(0.2)
            kill(*given, **how)

        running, ray.kill = threading.Thread(target=run), slow
        next(made.spread(self.WORK, ["job"]))
        running.join(20.0)
        assert told == [None]

    @pytest.mark.parametrize("needed", [0.5, 1])
    def test_without_the_gpus_of_one_worker_is_refused_at_once(self, ray: FakeRay, needed: float) -> None:
        made = RayExecutor("app:place", num_gpus=needed)
        with pytest.raises(ConfigurationError, match="num_gpus: expected at most 0, "):
            made._hire()
        assert [name for name, _ in ray.told] == ["init", "shutdown"]

    def test_sets_a_token_before_it_imports_ray(self, monkeypatch: pytest.MonkeyPatch) -> None:
        seen = []
        for name in [key for key in os.environ if key.startswith("RAY_")]:
            monkeypatch.delenv(name)
        for name in [key for key in sys.modules if key.partition(".")[0] == "ray"]:
            monkeypatch.delitem(sys.modules, name)

        def imported(name: str) -> FakeRay:
            seen.append((name, os.environ.get("RAY_AUTH_MODE"), len(os.environ.get("RAY_AUTH_TOKEN", ""))))
            return FakeRay()

        monkeypatch.setattr("langchain_dpicl.distributed.importlib.import_module", imported)
        RayExecutor("app:place", address="head:6379")
        RayExecutor("app:place")
        assert seen == [("ray", None, 0), ("ray", "token", 64)]
        monkeypatch.setenv("RAY_AUTH_MODE", "")  # taken away again with what the executor set
        monkeypatch.setenv("RAY_AUTH_TOKEN", "")

    def test_that_does_not_start_is_told_by_kind(self, ray: FakeRay, monkeypatch: pytest.MonkeyPatch) -> None:
        def broken(**how: Any) -> None:
            raise RuntimeError("a host and a file")

        ray.init = broken
        with pytest.raises(ConfigurationError, match=r"one that starts here, found none \(RuntimeError\)") as refusal:
            RayExecutor("app:place")._hire()
        assert "a host" not in str(refusal.value)
        assert "ray status" not in str(refusal.value)  # which asks a cluster that is there

    def test_that_does_not_start_leaves_no_server_behind(self, ray: FakeRay, tmp_path: Path) -> None:
        psutil = pytest.importorskip("psutil")  # Ray brings one
        command = [sys.executable, "-c", "import time; time.sleep(60)", str(tmp_path / "gcs_server")]

        def a_server() -> subprocess.Popen[bytes]:
            made = subprocess.Popen(command)
            while command[-1] not in psutil.Process(made.pid).cmdline():  # the system shows it a moment later
                time.sleep(0.01)
            return made

        started = [a_server()]  # somebody's, before

        def slow(**how: Any) -> None:
            started.append(a_server())
            raise RuntimeError("timed out")

        ray.init, ray.__file__ = slow, str(tmp_path / "__init__.py")
        try:
            with pytest.raises(ConfigurationError):
                RayExecutor("app:place")._hire()
            assert [one.poll() is None for one in started] == [True, False]
        finally:
            for one in started:
                one.kill()
                one.wait()


class TestAClusterOfOthers:
    @pytest.mark.parametrize("how", ["given", "environment", "connected"])
    def test_is_used_as_it_is_and_left_up(self, ray: FakeRay, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
        if how == "environment":
            monkeypatch.setenv("RAY_ADDRESS", "head:6379")
        ray.up = how == "connected"
        made = RayExecutor("app:place", address="head:6379" if how == "given" else None)
        assert not made.is_one_host
        made._hire()
        made.close()
        starts = [told for name, told in ray.told if name == "init"]
        assert [one["address"] for one in starts] == ([] if how == "connected" else ["head:6379"])
        assert "shutdown" not in dict(ray.told)

    def test_is_not_taken_for_its_own_where_that_one_was_ended_behind_its_back(self, ray: FakeRay) -> None:
        made = RayExecutor("app:place")
        made._hire()
        assert made.is_one_host
        ray.shutdown()
        ray.init(address="head:6379")
        assert not made.is_one_host
        made._hire()
        assert ray.told[-1] == ("Worker", (WorkerFactory("app:place", {}), {"is_one_host": False}))
        made.close()
        assert ray.told[-1][0] == "Worker"
        assert ray.up

    def test_that_is_connected_meanwhile_is_told_to_its_workers(
        self, ray: FakeRay, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        made = RayExecutor("app:place")
        connect = made._connect

        def late() -> None:
            ray.init(address="head:6379")  # as another thread may, between two looks
            connect()

        monkeypatch.setattr(made, "_connect", late)
        assert made.is_one_host
        made._hire()
        assert ray.told[-1] == ("Worker", (WorkerFactory("app:place", {}), {"is_one_host": False}))


class TestAClusterThatEnds:
    WORK: Any = SimpleNamespace(key="order")

    @pytest.mark.parametrize("is_connected_anew", [False, True])
    def test_between_runs_leaves_no_workers_to_the_next(self, ray: FakeRay, is_connected_anew: bool) -> None:
        made = RayExecutor("app:place", num_workers=1)
        assert next(made.spread(self.WORK, ["job"])) is None
        ray.shutdown()
        if is_connected_anew:
            ray.init(address="head:6379")
        assert next(made.spread(self.WORK, ["job"])) is None
        assert [name for name, _ in ray.told].count("Worker") == 2

    def test_before_it_is_closed_has_nothing_to_end(self, ray: FakeRay) -> None:
        made = RayExecutor("app:place", num_workers=1)
        next(made.spread(self.WORK, ["job"]))
        ray.shutdown()
        ray.init(address="head:6379")
        made.close()
        assert ray.told[-1][0] == "init"

    def test_in_a_run_ends_it(self, ray: FakeRay) -> None:
        made = RayExecutor("app:place", num_workers=1)
        run = made.spread(self.WORK, ["job"])
        next(run)
        ray.shutdown()
        with pytest.raises(ModelCallError, match="run it again to continue"):
            next(run)


def test_a_worker_is_started_once_and_repeats_nothing(ray: FakeRay) -> None:
    RayExecutor("app:place", options={"path": "a"}, num_cpus=0.5)._hire()
    told = dict(ray.told)
    assert told["options"] == {
        "max_restarts": 0,
        "max_task_retries": 0,
        "max_concurrency": 1,
        "num_cpus": 0.5,
        "num_gpus": 0.0,
        "resources": {},
    }
    assert told["Worker"] == (WorkerFactory("app:place", {"path": "a"}), {"is_one_host": True})


def test_a_worker_that_is_gone_has_no_answer(ray: FakeRay) -> None:
    made = RayExecutor("app:place")
    assert made._answer(ConnectionError()) is None
    assert made._answer(JobResult("done")) == JobResult("done")
    assert made._answer("something else") is None


class TestWhatIsRefused:
    @pytest.mark.parametrize("workplace", ["app", "app:", ":place", "", None, print])
    def test_a_function_without_a_name(self, ray: FakeRay, workplace: Any) -> None:
        with pytest.raises(ConfigurationError, match="workplace"):
            RayExecutor(workplace)

    @pytest.mark.parametrize(
        "options", [{"path": os}, {"records": object()}, [1], {"noise": float("nan")}, {"key": {1, 2}}]
    )
    def test_options_that_are_no_plain_values(self, ray: FakeRay, options: Any) -> None:
        with pytest.raises(ConfigurationError, match="a mapping of JSON values"):
            RayExecutor("app:place", options=options)

    @pytest.mark.parametrize("where", ["postgresql://me:{}@db/app", "host=db password={}", "postgres://:{}@db"])
    def test_a_password_in_options_which_is_not_quoted(self, ray: FakeRay, where: str) -> None:
        with pytest.raises(ConfigurationError, match="PGPASSWORD") as refusal:
            RayExecutor("app:place", options={"ledger": where.format(WORD)})
        assert WORD not in str(refusal.value)
        RayExecutor("app:place", options={"ledger": "postgresql://me@db/app"})

    @pytest.mark.parametrize(
        ("place", "options"),
        [
            ("password", {"password": WORD}),
            ("api_key", {"api_key": WORD}),
            ("client.apiKey", {"client": [{"apiKey": WORD}]}),
            ("headers.Authorization", {"headers": {"Authorization": f"Bearer {WORD}"}}),
            ("hf_token", {"hf_token": WORD}),
            ("openai_key", {"openai_key": WORD}),
            ("question_key", {"question_key": "question"}),
            ("secret_url", {"secret_url": f"https://hooks/{WORD}"}),
            ("OPENAI_KEY", {"OPENAI_KEY": WORD}),
            ("key", {"key": WORD}),
            ("openaiKey", {"openaiKey": WORD}),
            ("keys", {"keys": [WORD]}),
            ("text.key", {"text": {"key": WORD}}),
            ("bearer", {"bearer": WORD}),
            ("client", {"client": {"x-key": [WORD]}}),
            ("tokens", {"tokens": {WORD: ["hub"]}}),
            ("ledger", {"ledger": f"postgresql://db/app?user=me&sslpassword={WORD}"}),
            ("ledger", {"ledger": f"postgresql://me:{WORD} and more@db/app"}),
            ("", {f"postgresql://me:{WORD}@db/app": "ledger"}),
        ],
    )
    def test_keys_in_options_at_any_depth(self, ray: FakeRay, place: str, options: dict[str, Any]) -> None:
        where = f"options['{place}']: " if place else "options: "
        with pytest.raises(ConfigurationError, match="expected no password and no key") as refusal:
            RayExecutor("app:place", options=options)
        assert str(refusal.value).startswith(where)
        assert WORD not in str(refusal.value)

    def test_but_not_numbers_of_tokens_nor_paths_nor_names_of_fields(self, ray: FakeRay) -> None:
        options = {
            "max_tokens": 60,
            "tokenizer_limits": [1, 2],
            "is_secret": True,
            "passes": 3,
            "file": "/a:b@c/x",
            "token": "",
            "tokenizer": "a/b",
            "label_key": "queue",
            "input_key": "question-2",
            "key_file": "/etc/tls.pem",
            "password_file": "/run/pgpass",
            "monkey": "m",
        }
        RayExecutor("app:place", options={**options, "compass": "north", "url": "http://vllm:8000/v1"})

    def test_but_not_what_two_values_would_be_together(self, ray: FakeRay) -> None:
        RayExecutor("app:place", options={"url": "http://gpu1:8000", "dataset": "tickets@2026"})

    @pytest.mark.parametrize("how", ["given", "environment"])
    def test_rays_client(self, ray: FakeRay, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
        if how == "environment":
            monkeypatch.setenv("RAY_ADDRESS", "ray://head:10001")
        with pytest.raises(ConfigurationError, match="that this machine is part of"):
            RayExecutor("app:place", address="ray://head:10001" if how == "given" else None)

    @pytest.mark.parametrize(
        "options",
        [
            {"num_workers": 0},
            {"num_cpus": -1},
            {"num_gpus": "all"},
            {"num_gpus": 1.5},  # Ray shares single GPUs alone
            {"num_cpus": 1e-5},  # Ray counts in ten-thousandths
            {"resources": ["x"]},
            {"resources": {"CPU": 1}},
            {"resources": {"GPU": 1.0}},
            {"resources": {"memory": 1.0}},
            {"resources": {"x": -1}},
            {"resources": {"x": "1"}},
            {"resources": {"x": 1e-5}},
            {"resources": {1: 1}},
            {"resources": {"": 1}},
            {"address": ""},
            {"address": 3},
            {"start_timeout": 0},
        ],
    )
    def test_numbers_and_addresses_that_are_none(self, ray: FakeRay, options: Any) -> None:
        with pytest.raises(ConfigurationError):
            RayExecutor("app:place", **options)

    def test_a_missing_package_with_the_line_that_installs_it(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "ray", None)
        with pytest.raises(ConfigurationError, match=r"pip install 'langchain-dpicl\[ray\]'"):
            RayExecutor("app:place")


class TestTheWordRay:
    def test_means_the_environment(self, ray: FakeRay, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv(WORKPLACE, "app:place")
        monkeypatch.setenv(WORKERS, "5")
        assert repr(as_executor("ray")) == "RayExecutor('app:place', num_workers=5)"

    @pytest.mark.parametrize("environment", [{}, {WORKPLACE: "app:place", WORKERS: "many"}])
    def test_is_refused_without(
        self, ray: FakeRay, monkeypatch: pytest.MonkeyPatch, environment: dict[str, str]
    ) -> None:
        monkeypatch.delenv(WORKPLACE, raising=False)
        for key, value in environment.items():
            monkeypatch.setenv(key, value)
        with pytest.raises(ConfigurationError, match="DPICL_"):
            as_executor("ray")

    def test_none_is_here_and_an_executor_is_itself(self, ray: FakeRay) -> None:
        made = RayExecutor("app:place")
        assert as_executor(None) is None
        assert as_executor(made) is made


def test_what_is_sent_to_workers_can_be_read_by_anybody(ray: FakeRay) -> None:
    made = RayExecutor("app:place", options={"ledger": "postgresql://me@db/app", "gpus": [0, 1]})
    assert json.loads(json.dumps(made._setup.options)) == made._setup.options

"""Code before a method of an SDK, in every shape it is put there, is named and refused; naive calls show that it hears."""

from __future__ import annotations

import builtins
import functools
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import wrapt
from langchain_core.messages import HumanMessage
from openai.resources.chat.completions import Completions

from langchain_dpicl.backends.private_calls import method_checks
from langchain_dpicl.backends.private_calls.call import Reply, silence
from langchain_dpicl.backends.private_calls.method_checks import (
    NAMELESS,
    RECORDERS,
    SHOWING,
    AcceptedWrappers,
    allow_wrappers,
    is_shown,
    modules_of,
)
from langchain_dpicl.exceptions import ConfigurationError, UnsilencableModelError
from tests.canary import RECORD, canaries_in
from tests.unit_tests.backends.private_calls.test_preflight import ONCE, THEIRS, offline_chat, request
from tests.unit_tests.backends.recording_package import WAYS, Recorder, known

pytestmark = pytest.mark.filterwarnings("ignore:A test tried to use socket:UserWarning")


def heard_naively(seen: list[str]) -> list[str]:
    """What a stock model's call shows to a recorder."""
    seen.clear()
    offline_chat()._generate([HumanMessage(RECORD)])
    heard = canaries_in(" ".join(seen))
    seen.clear()
    return heard


class CompiledWrapper:
    """Says that it is built in, as compiled classes do that name no module."""

    __slots__ = ("__wrapped__", "_self_wrapper")
    __module__ = "builtins"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._self_wrapper(self.__wrapped__, None, args, kwargs)

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        bound = self.__wrapped__.__get__(instance, owner)
        return lambda *args, **kwargs: self._self_wrapper(bound, instance, args, kwargs)


class TestShapesOfAWrapper:
    @pytest.mark.parametrize("way", WAYS)
    @pytest.mark.parametrize("make", [Recorder, known], ids=["unknown", "known"])
    def test_are_refused_before_and_after_the_model_was_made_silent(
        self, monkeypatch: pytest.MonkeyPatch, make: Callable[[], Any], way: str
    ) -> None:
        recorder, silent = make(), silence(offline_chat())
        monkeypatch.setattr(Completions, "create", getattr(recorder, way)(vars(Completions)["create"]))
        assert heard_naively(recorder.seen) == [RECORD]
        named = "langfuse" if make is known else THEIRS
        with pytest.raises(UnsilencableModelError, match=f"{named} is in the path of .*Completions.create"):
            silence(offline_chat())
        assert silent.ask(request(), retry=ONCE) == Reply(fault="content")
        assert recorder.seen == []

    def test_are_refused_where_what_is_called_has_no_name(self, monkeypatch: pytest.MonkeyPatch) -> None:
        seen: list[Any] = []
        create = vars(Completions)["create"]
        for wrapped in (
            wrapt.FunctionWrapper(create, seen.append),
            functools.partialmethod(create, seen.append),
            types.FunctionType(create.__code__, {**create.__globals__, "__name__": None}, closure=create.__closure__),
        ):
            monkeypatch.setattr(Completions, "create", wrapped)
            with pytest.raises(
                UnsilencableModelError, match=f"{NAMELESS} is in the path of .*Completions.create"
            ) as caught:
                silence(offline_chat())
            assert "allow_wrappers" not in str(caught.value)

    @pytest.mark.parametrize("is_wrapts", [True, False], ids=["of wrapt", "of a copy of it"])
    @pytest.mark.parametrize("make", [Recorder, known], ids=["unknown", "known"])
    def test_are_refused_where_a_compiled_class_says_that_it_is_built_in(
        self, monkeypatch: pytest.MonkeyPatch, make: Callable[[], Any], *, is_wrapts: bool
    ) -> None:
        """As the classes of wrapt 1 do; a copy of them that nobody can name is refused as such."""
        if is_wrapts:
            monkeypatch.setattr(wrapt, "FunctionWrapper", CompiledWrapper)
        recorder, wrapped = make(), CompiledWrapper()
        wrapped.__wrapped__, wrapped._self_wrapper = vars(Completions)["create"], recorder._note
        monkeypatch.setattr(Completions, "create", wrapped)
        assert heard_naively(recorder.seen) == [RECORD]
        named = {Recorder: THEIRS, known: "langfuse"}[make] if is_wrapts else NAMELESS
        with pytest.raises(UnsilencableModelError, match=f"{named} is in the path of .*Completions.create"):
            silence(offline_chat())

    def test_are_refused_where_they_are_too_many_to_follow(self) -> None:
        deep: Any = vars(Completions)["create"]
        for _ in range(200):
            deep = staticmethod(classmethod(deep))
        assert AcceptedWrappers(frozenset({"openai"}), is_strict=True).culprit(deep) == NAMELESS

    def test_decorators_of_the_class_itself_are_at_home(self) -> None:
        bench = AcceptedWrappers(frozenset({"openai"}), is_strict=True)
        assert [bench.culprit(value) for value in vars(Completions).values()] == [""] * len(vars(Completions))


@pytest.fixture
def swapped() -> Iterator[Callable[[], list[str]]]:
    """Puts other code into the function that sends a completion, as debuggers do; the object stays the same."""
    function = vars(Completions)["create"]
    function = getattr(function, "__wrapped__", function)
    kept = function.__code__, function.__kwdefaults__, function.__defaults__
    seen: list[str] = []

    def swap() -> list[str]:
        inner = types.FunctionType(kept[0], function.__globals__, "create", kept[2])
        inner.__kwdefaults__ = kept[1]
        vars(builtins).update(_seen=seen.append, _inner=inner)
        text = "def create(self, *a, **k):\n import builtins as b\n b._seen(repr(k))\n return b._inner(self, *a, **k)"
        made: dict[str, Any] = {}
        exec(compile(text, "x", "exec"), made)  # noqa: S102  a text of this test
        function.__code__, function.__kwdefaults__, function.__defaults__ = made["create"].__code__, None, None
        return seen

    yield swap
    function.__code__, function.__kwdefaults__, function.__defaults__ = kept
    for name in ("_seen", "_inner"):
        vars(builtins).pop(name, None)


class TestCodeThatIsReplacedInPlace:
    def test_is_refused_before_the_first_look(self, swapped: Callable[[], list[str]]) -> None:
        assert heard_naively(swapped()) == [RECORD]
        with pytest.raises(UnsilencableModelError, match=f"{NAMELESS} is in the path of .*Completions.create"):
            silence(offline_chat())

    def test_is_noticed_after_it(self, swapped: Callable[[], list[str]]) -> None:
        silent = silence(offline_chat())
        assert silent.trouble() == ""
        seen = swapped()
        assert f"{NAMELESS} is in the path of" in silent.trouble()
        assert silent.ask(request(), retry=ONCE) == Reply(fault="content")
        assert seen == []

    def test_is_named_by_the_installed_package_it_is_of(self) -> None:
        function = types.FunctionType(heard_naively.__code__, {"__name__": "openai._client"})
        function.__code__ = function.__code__.replace(co_filename="/lib/site-packages/langfuse/openai.py")
        assert modules_of(function) == ["openai._client", "langfuse.openai"]
        assert AcceptedWrappers(frozenset({"openai"}), is_strict=False).culprit(function) == "langfuse"


class TestOptionsOfWrappersThatSeeNoBodies:
    """OpenTelemetry's wrapper of httpx shows a request to the hooks that it was given, and sizes among the headers."""

    @staticmethod
    def wrapper(monkeypatch: pytest.MonkeyPatch, **options: Any) -> Any:
        monkeypatch.setattr(method_checks, "_version", lambda _: (0, 66))
        module = "opentelemetry.instrumentation.httpx"
        wraps = types.FunctionType((lambda *a, **k: a[0](*a[2])).__code__, {"__name__": module})
        wraps.__code__ = wraps.__code__.replace(co_filename=f"/lib/site-packages/{module.replace('.', '/')}.py")
        wraps.__qualname__ = wraps.__code__.co_qualname
        return wrapt.FunctionWrapper(len, functools.partial(wraps, **options))  # Ray replaces `print` for good

    @pytest.mark.parametrize("option", sorted(SHOWING))
    def test_decide(self, monkeypatch: pytest.MonkeyPatch, option: str) -> None:
        bench = AcceptedWrappers(frozenset({"httpx"}), is_strict=True, place="http")
        assert bench.culprit(self.wrapper(monkeypatch, **{option: None})) == ""
        told = bench.culprit(self.wrapper(monkeypatch, **{option: [".*"]}))
        assert told == "opentelemetry.instrumentation.httpx"

    def test_decide_in_a_closure_too(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(method_checks, "_version", lambda _: (0, 66))

        def made(request_hook: Any) -> Any:
            def send() -> Any:
                return request_hook

            name = "opentelemetry.instrumentation.requests"
            code = send.__code__.replace(co_filename=f"/lib/site-packages/{name.replace('.', '/')}.py")
            function = types.FunctionType(code, {"__name__": name}, closure=send.__closure__)
            function.__qualname__ = code.co_qualname
            return function

        bench = AcceptedWrappers(frozenset({"requests"}), is_strict=True, place="http")
        assert bench.culprit(made(None)) == ""
        assert bench.culprit(made(print)) == "opentelemetry.instrumentation.requests"

    def test_hold_at_their_place_and_version_alone(self, monkeypatch: pytest.MonkeyPatch) -> None:
        wrapper = self.wrapper(monkeypatch)
        assert AcceptedWrappers(frozenset(), is_strict=True, place=None).culprit(wrapper)
        for version in ((), (0, 65), (1,)):
            monkeypatch.setattr(method_checks, "_version", lambda _, version=version: version)
            assert not is_shown("opentelemetry.instrumentation.httpx", "http")


class TestNamesThatTheOperatorGives:
    @pytest.mark.parametrize("name", ["", "a b", "a..b", 3, None, "builtins code"])
    def test_have_to_be_modules(self, name: Any) -> None:
        with pytest.raises(ConfigurationError, match="expected names such as"):
            allow_wrappers(name)

    @pytest.mark.parametrize("name", sorted(RECORDERS))
    def test_cannot_be_known_recorders(self, name: str) -> None:
        with pytest.raises(ConfigurationError, match="can record calls"):
            allow_wrappers(f"{name}.part")

    def test_are_kept_together(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(method_checks, "_named", ())
        allow_wrappers("b.c", "a")
        allow_wrappers("a", "b.c.d")
        assert method_checks.allowed_wrappers() == ("a", "b.c", "b.c.d")
        assert method_checks.is_within("b.c.e", ["b.c"])
        assert not method_checks.is_within("b.cc", ["b.c"])


def test_what_is_installed_is_told_from_what_users_write(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    own, theirs, zipped = (types.ModuleType(name) for name in ("own", "theirs", "zipped"))
    own.__file__ = str(tmp_path / "project" / "own.py")
    theirs.__file__ = str(tmp_path / "layer" / "theirs.py")
    zipped.__file__ = str(tmp_path / "all.zip" / "zipped.py")
    for folder in ("project", "layer"):
        (tmp_path / folder).mkdir()
    (tmp_path / "layer" / "theirs-1.0.dist-info").mkdir()
    for module in (own, theirs, zipped):
        monkeypatch.setitem(__import__("sys").modules, module.__name__, module)
    found = {
        name: method_checks.is_installed_module(name)
        for name in ("own", "theirs", "zipped", "openai", "json", "nowhere")
    }
    assert found == {"own": False, "theirs": True, "zipped": True, "openai": True, "json": False, "nowhere": False}

"""What reports every call in a process: LiteLLM's callbacks, pydantic's plugins, and clients that show no function."""

from __future__ import annotations

import json
import sys
import types
from typing import Any

import pytest
from langchain_core.messages import AIMessage, HumanMessage
from langchain_core.outputs import ChatGeneration
from pydantic.plugin import _schema_validator

from langchain_dpicl.backends import allow_wrappers
from langchain_dpicl.backends.private_calls import method_checks
from langchain_dpicl.backends.private_calls.call import Reply, silence
from langchain_dpicl.backends.private_calls.method_checks import AcceptedWrappers
from langchain_dpicl.exceptions import UnsilencableModelError
from tests.canary import RECORD, VOTE, canaries_in
from tests.scripted_models import ScriptedChat, fixed
from tests.unit_tests.backends.private_calls.test_preflight import ONCE, Client, distribution, fresh, made, request

LISTS = tuple(name for name in method_checks._LITELLM_SETTINGS if name not in {"cache", "log_raw_request_response"})


@pytest.fixture
def litellm(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """A module with LiteLLM's names, which tells its callbacks of each call and keeps answers in its cache."""
    module = types.ModuleType("litellm")
    vars(module).update(dict.fromkeys(method_checks._LITELLM_SETTINGS), **{name: [] for name in LISTS})
    monkeypatch.setitem(sys.modules, "litellm", module)
    return module


class ChatLiteLLM(ScriptedChat):
    """A model of that name, as it calls a module that is its client."""

    client: Any = None
    model_kwargs: Any = None

    def _generate(self, messages: Any, *args: Any, **kwargs: Any) -> Any:
        answer = super()._generate(messages, *args, **kwargs)
        for name in LISTS:
            for told in getattr(self.client, name):
                told(str(messages), str(answer))
        if self.client.cache is not None:
            self.client.cache.append(str(answer))
        return answer


def model_of(litellm: types.ModuleType, **options: Any) -> ChatLiteLLM:
    return ChatLiteLLM(answer=fixed({VOTE: 1.0}), client=litellm, **options)


class TestLiteLLM:
    def test_is_accepted_where_nothing_is_set(self, litellm: types.ModuleType) -> None:
        assert silence(model_of(litellm)).ask(request(), retry=ONCE).answer is not None

    @pytest.mark.parametrize("name", LISTS)
    @pytest.mark.parametrize("is_in_place", [False, True], ids=["set", "appended"])
    def test_is_refused_while_a_callback_is_set(self, litellm: types.ModuleType, name: str, is_in_place: bool) -> None:
        heard: list[str] = []
        model = model_of(litellm)
        silent = silence(model)
        assert silent.ask(request(), retry=ONCE).answer is not None
        if is_in_place:
            getattr(litellm, name).append(lambda *told: heard.extend(told))
        else:
            setattr(litellm, name, [lambda *told: heard.extend(told)])
        model._generate([HumanMessage(RECORD)])
        assert set(canaries_in(" ".join(heard))) == {RECORD, VOTE}
        heard.clear()
        assert silent.ask(request(), retry=ONCE) == Reply(fault="content")
        with pytest.raises(
            UnsilencableModelError, match=rf"litellm\.{name} would see or store .*provider's own LangChain"
        ):
            silence(model)
        assert heard == []
        getattr(litellm, name).clear()
        assert silent.trouble() == ""

    def test_is_refused_while_a_cache_is_set(self, litellm: types.ModuleType) -> None:
        silent = silence(model_of(litellm))
        litellm.cache = [VOTE]  # type: ignore[attr-defined]
        assert "litellm.cache would see or store" in silent.trouble()
        assert silent.ask(request(), retry=ONCE) == Reply(fault="content")
        assert litellm.cache == [VOTE]

    def test_is_refused_with_callbacks_of_its_own_calls(self, litellm: types.ModuleType) -> None:
        with pytest.raises(UnsilencableModelError, match=r"model_kwargs\['logger_fn'\]"):
            silence(model_of(litellm, model_kwargs={"logger_fn": print}))

    def test_is_known_by_what_a_model_holds_too(self, litellm: types.ModuleType) -> None:
        litellm.callbacks = [print]  # type: ignore[attr-defined]
        model = made(fresh())
        assert silence(model).trouble() == "", "other models get nothing of it"
        vars(model)["router"] = type("Router", (), {"__module__": "litellm.router"})()
        with pytest.raises(UnsilencableModelError, match=r"litellm\.callbacks"):
            silence(model)


class TestClientsThatShowNoFunction:
    def test_modules_are_refused_unless_the_operator_names_them(self) -> None:
        model = made(fresh())
        vars(model)["client"] = json
        with pytest.raises(
            UnsilencableModelError, match=r"json is in the path of Mine\.client, which cannot be inspected"
        ):
            silence(model)
        allow_wrappers("json")
        assert silence(model).trouble() == ""

    def test_compiled_clients_are_refused(self, monkeypatch: pytest.MonkeyPatch) -> None:
        class Compiled:
            """Has no function that Python sees."""

        model = made(fresh())
        client = vars(model)["client"] = distribution("fastclient", Compiled, monkeypatch).Compiled()
        with pytest.raises(UnsilencableModelError, match="fastclient is in the path of"):
            silence(model)
        type(client).__module__ = "builtins"  # as compiled classes have it that name no module
        with pytest.raises(UnsilencableModelError, match="code that belongs to no module is in the path of"):
            silence(model)

    @pytest.mark.parametrize("value", [None, "a", 1, {"a": 1}, ["a"], Client()])
    def test_plain_values_and_objects_of_users_are_not(self, value: Any) -> None:
        model = made(fresh())
        vars(model)["client"] = value
        assert silence(model).trouble() == ""

    def test_classes_are_looked_at_as_their_objects_are(self, monkeypatch: pytest.MonkeyPatch) -> None:
        model = made(fresh())
        kind = vars(model)["client"] = type("Theirs", (), {"__module__": "langfuse.client"})
        with pytest.raises(UnsilencableModelError, match="langfuse is in the path of"):
            silence(model)
        monkeypatch.setattr(kind, "__module__", "mine")
        assert silence(model).trouble() == ""


class Handler:
    """A plugin's, which hears what is validated."""

    def __init__(self) -> None:
        self.heard: list[str] = []

    def on_enter(self, *args: Any, **kwargs: Any) -> None:
        self.heard.append(f"{args} {kwargs}")


class Plugin:
    """One that is active, and hears nothing of classes that are made meanwhile."""

    def new_schema_validator(self, *_: Any) -> tuple[None, None, None]:
        return None, None, None


def plugged(monkeypatch: pytest.MonkeyPatch, kind: type, handler: Handler) -> None:
    """Puts a handler before the validation of a class, as pydantic does for a plugin."""
    inner = vars(kind)["__pydantic_validator__"]
    plugin = _schema_validator.PluggableSchemaValidator.__new__(_schema_validator.PluggableSchemaValidator)
    plugin._schema_validator = inner
    for name in ("validate_python", "validate_json", "validate_strings"):
        setattr(plugin, name, _schema_validator.build_wrapper(getattr(inner, name), [handler]))
    monkeypatch.setattr(kind, "__pydantic_validator__", plugin)


class TestPluginsOfPydantic:
    @pytest.mark.parametrize("kind", [HumanMessage, AIMessage, ChatGeneration])
    def test_that_see_messages_are_refused_by_name(self, monkeypatch: pytest.MonkeyPatch, kind: type) -> None:
        handler, silent = Handler(), silence(made(fresh()))
        assert silent.trouble() == ""
        plugged(monkeypatch, kind, handler)
        if kind is not ChatGeneration:
            kind(RECORD)
            assert canaries_in(" ".join(handler.heard)) == [RECORD]
        handler.heard.clear()
        assert (
            f"test_switches is in the path of the validation of {kind.__name__} (a pydantic plugin)" in silent.trouble()
        )
        assert silent.ask(request(), retry=ONCE) == Reply(fault="content")
        assert handler.heard == []

    def test_that_the_operator_names_are_accepted(self, monkeypatch: pytest.MonkeyPatch) -> None:
        plugged(monkeypatch, HumanMessage, Handler())
        allow_wrappers(__name__)
        assert silence(made(fresh())).trouble() == ""

    def test_that_see_the_classes_of_an_sdk_are_refused(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from openai.types.chat import ChatCompletion

        loader = sys.modules.setdefault("pydantic.plugin._loader", types.ModuleType("pydantic.plugin._loader"))
        monkeypatch.setattr(loader, "_plugins", {"theirs": Plugin()}, raising=False)
        bench = AcceptedWrappers(frozenset({"langchain_core"}), is_strict=True)
        assert list(method_checks.before_messages(bench, {"openai"})) == []
        plugged(monkeypatch, ChatCompletion, Handler())
        found = list(method_checks.before_messages(bench, {"openai"}))
        assert found == [(__name__, "the validation of ChatCompletion (a pydantic plugin)")]
        assert list(method_checks.before_messages(bench, {"another"})) == []


def test_what_makes_messages_is_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    silent, heard = silence(made(fresh())), []
    original = HumanMessage.__init__

    def hearing(self: Any, *args: Any, **kwargs: Any) -> None:
        heard.append(args)
        original(self, *args, **kwargs)

    assert silent.trouble() == ""
    monkeypatch.setattr(HumanMessage, "__init__", hearing)
    assert "test_switches is in the path of HumanMessage.__init__" in silent.trouble()
    assert silent.ask(request(), retry=ONCE) == Reply(fault="content")
    assert heard == []

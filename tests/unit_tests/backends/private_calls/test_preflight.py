"""Models with somebody else on the way to their provider are refused, before and after they were made silent."""

from __future__ import annotations

import functools
import importlib
import json
import subprocess
import sys
import time
import timeit
import types
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import openai
import pytest
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.language_models import BaseChatModel, FakeListChatModel, FakeListLLM
from langchain_core.messages import HumanMessage
from langsmith import traceable
from tenacity import retry

from langchain_dpicl.backends.langchain.backend import LangChainBackend
from langchain_dpicl.backends.private_calls import method_checks, model_checks
from langchain_dpicl.backends.private_calls.call import CallPool, OpaqueValue, Reply, Request, RetryPolicy, silence
from langchain_dpicl.backends.private_calls.method_checks import DECORATORS, RECORDERS, allow_wrappers
from langchain_dpicl.backends.private_calls.model_checks import ModelSnapshot
from langchain_dpicl.exceptions import UnsilencableModelError
from tests.canary import RECORD, VOTE, canaries_in
from tests.scripted_models import ScriptedChat, fixed
from tests.unit_tests.backends.canned_provider import ANSWERS, Provider
from tests.unit_tests.backends.recording_package import WAYS, Recorder, known

# Clients look for socket options when they are made.
pytestmark = pytest.mark.filterwarnings("ignore:A test tried to use socket:UserWarning")

ROOT = Path(__file__).resolve().parents[4]
ONCE = RetryPolicy(max_attempts=1)
THEIRS = "tests.unit_tests.backends.recording_package"
STOCK = ("ChatOpenAI", "OpenAI", "OpenAIDecisions", "ChatAnthropic")


def request(text: str = RECORD, explain: Any = "") -> Request:
    return Request(OpaqueValue(text), lambda prompt: [HumanMessage(prompt)], {}, explain=explain)


@functools.cache
def stock(name: str) -> Any:
    """A stock client that is never called; what it makes on first use is made, as each of these takes a while."""
    if name == "OpenAIDecisions":
        pytest.importorskip("langchain_openai.decisions", reason="this langchain-openai has no decisions")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # decisions are in beta
        model = Provider("http://127.0.0.1:9", []).models[name]()
    silence(model)
    for part in ("_client", "_async_client"):
        getattr(model, part, None)
    return model


def http() -> Any:
    """The package of the SDK's HTTP client: httpx, or httpx2."""
    return importlib.import_module(openai.DefaultHttpxClient.__mro__[1].__module__.partition(".")[0])


def in_memory(**options: Any) -> Any:
    """An HTTP client over a transport in memory."""
    body = json.dumps(ANSWERS["/v1/chat/completions"]).encode()
    headers = {"content-type": "application/json"}
    answer = http().MockTransport(lambda _: http().Response(200, content=body, headers=headers))
    return http().Client(**{"transport": answer, **options})


def offline_chat(client: Any = openai.OpenAI, **options: Any) -> Any:
    """A stock client over a transport in memory."""
    from langchain_openai import ChatOpenAI

    model = ChatOpenAI(model="m", api_key="none", base_url="http://here/v1", http_client=in_memory(**options))
    if client is not openai.OpenAI:
        model.root_client = client(api_key="none", base_url="http://here/v1", http_client=in_memory(**options))
        model.client = model.root_client.chat.completions
    return model


def fresh(**attributes: Any) -> type[ScriptedChat]:
    """A model class of this module that no other test patches."""

    def _generate(self: Any, *args: Any, **kwargs: Any) -> Any:
        return ScriptedChat._generate(self, *args, **kwargs)

    return type("Mine", (ScriptedChat,), {"_generate": _generate, "__module__": __name__, **attributes})


def made(kind: type[ScriptedChat]) -> ScriptedChat:
    return kind(answer=fixed({VOTE: 1.0}))


class TestModelsThatAreAccepted:
    @pytest.mark.parametrize("name", STOCK)
    def test_stock_clients(self, name: str) -> None:
        assert silence(stock(name)).trouble() == ""

    def test_stock_clients_of_azure(self) -> None:
        from langchain_openai import AzureChatOpenAI

        options: Any = {"azure_endpoint": "http://here", "api_version": "1", "api_key": "none"}
        assert silence(AzureChatOpenAI(model="m", **options)).trouble() == ""

    @pytest.mark.parametrize("model", [FakeListChatModel(responses=["a"]), FakeListLLM(responses=["a"])])
    def test_stock_models_without_a_provider(self, model: Any) -> None:
        assert silence(model).trouble() == ""

    def test_models_that_users_write_with_methods_decorators_and_callables_of_their_own(self) -> None:
        def mine(function: Any) -> Any:
            @functools.wraps(function)
            def wrapper(*args: Any, **kwargs: Any) -> Any:
                return function(*args, **kwargs)

            return wrapper

        def helper(self: Any) -> str:
            return "x"

        model = made(
            fresh(
                _generate=mine(fresh()._generate),
                _agenerate=retry(ScriptedChat._agenerate),
                cached=functools.lru_cache(helper),
                lazy=functools.cached_property(helper),
                help=staticmethod(json.dumps),
            )
        )
        assert silence(model).ask(request(), retry=ONCE).answer is not None

    @pytest.mark.parametrize("way", WAYS)
    def test_models_that_users_write_with_decorators_from_another_module_of_theirs(self, way: str) -> None:
        """A script and the `utils.py` beside it are two packages; nothing says that they belong together."""
        from langchain_openai import ChatOpenAI

        theirs = getattr(Recorder(), way)
        kind = fresh(_generate=theirs(fresh()._generate))
        model = made(kind)
        vars(model)["_generate"] = theirs(model._generate)
        assert silence(model).trouble() == ""
        subclass = type("MyOpenAI", (ChatOpenAI,), {"_generate": theirs(ChatOpenAI._generate)})
        assert silence(subclass(model="m", api_key="none", http_client=in_memory())).trouble() == ""

    @pytest.mark.parametrize("module", [__name__, "utils"])
    def test_clients_that_users_derive_from_an_sdk_s(self, module: str) -> None:
        def post(self: Any, *args: Any, **kwargs: Any) -> Any:
            return openai.OpenAI.post(self, *args, **kwargs)

        post = types.FunctionType(post.__code__, {"__name__": module, "openai": openai})
        silent = silence(offline_chat(type("Mine", (openai.OpenAI,), {"post": post})))
        assert silent.trouble() == ""
        assert silent.ask(request(), retry=ONCE).answer is not None

    def test_fields_are_left_as_they_are_whatever_they_answer_to(self) -> None:
        class Fields(ScriptedChat):
            create: Any = None

        stands_in = MagicMock(return_value={VOTE: 1.0})
        silent = silence(Fields(answer=stands_in, create=Recorder().by_replacement(str)))
        assert silent._model.answer is stands_in
        assert silent.ask(request(), retry=ONCE).answer is not None

    def test_clients_with_a_user_s_own_functions_in_them(self) -> None:
        from langchain_openai import ChatOpenAI

        model = ChatOpenAI(model="m", api_key=lambda: "key", base_url="http://here/v1")
        assert silence(model).trouble() == ""


PATCHED = [
    ("ChatOpenAI", "openai.resources.chat.completions.Completions", "create"),
    ("ChatOpenAI", "openai.resources.chat.completions.AsyncCompletions", "parse"),
    ("ChatOpenAI", "openai._base_client.SyncAPIClient", "post"),
    ("ChatOpenAI", "openai._base_client.AsyncAPIClient", "request"),
    ("ChatOpenAI", "langchain_openai.chat_models.base.BaseChatOpenAI", "_generate"),
    ("ChatOpenAI", "langchain_openai.ChatOpenAI", "_get_request_payload"),
    ("OpenAI", "openai.resources.completions.Completions", "create"),
    ("OpenAI", "langchain_openai.llms.base.BaseOpenAI", "_agenerate"),
    ("OpenAIDecisions", "openai._base_client.SyncAPIClient", "post"),
    ("OpenAIDecisions", "langchain_openai.decisions.OpenAIDecisions", "_adecide"),
    ("ChatAnthropic", "anthropic.resources.messages.Messages", "create"),
    ("ChatAnthropic", "anthropic.resources.messages.AsyncMessages", "create"),
    ("ChatAnthropic", "anthropic._base_client.SyncAPIClient", "request"),
    ("ChatAnthropic", "langchain_anthropic.ChatAnthropic", "_create"),
]


def located(path: str) -> Any:
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)


class TestInstrumentedMethods:
    @pytest.mark.parametrize(("name", "path", "method"), PATCHED, ids=[f"{path}.{at}" for _, path, at in PATCHED])
    def test_of_clients_and_sdks_are_refused_by_the_package_s_name(
        self, monkeypatch: pytest.MonkeyPatch, name: str, path: str, method: str
    ) -> None:
        model, owner = stock(name), located(path)
        silent = silence(model)
        monkeypatch.setattr(owner, method, Recorder().by_wraps(vars(owner)[method]))
        with pytest.raises(UnsilencableModelError, match=f"{THEIRS} is in the path of .*{owner.__name__}.{method}"):
            silence(model)
        assert f"{THEIRS} is in the path of" in silent.trouble()
        monkeypatch.undo()
        assert silent.trouble() == ""
        assert silence(model).trouble() == ""

    @pytest.mark.parametrize("way", WAYS)
    def test_are_refused_however_it_is_done(self, monkeypatch: pytest.MonkeyPatch, way: str) -> None:
        kind, recorder = fresh(), known()
        model = made(kind)
        monkeypatch.setattr(kind, "_generate", getattr(recorder, way)(vars(kind)["_generate"]))
        with pytest.raises(
            UnsilencableModelError, match=r"^Mine cannot be called in silence: langfuse is in the path of Mine\._"
        ):
            silence(model)
        assert recorder.seen == []
        model._generate([HumanMessage(RECORD)])
        assert canaries_in(" ".join(recorder.seen)) == [RECORD]

    @pytest.mark.parametrize("way", WAYS)
    async def test_that_come_later_stop_private_calls_and_raise_on_public_ones(
        self, monkeypatch: pytest.MonkeyPatch, way: str
    ) -> None:
        kind, recorder = fresh(), known()
        model = made(kind)
        backend, silent = LangChainBackend(model, max_top_k=1), silence(model)
        monkeypatch.setattr(kind, "_generate", getattr(recorder, way)(vars(kind)["_generate"]))
        asked = len(model.seen)
        assert backend.open([RECORD], []).score([VOTE.encode()]).tolist() == [[0.0]]
        assert silent.ask(request(), retry=ONCE) == Reply(fault="content")
        assert await silent.aask(request(), retry=ONCE) == Reply(fault="content")
        for ask in (silent.ask, backend._calls.model.ask):
            with pytest.raises(UnsilencableModelError, match=r"langfuse is in the path of Mine\._generate"):
                ask(request("hello", "kind"), retry=ONCE)
        with pytest.raises(UnsilencableModelError, match=r"langfuse is in the path of Mine\._generate"):
            await silent.aask(request("hello", "text"), retry=ONCE)
        assert (recorder.seen, len(model.seen)) == ([], asked)
        monkeypatch.undo()
        assert backend.open([RECORD], []).score([VOTE.encode()]).tolist() == [[1.0]]

    def test_of_an_sdk_see_the_naive_call_and_not_ours(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from openai.resources.chat.completions import Completions

        recorder, model = Recorder(), offline_chat()
        silent = silence(model)
        assert silent.ask(request(), retry=ONCE).answer is not None
        monkeypatch.setattr(Completions, "create", recorder.by_wrapt(Completions.create))
        assert silent.ask(request(), retry=ONCE) == Reply(fault="content")
        assert recorder.seen == []
        offline_chat()._generate([HumanMessage(RECORD)])
        assert canaries_in(" ".join(recorder.seen)) == [RECORD]

    def test_stay_in_a_client_that_was_used_meanwhile(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """SDKs keep what they made of an instrumented method on first use, after it was taken off the class."""
        from openai.resources.chat.completions import Completions

        recorder, model = Recorder(), offline_chat()
        monkeypatch.setattr(Completions, "create", recorder.by_wraps(Completions.create))
        model.invoke("hello")
        monkeypatch.undo()
        with pytest.raises(UnsilencableModelError, match=r"CompletionsWithRawResponse\.create"):
            silence(model)
        recorder.seen.clear()
        model._generate([HumanMessage(RECORD)])
        assert canaries_in(" ".join(recorder.seen)) == [RECORD]
        assert silence(offline_chat()).ask(request(), retry=ONCE).answer is not None

    def test_of_one_object_are_refused(self) -> None:
        """As LangSmith's wrap_openai does it, and as tests do it."""
        model = offline_chat()
        model.client.create = traceable(model.client.create)
        with pytest.raises(UnsilencableModelError, match=r"langsmith is in the path of Completions\.create"):
            silence(model)
        mine = made(fresh())
        vars(mine)["_generate"] = known().by_replacement(mine._generate)
        with pytest.raises(UnsilencableModelError, match=r"langfuse is in the path of Mine\._generate"):
            silence(mine)

    def test_inherited_from_langchain_are_refused(self, monkeypatch: pytest.MonkeyPatch) -> None:
        silent = silence(made(fresh()))
        monkeypatch.setattr(BaseChatModel, "_agenerate", Recorder().by_wrapt(BaseChatModel._agenerate))
        assert f"{THEIRS} is in the path of BaseChatModel._agenerate" in silent.trouble()

    def test_put_over_an_inherited_one_are_refused(self, monkeypatch: pytest.MonkeyPatch) -> None:
        kind = fresh()
        silent = silence(made(kind))
        monkeypatch.setattr(kind, "_agenerate", known().by_wraps(kind._agenerate), raising=False)
        assert "langfuse is in the path of Mine._agenerate" in silent.trouble()

    def test_that_cannot_be_looked_into_are_refused_where_prompts_pass(self, monkeypatch: pytest.MonkeyPatch) -> None:
        class Locked:
            def __get__(self, instance: Any, owner: Any = None) -> Any:
                return self

            def __getattr__(self, name: str) -> Any:
                raise RuntimeError("nothing to see")

            def __call__(self, *args: Any, **kwargs: Any) -> Any: ...

        Locked.__module__ = "somewhere.else"
        model = made(fresh())
        monkeypatch.setattr(BaseChatModel, "_agenerate", Locked())
        with pytest.raises(
            UnsilencableModelError, match=r"somewhere\.else is in the path of BaseChatModel\._agenerate"
        ):
            silence(model)

    @pytest.mark.parametrize("what", [traceable(lambda text: text), MagicMock()], ids=["langsmith", "mock"])
    def test_of_known_recorders_are_refused_around_any_method(self, what: Any) -> None:
        kind = fresh()
        silent = silence(made(kind))
        kind.helper = what  # type: ignore[attr-defined]
        with pytest.raises(UnsilencableModelError, match=r"(langsmith|unittest) is in the path of Mine\.helper"):
            silence(made(kind))
        assert "is in the path of Mine.helper" in silent.trouble()

    def test_of_the_http_client_are_refused_but_those_that_see_no_bodies(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Below that, what users put in is theirs: transports, recorders for tests, hooks."""
        model = offline_chat()
        client = type(model.root_client._client)
        sentry = types.FunctionType(client.send.__code__, {"__name__": "sentry_sdk.integrations.http"})
        silent = silence(model)
        monkeypatch.setattr(client, "send", Recorder().by_wraps(client.send))
        assert f"{THEIRS} is in the path of" in silent.trouble()
        monkeypatch.setattr(client, "send", traceable(client.send))
        assert "langsmith is in the path of Client.send" in silent.trouble()
        monkeypatch.setattr(client, "send", sentry)
        assert silent.trouble() == ""
        monkeypatch.setattr(method_checks, "_version", lambda _: (3, 0))
        assert "sentry_sdk.integrations.http is in the path of" in model_checks._look(model).trouble
        monkeypatch.undo()
        model.root_client._client.send = Recorder().by_replacement(model.root_client._client.send)
        assert f"{THEIRS} is in the path of" in silent.trouble()

    def test_of_an_sdk_of_another_make_are_refused(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Its classes are of an installed distribution, known here or not."""
        sdk, model = distribution("someprovider", Models, monkeypatch), made(fresh())
        models = sdk.Models()
        vars(model)["client"] = Client(models=models)
        silent = silence(model)
        assert silent.trouble() == ""
        monkeypatch.setattr(sdk.Models, "generate_content", Recorder().by_wraps(sdk.Models.generate_content))
        assert f"{THEIRS} is in the path of Models.generate_content" in silent.trouble()

    def test_of_any_package_but_a_known_recorder_are_accepted_where_the_operator_names_it(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from openai.resources.chat.completions import Completions

        monkeypatch.setattr(method_checks, "_named", ())
        monkeypatch.setattr(Completions, "create", Recorder().by_wrapt(Completions.create))
        with pytest.raises(UnsilencableModelError, match=r"call allow_wrappers\('" + THEIRS):
            silence(offline_chat())
        early = model_checks.PromptPath(offline_chat())
        allow_wrappers(THEIRS.rpartition(".")[0])
        assert silence(offline_chat()).ask(request(), retry=ONCE).answer is not None
        assert THEIRS in early.trouble(), "models that were built before go by what was named then"
        monkeypatch.setattr(Completions, "create", known().by_wrapt(Completions.create))
        with pytest.raises(UnsilencableModelError, match="langfuse is in the path of"):
            silence(offline_chat())

    def test_of_a_class_with_the_name_of_the_http_client_s_base_are_refused(self) -> None:
        class BaseClient:
            """Another SDK's: what Sentry does there is not about HTTP."""

            send = types.FunctionType(http().Client.send.__code__, {"__name__": "sentry_sdk.integrations.http"})

        mine = made(fresh())
        vars(mine)["client"] = BaseClient()
        with pytest.raises(
            UnsilencableModelError, match=r"sentry_sdk\.integrations\.http is in the path of BaseClient\.send"
        ):
            silence(mine)


class TestCompanyInFieldsOfNoName:
    """A pydantic model that allows extra fields holds them apart from those it declares."""

    @pytest.mark.parametrize(
        "thing", [BaseCallbackHandler(), FakeListLLM(responses=["a"])], ids=["handler", "runnable"]
    )
    @pytest.mark.parametrize("wrap", [lambda thing: thing, lambda thing: [thing]], ids=["itself", "in a list"])
    def test_is_refused(self, thing: Any, wrap: Any) -> None:
        kind = fresh(model_config={"extra": "allow"})
        with pytest.raises(UnsilencableModelError, match="held"):
            silence(kind(answer=fixed({VOTE: 1.0}), held=wrap(thing)))

    def test_is_not_seen_in_a_plain_value(self) -> None:
        kind = fresh(model_config={"extra": "allow"})
        assert silence(kind(answer=fixed({VOTE: 1.0}), held=["a", 1])).trouble() == ""


def of(module: str, *bases: type, **attributes: Any) -> Any:
    """A class of a package."""
    return type("Theirs", bases, {"__module__": module, **attributes})


class TestRecordersThatAreClasses:
    """A class of a recorder's package has nothing foreign in it: there, it is at home."""

    @pytest.mark.parametrize("is_derived", [False, True], ids=["itself", "derived"])
    def test_models_are_refused(self, is_derived: bool) -> None:
        kind = of("langfuse.langchain", ScriptedChat)
        kind = type("Mine", (kind,), {"__module__": __name__}) if is_derived else kind
        with pytest.raises(UnsilencableModelError, match=f"langfuse is in the path of {kind.__name__}"):
            silence(made(kind))

    @pytest.mark.parametrize("attributes", [{}, {"post": openai.OpenAI.post}], ids=["empty", "with a method"])
    def test_clients_are_refused(self, attributes: dict[str, Any]) -> None:
        with pytest.raises(UnsilencableModelError, match="langfuse is in the path of Theirs"):
            silence(offline_chat(of("langfuse.openai", openai.OpenAI, **attributes)))

    @pytest.mark.parametrize("client", [of("portkey_ai.api")(), MagicMock()], ids=["portkey_ai", "unittest"])
    def test_clients_of_no_known_sdk_are_refused(self, request: pytest.FixtureRequest, client: Any) -> None:
        model = made(fresh())
        vars(model)["client"] = client
        with pytest.raises(UnsilencableModelError, match=f"{request.node.callspec.id} is in the path of"):
            silence(model)

    def test_http_clients_are_refused(self) -> None:
        model = offline_chat()
        model.root_client._client = of("logfire.http", http().Client)()
        with pytest.raises(UnsilencableModelError, match="logfire is in the path of Theirs"):
            silence(model)

    @pytest.mark.parametrize("place", ["transport", "inside another", "mounts"])
    def test_transports_are_refused(self, place: str) -> None:
        theirs = of("opentelemetry.instrumentation.httpx", http().BaseTransport)()
        outer = of("mine", http().BaseTransport)()
        outer.inner = theirs
        given = {"transport": theirs, "inside another": outer, "mounts": {"https://": theirs}}[place]
        with pytest.raises(
            UnsilencableModelError, match=r"opentelemetry\.instrumentation\.httpx is in the path of Theirs"
        ):
            silence(offline_chat(**{"mounts" if place == "mounts" else "transport": given}))
        outer.inner = None
        assert silence(offline_chat(mounts={"https://": outer})).trouble() == ""

    def test_transports_that_are_mounted_later_are_refused(self) -> None:
        model = offline_chat()
        silent, mounts = silence(model), model.root_client._client._mounts
        assert silent.trouble() == ""
        mounts["https://"] = of("opentelemetry.instrumentation.httpx", http().BaseTransport)()
        assert "opentelemetry.instrumentation.httpx is in the path of Theirs" in silent.trouble()
        mounts.clear()
        assert silent.trouble() == ""


def a_users_hook(request: Any) -> None:
    """Not `print`: Ray replaces that in the process that has imported it."""


class TestHooksOfTheHTTPClient:
    def test_of_users_are_accepted_and_of_recorders_refused(self) -> None:
        silence(offline_chat(event_hooks={"request": [a_users_hook, Recorder().by_replacement(a_users_hook)]}))
        with pytest.raises(UnsilencableModelError, match=r"langfuse is in the path of Client\.event_hooks"):
            silence(offline_chat(event_hooks={"response": [a_users_hook, known().by_replacement(a_users_hook)]}))

    def test_of_the_sdk_of_the_model_are_accepted_and_of_others_refused(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """OpenAI's client for Azure puts one on the client that it is given."""
        from langchain_openai import AzureChatOpenAI

        options: Any = {"azure_endpoint": "http://here", "api_version": "1", "api_key": "none", "model": "m"}
        clients = {"http_client": in_memory(), "http_async_client": http().AsyncClient()}
        for name, client in clients.items():
            assert silence(AzureChatOpenAI(**options, **{name: client})).trouble() == ""
            assert client.event_hooks["request"]
        shared = offline_chat()
        shared.root_client._client.event_hooks["request"] += clients["http_client"].event_hooks["request"]
        assert silence(shared).trouble() == ""
        foreign = vars(distribution("apm_agent", Models, monkeypatch).Models)["generate_content"]
        for client in clients.values():
            client.event_hooks["request"].append(foreign)
        for name, client in clients.items():
            with pytest.raises(
                UnsilencableModelError, match=r"apm_agent is in the path of (Async)?Client\.event_hooks"
            ):
                silence(AzureChatOpenAI(**options, **{name: client}))

    def test_in_a_wrapper_of_the_sdk_of_the_model_are_refused(self) -> None:
        from openai._utils import asyncify

        model = offline_chat()
        hooks = model.root_async_client._client.event_hooks["request"]
        hooks.append(asyncify(known().by_replacement(a_users_hook)))
        with pytest.raises(UnsilencableModelError, match=r"is in the path of .*event_hooks"):
            silence(model)
        hooks.clear()

    def test_of_an_sdk_that_is_not_of_the_model_are_refused(self) -> None:
        from langchain_openai import AzureChatOpenAI

        given = http().Client()
        AzureChatOpenAI(azure_endpoint="http://here", api_version="1", api_key="none", model="m", http_client=given)
        other = stock("ChatAnthropic").model_copy()
        hooks = other._client._client.event_hooks["request"]
        hooks += given.event_hooks["request"]
        try:
            with pytest.raises(UnsilencableModelError, match=r"openai\.lib\.azure is in the path of .*event_hooks"):
                silence(other)
        finally:
            hooks.clear()

    @pytest.mark.parametrize("is_in_place", [False, True], ids=["set", "appended"])
    def test_that_come_later_are_refused(self, is_in_place: bool) -> None:
        model, hook = offline_chat(), known().by_an_object(a_users_hook)
        silent, client = silence(model), model.root_client._client
        assert silent.trouble() == ""
        if is_in_place:
            client.event_hooks["request"].append(hook)
        else:
            client.event_hooks = {"request": [hook]}
        assert "langfuse is in the path of Client.event_hooks" in silent.trouble()


def distribution(name: str, kind: type, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A module with a class that looks as if it were of an installed distribution."""
    module = types.ModuleType(name)
    module.__file__ = f"/usr/lib/python3/site-packages/{name}.py"
    functions = {
        key: types.FunctionType(value.__code__.replace(co_filename=module.__file__), vars(module), key)
        for key, value in vars(kind).items()
        if type(value) is types.FunctionType
    }
    for function in functions.values():
        function.__qualname__ = function.__code__.co_qualname
    vars(module)[kind.__name__] = type(kind.__name__, (), {**functions, "__module__": name})
    monkeypatch.setitem(sys.modules, name, module)
    return module


class Models:
    """What calls pass in an SDK of another make."""

    def generate_content(self, text: str) -> str:
        return text


class Client:
    """A client of such an SDK, or a part of it."""

    def __init__(self, **parts: Any) -> None:
        vars(self).update(parts)


DEPTHS = {
    "client": lambda models: models,
    "client.models": lambda models: Client(models=models),
    "client.aio.models": lambda models: Client(aio=Client(models=models)),
}


class TestClientsOfAnySDK:
    @pytest.mark.parametrize("depth", DEPTHS)
    @pytest.mark.parametrize("way", ["by_wrapt", "by_wraps", "by_replacement", "by_an_object"])
    def test_are_refused_with_a_known_recorder_in_them(
        self, monkeypatch: pytest.MonkeyPatch, depth: str, way: str
    ) -> None:
        model, models = made(fresh()), Models()
        vars(model)["client"] = DEPTHS[depth](models)
        silent, message = silence(model), "langfuse is in the path of Models.generate_content"
        for owner in (Models, models):
            method = owner.generate_content
            monkeypatch.setattr(owner, "generate_content", getattr(Recorder(), way)(method))
            assert silent.trouble() == ""
            monkeypatch.setattr(owner, "generate_content", getattr(known(), way)(method))
            assert message in silent.trouble()
            with pytest.raises(UnsilencableModelError, match=message):
                silence(model)
            monkeypatch.undo()
            assert silent.trouble() == ""

    def test_are_refused_once_a_part_is_replaced(self) -> None:
        model = made(fresh())
        client = vars(model)["client"] = Client(models=Models())
        silent = silence(model)
        assert silent.trouble() == ""
        client.models = of("opentelemetry.instrumentation.google_genai", Models)()
        assert "opentelemetry.instrumentation.google_genai is in the path of Theirs" in silent.trouble()

    def test_are_refused_for_the_http_client_below(self) -> None:
        model = made(fresh())
        transport = of("opentelemetry.instrumentation.httpx", http().BaseTransport)()
        below = Client(api=Client(http=Client(inner=http().Client(transport=transport))))
        vars(model)["async_client"] = below
        with pytest.raises(UnsilencableModelError, match=r"opentelemetry\.instrumentation\.httpx is in the path of"):
            silence(model)

    def test_are_looked_at_without_asking_them_for_anything(self) -> None:
        """Some answer to any name, by a call, and some to none."""

        class Answering(Client):
            model_fields = property(len)

            def __getattr__(self, name: str) -> Any:
                asked.append(name)
                return Client(items=print)

        class Locked:
            def __getattribute__(self, name: str) -> Any:
                raise RuntimeError("nothing to see")

        asked: list[str] = []
        model = made(fresh())
        vars(model)["client"] = Client(answering=Answering(models=Models()), locked=Locked())
        assert silence(model).trouble() == ""
        assert set(asked) <= {"base_url"}

    def test_are_looked_at_where_a_model_has_them_and_nowhere_else(self) -> None:
        """What a user's own object holds is the user's."""
        model = made(fresh())
        vars(model)["log"] = Client(theirs=of("langfuse.client")())
        assert silence(model).trouble() == ""


class TestTheCheck:
    @pytest.mark.parametrize("name", [*STOCK, "mine"])
    def test_takes_little_time_per_call(self, name: str) -> None:
        silent = silence(made(fresh()) if name == "mine" else stock(name))
        # 3 to 30 microseconds on a free core; the least of many is compared with ten times that.
        assert min(timeit.repeat(silent.trouble, number=10, repeat=50, timer=time.thread_time)) / 10 < 300e-6

    def test_looks_again_only_when_something_has_changed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        looks: list[Any] = []

        def look(model: Any, named: Any) -> Any:
            looks.append(model)
            return seen(model, named)

        seen = model_checks._look
        kind = fresh()
        silent = silence(made(kind))
        monkeypatch.setattr(model_checks, "_look", look)
        for _ in range(5):
            silent.ask(request(), retry=ONCE)
        assert looks == []
        monkeypatch.setattr(kind, "another", 1, raising=False)
        for _ in range(5):
            silent.ask(request(), retry=ONCE)
        assert len(looks) == 1

    def test_holds_for_a_class_that_changes_while_it_is_read(self) -> None:
        class Changing(tuple[Any, ...]):
            __slots__ = ()

            def __iter__(self) -> Iterator[Any]:
                raise RuntimeError("dictionary changed size during iteration")

        assert ModelSnapshot([(Changing((1,)), (1,))], "").is_old()
        assert not ModelSnapshot([((1,), (1,))], "").is_old()

    def test_sees_what_moved_from_one_place_to_another(self) -> None:
        first, second = [1], [2, 3]
        sight = ModelSnapshot([(first, (1,)), (second, (2, 3))], "")
        assert not sight.is_old()
        first.append(second.pop(0))
        assert sight.is_old()

    def test_is_not_deceived_by_what_says_that_it_is_the_same(self) -> None:
        class Proxy:
            def __eq__(self, other: object) -> bool:
                return True

            __hash__ = object.__hash__

        was = object()
        held = [was]
        sight = ModelSnapshot([(held, (was,))], "")
        held[0] = Proxy()
        assert sight.is_old()

    def test_is_made_before_each_call_of_a_batch(self) -> None:
        kind, recorder = fresh(), known()
        original = vars(kind)["_generate"]

        def answer_and_be_instrumented(_: str) -> dict[str, float]:
            setattr(kind, "_generate", recorder.by_wraps(original))  # noqa: B010
            return {VOTE: 1.0}

        calls = CallPool(silence(kind(answer=answer_and_be_instrumented)), ONCE, 1)
        assert [reply.fault for reply in calls.many([request()] * 3)] == [None, "content", "content"]
        assert recorder.seen == []


class TestSpansOfTheSDK:
    """Anthropic's clients draw a span for each call: with its tokens, and with its messages if they are asked to."""

    @pytest.mark.parametrize("content", ["", "content"])
    def test_are_off_in_the_silent_copy_only(self, monkeypatch: pytest.MonkeyPatch, content: str) -> None:
        monkeypatch.setenv("ANTHROPIC_OPEN_TELEMETRY_TRACES_CONTENT_MODE", content)
        model = Provider("http://127.0.0.1:9", []).models["ChatAnthropic"]()
        if not hasattr(model._client, "open_telemetry"):
            pytest.skip("this SDK of Anthropic draws no spans")
        silent = silence(model)._model
        for part in ("_client", "_async_client"):
            assert getattr(silent, part).open_telemetry["traces"]["enabled"] is False
            assert getattr(model, part).open_telemetry["traces"]["enabled"] is True
            assert getattr(model, part)._otel.records_content == bool(content)
            assert getattr(silent, part).api_key == "none"


GATEWAYS = {"true": "https://gateway.smith.langchain.com", "http://gateway.local:80/": "http://gateway.local:80"}


class TestTheGateway:
    @pytest.mark.parametrize("switch", GATEWAYS)
    @pytest.mark.parametrize("name", ["ChatOpenAI", "OpenAIDecisions", "ChatAnthropic"])
    def test_a_model_that_it_rerouted_is_refused(self, monkeypatch: pytest.MonkeyPatch, name: str, switch: str) -> None:
        given = pytest.importorskip("langchain_core.utils._gateway", reason="this langchain-core has no gateway")
        assert given
        for variable in ("OPENAI_API_BASE", "OPENAI_BASE_URL", "ANTHROPIC_API_URL", "ANTHROPIC_BASE_URL"):
            monkeypatch.delenv(variable, raising=False)
        monkeypatch.setenv("LANGSMITH_GATEWAY", switch)
        kind = type(stock(name))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            rerouted, told = (kind(model="m", api_key="none", **more) for more in ({}, {"base_url": "http://here/v1"}))
        assert GATEWAYS[switch] in json.dumps(vars(rerouted), default=str)
        with pytest.raises(UnsilencableModelError, match=r"LangSmith gateway.*unset LANGSMITH_GATEWAY, or .*base_url="):
            silence(rerouted)
        assert silence(told).trouble() == ""
        monkeypatch.setenv("LANGSMITH_GATEWAY", "false")
        if switch == "true":
            with pytest.raises(UnsilencableModelError, match="LangSmith gateway"):
                silence(rerouted)

    def test_a_model_whose_client_holds_the_address_is_refused(self) -> None:
        """As completion models do, which have no field for it, on any langchain-core."""

        class Client:
            base_url = "https://gateway.smith.langchain.com/openai/v1"

        model = made(fresh())
        vars(model)["client"] = Client()
        with pytest.raises(UnsilencableModelError, match="LangSmith gateway"):
            silence(model)


class TestInstrumentationThatPeopleUse:
    """Each in a process of its own, as it stays. Naive calls of the same models show that it works."""

    @staticmethod
    def lines(*which: str) -> dict[tuple[str, str], dict[str, Any]]:
        program = [sys.executable, "-m", "tests.unit_tests.backends.instrumented", *which]
        done = subprocess.run(program, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
        assert done.returncode == 0, done.stderr[-2000:]
        found = [json.loads(line) for line in done.stdout.splitlines()]
        return {(line["phase"], line["model"]): line for line in found}

    @staticmethod
    def check(found: dict[str, Any], *, refused: str = "", is_overheard: bool = True) -> None:
        assert found["naive"] == is_overheard
        assert found["sent_naively"] >= 1
        assert canaries_in(" ".join(found["sent"])) == []
        if refused:
            assert f"cannot be called in silence: {refused} is in the path of" in found["refused"]
        else:
            assert found["refused"] == ""

    @pytest.mark.loopback
    def test_is_refused_or_hears_nothing(self) -> None:
        """In one test, as most of the time goes into imports, which processes share where they can be forked."""
        programs = ("otel", "sentry", "embeddings")
        several = [programs] if sys.platform == "linux" else [(one,) for one in programs]
        seen = {key: line for some in several for key, line in self.lines(*some).items()}
        self.check_embeddings({key[0]: seen.pop(key) for key in [*seen] if key[1] == "embeddings"})
        self.check_sentry({key: line for key, line in seen.items() if key[0].startswith("Sentry")})
        self.check_opentelemetry({key: line for key, line in seen.items() if not key[0].startswith("Sentry")})

    @staticmethod
    def check_embeddings(lines: dict[str, dict[str, Any]]) -> None:
        assert [*lines] == ["none", "OpenTelemetry", "OpenTelemetry, taken off", "Sentry"]
        assert {phase for phase, line in lines.items() if line["naive"]} >= {"OpenTelemetry", "Sentry"}
        assert {phase: line["refused"] for phase, line in lines.items() if line["refused"]} == {
            "OpenTelemetry": "opentelemetry.instrumentation.openai",
            "Sentry": "sentry_sdk.integrations.langchain",
        }
        assert [line["late"] for line in lines.values()] == [[True, True], [False, False], [True, True], [False, False]]
        assert [line["seen"] for line in lines.values()] == [[]] * 4

    def check_opentelemetry(self, lines: dict[tuple[str, str], dict[str, Any]]) -> None:
        self.check(lines["no instrumentation", "ChatAnthropic"], is_overheard=False)  # it counts tokens
        self.check(lines["the SDK's own content mode", "ChatAnthropic"])
        self.check(lines["OpenInference", "ChatOpenAI"])
        self.check(lines["OpenTelemetry langchain without propagation", "ChatOpenAI"])
        self.check(lines["OpenTelemetry langchain without propagation", "OpenAIDecisions"])
        self.check(lines["OpenTelemetry openai", "OpenAIDecisions"])
        for name in ("openai", "anthropic", "langchain"):
            client = "ChatAnthropic" if name == "anthropic" else "ChatOpenAI"
            found = lines[f"OpenTelemetry {name}", client]
            self.check(found, refused=f"opentelemetry.instrumentation.{name}")
        self.check(lines["OpenTelemetry openai", "OpenAI"], refused="opentelemetry.instrumentation.openai")
        self.check(lines["OpenTelemetry langchain", "OpenAI"], refused="opentelemetry.instrumentation.langchain")
        assert "disable_trace_context_propagation=True" in lines["OpenTelemetry langchain", "OpenAI"]["refused"]
        assert lines["OpenTelemetry anthropic, taken off", "ChatAnthropic"]["refused"] == ""
        assert [line["sent"] for line in lines.values()] == [[]] * len(lines)
        assert all(line["refused"] or line["faults"] == [None, None] for line in lines.values())

    def check_sentry(self, lines: dict[tuple[str, str], dict[str, Any]]) -> None:
        """Its error events hold the local variables of every frame, its spans the messages."""
        for name in ("ChatOpenAI", "OpenAI", "ChatAnthropic"):
            self.check(lines["Sentry", name])
        self.check(lines["Sentry", "OpenAIDecisions"], is_overheard=False)
        self.check(lines["Sentry", "a failing model"])
        assert lines["Sentry", "a failing model"]["faults"] == ["content", "content"]
        for (phase, _), line in lines.items():
            if phase == "Sentry":  # the caller's own transaction, and in it no HTTP request, log line or error
                (sent,) = map(json.loads, line["sent"])
                assert (sent["type"], sent["spans"], sent.get("breadcrumbs")) == ("transaction", [], None)
        for name, sdk in {"ChatOpenAI": "openai", "ChatAnthropic": "anthropic"}.items():
            self.check(lines["Sentry in the SDKs", name], refused=f"sentry_sdk.integrations.{sdk}")
            assert "disabled_integrations=[...]" in lines["Sentry in the SDKs", name]["refused"]


def test_every_known_recorder_is_a_top_level_package_and_no_decorator() -> None:
    assert all(name.isidentifier() for name in RECORDERS)
    assert not RECORDERS & DECORATORS

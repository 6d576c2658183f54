"""Sentry: its LangChain integration, its SDK integrations, and the frames it sends with an error."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

from tests.leaks.channels.registry import channel
from tests.leaks.channels.stock import anthropic_models, openai_models
from tests.leaks.models import both, failing
from tests.leaks.scene import Scene
from tests.leaks.sink import provider

ENVELOPES: list[str] = []


@functools.cache
def sentry() -> Any:
    """Sentry as `init()` sets it up, with the SDK integrations people add; personal data stays off."""
    import anthropic  # noqa: F401  integrations look for what is imported
    import openai  # noqa: F401
    import sentry_sdk
    from sentry_sdk.integrations.anthropic import AnthropicIntegration
    from sentry_sdk.integrations.openai import OpenAIIntegration
    from sentry_sdk.transport import Transport

    class Kept(Transport):
        def capture_envelope(self, envelope: Any) -> None:
            ENVELOPES.append(envelope.serialize().decode("utf-8", "replace"))

    sentry_sdk.init(
        dsn="http://key@127.0.0.1:1/1",
        transport=Kept,
        traces_sample_rate=1.0,
        send_default_pii=False,
        integrations=[OpenAIIntegration(), AnthropicIntegration()],
    )
    return sentry_sdk


def reported(scene: Scene) -> Iterator[None]:
    """The application reports what escapes, as its framework does."""
    sdk = sentry()
    ENVELOPES.clear()
    with sdk.start_transaction(name="application"):
        yield
        if scene.error is not None:
            sdk.capture_exception(scene.error)
    sdk.flush()
    scene.saw(*ENVELOPES)


@channel("Sentry: a failed run, frame locals", needs="R", group="sentry", fails=True)
def failed_run(scene: Scene) -> Iterator[None]:
    scene.models = both(answer=failing)
    yield from reported(scene)


@channel("Sentry: OpenAI integration, provider error", needs="R", group="sentry", fails=True, may_refuse=True)
def openai_error(scene: Scene) -> Iterator[None]:
    scene.models = openai_models(provider("fails")[0])
    yield from reported(scene)


@channel("Sentry: Anthropic integration, provider error", needs="R", group="sentry", fails=True, may_refuse=True)
def anthropic_error(scene: Scene) -> Iterator[None]:
    scene.models = anthropic_models(provider("fails")[0])
    yield from reported(scene)

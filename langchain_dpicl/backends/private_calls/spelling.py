"""How each LangChain class spells the options of a call: one table, for private and public calls."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from langchain_dpicl.backends.private_calls.method_checks import top_of

CAP, HEAT = "max_tokens", "temperature"
"""The names of two options here; `stop`, `logprobs` and `top_logprobs` have the same name in every class."""

OPTIONS, STOP = "options", "stop"
"""Arguments of a class with fields: `options` is a mapping that it sends in the place of its fields and of `stop`."""


class SpelledOptions(NamedTuple):
    """Options as one class takes them: arguments of its call, and fields of the copy that is called."""

    arguments: dict[str, Any]
    fields: dict[str, Any]


@dataclass(frozen=True)
class Spelling:
    """How one class spells the options of a call.

    Attributes:
      cap: its name of the most tokens of an answer.
      fields: options, by its own names, that are fields of the model; as arguments its client rejects them. An
        argument `options` takes them in, as the class then ignores its fields.
      greedy: what it takes in the place of temperature 0, which its server rejects.
      added: what every call sends besides, whatever else is asked for.
      is_text_only: whether it passes no log-probabilities on, so that it votes with its text without being probed.
    """

    cap: str = CAP
    fields: frozenset[str] = frozenset()
    greedy: Mapping[str, Any] = field(default_factory=lambda: {HEAT: 0.0})
    added: Mapping[str, Any] = field(default_factory=dict)
    is_text_only: bool = False

    def spell(self, options: Mapping[str, Any]) -> SpelledOptions:
        """Returns options in the names of the class; of two with the same name the later counts.

        >>> Spelling("num_predict", fields=frozenset({"num_predict"})).spell({"max_tokens": 5, "logprobs": True})
        SpelledOptions(arguments={'logprobs': True}, fields={'num_predict': 5})
        """
        spelled: dict[str, Any] = {}
        for name, value in options.items():
            spelled |= self.greedy if name == HEAT and value == 0.0 else {self.cap if name == CAP else name: value}
        spelled |= self.added
        fields = {name: spelled.pop(name) for name in self.fields & spelled.keys()}
        own = spelled.get(OPTIONS)
        if not self.fields or not isinstance(own, Mapping):
            return SpelledOptions(spelled, fields)
        # These replace the fields and the argument `stop`; one bound among them is dropped as a bound `stop` is.
        kept = {name: value for name, value in own.items() if name != STOP}
        asked = {name: spelled.pop(name) for name in (STOP,) if name in spelled}
        return SpelledOptions({**spelled, OPTIONS: kept | fields | asked}, {})


_OLLAMA_FIELDS = frozenset({"num_predict", HEAT})
_OLLAMA = Spelling("num_predict", fields=_OLLAMA_FIELDS)
_OLLAMA_TEXT = Spelling("num_predict", fields=_OLLAMA_FIELDS, is_text_only=True)
_GEMINI = Spelling("max_output_tokens", is_text_only=True)
_TEXT = Spelling(is_text_only=True)
_LITELLM = Spelling(added={"no-log": True, "caching": False})

# By package and name, so that no provider's package is imported.
SPELLINGS: Mapping[tuple[str, str], Spelling] = {
    ("langchain_anthropic", "ChatAnthropic"): _TEXT,
    ("langchain_anthropic", "AnthropicLLM"): _TEXT,
    ("langchain_aws", "ChatBedrockConverse"): _TEXT,
    ("langchain_google_genai", "ChatGoogleGenerativeAI"): _GEMINI,
    # TGI rejects temperature 0; without a temperature it takes the likeliest token.
    ("langchain_huggingface", "HuggingFaceEndpoint"): Spelling(
        "max_new_tokens", greedy={HEAT: None, "do_sample": False}, is_text_only=True
    ),
    ("langchain_litellm", "ChatLiteLLM"): _LITELLM,
    ("langchain_mistralai", "ChatMistralAI"): _TEXT,
    ("langchain_ollama", "ChatOllama"): _OLLAMA,
    ("langchain_ollama", "OllamaLLM"): _OLLAMA_TEXT,
}
"""The spelling of each class that has one of its own; subclasses inherit it."""

_USUAL = Spelling()


def spelling_of(model: Any) -> Spelling:
    """Returns the spelling of a model's class, or of its nearest base in the table; that of OpenAI's for any other."""
    keys = ((top_of(base.__module__), base.__name__) for base in type(model).__mro__)
    return next((SPELLINGS[key] for key in keys if key in SPELLINGS), _USUAL)

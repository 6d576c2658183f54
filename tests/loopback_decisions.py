"""What the loopback provider answers to POST /v1/decisions: a probability for every label, by the embedded model.

The request and response shapes are those of `openai.types.decision`; the confidence is one minus the normalised
entropy, which is an assumption: the documentation says only that it is derived from the distribution.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from tests.loopback_answers import Body, Manners, RejectedError, engine

CHOICES = (2, 255)


def decisions(body: Body, manners: Manners) -> Body:
    """Answers every question about the input, in order."""
    text, questions = _input(body.get("input")), body.get("questions")
    if not isinstance(questions, list) or not questions:
        raise RejectedError("Expected questions.", param="questions")
    answers = [_answer(question, text, manners) for question in questions]
    read = engine().count_tokens(text) + sum(engine().count_tokens(_instructions(one)) for one in questions)
    usage = {
        "input_tokens": read,
        "input_tokens_details": {"cache_write_tokens": 0, "cached_tokens": 0},
        "output_tokens": len(answers),
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": read + len(answers),
    }
    return {"model": str(body.get("model", manners.model)), "answers": answers, "usage": usage}


def _input(value: Any) -> str:
    """Returns the text of the input: a string, or messages of text parts."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list) or not value:
        raise RejectedError("Expected 'input' as a text or a list of messages.", param="input")
    return "\n\n".join(_content(message.get("content")) for message in value)


def _content(value: Any) -> str:
    parts = [{"type": "input_text", "text": value}] if isinstance(value, str) else value
    if not isinstance(parts, list) or any(part.get("type") != "input_text" for part in parts):
        raise RejectedError("This server reads text only.", param="input")
    return "\n\n".join(part["text"] for part in parts)


def _instructions(question: Body) -> str:
    """Returns what is asked; the name and the instructions of every question are checked here."""
    text, name = question.get("instructions"), question.get("name")
    if not isinstance(text, str) or not text or not isinstance(name, str | None):
        raise RejectedError("Expected 'instructions' as a text, and 'name' as a text if given.", param="questions")
    return text


def _answer(question: Body, text: str, manners: Manners) -> Body:
    instructions, name = _instructions(question), question.get("name")
    if manners.refuse and manners.refuse in f"{text} {instructions}":
        return {"type": "refusal", "name": name}
    if question.get("type") != "choice":
        raise RejectedError("Expected a choice question: this server answers no other.", param="questions")
    return {"type": "choice", "name": name, **_choice(question, f"{instructions}\n\n{text}")}


def _choice(question: Body, prompt: str) -> Body:
    choices = question.get("choices") or []
    values = [choice.get("value") for choice in choices]
    typed = {(type(value), value) for value in values}
    if not CHOICES[0] <= len(values) <= CHOICES[1] or len(typed) != len(values):
        raise RejectedError("Expected 2 to 255 different choices.", param="questions")
    if not all(isinstance(value, str | bool) for value in values):
        raise RejectedError("Expected choice values as texts or booleans.", param="questions")
    row = _spread(prompt, [value if isinstance(value, str) else str(value).lower() for value in values])
    listed = [{"value": value, "probability": float(p)} for value, p in zip(values, row, strict=True)]
    return {"choice": values[int(row.argmax())], "confidence": _confidence(row), "probabilities": listed}


def _spread(prompt: str, labels: Sequence[str]) -> np.ndarray:
    """Returns float64[labels]: the likelihoods of the labels as what follows the prompt, scaled to sum to 1."""
    scores = engine().score_choices([prompt], [f" {label}" for label in labels])[0]
    weights = np.exp(scores - scores.max())
    return weights / weights.sum()


def _confidence(row: np.ndarray) -> float:
    entropy = -math.fsum(float(p) * math.log(p) for p in row if p > 0)
    return min(1.0, max(0.0, 1.0 - entropy / math.log(len(row))))

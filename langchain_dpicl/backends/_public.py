"""What a public call or probe that failed tells: errors with advice. Knows no prompt; private calls never come here."""

from __future__ import annotations

from langchain_dpicl.backends.silent import Answer, Hidden, Reply
from langchain_dpicl.exceptions import CapabilityError, ModelCallError


def answered(name: str, reply: Reply) -> Hidden[Answer]:
    """Returns the answer to a public prompt.

    Raises:
      ModelCallError: nobody answered, or the call was rejected.
    """
    if reply.answer is None:
        raise ModelCallError(
            f"a public call to {name} failed ({_said(reply)}). Check the model and the length of the prompt, then call "
            "again"
        )
    return reply.answer


def probed(name: str, reply: Reply, *, asked: str, advice: str) -> Hidden[Answer]:
    """Returns the answer to a probe.

    Raises:
      ModelCallError: nobody answered.
      CapabilityError: the call was rejected; says what was `asked` for, and the `advice`.
    """
    if reply.fault in {"busy", "loop"}:
        raise ModelCallError(
            f"{name} could not be reached: a public probe got no answer ({_said(reply)}). Nothing was spent; check "
            "the address, the key and that the server is up, then build it again"
        )
    if reply.answer is None:
        raise CapabilityError(f"{name} rejected a public probe that asks for {asked} ({_said(reply)}). {advice}")
    return reply.answer


def _said(reply: Reply) -> str:
    return reply.detail.rstrip(". ") or "it did not say why"

"""What a record can make happen, and what a stop leaves behind: no error of its own, no private text in our frames."""

from __future__ import annotations

import asyncio
import sys
import traceback
from types import FrameType
from typing import Any

import numpy as np
import pytest

from langchain_dpicl import GenerationTask, Noise, Rows
from langchain_dpicl.backends.fake import FakeBackend, word_copier
from langchain_dpicl.backends.rows import rows
from langchain_dpicl.budget.handler import PrivacyBudgetCallbackHandler
from langchain_dpicl.exceptions import LedgerError
from langchain_dpicl.generation.synthesizer import DemonstrationSynthesizer
from langchain_dpicl.options import NoiseName
from langchain_dpicl.privacy.ledger.shares import Reservation
from langchain_dpicl.privacy.mechanisms.bounded import ProbabilitySum
from langchain_dpicl.privacy.mechanisms.release_plan import GumbelMechanism
from langchain_dpicl.privacy.private_examples import PrivateExamples
from langchain_dpicl.release import curator
from langchain_dpicl.tasks import GenerationTemplate
from tests.canary import OURS
from tests.doubles import WORDS, PanicError

CANARY = "zx-frame-canary"
COMMON = ["my card was declined"] * 150


class Faulty(FakeBackend):
    """Raises `error` at one step whenever a prompt holds the canary."""

    def __init__(self, error: BaseException, step: str) -> None:
        super().__init__(word_copier(WORDS), vocabulary=WORDS)
        self.error = error
        self.step = step

    def open(self, prompts: Any, prefix: Any) -> Any:
        marked = any(CANARY in prompt for prompt in prompts)
        if marked and self.step == "open":
            raise self.error
        return Session(super().open(prompts, prefix), self.error if marked else None, self.step)


class Session:
    def __init__(self, inner: Any, error: BaseException | None, step: str) -> None:
        self.inner = inner
        self.error = error
        self.step = step

    def _at(self, step: str) -> None:
        if self.error is not None and self.step == step:
            raise self.error

    def score(self, domain: Any) -> Any:
        self._at("score")
        return self.inner.score(domain)

    async def ascore(self, domain: Any) -> Any:
        self._at("score")
        return await self.inner.ascore(domain)

    def push(self, token: Any) -> None:
        self._at("push")
        self.inner.push(token)

    def close(self) -> None:
        self._at("close")
        self.inner.close()


def synthesizer(backend: Any, *, extra: str = CANARY, **options: Any) -> DemonstrationSynthesizer:
    given = {"rows": Rows(units=150, redraw_every=2), "noise": Noise(multiplier=0.3), **options}
    return DemonstrationSynthesizer.from_private_examples(
        PrivateExamples([*COMMON, extra], public_size=150),
        llm=backend,
        budget=PrivacyBudgetCallbackHandler(epsilon=300.0, delta=1e-5),
        instruction="Messages.",
        task=GenerationTask(record_prompt="{text}"),
        max_tokens=4,
        epsilon=200.0,
        **given,
    )


FAULTS = [
    PanicError("panic"),
    SystemExit(3),
    GeneratorExit(),
    asyncio.CancelledError(),
    ValueError(CANARY),
    MemoryError(),
]


@pytest.mark.parametrize("step", ["open", "score", "push", "close"])
@pytest.mark.parametrize("fault", FAULTS, ids=lambda e: type(e).__name__)
class TestWhateverARecordRaises:
    def test_the_run_goes_on_as_without_the_record(self, fault: BaseException, step: str) -> None:
        assert len(synthesizer(Faulty(fault, step)).run().examples) == 1

    def test_the_run_goes_on_async(self, fault: BaseException, step: str) -> None:
        assert len(asyncio.run(synthesizer(Faulty(fault, step)).arun()).examples) == 1


def locals_of_ours(error: BaseException) -> list[Any]:
    found: list[Any] = []
    todo: list[BaseException | None] = [error]
    while todo:
        current = todo.pop()
        if current is None:
            continue
        for frame, _ in traceback.walk_tb(current.__traceback__):
            if OURS in frame.f_code.co_filename:
                found += list(frame.f_locals.values())
        todo += [current.__cause__, current.__context__]
    return found


def shows_private(error: BaseException) -> list[str]:
    """Locals of our frames that are rows, or whose repr holds record text."""

    def is_private(value: Any) -> bool:
        looks = repr(value)
        full_box = isinstance(value, rows.OpaqueRows) and bool(value._rows)
        return full_box or isinstance(value, np.ndarray) or any(t in looks for t in (CANARY, "my card was", "array("))

    return [repr(value)[:80] for value in locals_of_ours(error) if is_private(value)]


def stop(*args: Any, **kwargs: Any) -> Any:
    raise KeyboardInterrupt


class TestAStop:
    @pytest.mark.parametrize(
        ("owner", "name"),
        [
            (GenerationTemplate, "record"),
            (FakeBackend, "open"),
            (FakeBackend, "_row"),
            (rows, "restrict"),
            (ProbabilitySum, "bounded_rows"),
            (GumbelMechanism, "release"),
        ],
        ids=["rendering", "opening", "scoring", "restricting", "bounding", "noising"],
    )
    def test_ctrl_c_leaves_nothing_private_in_our_frames(
        self, owner: Any, name: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        made = synthesizer(FakeBackend(word_copier(WORDS), vocabulary=WORDS))
        monkeypatch.setattr(owner, name, stop)
        if owner is rows:
            monkeypatch.setattr("langchain_dpicl.release.token_block.restrict", stop)
        with pytest.raises(KeyboardInterrupt) as caught:
            made.run()
        assert shows_private(caught.value) == []
        assert caught.value.run is made

    def test_ctrl_c_as_the_prompts_are_handed_on_would_find_none_of_them_under_a_name(self) -> None:
        made = synthesizer(FakeBackend(word_copier(WORDS), vocabulary=WORDS))
        named = []

        def look(frame: FrameType, event: str, arg: object) -> Any:
            # What these call runs inside `run_guarded`, which raises a stop anew from a frame without prompts.
            outer = frame.f_code.co_name in {"drawn", "<lambda>", "_renders", "_begin", "next_release"}
            if frame.f_code.co_filename != curator.__file__ or not outer:
                return None
            named.append(repr(list(frame.f_locals.values())))
            return look

        before = sys.gettrace()
        sys.settrace(look)
        try:
            made.run()
        finally:
            sys.settrace(before)
        assert named
        assert [looks for looks in named if CANARY in looks or "my card was" in looks] == []

    def test_a_ledger_that_fails_at_commit_leaves_no_rows_in_our_frames(self, monkeypatch: pytest.MonkeyPatch) -> None:
        made = synthesizer(FakeBackend(word_copier(WORDS), vocabulary=WORDS), rows=Rows(units=150))

        def full(self: Any, count: int = 1) -> None:
            raise LedgerError("disk full")

        monkeypatch.setattr(Reservation, "commit", full)
        with pytest.raises(LedgerError) as caught:
            made.run()
        assert shows_private(caught.value) == []

    def test_the_check_sees_what_it_should(self) -> None:
        """The same look finds rows in a frame that holds them (a frame of the package, made for the purpose)."""
        code = compile("def hold(rows):\n    raise ValueError\n", f"{OURS}planted.py", "exec")
        names: dict[str, Any] = {}
        exec(code, names)  # noqa: S102
        with pytest.raises(ValueError) as caught:
            names["hold"](np.ones((2, 2)))
        assert shows_private(caught.value)

    async def test_a_genuine_cancellation_still_cancels(self) -> None:
        class Slow(FakeBackend):
            def open(self, prompts: Any, prefix: Any) -> Any:
                session = super().open(prompts, prefix)

                class Waiting:
                    score, push, close = session.score, session.push, session.close

                    async def ascore(self, domain: Any) -> Any:
                        await asyncio.sleep(60)

                return Waiting()

        made = synthesizer(Slow(word_copier(WORDS), vocabulary=WORDS))
        task = asyncio.ensure_future(made.arun())
        await asyncio.sleep(0.2)
        task.cancel()
        with pytest.raises(asyncio.CancelledError) as caught:
            await task
        assert shows_private(caught.value) == []


@pytest.mark.parametrize("mechanism", ["gumbel", "gaussian", "permute_and_flip"])
def test_a_caller_s_numpy_error_state_turns_no_record_into_an_exception(mechanism: NoiseName) -> None:
    def odd(prompt: str, prefix: tuple[bytes, ...]) -> dict[str, float]:
        return {" my": 4.9e-322} if CANARY in prompt else {" my": 0.9, " card": 0.05}

    made = synthesizer(FakeBackend(odd, vocabulary=WORDS), noise=Noise(mechanism, multiplier=0.3), extra=CANARY)
    with np.errstate(all="raise"):
        assert made.run().examples


def test_a_progress_bar_whose_terminal_went_away_stops_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    made = synthesizer(FakeBackend(word_copier(WORDS), vocabulary=WORDS))

    def broken(self: Any, n: int = 1) -> None:
        raise BrokenPipeError

    monkeypatch.setattr("tqdm.std.tqdm.update", broken)
    assert made.run(progress=True).examples

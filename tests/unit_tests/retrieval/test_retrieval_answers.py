"""DPRetrievalFreeFormRunnable: keywords and embeddings of the private answers of those near a query, with noise."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from langchain_core.embeddings import Embeddings
from langchain_core.language_models import FakeListChatModel
from langchain_core.output_parsers import StrOutputParser
from langchain_core.runnables import RunnableLambda
from scipy import stats

from langchain_dpicl import (
    DPRetrievalFreeFormRunnable,
    DPRetrievalVotingRunnable,
    EmbeddingAnswers,
    FewShotTask,
    KeywordAnswers,
    LabelAnswers,
    Noise,
    PrivacyBudgetCallbackHandler,
    Serving,
)
from langchain_dpicl.backends.fake import FakeBackend
from langchain_dpicl.exceptions import ConfigurationError, ModelCallError, NoisyPlanWarning
from langchain_dpicl.free_form import NoisyKeywordAggregator
from langchain_dpicl.privacy.extensions.individual_filter import FILTER_TEMPLATE
from langchain_dpicl.privacy.extensions.normalized_sums import UnitVectorSum, VoteVectorSum
from langchain_dpicl.privacy.ledger import budget as ledger
from tests.contracts.front_room import shown_by
from tests.retrieval_doubles import CANARY, FRESH, NEAR, TASK, examples, house, records

pytestmark = pytest.mark.usefixtures("remembered_prices")

WORDS = ("syrup", "tablets", "rest")


def answers_as_it_reads(prompt: str, prefix: tuple[bytes, ...]) -> dict[str, float]:
    """Answers "syrup rest" where the row's document says yes, "tablets" where it says no, and "nothing" without one."""
    said = (" syrup", " rest") if "says yes" in prompt else (" tablets",) if "says no" in prompt else (" nothing",)
    return {said[len(prefix)]: 1.0} if len(prefix) < len(said) else {"": 1.0}


def engine() -> FakeBackend:
    return FakeBackend(answers_as_it_reads, vocabulary=[" syrup", " rest", " tablets", " nothing"])


class WordEmbeddings(Embeddings):
    """One direction for each word of an answer."""

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        return [[float(word in text) for word in WORDS] + [0.01] for text in texts]

    def embed_query(self, text: str) -> list[float]:
        raise AssertionError("not asked")


CLOSE = NEAR.replace(slots=4)
SPOKEN = KeywordAnswers(
    keywords=WORDS, num_keywords=2, writer=FakeListChatModel(responses=["written in public"]) | StrOutputParser()
)
CANDIDATES = ("tablets, please", "syrup and rest", "rest")
CHOSEN = EmbeddingAnswers(embeddings=WordEmbeddings(), candidates=CANDIDATES, writer=SPOKEN.writer)


def helper(*listed: Any, **options: Any) -> Any:
    """A component whose answers are results."""
    given: dict[str, Any] = {
        "llm": engine(),
        "retrieval": CLOSE,
        "noise": Noise(multiplier=0.01),
        "epsilon": 1e7,
        "answers": SPOKEN,
        "serving": FRESH,
        **options,
    }
    given.setdefault("budget", house())
    made = DPRetrievalFreeFormRunnable.from_private_examples(examples(*listed), **given).with_receipts()
    if isinstance(made.maker.space, NoisyKeywordAggregator) and made.plan.noise_multiplier == 0.01:
        made.maker.space.floor = 0.1  # seven deviations: noise alone reaches it on three words once in 10^12 answers
    return made


def test_the_keywords_of_those_near_are_told_and_written_from_until_they_are_exhausted() -> None:
    made = helper(*records("cough", "yes", 2), *records("fever", "no", 3))
    told = [made.invoke(f"cough {place}") for place in range(3)]
    assert [set(each.keywords) for each in told] == [{"syrup", "rest"}] * 2 + [set()]
    assert made.invoke("fever").keywords == ("tablets",)
    assert [each.answer for each in told] == ["written in public", "written in public", "abstain"]
    assert [each.abstained for each in told] == [False, False, True]
    assert made.share.remaining(FILTER_TEMPLATE) == 0
    assert isinstance(made.plan.release.aggregation, VoteVectorSum)


def test_an_answer_of_many_keywords_weighs_as_much_as_one_of_one() -> None:
    made = helper(*records("cough", "yes", 2), *records("cough", "no", 2), answers=SPOKEN.replace(num_keywords=1))
    assert made.invoke("cough").keywords == ("tablets",)  # 2 against 2 / sqrt(2) for each of the other two


def test_the_nearest_candidate_to_the_noisy_sum_is_the_answer() -> None:
    made = helper(*records("cough", "yes", 3), answers=CHOSEN.replace(candidates=CANDIDATES[:2]))
    assert made.invoke("cough").answer == "syrup and rest"
    assert isinstance(made.plan.release.aggregation, UnitVectorSum)
    assert made.plan.release.sensitivity.l2 == 2.0


@pytest.mark.parametrize("answers", [SPOKEN, CHOSEN, None], ids=["words", "candidates", "labels"])
def test_a_plan_whose_noise_is_above_all_rows_is_named_before_it_is_paid(answers: Any) -> None:
    def make(epsilon: float) -> Any:
        given: dict[str, Any] = {"retrieval": CLOSE, "epsilon": epsilon, "budget": house(), "llm": engine()}
        private = examples(*records("cough", "yes", 2))
        if answers is None:
            return DPRetrievalVotingRunnable.from_private_examples(private, task=TASK, **given)
        return DPRetrievalFreeFormRunnable.from_private_examples(private, answers=answers, **given)

    with pytest.warns(NoisyPlanWarning, match="the rows of one are 4 at most.*fewer participations, more slots or"):
        make(1.0)
    with warnings.catch_warnings():
        warnings.simplefilter("error", NoisyPlanWarning)
        make(1e7)


def test_nobody_is_asked_to_write_from_nothing() -> None:
    prompts: list[str] = []

    def writes(prompt: Any) -> str:
        prompts.append(prompt.to_string() if hasattr(prompt, "to_string") else str(prompt))
        return "made up"

    answers = SPOKEN.replace(writer=RunnableLambda(writes), abstain_answer="nothing is known")
    made = helper(answers=answers, serving=Serving(memo_size=9))
    for _ in range(2):
        told = made.invoke("cough")
        assert (told.answer, told.keywords, told.abstained) == ("nothing is known", (), True)
    assert len(prompts) == 1  # the zero-shot answer, before anybody was debited
    assert "Words that good answers" not in prompts[0]


@pytest.mark.parametrize(
    "answers", [SPOKEN.replace(keywords=None), CHOSEN.replace(candidates=None)], ids=["words", "c"]
)
def test_what_is_spent_asks_for_one_public_answer_and_for_no_candidates(answers: Any) -> None:
    said, prompts = list(CANDIDATES), list[str]()

    def writes(prompt: Any) -> str:
        prompts.append(str(prompt))
        return said[len(prompts) % len(said)]

    answers = answers.replace(writer=RunnableLambda(writes))
    made = helper(max_queries=1, answers=answers, serving=FRESH.replace(on_exhausted="zero_shot"))
    assert made.invoke("cough").receipt.source == "release"
    said[:] = ["it"]  # one text, and no keyword: a release could not be made of it
    prompts.clear()
    told = made.invoke("fever")
    assert (told.answer, told.receipt.source, len(prompts)) == ("it", "zero-shot", 1)


def test_of_the_answers_that_nobody_gave_most_are_none() -> None:
    """Of 300 queries that nobody takes part in at most one of twenty is answered; binomial, false alarm 1e-6."""
    made = helper(answers=CHOSEN, noise=Noise(multiplier=1.0))
    found = made.batch([f"cough {place}" for place in range(300)])
    answered = sum(not each.abstained for each in found)
    assert {each.answer for each in found if each.abstained} == {"abstain"}
    assert {each.answer for each in found if not each.abstained} <= set(CANDIDATES)
    assert stats.binomtest(answered, 300, 0.05, alternative="greater").pvalue > 1e-6
    assert answered < 300
    words = helper(noise=Noise(multiplier=1.0)).batch([f"cough {place}" for place in range(300)])
    assert stats.binomtest(sum(not each.abstained for each in words), 300, 0.05).pvalue > 1e-6


def test_the_floor_along_directions_is_what_noise_reaches_in_one_of_twenty_queries() -> None:
    """Second source: the normal law of the noise along one direction, and orthogonal ones of which each may pass."""
    plan = helper().plan
    for count in (1, 2, 20):
        one = stats.norm.sf(plan.noise_floor_along(count), scale=plan.noise_stddev)
        assert one * count == pytest.approx(0.05, rel=1e-9)
        assert 1.0 - (1.0 - one) ** count <= 0.05 + 1e-12


def test_an_abstention_is_told_again_by_another_process(tmp_path: Path) -> None:
    place, limits = tmp_path / "ledger.db", {"epsilon": 1e8, "delta": 1e-4}
    given: dict[str, Any] = {
        "component": "notes",
        "serving": Serving(memo=tmp_path / "memo.db", memo_size=9),
        "retrieval": CLOSE.replace(balances=tmp_path / "balances.db"),
    }
    first = helper(budget=PrivacyBudgetCallbackHandler.create(place, **limits), **given)
    assert first.invoke("cough").abstained
    ledger._IDENTITIES.clear()
    again = helper(budget=PrivacyBudgetCallbackHandler.open(place), **given).invoke("cough")
    assert (again.answer, again.abstained, again.receipt.source) == ("abstain", True, "memo")


def test_what_was_released_is_owed_until_it_is_written() -> None:
    class Broken(FakeListChatModel):
        def _call(self, *_: Any, **__: Any) -> str:
            raise RuntimeError("out")

    made = helper(*records("cough", "yes", 2), retrieval=CLOSE.replace(participations=1))
    whole, broken = made.maker, helper(answers=SPOKEN.replace(writer=Broken(responses=[""])))
    made.maker = replace(whole, public=broken.maker.public)
    with pytest.raises(ModelCallError):
        made.invoke("cough")  # out before anybody was debited
    assert made.share.remaining(FILTER_TEMPLATE) == 1
    made.maker = whole
    assert set(made.invoke("cough").keywords) == {"syrup", "rest"}


def test_nothing_private_shows() -> None:
    made = helper(*records("cough", "yes", 2))
    told = made.invoke("cough")
    for thing in (made, made.filter, made.maker, made.maker.space, made.plan, told, made.budget.report()):
        assert CANARY not in shown_by(thing)


def test_its_embeddings_are_those_of_the_documents_unless_told_otherwise() -> None:
    made = helper(answers=CHOSEN.replace(embeddings=None))
    assert made.maker.space.embeddings is made.filter.texts.embeddings


@pytest.mark.parametrize(
    ("build", "says"),
    [
        (lambda: helper(answers=LabelAnswers()), "answers"),
        (lambda: helper(top_k=3), "found 'top_k'"),
        (lambda: helper(retrieval=None), "similarity_threshold"),
        (lambda: helper(retrieval=CLOSE.replace(documents_per_unit=2)), "documents_per_unit"),
        (lambda: helper(task=FewShotTask(labels=("yes", "no"))), "no labels"),
        (lambda: helper(noise=Noise("gumbel", multiplier=1.0)), "'gaussian' noise"),
        (lambda: helper(answers=SPOKEN.replace(num_keywords=9)), "keywords"),
        (lambda: helper(answers=SPOKEN.replace(abstain_answer=" ")), "abstain_answer"),
        (lambda: helper(answers=CHOSEN.replace(abstain_answer="rest")), "abstain_answer"),
        (lambda: helper(budget="none"), "budget"),
    ],
)
def test_public_faults_are_refused(build: Callable[[], Any], says: str) -> None:
    with pytest.raises(ConfigurationError, match=says):
        build()

"""DPRetrievalFreeFormRunnable: keywords and embeddings of the private answers of those near a query, with noise."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from langchain_core.embeddings import Embeddings
from langchain_core.language_models import FakeListChatModel
from langchain_core.output_parsers import StrOutputParser
from langchain_core.runnables import RunnableLambda
from scipy import stats

from langchain_dpicl import DPRetrievalFreeFormRunnable, PrivacyBudgetCallbackHandler
from langchain_dpicl.backends.fake import FakeBackend
from langchain_dpicl.exceptions import ConfigurationError, ModelCallError
from langchain_dpicl.free_form.answers import NoisyKeywordAggregator
from langchain_dpicl.privacy.extensions.individual_filter import FILTER_TEMPLATE
from langchain_dpicl.privacy.extensions.unit_vector_sums import UnitVectorSum, VoteVectorSum
from langchain_dpicl.privacy.ledger import budget as ledger
from tests.contracts.front_room import shown_by
from tests.retrieval_doubles import CANARY, TopicEmbeddings, documents, examples, house, records

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


def helper(*listed: Any, **options: Any) -> DPRetrievalFreeFormRunnable:
    given: dict[str, Any] = {
        "llm": engine(),
        "candidates_llm": FakeListChatModel(responses=["written in public"]) | StrOutputParser(),
        "embeddings": TopicEmbeddings(),
        "keyword_domain": WORDS,
        "num_keywords": 2,
        "similarity_threshold": 0.5,
        "participations": 2,
        "num_slots": 4,
        "noise_multiplier": 0.01,
        "epsilon": 1e7,
        "memo_size": 0,
        "with_receipt": True,
        **options,
    }
    given.setdefault("budget", house())
    made = DPRetrievalFreeFormRunnable.from_private_examples(examples(*listed), **given)
    if isinstance(made.space, NoisyKeywordAggregator) and made.plan.noise_multiplier == 0.01:
        made.space.floor = 0.1  # seven deviations: noise alone reaches it on three words once in 10^12 answers
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
    made = helper(*records("cough", "yes", 2), *records("cough", "no", 2), num_keywords=1)
    assert made.invoke("cough").keywords == ("tablets",)  # 2 against 2 / sqrt(2) for each of the other two


def test_the_nearest_candidate_to_the_noisy_sum_is_the_answer() -> None:
    given: dict[str, Any] = {"aggregation": "embedding", "answer_embeddings": WordEmbeddings(), "keyword_domain": None}
    made = helper(*records("cough", "yes", 3), candidates=["tablets, please", "syrup and rest"], **given)
    assert made.invoke("cough").answer == "syrup and rest"
    assert isinstance(made.plan.release.aggregation, UnitVectorSum)
    assert made.plan.release.sensitivity.l2 == 2.0


def test_nobody_is_asked_to_write_from_nothing() -> None:
    prompts: list[str] = []

    def writes(prompt: Any) -> str:
        prompts.append(prompt.to_string() if hasattr(prompt, "to_string") else str(prompt))
        return "made up"

    made = helper(candidates_llm=RunnableLambda(writes), abstain_answer="nothing is known", memo_size=9)
    for _ in range(2):
        told = made.invoke("cough")
        assert (told.answer, told.keywords, told.abstained) == ("nothing is known", (), True)
    assert len(prompts) == 1  # the zero-shot answer, before anybody was debited
    assert "Words that good answers" not in prompts[0]


def test_of_the_answers_that_nobody_gave_most_are_none() -> None:
    """Of 300 queries that nobody takes part in at most one of twenty is answered; binomial, false alarm 1e-6."""
    given: dict[str, Any] = {"answer_embeddings": WordEmbeddings(), "keyword_domain": None, "noise_multiplier": 1.0}
    candidates = ["tablets, please", "syrup and rest", "rest"]
    made = helper(aggregation="embedding", candidates=candidates, **given)
    found = made.batch([f"cough {place}" for place in range(300)])
    answered = sum(not each.abstained for each in found)
    assert {each.answer for each in found if each.abstained} == {"abstain"}
    assert {each.answer for each in found if not each.abstained} <= set(candidates)
    assert stats.binomtest(answered, 300, 0.05, alternative="greater").pvalue > 1e-6
    assert answered < 300
    words = helper(noise_multiplier=1.0).batch([f"cough {place}" for place in range(300)])
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
    given: dict[str, Any] = {"component": "notes", "memo": tmp_path / "memo.db", "memo_size": 9}
    given["balances"] = tmp_path / "balances.db"
    first = helper(budget=PrivacyBudgetCallbackHandler.create(place, **limits), **given)
    assert first.invoke("cough").abstained
    ledger._IDENTITIES.clear()
    again = helper(budget=PrivacyBudgetCallbackHandler.open(place), **given).invoke("cough")
    assert (again.answer, again.abstained, again.receipt.source) == ("abstain", True, "memo")


def test_what_was_released_is_owed_until_it_is_written() -> None:
    class Broken(FakeListChatModel):
        def _call(self, *_: Any, **__: Any) -> str:
            raise RuntimeError("out")

    made = helper(*records("cough", "yes", 2), participations=1)
    whole, made.public = made.public, helper(candidates_llm=Broken(responses=[""])).public
    with pytest.raises(ModelCallError):
        made.invoke("cough")  # out before anybody was debited
    assert made.share.remaining(FILTER_TEMPLATE) == 1
    made.public = whole
    assert set(made.invoke("cough").keywords) == {"syrup", "rest"}


def test_nothing_private_shows() -> None:
    made = helper(*records("cough", "yes", 2))
    told = made.invoke("cough")
    for thing in (made, made.filter, made.space, made.plan, told, made.budget.report()):
        assert CANARY not in shown_by(thing)


def test_it_is_built_on_documents_with_balances_in_a_file(tmp_path: Path) -> None:
    budget = PrivacyBudgetCallbackHandler.create(tmp_path / "ledger.db", epsilon=1e8, delta=1e-4)
    made = DPRetrievalFreeFormRunnable.from_documents(
        documents(*records("cough", "yes", 2)),
        public_size=50,
        unit_key="patient",
        llm=engine(),
        candidates_llm=FakeListChatModel(responses=["written"]) | StrOutputParser(),
        embeddings=TopicEmbeddings(),
        similarity_threshold=0.5,
        participations=1,
        noise_multiplier=0.01,
        num_keywords=2,
        budget=budget,
        epsilon=1e7,
        component="notes",
        balances=tmp_path / "balances.db",
        memo=tmp_path / "memo.db",
        keyword_domain=WORDS,
    )
    assert made.invoke("cough") == "written"
    assert made.invoke("cough") == "written"
    assert made.share.remaining("query") == 99_999


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"aggregation": "votes"}, "aggregation"),
        ({"top_k": 3}, "may depend on that document"),
        ({"answer_embeddings": WordEmbeddings()}, "embeddings"),
        ({"num_candidates": 0}, "num_candidates"),
        ({"on_exhausted": "guess"}, "on_exhausted"),
        ({"num_keywords": 9}, "keywords"),
        ({"participations": -1}, "participations"),
        ({"budget": "none"}, "budget"),
        ({"abstain_answer": " "}, "abstain_answer"),
        ({"documents_per_row": 2}, "documents_per_row"),
    ],
)
def test_public_faults_are_refused(options: dict[str, Any], says: str) -> None:
    with pytest.raises((ConfigurationError, TypeError), match=says):
        helper(**options)

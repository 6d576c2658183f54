"""Questions that customers of an invented bank might ask: the private data of the demo, made here and about nobody.

Every sentence, name, shop and number comes out of the lists below; the seed fixes
the data (never any noise), so two runs see the same questions.
"""

from __future__ import annotations

import random

LABELS = ("card payment", "transfer", "cash withdrawal", "top up")

_FIRST = (
    "Maria Peter Amara Jonas Elif Tomasz Priya Lucas Ingrid Samuel Chloe Mateo Fatima Oscar Hannah Diego Yuki Nadia "
    "Callum Beatriz Anton Grace Ibrahim Sofia Ruben Meera Liam Katarina Joseph Leila Marco Astrid Daniel Zanele Felix "
    "Aisha Viktor Rosa Emil Naomi"
).split()
_LAST = (
    "Lopez Novak Okafor Lindqvist Demir Kowalski Sharma Moreau Haugen Adeyemi Bennett Fuentes Rahman Whitfield Keller "
    "Vargas Tanaka Petrova Fraser Carvalho Orlov Sinclair Hassan Marino Jansen Iyer Gallagher Horvat Mensah Karimi "
    "Ricci Solberg Abbott Dlamini Brandt Siddiqui Sokolov Medina Holm Blackwood"
).split()
_CITIES = (
    "Lisbon Leeds Krakow Oslo Seville Ghent Dublin Vienna Bristol Porto Turin Lyon Hamburg Gdansk Malmo Athens Cork "
    "Zagreb Basel Nantes Bergen Valencia Utrecht Cardiff Riga Bologna Tartu Antwerp Graz Split"
).split()
_SHOPS = (
    "Harbour Bakery|Northside Books|Olive and Thyme|Kettle Street Cafe|Bluebird Cycles|Marble Arch Shoes|Green Lantern "
    "Grocers|Old Mill Hardware|Silverline Travel|Copper Pot Kitchen|Meadow Pharmacy|Two Rivers Toys|Lantern Cinema|"
    "Fern and Clay|Dockside Records|Hilltop Garage|Paper Crane Gifts|Sunday Fish Market|Pinecone Outdoor|Velvet Lounge"
).split("|")
_MONTHS = ("January February March April May June July August September October November December").split()

_QUESTIONS = {
    "card payment": (
        "Why was I charged a fee for my card payment to {shop}?",
        "Why was my card payment of {amount} declined at {shop}?",
        "Why is my card payment to {shop} still pending?",
        "Why was my card payment of {amount} charged twice?",
        "My card payment at {shop} was declined.",
        "My card payment of {amount} is still pending.",
        "My card payment to {shop} was charged twice on {date}.",
        "I was charged a fee of {amount} for my card payment in {city}.",
        "I do not recognise a card payment of {amount} to {shop}.",
        "I made a card payment of {amount} at {shop} and it was declined.",
        "There is a card payment to {shop} on my account that I did not make.",
        "How do I get a refund for my card payment of {amount} to {shop}?",
    ),
    "transfer": (
        "Why has my transfer to {name} not arrived yet?",
        "Why has my transfer of {amount} to {name} not arrived?",
        "Why is my transfer to {name} still pending?",
        "Why was my transfer of {amount} declined?",
        "My transfer to {name} has not arrived yet.",
        "My transfer of {amount} to {name} has not arrived.",
        "My transfer to {name} in {city} was declined.",
        "I made a transfer of {amount} to {name} and it has not arrived.",
        "I made a transfer to the wrong account on {date}, can I cancel it?",
        "The transfer I made to {name} on {date} has not arrived.",
        "How long does a transfer to {city} take?",
        "Can I cancel my transfer of {amount} to {name}?",
    ),
    "cash withdrawal": (
        "Why was I charged a fee for my cash withdrawal in {city}?",
        "Why was I charged a fee of {amount} for my cash withdrawal?",
        "Why was my cash withdrawal of {amount} declined?",
        "Why is my cash withdrawal still pending?",
        "My cash withdrawal at the ATM in {city} was declined.",
        "My cash withdrawal of {amount} is still pending.",
        "I made a cash withdrawal of {amount} and got the wrong amount of cash.",
        "I was charged a fee for my cash withdrawal on {date}.",
        "I do not recognise a cash withdrawal of {amount} on my account.",
        "There is a cash withdrawal in {city} on my account that I did not make.",
        "The ATM in {city} gave me the wrong amount of cash.",
        "How much is the fee for a cash withdrawal in {city}?",
    ),
    "top up": (
        "Why was my top up of {amount} declined?",
        "Why has my top up not arrived in my account?",
        "Why is my top up of {amount} still pending?",
        "Why is there a fee for my top up by card?",
        "My top up of {amount} has not arrived in my account.",
        "My top up by card was declined on {date}.",
        "My top up is still pending in my account.",
        "I made a top up of {amount} and it is still pending.",
        "I made a top up by card in {city} and it was declined.",
        "The top up I made on {date} has not arrived in my account.",
        "How do I top up my account by card from {city}?",
        "Can I top up my account with {amount} in cash?",
    ),
}
_DETAILS = (
    "",
    "",
    "It happened on {date}.",
    "It was on {date} in {city}.",
    "My name is {name}.",
    "My name is {name} and I am in {city}.",
    "I have been waiting since {date}.",
    "Please call me back, {name}, {phone}.",
    "I was in {city} at the time.",
    "Thank you, {name}.",
)

_NEW_QUESTIONS = {
    "card payment": (
        "{shop} took {amount} from my card two times, what can I do?",
        "The shop says that paying by card did not work, but I can see the payment in the app.",
        "Somebody used my card at {shop} and I want the payment stopped.",
        "I paid {amount} with my card at {shop}, where does the extra fee come from?",
        "Is there a charge when I pay in {city} with my card?",
    ),
    "transfer": (
        "{name} says the money I transferred on {date} is not there.",
        "I sent {amount} to {name}, when will it be in their account?",
        "The money for {name} went to the wrong account, please cancel the transfer.",
        "When can the person in {city} expect the transfer I sent?",
        "I am trying to transfer {amount} to a friend and it fails.",
    ),
    "cash withdrawal": (
        "The machine in {city} gave me less cash than I asked for.",
        "I tried to withdraw {amount} and no cash came out of the ATM.",
        "What does it cost to get cash from an ATM in {city}?",
        "My app shows a withdrawal at an ATM where I have never been.",
        "I wanted to withdraw cash on {date}, but the ATM refused it.",
    ),
    "top up": (
        "I topped up with {amount} and my balance did not change.",
        "Topping up did not work on {date}, is something wrong with my card?",
        "Can somebody check whether my top up went through?",
        "I would like to add {amount} to my balance by card, how does topping up work?",
        "Is it possible to cancel a top up of {amount} that I just made?",
    ),
}
# Titles of a bank's help pages, which are public: four for each of `LABELS`, in their order.
PUBLIC_LINES = (
    "Why did a shop decline my card?",
    "What does it mean that a card payment is pending?",
    "How do I get a refund for something that I paid by card?",
    "What do card payments abroad cost?",
    "When does a transfer arrive?",
    "How do I cancel a transfer?",
    "How do I send money to somebody at another bank?",
    "Why did my transfer fail?",
    "How much cash can I take out in a day?",
    "What does a cash withdrawal abroad cost?",
    "What do I do if an ATM gives me too little cash?",
    "Where do I find the next ATM?",
    "How do I top up my account by card?",
    "When does a top up arrive on my balance?",
    "Can I top up in cash?",
    "Why was my top up declined?",
)
_NEW_FIRST = "Oliver Renata Goran Mireille Kofi Ayumi Stefan Ximena Bram Farah".split()
_NEW_LAST = "Castellano Oyelaran Dubois Nakamura Steiner Vukovic Lindgren Aziz Barros Whelan".split()
_NEW_CITIES = "Geneva Malaga Tallinn Bordeaux Sofia Aarhus Galway Genoa Leipzig Poznan".split()
_NEW_SHOPS = "Quayside Noodles|Amber Opticians|Rookery Sports|Elm Street Florist|Tidewater Deli".split("|")


def bank_questions(num_per_label: int = 1500, *, seed: int = 2024) -> list[dict[str, str]]:
    """Returns `num_per_label` questions for each of `LABELS`, shuffled, as {"text": ..., "label": ...}."""
    source = random.Random(seed)
    values = (_FIRST, _LAST, _CITIES, _SHOPS)
    records = [
        {"text": _question(source, _QUESTIONS[label], _DETAILS, values), "label": label}
        for label in LABELS
        for _ in range(num_per_label)
    ]
    source.shuffle(records)
    return records


def new_questions(num_per_label: int = 50, *, seed: int = 7) -> list[dict[str, str]]:
    """Returns questions to test on: other templates, names, cities and shops than `bank_questions` uses."""
    source = random.Random(seed)
    values = (_NEW_FIRST, _NEW_LAST, _NEW_CITIES, _NEW_SHOPS)
    records = [
        {"text": _question(source, _NEW_QUESTIONS[label], ("",), values), "label": label}
        for label in LABELS
        for _ in range(num_per_label)
    ]
    source.shuffle(records)
    return records


def _question(
    source: random.Random,
    questions: tuple[str, ...],
    details: tuple[str, ...],
    values: tuple[list[str], list[str], list[str], list[str]],
) -> str:
    """Fills one template, and perhaps one detail, with fresh values."""
    first, last, cities, shops = values
    template = f"{source.choice(questions)} {source.choice(details)}".strip()
    return template.format(
        name=f"{source.choice(first)} {source.choice(last)}",
        amount=f"${source.randint(5, 900)}.{source.randint(0, 99):02d}",
        date=f"{source.randint(1, 28)} {source.choice(_MONTHS)}",
        city=source.choice(cities),
        shop=source.choice(shops),
        phone=f"07{source.randint(100, 999)} {source.randint(100000, 999999)}",
    )

"""Notes that an invented clinic might take on the phone: the second private data of the demo, about nobody.

Every sentence, name and number comes out of the lists below; the seed fixes the data (never any noise), so two runs see
the same notes.
"""

from __future__ import annotations

import random

LABELS = ("teeth", "eyes", "heart", "skin")

_FIRST = (
    "Alma Bruno Carmen Dmitri Elena Farid Gloria Hugo Irene Jamal Klara Lorenzo Mina Nils Olga Pablo Quentin Rania "
    "Stella Theo Ulla Vera Walter Xenia Yusuf Zora Agnes Basil Clara Dario Edith Flora Gustav Helga Idris Jana"
).split()
_LAST = (
    "Achterberg Bellini Cordero Dvorak Eriksson Farouk Grimaldi Hofer Ivanova Jurado Kimura Larsen Mazur Nwosu Olsen "
    "Pereira Quist Romano Schuster Tamura Ulrich Vasquez Weiss Xavier Yilmaz Zeller Amari Bosch Costa Duarte"
).split()
_MONTHS = "January February March April May June July August September October November December".split()

_NOTES = {
    "teeth": (
        "Toothache on the {side} side since {day}.",
        "Toothache and swollen gums since {day}.",
        "Broken tooth on the {side} side, from a fall on {day}.",
        "Loose tooth and bleeding gums since {day}.",
        "Tooth pain when chewing, on the {side} side of the jaw.",
        "Tooth filling lost on {day}, pain when chewing.",
        "Bleeding gums when brushing teeth, since {day}.",
        "Wisdom teeth painful on the {side} side, swollen jaw.",
    ),
    "eyes": (
        "Blurred vision in the {side} eye since {day}.",
        "Blurred vision and red eyes since {day}.",
        "Eye pain on the {side} side, vision blurred.",
        "Eyes red and watering since {day}.",
        "Double vision when reading, since {day}.",
        "Eyes dry and red, new glasses needed.",
        "Vision worse in the {side} eye, new glasses needed.",
        "Eyelid swollen on the {side} eye since {day}.",
    ),
    "heart": (
        "Chest pain and fast heartbeat since {day}.",
        "Chest pain on the {side} side, heart attack feared.",
        "Heart beating fast at night, since {day}.",
        "Heart skipping beats since {day}, blood pressure high.",
        "High blood pressure and chest pain since {day}.",
        "Irregular heartbeat and short of breath since {day}.",
        "Blood pressure high since {day}, heart medicine used up.",
        "Heart attack in the family, chest pain on {day}.",
    ),
    "skin": (
        "Itchy skin rash on the {side} arm since {day}.",
        "Skin rash on the {side} leg, red and itchy.",
        "Dry skin and itchy spots since {day}.",
        "Red spots on the skin of the {side} arm.",
        "Skin burned by the sun on {day}, blisters.",
        "Itchy rash on the face since {day}.",
        "Mole on the {side} shoulder growing, skin dark.",
        "Skin peeling on the {side} hand since {day}.",
    ),
}
_DETAILS = (
    "",
    "Name: {name}.",
    "Born on {day} {year}.",
    "Name: {name}, born on {day} {year}.",
    "Call back {name}, {phone}.",
    "Call back on {phone}.",
)

_NEW_NOTES = {
    "teeth": (
        "Crown fell out while eating, molar aches.",
        "Wants braces for a child with crooked teeth.",
        "Dental cleaning wanted, last one was on {day}.",
        "Cavity in a molar, hurts with cold drinks.",
        "Jaw hurts, grinds teeth at night.",
    ),
    "eyes": (
        "Cannot see well at night when driving.",
        "Contact lens is stuck, eye burns.",
        "Something flew into the {side} eye while cycling.",
        "Asks for an eye test and new lenses.",
        "Sees flashes of light and dark spots floating.",
    ),
    "heart": (
        "Pulse races when climbing stairs.",
        "Pacemaker check is due in {month}.",
        "Pressure in the chest after sport on {day}.",
        "Cardiac medicine causes dizziness, pulse is slow.",
        "Had a stroke on {day}, pulse uneven.",
    ),
    "skin": (
        "Acne on the forehead got worse.",
        "Eczema between the fingers, cream does not help.",
        "Insect bite on the {side} ankle, swollen and itching.",
        "Sunburn with blisters on both shoulders.",
        "Wart on the {side} foot, wants it removed.",
    ),
}

# What a health site asks its readers: four lines for each of `LABELS`, in their order.
PUBLIC_LINES = (
    "Why do my gums bleed when I brush my teeth?",
    "What helps against toothache at night?",
    "Is a swollen jaw a sign of a bad tooth?",
    "How long does a tooth filling last?",
    "Why are my eyes red and dry?",
    "What causes blurred vision in one eye?",
    "Do I need new glasses?",
    "Why is my eyelid swollen?",
    "Is chest pain always a heart attack?",
    "What is a normal blood pressure?",
    "Why does my heart beat so fast?",
    "What is an irregular heartbeat?",
    "What causes an itchy skin rash?",
    "How do I treat dry skin on my hands?",
    "Are red spots on the skin dangerous?",
    "What helps when the sun has burned my skin?",
)


def clinic_notes(num_per_label: int = 1500, *, seed: int = 2025) -> list[dict[str, str]]:
    """Returns `num_per_label` notes for each of `LABELS`, shuffled, as {"text": ..., "label": ...}."""
    return _written(random.Random(seed), num_per_label, _NOTES, _DETAILS)


def new_notes(num_per_label: int = 50, *, seed: int = 8) -> list[dict[str, str]]:
    """Returns notes to test on: other templates than `clinic_notes` uses, and no names."""
    return _written(random.Random(seed), num_per_label, _NEW_NOTES, ("",))


def _written(
    source: random.Random, num_per_label: int, notes: dict[str, tuple[str, ...]], details: tuple[str, ...]
) -> list[dict[str, str]]:
    """Fills a template, and perhaps a detail, with fresh values for each note."""
    records = [
        {
            "text": f"{source.choice(notes[label])} {source.choice(details)}".strip().format(
                name=f"{source.choice(_FIRST)} {source.choice(_LAST)}",
                phone=f"07{source.randint(100, 999)} {source.randint(100000, 999999)}",
                day=f"{source.randint(1, 28)} {source.choice(_MONTHS)}",
                month=source.choice(_MONTHS),
                year=source.randint(1935, 2012),
                side=source.choice(("left", "right")),
            ),
            "label": label,
        }
        for label in LABELS
        for _ in range(num_per_label)
    ]
    source.shuffle(records)
    return records

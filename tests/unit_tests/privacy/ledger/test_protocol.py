"""The ledger's protocol: no state of the small scenes and no schedule of the real writer is wrong; plants are found."""

from __future__ import annotations

import re

import pytest

from tests.faults.counts import Violation
from tests.protocol import schedules
from tests.protocol.model import Model
from tests.protocol.scenes import PLANTS, SMALL
from tests.protocol.slips import SLIPS

SCHEDULES = 150
ENOUGH = 400
"""Schedules within which every slip is found."""
FINDS = {
    "commits whose answer was lost are taken for written": 353,
    "commits whose answer was lost are written again": 35,
    "the purse is filled before the line is durable": 58,
    "what went back of a lease that waits enters the purse": 65,
    "a ticket of the purse is handed out twice": 95,
    "the purse does not name the cap": 33,
    "a flush does not look for its line": 216,
}
"""A schedule that finds the slip, tried first; where the writer has changed since, all are tried."""


@pytest.mark.parametrize("name", SMALL)
def test_no_order_of_steps_and_faults_grants_what_the_disk_does_not_hold(name: str) -> None:
    scene = SMALL[name]
    found = Model(scene).search()
    assert (found.fault, found.trace) == ("", ())
    assert found.is_complete
    assert found.states > 300
    assert found.reads == scene.tickets  # the scene gets as far as using all of them


@pytest.mark.parametrize("plant", PLANTS)
def test_a_planted_mistake_of_the_protocol_is_found(plant: str) -> None:
    scene, fault = PLANTS[plant]
    found = Model(scene, plant).search()
    assert fault in found.fault
    assert found.trace


def test_the_scenes_of_planted_mistakes_are_sound_without_them() -> None:
    for scene in {scene for scene, _ in PLANTS.values() if not scene.copies}:
        assert Model(scene).search().fault == ""


@pytest.mark.usefixtures("simple_prices")
def test_no_schedule_of_the_real_writer_burns_what_the_disk_does_not_hold() -> None:
    found = [schedules.run(seed) for seed in range(SCHEDULES)]
    lines, burnt = (sum(numbers) for numbers in zip(*found, strict=True))
    assert lines > SCHEDULES
    assert burnt > SCHEDULES


@pytest.mark.usefixtures("simple_prices")
@pytest.mark.parametrize("slip", SLIPS)
def test_a_slip_of_the_real_writer_is_found(slip: str, monkeypatch: pytest.MonkeyPatch) -> None:
    patch, fault = SLIPS[slip]
    patch(monkeypatch)
    for seed in (FINDS.get(slip, 0), *range(ENOUGH)):
        try:
            schedules.run(seed)
        except Violation as violation:
            if re.search(fault, str(violation)):
                return
    pytest.fail(f"none of {ENOUGH} schedules found it")

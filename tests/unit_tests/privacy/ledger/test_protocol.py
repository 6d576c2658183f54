"""The ledger's protocol: no state of the small scenes is wrong, and every planted mistake is found."""

from __future__ import annotations

import pytest

from tests.protocol.model import Model
from tests.protocol.scenes import PLANTS, SMALL


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

"""The registry of schemas after kills and power cuts: what was registered stays, and no id is given twice."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

import holdfast
from holdfast.env import SeededIds, World
from holdfast.env.sim.disk import SimulatedDisk
from holdfast.errors import SchemaNotFound
from tests.unit.brokers import FOLDER, SETTINGS, Place

CUTS = 2  # possible disks for each call


def schema(number: int) -> str:
    fields = [{"name": f"f{each}", "type": "int", "default": 0} for each in range(number)]
    return json.dumps({"type": "record", "name": "R", "fields": fields})


def reopened(disk: SimulatedDisk, place: Place) -> holdfast.Broker:
    return holdfast.open_broker(FOLDER, world=World(clock=place.clock, disk=disk, ids=SeededIds(9)), settings=SETTINGS)


@pytest.mark.parametrize("stop", ["kill", "cut"])
def test_what_was_registered_is_there_wherever_the_owner_is_stopped(stop: str, scale: Any):
    place, rng = Place(), random.Random(stop)
    left: list[tuple[SimulatedDisk, dict[str, Any]]] = []
    done: dict[str, Any] = {"ids": {}, "gone": set()}

    def look(_call: str) -> None:
        for _ in range(scale(CUTS, 20) if stop == "cut" else 1):
            disk = place.disk.cut(rng) if stop == "cut" else place.disk.kill()
            left.append((disk, {"ids": dict(done["ids"]), "gone": set(done["gone"])}))

    place.disk.on_call = look
    schemas = place.broker.schemas
    for number in range(3):
        done["ids"][schemas.register("r-value", schema(number)).id] = schema(number)
    newest = max(done["ids"])
    schemas.delete("r-value", 3)
    del done["ids"][newest]  # while it is being removed, it may be there or not
    schemas.delete("r-value", 3, permanent=True)
    done["gone"].add(newest)
    place.disk.on_call = None
    place.close()
    assert len(left) > 20
    for disk, known in left[:: scale(3, 1)]:
        with reopened(disk, place) as broker:
            for schema_id, text in known["ids"].items():
                assert broker.schemas.by_id(schema_id).text == text
            for schema_id in known["gone"]:
                with pytest.raises(SchemaNotFound):
                    broker.schemas.by_id(schema_id)
            made = broker.schemas.register("other-value", schema(9))
            assert made.id not in {*known["ids"], *known["gone"]}
            assert broker.schemas.by_id(made.id).text == schema(9)

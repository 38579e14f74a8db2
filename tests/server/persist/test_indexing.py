"""A start on a store of files: what is known before all of its names are."""

from __future__ import annotations

from tests.server.persist.controlled_store import TierWorld, until
from tests.server.qstore.fake_worker import FAMILY

LOCAL = "file:///controlled"


async def test_readers_find_the_models_while_names_are_still_listed() -> None:
    """A folder of 100,000 takes seconds, in which a reader must not hear that the model is unknown."""
    first, second = TierWorld(url=LOCAL), TierWorld(url=LOCAL)
    first.attach()
    await first.store(await first.worker(), 1, 0, 3)
    await first.forget()
    store = second.store_of_objects
    store.objects.update(first.store_of_objects.objects)
    store.held = {"list"}
    second.attach()
    await store.until_waits("list")
    assert models(second) == []
    store.step()
    await second.persistence.learnt()
    assert second.persistence.summary().indexing
    assert models(second) == [FAMILY.model_name]
    store.let_go()
    await until(lambda: not second.persistence.summary().indexing)
    assert models(second) == [FAMILY.model_name]
    await second.module.purge_q(FAMILY.model_name, None)
    assert models(second) == []
    await first.close()
    await second.close()


def models(world: TierWorld) -> list[str]:
    return [report.model_name for report in world.persistence.models([])]

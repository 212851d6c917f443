"""Memory for a copy of a retained version, as the log has placed it."""

import asyncio
from typing import Final

import msgspec

from tensorhub_agent.effects import CopyMade, MakeCopy
from tensorhub_agent.shelf import Shelf
from tensorhub_common.bus.blobs import Blobs
from tensorhub_common.errors import TensorHubError
from tensorhub_common.layout import Layout

LAYOUT_S_MAX: Final = 10.0
"""The layout is had within this, or the copy is given up."""


async def make_copy(wanted: MakeCopy, job: str, blobs: Blobs, shelf: Shelf, incarnation: int) -> CopyMade:
    """Make a segment for the copy. What goes wrong is told, so that the log can place it elsewhere."""
    try:
        async with asyncio.timeout(LAYOUT_S_MAX):
            layout = msgspec.msgpack.decode(await blobs.get(job, wanted.layout), type=Layout)
        place = await shelf.make(wanted.key, wanted.shards, layout, wanted.layout, spot=False, incarnation=incarnation)
    except (TensorHubError, TimeoutError, msgspec.MsgspecError) as why:
        return CopyMade(wanted.key, wanted.shards, wanted.layout, failure=str(why) or "its layout did not come")
    return CopyMade(wanted.key, wanted.shards, wanted.layout, nbytes=tuple(place.table.nbytes))

"""What an agent says with each beat of the shards that read from it. Pure.

A shard with several leases (on several shards of one agent, or in several streams) is one reader. It is named with the
place in the log where its round was decided, so that planners can tell when the log has said that this is over.
"""

from collections import Counter
from collections.abc import Iterable

import msgspec

from tensorhub_common.protocol.heartbeat import SERVED_MAX, ReaderLoad, ServingLoad
from tensorhub_common.protocol.leases import LeaseRequest
from tensorhub_common.protocol.plans import Transport
from tensorhub_common.protocol.subjects import is_name


def reader_of(ask: LeaseRequest) -> ReaderLoad:
    """Return what the log is told of a reader that has got its lease.

    One without a turn was decided nowhere; nor was one whose name can't be, and may be too long for a beat.
    """
    reader = ask.reader
    decided = ask.turn.decided if ask.turn is not None and is_name(reader.replica) else 0
    return ReaderLoad(ask.job, ask.model, reader.replica, reader.shard, decided, max(ask.nbytes, 0))


def reader_loads(readers: Iterable[tuple[Transport, ReaderLoad]]) -> tuple[ServingLoad, ...]:
    """Say what the leases of all jobs come to. Of whom it is not known where they were decided, they are only counted.

    An agent of an earlier release says no turn for some of its reads, and when these are over would be unknown.
    """
    found: dict[tuple[Transport, str, str, str, int], ReaderLoad] = {}
    for transport, each in readers:
        who = (transport, each.job, each.model, each.replica, each.shard)
        before = found.get(who)
        if before is not None:
            decided, nbytes = max(before.decided, each.decided), before.nbytes + each.nbytes
            found[who] = msgspec.structs.replace(each, decided=decided, nbytes=nbytes)
        else:
            found[who] = each
    count, nbytes_of = Counter[Transport](), Counter[Transport]()
    named: dict[Transport, list[ReaderLoad]] = {}
    for (transport, *_), each in found.items():
        count[transport] += 1
        nbytes_of[transport] += each.nbytes
        names = named.setdefault(transport, [])
        if each.decided and len(names) < SERVED_MAX:
            names.append(each)
    return tuple(ServingLoad(each, count[each], nbytes_of[each], tuple(named[each])) for each in count)

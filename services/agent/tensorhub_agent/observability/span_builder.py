"""From a call's note, when it is over, to the spans that tell it. Pure; docs/operate/tracing.md lists their content."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

from tensorhub_agent.observability.records import CallRecord, PlanRecord, PublishRecord, ReadRecord, SourceRecord
from tensorhub_agent.primitives.ids import ShardKey
from tensorhub_agent.transfer.source import Source
from tensorhub_common.observability.trace_context import AttributeValue, SpanRecord, TraceContext, finished_span
from tensorhub_common.protocol.log.commands import NO_ROOT
from tensorhub_common.protocol.plans import Refusal

NS_PER_S: Final = 1_000_000_000
GB: Final = 1_000_000_000
DONE: Final = "done"


@dataclass(frozen=True, slots=True)
class SpanBuilder:
    """Whose stories these are; `new_span` gives out ids."""

    job: str
    agent: str
    digests: bool
    new_span: Callable[[], str]

    def spans_of(self, note: CallRecord) -> Iterator[SpanRecord]:
        """Yield the spans of a call that is over.

        Of a read that failed before a version was decided it is the wait alone, and of one that ended well there none.
        """
        if isinstance(note, PublishRecord):
            yield from self._publication(note)
        elif note.version is not None:
            yield from self._transfer(note)
        elif note.error is not None:
            yield self._wait(note)

    def _about(self, key: ShardKey, version: int | None) -> dict[str, AttributeValue]:
        about: dict[str, AttributeValue] = {
            "tensorhub.job": self.job,
            "tensorhub.model": key.model,
            "tensorhub.replica": key.replica,
            "tensorhub.shard": key.shard,
            "tensorhub.agent": self.agent,
        }
        if version is not None:
            about["tensorhub.version"] = version
        return about

    # Publications.

    def _publication(self, note: PublishRecord) -> Iterator[SpanRecord]:
        about = self._about(note.key, note.version)
        if note.is_ours:
            yield finished_span("publish", note.context, note.parent, (note.began, note.ended), about, error=note.error)
        mine = note.context.beside(self.new_span())
        own: dict[str, AttributeValue] = {**about, "tensorhub.root": note.root}
        yield finished_span("publish.agent", mine, note.context, (note.began, note.ended), own, error=note.error)
        if note.digested:
            digests = note.root not in ("", NO_ROOT)
            yield self._child(mine, "digest", note.digested_from, note.digested, {"tensorhub.digests": digests})
        if note.said:
            yield self._child(mine, "log", note.said, note.ended)

    # Transfers.

    def _transfer(self, note: ReadRecord) -> Iterator[SpanRecord]:
        context = note.context
        yield self._whole(note)
        if note.decided > note.began:
            yield self._wait(note)
        for plan in note.plans:
            yield self._plan(note, plan)
        for source in note.sources.values():
            yield self._lease(note, source)
            if source.opened and (note.started or source.last):
                yield self._read(note, source)
        if note.filled:
            last = max((source.last for source in note.sources.values()), default=0)
            checked: dict[str, AttributeValue] = {"tensorhub.verified_in_read": self.digests}
            yield self._child(context, "verify", last or note.filled, note.filled, checked)
            yield self._child(context, "ready", note.filled, note.ended)

    def _whole(self, note: ReadRecord) -> SpanRecord:
        readings = [source.reading for source in note.sources.values() if source.reading is not None]
        got = sum(reading.got_bytes for reading in readings)
        reading_ns = max((source.last for source in note.sources.values()), default=0) - note.started
        attributes: dict[str, AttributeValue] = {
            **self._about(note.key, note.version),
            "tensorhub.want": str(note.call.want),
            "tensorhub.attempts": note.attempts,
            "tensorhub.bytes": got,
            "tensorhub.GBps": round(got / GB * NS_PER_S / reading_ns, 3) if note.started and reading_ns > 0 else 0.0,
            "tensorhub.wait_s": round(max(note.decided - note.began, 0) / NS_PER_S, 6),
            "tensorhub.pieces": sum(reading.got_pieces for reading in readings),
            "tensorhub.retries": sum(reading.retried for reading in readings),
            "tensorhub.kept": note.kept,
            "tensorhub.sources": len(note.sources),
            "tensorhub.transports": tuple(sorted({str(source.share.transport) for source in note.sources.values()})),
            "tensorhub.verified_in_read": self.digests,
        }
        wait = note.wait if note.decided > note.began else None
        return finished_span(
            "transfer",
            note.context,
            note.parent,
            (note.decided, note.ended),
            attributes,
            links=tuple(link for link in (note.published, note.engine, wait) if link is not None),
            error=note.error,
        )

    def _wait(self, note: ReadRecord) -> SpanRecord:
        """Tell of the time before the log has decided: a sibling or a publisher was awaited, and nothing read.

        A read that fails meanwhile has no other span, so this one has its error.
        """
        attributes: dict[str, AttributeValue] = {
            **self._about(note.key, note.version),
            "tensorhub.want": str(note.call.want),
            "tensorhub.round": note.round or 0,
        }
        is_decided = note.version is not None
        links = tuple(link for link in (note.context if is_decided else None, note.engine) if link is not None)
        times = (note.began, note.decided if is_decided else note.ended)
        error = None if is_decided else note.error
        return finished_span("wait", note.wait, None, times, attributes, links=links, error=error)

    def _plan(self, note: ReadRecord, plan: PlanRecord) -> SpanRecord:
        answer = plan.answer
        refused = isinstance(answer, Refusal)
        attributes: dict[str, AttributeValue] = {}
        if answer is not None and not isinstance(answer, Refusal):
            attributes = {"tensorhub.sources": len(answer.shares), "tensorhub.why": answer.why}
        return finished_span(
            "plan",
            note.context.beside(plan.context.span_id),
            note.context,
            (plan.asked, plan.came or note.ended),
            attributes,
            error=f"{answer.error}: {answer.reason}" if refused and isinstance(answer, Refusal) else None,
        )

    def _lease(self, note: ReadRecord, source: SourceRecord) -> SpanRecord:
        return finished_span(
            "lease",
            note.context.beside(source.lease.span_id),
            note.context,
            (source.asked, source.opened or source.over or note.ended),
            _source(source),
            error=None if source.opened else _reason(source) or "not granted in time",
        )

    def _read(self, note: ReadRecord, source: SourceRecord) -> SpanRecord:
        reading, reason = source.reading, _reason(source)
        start = max(source.opened, note.started)
        end = (source.over if reason else source.last) or source.over or note.ended
        got = reading.got_bytes if reading is not None else 0
        return finished_span(
            "read",
            note.context.beside(source.read.span_id),
            note.context,
            (start, end),
            {
                **_source(source),
                **_encoded(source, reading),
                "tensorhub.bytes": got,
                "tensorhub.pieces": reading.got_pieces if reading is not None else 0,
                "tensorhub.retries": reading.retried if reading is not None else 0,
                "tensorhub.GBps": round(got / GB * NS_PER_S / (end - start), 3) if end > start else 0.0,
                "tensorhub.end": f"lost: {reason}" if reason else DONE,
            },
            error=f"lost: {reason}" if reason else None,
        )

    def _child(
        self, parent: TraceContext, name: str, start: int, end: int, attributes: dict[str, AttributeValue] | None = None
    ) -> SpanRecord:
        return finished_span(name, parent.beside(self.new_span()), parent, (start, end), attributes or {})


def _source(source: SourceRecord) -> dict[str, AttributeValue]:
    share = source.share
    return {
        "tensorhub.source.agent": share.source.agent,
        "tensorhub.source.replica": share.source.replica,
        "tensorhub.source.shard": share.source.shard,
        "tensorhub.transport": share.transport,
        "tensorhub.why": share.why,
    }


def _encoded(source: SourceRecord, reading: Source | None) -> dict[str, AttributeValue]:
    """Say what came otherwise than as it is, if anything did."""
    if reading is None or not reading.encoded:
        return {}
    saved = sum(each.nbytes - each.wire_bytes for each in reading.encoded.values())
    attributes: dict[str, AttributeValue] = {
        "tensorhub.encodings": tuple(sorted(reading.encoded)),
        "tensorhub.encodings_why": "; ".join(f"{how}: {each.why}" for how, each in sorted(reading.encoded.items())),
        "tensorhub.wire_bytes": reading.got_bytes + reading.wasted_bytes - saved,
    }
    if "delta" in reading.encoded and source.base is not None:
        attributes["tensorhub.base"] = source.base
    return attributes


def _reason(source: SourceRecord) -> str:
    """Say why a source was left out, "" for one that was read to its end."""
    return source.lost or (source.reading.lost if source.reading is not None else "")

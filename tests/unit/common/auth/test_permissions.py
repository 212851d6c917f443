"""The table of permissions: who may publish and subscribe to what, and that no list lets a name out of its place."""

import re

import pytest

from tensorhub_common.auth.permissions import Permissions, Role, User, inbox_of, permissions_of, users_conf
from tensorhub_common.errors import InvalidName

KEY = "UABC"
INBOX = inbox_of(KEY)
EVERYBODY = {
    "registry": User(Role.REGISTRY),
    "planner": User(Role.PLANNER),
    "rollout": User(Role.ROLLOUT),
    "agent": User(Role.AGENT, "a"),
    "runner": User(Role.RUNNER, "r"),
    "client": User(Role.CLIENT),
    "job": User(Role.CLIENT, "j"),
}
J = "tensorhub.v1.j"
OTHER = "tensorhub.v1.other"
HUB = "tensorhub.v1._hub"
LOG, LOG_OF_OTHER, BLOBS = "TENSORHUB_j", "TENSORHUB_other", "TENSORHUB_BLOBS_j"
ROLLOUTS, PAYLOADS = "TENSORHUB_ROLLOUTS_j", "TENSORHUB_PAYLOADS_j"

PUBLISH = {
    f"{J}.cmd.publish": "client job",
    f"{OTHER}.cmd.publish": "client",
    f"{J}.cmd.ready.a": "agent",
    f"{J}.cmd.ready.b": "",
    f"{J}.cmd.expire._registry": "registry",
    f"{J}.event.m.version.published": "registry",
    f"{J}.event._hub.agent.lost": "registry",
    f"{J}.snapshot.index": "registry",
    f"{J}.blob.{'0' * 64}.0": "planner agent",
    f"{J}.ask.open": "agent client job",
    f"{OTHER}.ask.open": "agent client",
    f"{J}.ask.versions": "client job",
    f"{OTHER}.ask.versions": "client",
    f"{J}.ask.spans": "client job",
    f"{J}.ask.health.registry": "client job",
    f"{OTHER}.ask.health.registry": "client",
    f"{HUB}.ask.health.registry": "client",
    f"{HUB}.ask.health.planner": "client",
    f"{J}.ask.plan": "agent",
    **{f"{J}.rollout.{verb}": "client job" for verb in ("attach", "submit", "cancel", "done")},
    **{f"{J}.rollout.{verb}": "rollout" for verb in ("lead", "checkpoint", "end", "scale")},
    f"{OTHER}.rollout.submit": "client",
    f"{OTHER}.rollout.end": "rollout",
    f"{J}.rollout.payload.{'0' * 64}.0": "rollout client job",
    f"{OTHER}.rollout.payload.{'0' * 64}.0": "rollout client",
    f"{J}.rollout.snapshot.index": "rollout",
    f"{J}.rollout.snapshot.{'0' * 64}.0": "rollout",
    **{f"{J}.rollout.{what}.r": "rollout" for what in ("assign", "abort")},
    **{f"{J}.rollout.{what}.r": "runner" for what in ("tokens", "report", "beat")},
    **{f"{J}.rollout.{what}.s": "" for what in ("tokens", "report", "beat")},
    **{f"{J}.rollout.{what}.trainer": "client job" for what in ("tokens", "report", "beat")},
    **{f"{OTHER}.rollout.{what}.trainer": "client" for what in ("tokens", "report", "beat")},
    **{f"{J}.rollout.ask.{what}": "client job" for what in ("outcome", "ready", "seeding", "status")},
    f"{OTHER}.rollout.ask.ready": "client",
    f"{HUB}.ask.ping.x": "registry planner rollout agent runner client job",
    f"{HUB}.beat.a": "agent",
    f"{HUB}.beat.b": "",
    f"{HUB}.agent.b.lease.a": "agent",
    f"{HUB}.agent.a.lease.b": "",
    f"{HUB}.agent.b.digests.a": "agent",
    "$KV.tensorhub.registry": "registry",
    "$KV.another.registry": "",
    "$KV.tensorhub-rollouts.j": "rollout",
    "$JS.API.STREAM.CREATE.KV_tensorhub-rollouts": "registry rollout",
    "$JS.API.INFO": "registry planner rollout agent runner client job",
    "$JS.API.STREAM.NAMES": "registry planner rollout client",
    f"$JS.API.STREAM.CREATE.{LOG}": "registry",
    f"$JS.API.STREAM.UPDATE.{LOG}": "registry",
    f"$JS.API.STREAM.PURGE.{LOG}": "registry rollout",
    f"$JS.API.STREAM.DELETE.{LOG}": "registry",
    f"$JS.API.STREAM.MSG.DELETE.{LOG}": "",
    f"$JS.API.STREAM.PURGE.{ROLLOUTS}": "registry rollout",
    f"$JS.API.STREAM.PURGE.{PAYLOADS}": "registry rollout",
    f"$JS.API.STREAM.CREATE.{ROLLOUTS}": "registry",
    f"$JS.API.STREAM.DELETE.{ROLLOUTS}": "registry",
    f"$JS.API.STREAM.MSG.DELETE.{ROLLOUTS}": "",
    f"$JS.API.STREAM.MSG.GET.{ROLLOUTS}": "rollout client",
    f"$JS.API.STREAM.MSG.GET.{PAYLOADS}": "rollout client job",
    f"$JS.API.STREAM.INFO.{ROLLOUTS}": "registry planner rollout agent client job",
    f"$JS.API.DIRECT.GET.{ROLLOUTS}": "registry planner rollout agent client",
    f"$JS.API.CONSUMER.CREATE.{ROLLOUTS}.c": "registry planner rollout client",
    f"$JS.API.CONSUMER.CREATE.{ROLLOUTS}.c.{J}.rollout.*": "registry planner rollout client",
    f"$JS.API.CONSUMER.CREATE.{PAYLOADS}.c": "registry planner rollout client",
    f"$JS.API.CONSUMER.CREATE.{PAYLOADS}.c.{J}.rollout.payload.*.0": "registry planner rollout client",
    f"$JS.API.STREAM.SNAPSHOT.{LOG}": "",
    f"$JS.API.STREAM.INFO.{LOG}": "registry planner rollout agent client job",
    f"$JS.API.STREAM.INFO.{LOG_OF_OTHER}": "registry planner rollout agent client",
    f"$JS.API.DIRECT.GET.{LOG}": "registry planner rollout agent client job",
    f"$JS.API.DIRECT.GET.{BLOBS}": "registry planner rollout agent client job",
    f"$JS.API.DIRECT.GET.{LOG_OF_OTHER}": "registry planner rollout agent client",
    "$JS.API.DIRECT.GET.KV_tensorhub": "registry planner rollout agent client",
    f"$JS.API.CONSUMER.CREATE.{LOG}.c": "registry planner rollout client job",
    f"$JS.API.CONSUMER.CREATE.{LOG}.c.{J}.cmd.>": "registry planner rollout client job",
    f"$JS.API.CONSUMER.CREATE.{LOG}.c.{J}.event.>": "registry planner rollout agent client job",
    f"$JS.API.CONSUMER.CREATE.{LOG_OF_OTHER}.c": "registry planner rollout client",
    f"$JS.API.CONSUMER.CREATE.{LOG_OF_OTHER}.c.{OTHER}.event.>": "registry planner rollout agent client",
    f"$JS.API.CONSUMER.DURABLE.CREATE.{LOG}.c": "",
    f"$JS.API.CONSUMER.LIST.{LOG}": "",
    f"$JS.API.CONSUMER.DELETE.{LOG}.c": "",
    f"$JS.API.CONSUMER.MSG.NEXT.{LOG}.c": "registry planner rollout agent client job",
    "$JS.API.ACCOUNT.PURGE.x": "",
    "$SYS.REQ.SERVER.PING": "",
    f"{INBOX}.1.2": "registry planner rollout agent runner client job",
    f"{inbox_of('UXYZ')}.1.2": "registry planner rollout agent runner",
}

SUBSCRIBE = {
    f"{INBOX}.1.*": "registry planner rollout agent runner client job",
    f"{inbox_of('UXYZ')}.1.*": "",
    f"{J}.ask.versions": "registry",
    f"{J}.ask.health.registry": "registry",
    f"{J}.ask.health.planner": "planner",
    f"{HUB}.ask.health.registry": "registry",
    f"{J}.ask.plan": "planner",
    f"{J}.ask.spans": "registry planner rollout agent runner",
    f"{HUB}.beat.a": "registry planner",
    f"{HUB}.agent.a.lease.b": "agent",
    f"{HUB}.agent.b.lease.a": "",
    f"{HUB}.ask.ping.a": "registry planner rollout agent",
    f"{HUB}.ask.ping.b": "registry planner rollout",
    f"{HUB}.ask.ping.r": "registry planner rollout runner",
    **{f"{J}.rollout.{what}.r": "runner" for what in ("assign", "abort")},
    **{f"{J}.rollout.{what}.s": "" for what in ("assign", "abort")},
    **{f"{J}.rollout.{what}.trainer": "client job" for what in ("assign", "abort")},
    **{f"{OTHER}.rollout.{what}.trainer": "client" for what in ("assign", "abort")},
    **{f"{J}.rollout.{what}.r": "rollout" for what in ("tokens", "report", "beat")},
    **{f"{J}.rollout.ask.{what}": "rollout" for what in ("outcome", "ready", "seeding", "status")},
    f"{J}.rollout.submit": "",
    f"{J}.rollout.payload.{'0' * 64}.0": "",
    f"{J}.event.m.version.published": "client job",
    f"{OTHER}.event.m.version.published": "client",
    f"{J}.cmd.publish": "",
    "$JS.EVENT.ADVISORY.x": "",
}


def matches(pattern: str, subject: str) -> bool:
    """Tell whether a subject falls under a wildcard, as NATS has it."""
    form = re.escape(pattern).replace(r"\*", r"[^.]+").replace(r"\.>", r"\..+").replace(">", ".+")
    return re.fullmatch(form, subject) is not None


def allowed(patterns: tuple[str, ...], subject: str) -> bool:
    return any(matches(pattern, subject) for pattern in patterns)


RULES = [(verb, *rule) for verb, rules in (("publish", PUBLISH), ("subscribe", SUBSCRIBE)) for rule in rules.items()]


@pytest.mark.parametrize(("verb", "subject", "who"), RULES)
def test_who_may_publish_and_subscribe_to_what(verb: str, subject: str, who: str) -> None:
    may = [name for name, user in EVERYBODY.items() if allowed(getattr(permissions_of(user, INBOX), verb), subject)]
    assert may == who.split()


@pytest.mark.parametrize("user", EVERYBODY.values(), ids=list(EVERYBODY))
def test_nobody_but_an_admin_may_listen_on_everything(user: User) -> None:
    assert permissions_of(User(Role.ADMIN), INBOX) == Permissions((">",), (">",))
    permissions = permissions_of(user, INBOX)
    for subject in (">", "_INBOX.>", "tensorhub.>", "$JS.>"):
        assert subject not in permissions.subscribe
        assert subject not in permissions.publish or subject == "_INBOX.>"


@pytest.mark.parametrize("name", ["*", ">", "a.b", "", "_registry", "a b", 'a"]}'])
def test_a_name_that_is_none_has_no_permissions(name: str) -> None:
    """A name stands in subjects and in the server's file, and must not widen either."""
    with pytest.raises(InvalidName):
        User(Role.AGENT, name)
    with pytest.raises(InvalidName):
        User(Role.RUNNER, name)
    with pytest.raises(InvalidName):
        User(Role.CLIENT, name)
    with pytest.raises(ValueError, match="one registry"):
        User(Role.REGISTRY, "registry-0")
    with pytest.raises(ValueError, match="one rollout"):
        User(Role.ROLLOUT, "rollout-0")


def test_a_runner_has_not_the_name_of_a_trainers_own_engine() -> None:
    with pytest.raises(InvalidName, match="no runner can be called 'trainer': that is a trainer's own engine"):
        User(Role.RUNNER, "trainer")


def test_the_servers_file_holds_public_keys_and_lists() -> None:
    text = users_conf({EVERYBODY["job"]: "UJOB", EVERYBODY["agent"]: "UAGENT"})
    assert text.index("# agent a\n    { nkey: UAGENT, ") < text.index("# client j\n    { nkey: UJOB, ")
    assert '"tensorhub.v1.*.cmd.*.a"' in text
    assert '"_INBOX.UJOB.>"' in text
    assert text.count("allow_responses: { max: 1, ") == 1, "the client's alone"

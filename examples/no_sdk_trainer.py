"""Publish what a replica's memory holds, with a NATS client alone.

no_sdk_trainer.py URL KEY JOB MODEL REPLICA VERSION, where KEY is a file of `tensorhub credentials`, or the one that
hub.json names.
"""

import asyncio
import json
import sys
import uuid
from pathlib import Path

import nats
import nkeys
from nats.aio.subscription import Subscription

# A version that was taken back is available again when the same bytes are published under its number again.
ENDS = ("version.published", "version.available", "publish.failed", "publish.declined")


def public_half(key: Path) -> str:
    """Return what NATS knows of a key."""
    return bytes(nkeys.from_seed(bytearray(key.read_bytes())).public_key).decode()


async def next_of(subscription: Subscription, timeout_s: float) -> bytes:
    """Return the next message's data, or raise `TimeoutError`.

    Not by `next_msg`: on Python 3.11 it loses a Ctrl-C that comes together with a message, and the program goes on.
    """
    async with asyncio.timeout(timeout_s):
        return (await anext(subscription.messages)).data


async def publish(url: str, key: Path, job: str, model: str, replica: str, version: int) -> bool:
    """Say the wish, read its outcome, and follow the model's events until the version is there."""
    # Who logs in with a key may listen on inboxes that begin with its public half, and on no others.
    client = await nats.connect(url, nkeys_seed=str(key), inbox_prefix=f"_INBOX.{public_half(key)}")
    inbox = client.new_inbox()
    outcomes = await client.subscribe(inbox)
    events = await client.subscribe(f"tensorhub.v1.{job}.event.{model}.*.*")
    wish = {"verb": "publish", "model": model, "replica": replica, "version": version}
    headers = {"Nats-Msg-Id": str(uuid.uuid4()), "Tensorhub-Reply-To": inbox}
    subject = f"tensorhub.v1.{job}.cmd.publish"
    ack = await client.jetstream().publish(subject, json.dumps(wish).encode(), headers=headers)
    event = json.loads(await next_of(outcomes, 10))[0]
    asked = await client.request(f"tensorhub.v1.{job}.ask.outcome", json.dumps({"seq": ack.seq}).encode(), timeout=10)
    print(f"command {ack.seq} stands in the log; asked for its outcome: {json.loads(asked.data)['events'][0]['kind']}")
    print(f"inbox: {event['kind']} {event.get('message', '')}")
    while event["kind"] != "command.rejected" and (event["kind"] not in ENDS or event["replica"] != replica):
        event = json.loads(await next_of(events, 60))
    print(f"event: {event['kind']} {event.get('version', '')} {event.get('message', '')}")
    await client.close()
    return bool(event["kind"] in ("version.published", "version.available"))


try:
    url, key, job, model, replica, version = sys.argv[1:]
except ValueError:
    sys.exit(__doc__)
try:
    sys.exit(not asyncio.run(publish(url, Path(key), job, model, replica, int(version))))
except TimeoutError:
    sys.exit("no_sdk_trainer.py: no answer in time: see what 'tensorhub doctor' says")
except KeyboardInterrupt:
    sys.exit(130)

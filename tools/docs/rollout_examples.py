"""An example of each message of rollouts, for the AsyncAPI document."""

import struct
from typing import Final

import msgspec

from tensorhub_common.protocol.rollout import entries, messages, questions
from tensorhub_common.protocol.rollout.entries import Attempt, Payload, RequestId, SdkSender

_LOG: Final = "01763640000123456789"
_INCARNATION: Final = 1763692800123
_ATTEMPT: Final = Attempt(3, 17)
_OLDER: Final = Attempt(3, 9)
_REQUEST: Final = RequestId(4711, 0)
_PAYLOAD: Final = Payload("b996adfe1be9b807ff5a7052fc4dc57188bc9aab0bd886f2b51d9443400730af", 4096)
_TOKENS_PAYLOAD: Final = "2d711642b726b04401627ca9fbac32f5c8530fb1903cc4db02258717921a4881"
_SENDER: Final = SdkSender(4700, 2)
_SEEDING: Final = questions.SeedingState(122.25, 6, ((4.0, 122.25),), 12)
_VERSIONS: Final = messages.PublishedVersions(815, (11, 12))
_ENGINE: Final = messages.RunEngine("torch", "torch 2.9.1, transformers 5.3.0", "float64", is_exact=True)
_RUN: Final = messages.TokenRun(0, 12, "6c78e0e3bd51d358d01e758642b85fb8", "runner-0", _ATTEMPT, engine=_ENGINE)
_TOKENS: Final = struct.pack("<2i", 1024, 7)
_LOGPROBS: Final = struct.pack("<2f", -0.25, -1.5)

_EXAMPLES: Final[tuple[msgspec.Struct, ...]] = (
    entries.Attach("main", "policy", 0, "5f2c9a1b7d3e4f60"),
    entries.Submit(_SENDER, (entries.GroupSubmitted("p-17", _PAYLOAD.digest, 8, 512, 1024),), _PAYLOAD),
    entries.Cancel(_SENDER, ("p-17",)),
    entries.Done(_SENDER, (_REQUEST,)),
    entries.Lead(3, "rollout-0"),
    entries.Checkpoint(3, "runner-0", (entries.TokensKept(_REQUEST, _ATTEMPT, 0, 128),), _PAYLOAD),
    entries.End(3, (entries.RequestEnded(_REQUEST, _ATTEMPT, "stop", 512),), _PAYLOAD),
    entries.Scale(3, 4, "berlin", "the queue is longer than two steps take"),
    messages.AssignRequest(
        _LOG,
        3,
        _INCARNATION,
        _VERSIONS,
        (messages.Assign(_REQUEST, _ATTEMPT, _TOKENS, messages.Sampling(1024, 7), messages.VersionRule()),),
    ),
    messages.AssignAnswer((messages.AssignResult(_ATTEMPT, 0),)),
    messages.AbortRequest(_LOG, 3, _INCARNATION, stop=(_ATTEMPT,), forget=(_OLDER,)),
    messages.AbortAnswer((messages.AbortResult(_ATTEMPT, 128),), (_OLDER,)),
    messages.Frame(
        _LOG,
        _INCARNATION,
        42,
        attempts=struct.pack("<q", messages.attempt_key(_ATTEMPT)),
        starts=struct.pack("<q", 0),
        counts=struct.pack("<q", 2),
        tokens=_TOKENS,
        logprobs=_LOGPROBS,
        runs=((_ATTEMPT, _RUN),),
    ),
    messages.FrameResult(_LOG, 3, 42),
    messages.Report(_LOG, _INCARNATION, (messages.HeldAttempt(_REQUEST, _ATTEMPT, 128, "running"),)),
    messages.ReportResult(_LOG, 3, forget=(_OLDER,), resend=((_ATTEMPT, 64),)),
    messages.RunnerHeartbeat(_LOG, _INCARNATION, steps=4096, model="policy", slots=64, version=12),
    messages.HeartbeatResult(_LOG, 3, _VERSIONS),
    questions.FollowQuestion(_SENDER.attachment, 4712, (questions.FollowedPlace("p-17", 1, 64),), wait_s=2.0),
    questions.FollowAnswer((questions.FollowedTokens(0, _TOKENS, _LOGPROBS),)),
    questions.OutcomeQuestion(4711, _SENDER.attachment, _SENDER.n),
    questions.OutcomeAnswer(known=("p-16",)),
    questions.ReadyQuestion(_SENDER.attachment, 4712, after=4800, after_request=_REQUEST, wait_s=2.0),
    questions.ReadyAnswer(
        (
            questions.EndedRequest(
                RequestId(4711, 1),
                4815,
                group="p-17",
                index_in_group=1,
                group_size=8,
                group_open=6,
                prompts=_PAYLOAD.digest,
                group_index=0,
                reason="stop",
                tokens=512,
                attempt=_ATTEMPT,
                payload=_TOKENS_PAYLOAD,
            ),
        ),
        open=6,
        instances=2,
        published=(11, 12),
    ),
    questions.SeedingQuestion(
        _SENDER.attachment, 12, train_wait_s=31.5, seeded_s=120.0, initial_s=150.0, gain=3.0, state=_SEEDING
    ),
    questions.SeedingAnswer(_SEEDING, "6c78e0e3bd51d358d01e758642b85fb8"),
    questions.RolloutStatus(
        "run-7",
        "rollout-0.8f0c1d2e3a4b5c6d",
        3,
        4815,
        (questions.ConsumerStatus("main", "policy", 0, 6, 2, 1, (3, 1)),),
        (questions.InstanceStatus("runner-0", "policy", "serving", 12, 64, 1, 3, 1920.5),),
        1920.5,
        8192,
    ),
    questions.WhyQuestion("p-17", 3),
    questions.WhyAnswer(
        "p-17",
        (
            questions.RequestWhy(
                "main",
                3,
                "waiting",
                128,
                "it waits for runner-3, which has the next version in about 2.1 s and is then done soonest",
                questions.ExpectedLength(512.0, 870.5, "finished"),
                (
                    questions.AttemptWhy(
                        "runner-0",
                        _ATTEMPT,
                        12.5,
                        9.25,
                        0,
                        128,
                        first_token_s=0.5,
                        end="stopped",
                        reason="about 50 tokens: of the instances with room runner-0 is done soonest with it",
                        withdrawn_why="its machine goes away soon, and it has 640 tokens",
                    ),
                ),
            ),
        ),
    ),
)
ROLLOUT_EXAMPLES: Final[dict[type[msgspec.Struct], msgspec.Struct]] = {type(each): each for each in _EXAMPLES}

"""What stands proven: by the log's root, piece by piece."""

from tensorhub_agent.proof import Proof
from tensorhub_common.digests import piece_digest, root_digest

LIST = b"".join(piece_digest(bytes([number])) for number in range(4))
WRONG = piece_digest(b"wrong")


def test_a_list_of_another_root_or_length_proves_nothing() -> None:
    proof = Proof(4, root_digest(LIST), None, verify=True)
    assert not proof.vouched(LIST[16:])
    assert not proof.vouched(WRONG * 4)
    assert proof.vouched(LIST)
    assert not proof.vouched(WRONG * 4), "one list is the log's for the whole read"


def test_right_pieces_of_a_batch_count_and_wrong_ones_are_named() -> None:
    proof = Proof(4, root_digest(LIST), None, verify=True)
    proof.vouched(LIST)
    assert proof.count([(0, 2), (3, 1)], LIST[:16] + WRONG + LIST[48:]) == [(1, 1)]
    assert proof.missing() == [(1, 2)]
    assert not proof.whole


def test_keeps_only_what_digests_have_proven() -> None:
    proof = Proof(4, None, None, verify=False)
    proof.confirmed([(0, 4)])
    assert proof.whole
    assert proof.keep() is None

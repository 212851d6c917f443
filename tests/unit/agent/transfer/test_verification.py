"""What stands proven: by the log's root, piece by piece."""

from tensorhub_agent.primitives.digests import piece_digest, root_digest
from tensorhub_agent.transfer.verification import Verification
from tensorhub_common.protocol.log.commands import NO_ROOT

LIST = b"".join(piece_digest(bytes([number])) for number in range(4))
WRONG = piece_digest(b"wrong")


def test_a_list_of_another_root_or_length_proves_nothing() -> None:
    proof = Verification(4, root_digest(LIST), None, verify=True)
    assert not proof.vouched(LIST[16:])
    assert not proof.vouched(WRONG * 4)
    assert proof.vouched(LIST)
    assert not proof.vouched(WRONG * 4), "one list is the log's for the whole read"


def test_right_pieces_of_a_batch_count_and_wrong_ones_are_named() -> None:
    proof = Verification(4, root_digest(LIST), None, verify=True)
    proof.vouched(LIST)
    assert proof.count([(0, 2), (3, 1)], LIST[:16] + WRONG + LIST[48:]) == [(1, 1)]
    assert proof.missing() == [(1, 2)]
    assert not proof.whole


def test_keeps_only_what_digests_have_proven() -> None:
    proof = Verification(4, None, None, verify=False)
    proof.confirmed([(0, 4)])
    assert proof.whole
    assert proof.keep() is None


def test_a_list_that_was_kept_is_the_only_one_that_counts() -> None:
    proof = Verification(4, None, (bytearray([1, 0, 1, 0]), LIST), verify=True)
    assert (proof.kept, proof.missing()) == (2, [(1, 1), (3, 1)])
    assert not proof.vouched(WRONG * 4)
    assert proof.vouched(LIST)


def test_what_was_kept_without_digests_is_read_again() -> None:
    proof = Verification(4, None, (bytearray([1, 0, 1, 0]), LIST), verify=False)
    assert (proof.kept, proof.digests, proof.missing()) == (0, None, [(0, 4)])


def test_a_publication_without_a_root_is_not_verified() -> None:
    assert not Verification(4, NO_ROOT, None, verify=True).verify
    assert Verification(4, None, None, verify=True).verify


def test_the_pieces_of_a_later_range_are_held_against_their_own_digests() -> None:
    proof = Verification(4, root_digest(LIST), None, verify=True)
    proof.vouched(LIST)
    assert proof.count([(3, 1), (0, 2)], LIST[48:] + LIST[:32]) == []
    assert proof.missing() == [(2, 1)]
    assert proof.count([(2, 1)], LIST[48:]) == [(2, 1)], "the digest of another piece proves nothing"
    assert proof.count([(2, 1)], b"") == [(2, 1)]


def test_every_range_of_a_batch_is_judged_by_itself() -> None:
    proof = Verification(4, root_digest(LIST), None, verify=True)
    proof.vouched(LIST)
    assert proof.count([(3, 1), (1, 1), (0, 1)], LIST[48:] + LIST[16:32] + LIST[:16]) == []
    assert proof.missing() == [(2, 1)]
    proof = Verification(4, root_digest(LIST), None, verify=True)
    proof.vouched(LIST)
    assert proof.count([(0, 2), (2, 1), (3, 1)], WRONG + LIST[16:32] + WRONG * 2) == [(0, 1), (2, 1), (3, 1)]
    assert proof.missing() == [(0, 1), (2, 2)]


def test_what_is_kept_is_a_copy_with_its_list() -> None:
    proof = Verification(4, root_digest(LIST), None, verify=True)
    assert proof.keep() is None
    proof.vouched(LIST)
    assert proof.keep() is None, "nothing is proven yet"
    proof.count([(1, 1)], LIST[16:32])
    kept = proof.keep()
    assert kept == (bytearray([0, 1, 0, 0]), LIST)
    assert kept[0] is not proof.done

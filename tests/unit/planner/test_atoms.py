"""Atoms: the boxes of global tensors in a shard's memory, and where they stand."""

from tensorhub_common.layout import Layout, Part, TensorEntry
from tensorhub_common.parts import padding
from tensorhub_planner.atoms import Cutout, Cutouts


def test_padding_is_no_atom() -> None:
    parts = (Part("v", (10, 3), (8, 0), (2, 3), (0, 0), (2, 3)), padding((2, 0), (2, 3)))
    layout = Layout((TensorEntry("embedding", "float32", 4, (4, 3), (4, 3), (0, 0), parts),))
    cutouts = Cutouts()
    atoms = cutouts.atoms(layout)
    assert (atoms.names, atoms.at) == (["v"], [0])
    [cutout] = atoms.cutouts
    assert cutouts[cutout] == Cutout("float32", 4, (10, 3), (8, 0), (10, 3), (12, 4))

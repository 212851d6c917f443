"""Which mutants only lack an assertion: those alone are passed over."""

from tests.mutation.typed import lacks_assertion

ORIGINAL = "def x_f__mutmut_orig(a, b):\n    return [c < d for c, d in zip(a, b, strict=True)]"


def mutant(number: int, before: str, after: str) -> tuple[str, str]:
    assert before in ORIGINAL
    name = f"x_f__mutmut_{number}"
    return name, ORIGINAL.replace(before, after).replace("x_f__mutmut_orig", name)


def test_what_lacks_more_than_an_assertion_is_tested() -> None:
    texts = {
        "x_f__mutmut_orig": ORIGINAL,
        **dict(
            [
                mutant(1, "strict=True", "strict=False"),
                mutant(2, "strict=True", ""),
                mutant(3, "c < d", "c <= d"),
                mutant(4, "zip(a, b, strict=True)", "zip(a, strict=True)"),
                mutant(11, "strict=True", "strict=False"),
            ]
        ),
        "x_g__mutmut_1": ORIGINAL,
    }
    assert lacks_assertion(texts) == {"x_f__mutmut_1", "x_f__mutmut_2", "x_f__mutmut_11"}

"""Answers as public data sets have them: each is found as people and models write it, and none is taken for another."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from counterpoint.environments.rewards.mathematics import answer_in, end_of, plain, read
from counterpoint.environments.rewards.worker import compare_mathematics

NUMBERS = [
    "42", "-3", "1,234", "1.25", ".65", "1/2", "9%", "$32", "$1,000.50", "7 apples", "8 cm", "12 m^2", "36 cm^2", "4 ft^3",
    "30 degrees", "90°", "2/3 cup", "25 square meters", "60 mph", "1 000 000",
]  # fmt: skip
FORMULAS = [
    "2x", "6 - 5i", "1,-2", "y = 2x + 3", "p - q", "x+1", "(3,4)", "[0,1)", r"\$33", "1,2", "2^10", "2**11", "1 3/4",
    "x > 3", "x>=3", "sqrt(2)", "√3", "pi/2", "2pi", "infinity", "A, B", "{1,2,3}", "(-inf, 3)", "(-∞, 4)", "1e5",
    "1.5e-3", "3:4", "2 or 4", "e^x", "sin(x)", "x=91", "-x", "H2O", r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}",
    r"x \in [0,2]", "xy + 1", "|x|", "7.5 km/h", "log_2 9", r"\frac{1}{3}", r"10\%", r"5\text{ cm}", r"45^\circ",
    "1 - 1/e", "n(n+1)/2", "3m^2", "3 xy^2", "x^2 - y^2", "[1, 2, 5]", "f(x) = x^2", "3!", "2;3",
]  # fmt: skip
TEXTS = [
    "C", "(D)", r"\text{(E)}", "even", "odd", r"\text{east}", r"\text{seat}", "no solution", "True", "Tuesday",
    "11:30", "11:45", "12:00 PM", "12 AM", "5:30 p.m.", "5:30 a.m.", "5 hours 30 minutes", "4 ft 3 in", "3 ft 4 in",
    "May 5", "x", "y", "ab",
]  # fmt: skip
ALL = NUMBERS + FORMULAS + TEXTS


def equal(answer: str, completion: str) -> bool:
    return bool(compare_mathematics(answer, completion, 6, True)["equal"])


@pytest.mark.slow
@pytest.mark.parametrize("answer", ALL)
def test_an_answer_is_found_as_it_is_written(answer: str) -> None:
    for form in (
        "{}", "Some 77 words.\n{}", "First 7.\nAnswer: {}", "So, the final answer is {}.", "**Answer:** **{}**",
        "Thus $n=7$. Answer: ${}$", "Hence $n = 7$ and\n\\boxed{{{}}}.", "<answer>{}</answer>",
    ):  # fmt: skip
        if "$" not in form or "$" not in answer.replace("\\$", ""):
            assert equal(answer, form.format(answer)), form.format(answer)


@pytest.mark.slow
@pytest.mark.parametrize("answer", ALL)
def test_no_other_answer_is_taken_for_it(answer: str) -> None:
    """Except a number among words, which math-verify takes for the number. Each two meet in either form, and in either order."""
    place = ALL.index(answer)
    for form, others in (("\\boxed{{{}}}", ALL[:place]), ("Answer: {}", ALL[place + 1 :])):
        for other in others:
            if not (answer in NUMBERS and other in TEXTS):
                assert not equal(answer, form.format(other)), other


@pytest.mark.slow
@pytest.mark.parametrize(
    ("answer", "completions"),
    [
        ("pi/2", [r"\boxed{\frac{\pi}{2}}", "Answer: π/2", r"It is $\pi/2$."]),
        ("y = 2x + 3", ["y = 3 + 2x", r"\boxed{y=2x+3}"]),
        ("1 1/2", [r"\boxed{\frac{3}{2}}", "Answer: 3/2", r"\boxed{1.5}"]),
        ("1e5", [r"\boxed{100000}", "Answer: 10^5"]),
        ("even", [r"\boxed{\text{even}}", r"The sum is $\text{even}$.", "Answer: Even."]),
        (r"\text{even}", [r"\boxed{even}", "even"]),
        (
            "C",
            [
                "(C)",
                r"\boxed{\textbf{(C)}}",
                "Answer: (C).",
                "The answer is (C) 45 degrees.",
                "Answer: C) both of them",
            ],
        ),
        ("C", ["Answer: **C**: 45", r"\boxed{\text{(C) 45}}", "The answer is C. Both of them."]),
        (r"\text{(C)}", ["C", r"\boxed{C}"]),
        ("5:30 p.m.", ["Answer: 5:30 PM", r"\boxed{5{:}30\text{ p.m.}}"]),
        ("(-inf, 3)", [r"\boxed{(-\infty, 3)}"]),
        (
            "42",
            ["#### 42", "She has 42 apples left.", "A: 42", "x = 42", "40 + 2 = 42", "42!", "42 m", "-> 42", "T = 42"],
        ),
    ],
)
def test_other_ways_to_write_it_are_right(answer: str, completions: list[str]) -> None:
    for completion in completions:
        assert equal(answer, completion), completion


@pytest.mark.slow
def test_a_letter_among_others_is_no_choice() -> None:
    for completion in (
        "(A) or (C)",
        "(A) 45 (C)",
        "C or D",
        "Cats",
        "C-3",
        "(B) as in C.",
        "a C.",
        "(C) or (D) 45",
        "C and B: 4",
    ):
        assert not equal("C", f"Answer: {completion}"), completion


@pytest.mark.slow
@pytest.mark.parametrize("answer", ["2", "2x", "even", "(1,2)"])
def test_several_answers_are_none(answer: str) -> None:
    for completion in (
        "1, 2, 3, 2x", r"\boxed{1, 2, 2x}", r"\boxed{2 \text{ or } 2x}", "even or odd", r"\boxed{\{1,2,3\}}", "", r"\boxed{}",
        r"\boxed", r"\boxed{\infty}", "answer",
    ):  # fmt: skip
        assert not equal(answer, completion), completion


@pytest.mark.slow
@pytest.mark.parametrize("answer", ["5", "x+1", "even", "(1,2)"])
def test_only_the_last_box_counts_and_it_has_to_be_closed(answer: str) -> None:
    box = f"\\boxed{{{answer}}}"
    for completion in (f"It is \\fbox{{{answer}}}.", f"$\\framebox{{{answer}}}$"):
        assert equal(answer, completion), completion
    for after in (
        r"\boxed{",
        r"\boxed{\text{",
        rf"\boxed{{{answer}",
        r"\fbox{",
        r"\boxed{}",
        r"\boxed{7x",
        r"\fbox{7x}",
    ):
        assert not equal(answer, f"{box} or {after}"), after


@pytest.mark.slow
@pytest.mark.parametrize("answer", ["5", "x+1", "even", "(1,2)", "x>3"])
def test_what_stands_in_reasoning_is_no_answer(answer: str) -> None:
    box = f"\\boxed{{{answer}}}"
    for completion in (
        f"<think>It is {box}.",
        f"<think>It is {box}.</think>",
        f"<think>It is {box}.</think>I do not know.",
        f"<think>It is {box}.</think>\\boxed{{7x}}",
        f"<think>Answer: {answer}</think>\nAnswer: 7x",
        f"It is {box}.</think>Answer: 7x",
        f"[THINK]{answer}",
        f"\\boxed{{7x}}<think>or {box}",
    ):
        assert not equal(answer, completion), completion
    for completion in (
        f"<think>\\boxed{{7x}}</think>It is {box}.",
        f"Is it \\boxed{{7x}}?</think>Answer: {answer}",
        f"{box}<think>7x",
    ):
        assert equal(answer, completion), completion


@pytest.mark.slow
@pytest.mark.parametrize("end", ["not 3", "not $3$", "Not 3, but odd", "between 3 and 4"])
def test_a_number_that_is_denied_is_no_answer(end: str) -> None:
    for before in ("The answer is ", "Answer: "):
        assert not equal("3", before + end)


@pytest.mark.slow
def test_the_mark_of_a_quoted_line_is_no_sign() -> None:
    for completion in ("So it is\n\n> 5", "> > **5**", "> \\boxed{5}"):
        assert equal("5", completion), completion
        assert not equal("x>5", completion), completion
    assert equal("x>5", "> x>5")
    assert not equal("5", "\\boxed{> 5}")


@given(st.text(max_size=60) | st.text("12 /.,-$\\(){}[]boxed answer:x√", max_size=60))
def test_any_text_can_be_read(text: str) -> None:
    for kind in ("number", "formula"):
        answer_in(text, kind)
    assert read(text).kind in ("number", "formula", "text")
    assert len(plain(end_of(text))) <= 2 * len(text)

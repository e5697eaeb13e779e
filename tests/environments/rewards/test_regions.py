"""Forms of one answer, each as the answer of the data and as what a completion gives: the order must not matter."""

from __future__ import annotations

import itertools

import pytest

from counterpoint.environments.rewards.regions import region
from counterpoint.environments.rewards.worker import compare_mathematics

REGIONS = {
    "open": [
        "(1,2)", "1<x<2", r"x \in (1,2)", "2>x>1", r"1<x \text{ and } x<2", "x > 1, x < 2", "]1,2[", r"1<x \land x<2",
        r"\{x \mid 1<x<2\}", r"\left(1,2\right)", r"x\in(1;2)", r"\{x\in\mathbb R\mid 1<x<2\}", r"\left]1;2\right[",
    ],
    "closed": ["[1,2]", r"1 \le x \leq 2", r"x\in[1,2]", r"2 \ge x \ge 1", "1 <= x <= 2"],
    "left": ["[1,2)", r"1 \le x < 2", r"2 > x \geq 1", "1 ≤ x < 2", "[1,2["],
    "right": ["(1,2]", r"1 < x \leqslant 2", "]1,2]"],
    "wider": ["(1,3)", "1<x<3"],
    "above": [r"(3,\infty)", "x>3", "3<x", r"x \in (3,+\infty)", "(3,∞)", r"\{x\in\mathbb{R} : x>3\}", "]3,+\\infty["],
    "from": [r"[3,\infty)", r"x \ge 3", "x≥3", "x ⩾ 3", r"x\geqq 3", r"x\in[3;\infty)"],
    "to": [r"(-\infty,-2]", r"x \le -2", "-2 ≥ x", "x≤\N{MINUS SIGN}2"],
    "outside": [
        r"(-\infty,1)\cup(2,\infty)", r"x<1 \text{ or } x>2", "x > 2 or x < 1", r"x<1 \lor x>2", "x<1, x>2",
        r"x<1, \text{ or } x>2", r"\R\setminus[1,2]", r"\mathbb{R}\backslash[1,2]",
        r"\mathbb{R}\setminus[1,2]", r"]-\infty,1[ \cup ]2,+\infty[",
    ],
    "without": [r"x \ne 3", r"(-\infty,3)\cup(3,\infty)", r"\mathbb{R}\setminus\{3\}", r"x \notin \{3\}", "x≠3"],
    "apart": [
        r"x \ne -2, x \ne 2", r"x \neq -2, 2", r"x\ne\pm 2", r"(-\infty,-2)\cup(-2,2)\cup(2,\infty)", r"|x| \ne 2",
        r"x\ne -2 \text{ and } 2",
    ],
    "far": ["|x|>1", r"(-\infty,-1)\cup(1,\infty)", r"\left|x\right|>1", "1<|x|", "x<-1 or x>1", r"\lvert x\rvert > 1"],
    "near": [r"|x|\le 1", "[-1,1]", r"1 \ge |x|", r"-1 \le x \le 1"],
    "some": [r"x>1 \text{ and } x \ne 2", r"(1,2)\cup(2,\infty)", r"x>1, x\neq 2"],
    "point": [r"\{3\}\cup(5,\infty)", r"x=3 \text{ or } x>5"],
    "all": [r"\mathbb{R}", r"(-\infty,\infty)", r"-\infty<x<\infty", r"\mathbb R", r"\R",
        "all real numbers", r"\text{All real numbers}"],
    "none": [r"\emptyset", "no solution", r"\text{No solutions.}", "∅"],
    "roots": [r"[-\sqrt{2},\sqrt{2}]", r"-\sqrt{2} \le x \le \sqrt2"],
    "decimal": [r"[1/2,\infty)", r"x \ge \frac12", r"x \geq 0.5"],
    "angle": [r"(0,\pi)", r"0<\theta<\pi", r"\theta\in(0,\pi)"],
}  # fmt: skip

OTHERS = {
    "list": [
        r"\{1,2\}", "x=1,2", "x=1 or x=2", r"x \in \{1,2\}", "2, 1", "x_1=1, x_2=2", r"x=2 \lor x=1", r"1 \text{ and } 2",
    ],
    "five": ["5", "x=5", "5=x", r"x \in \{5\}", "5.0", "5.", r"\frac{10}{2}", r"\text{5}", "f(2)=5", "+5"],
    "six": ["6", "f(2)=6"],
    "half": ["1/2", "0.5", r"\dfrac{1}{2}", r"50\%", "½", r"5\cdot10^{-1}"],
    "percent": ["33.3%", r"33.3\%", "0.333"],
    "per hundred": ["62.5", "62.5%"],
    "mixed": ["3½", "7/2", r"3\frac{1}{2}"],
    "pair": [
        r"(3,4)", "x=3, y=4", "y=4, x=3", "(x,y)=(3,4)", r"\begin{cases} x=3 \\ y=4 \end{cases}",
        "y=4; x=3", r"\begin{aligned} y&=4 \\ x&=3 \end{aligned}", r"\left\{\begin{array}{l}x=3\\y=4\end{array}\right.",
        r"\begin{cases} y = 4, \\ x = 3. \end{cases}",
    ],
    "triple": ["(1,2,3)", r"\langle 1,2,3\rangle", "x=1, y=2, z=3", r"\left\langle 1,2,3 \right\rangle"],
    "logarithm": [r"\ln 5", r"\log_e 5", r"\log_{e}(5)"],
    "of ten": [r"\lg 5", r"\log_{10} 5"],
    "product": ["2xy", "2yx", r"2\cdot x\cdot y", "2*x*y"],
    "bold": ["12", r"\boldsymbol{12}", r"\mathbf{12}"],
    "ratio": ["3:4", r"3\colon 4"],
    "pairs": ["(1,2),(3,4)", "x=1, y=2 or x=3, y=4", r"y=4, x=3 \text{ or } x=1, y=2", "x=1, y=2; x=3, y=4", "(x,y)=(1,2),(3,4)"],
    "at least": [r"\ge 5", r"x \ge 5", "≥5", r"[5,\infty)"],
    "either": ["x=0 or y=0", r"y=0 \text{ or } x=0"],
    "square": ["x^2", "x²", "x**2"],
    "e": ["e^2", r"\mathrm{e}^2"],
    "both": [r"\pm 3", "3, -3", r"x=\pm 3", "x=3 or x=-3"],
    "thousand": ["1234", "1,234", r"1{,}234", r"1.234 \times 10^3", r"\$1,234"],
    "matrix": [r"\begin{pmatrix}1&0.5\\3&4\end{pmatrix}", r"\begin{bmatrix}1&1/2\\3&4\end{bmatrix}"],
    "line": ["y=2x+3", "2x-y+3=0"],
}  # fmt: skip


def equal(answer: str, completion: str, *, strict: bool = True) -> bool:
    return bool(compare_mathematics(answer, completion, 6, strict).get("equal"))


@pytest.mark.slow
@pytest.mark.parametrize("forms", [*REGIONS.values(), *OTHERS.values()], ids=[*REGIONS, *OTHERS])
def test_each_form_equals_each_other_in_both_orders(forms: list[str]) -> None:
    for answer, given in itertools.product(forms, forms):
        for completion in (f"\\boxed{{{given}}}", f"Answer: ${given}$"):
            assert equal(answer, completion), (answer, completion)


@pytest.mark.slow
@pytest.mark.parametrize("name", REGIONS)
def test_no_other_region_is_taken_for_it(name: str) -> None:
    for other, forms in REGIONS.items():
        if other != name:
            for answer, given in itertools.product(REGIONS[name][:2], forms[1:3]):
                assert not equal(answer, f"\\boxed{{{given}}}"), (answer, given)


@pytest.mark.slow
def test_what_looks_alike_is_not_the_same() -> None:
    wrong = [
        ("x>3", "y>3"), (r"x \in (1,2)", "1<y<2"), ("x<1 or x>2", "x<1 and x>2"), ("1<x<2", r"\{1,2\}"), ("x>3", "3"),
        ("(1,2)", "x>1 or x<2"), ("x>3", "x>y"), ("33.3", "0.333"), ("5%", "0.5"), ("x_1=1, x_2=2", "x_1=1, x_2=3"),
        ("x=3, y=4", "x=4, y=3"), ("x=1, y=2", "a=1, b=2"),
         ("f(2)=5", "f(2)=6"),
        ("(3;4)", "(4;3)"), ("(4;3)", "(5;2)"), (r"\mathbb R", r"\mathbb{R}^2"), (r"\mathbb R", r"\mathbb{Z}"),
        ("2", "x>1, 2"), ("2", r"x \ne -2, 2"), (r"x \ne 1, 2", "x=1, 2"), (r"x \ne 1, 2", r"x \ne 1"), ("2", "x<3 or 2"),
        ("no solution", r"(1,2)\text{ and }(3,4)"), ("1<x<2", "x_1=1, x_2=2"), ("2, 1", "x=1, y=2"), ("2xy", "2xz"),
        ("|x|>1", "x>1"), ("|x|>1", "|y|>1"), ("|x|<1", r"|x| \le 1"), ("|x|>1", "(-1,1)"), (r"\ln 5", r"\lg 5"),
        (r"\begin{aligned}x&=3\\y&=4\end{aligned}", r"\begin{aligned}x&=4\\y&=3\end{aligned}"),
        (r"\begin{array}{c}1\\2\end{array}", "2,1"), (r"\langle 1,2\rangle", r"\langle 2,1\rangle"), ("3:4", "4:3"),
        ("3½", "31/2"), (r"\frac{1}{2}", r"Answer: \frac{1}{3}"),
        ("3", r"\ge 3"), ("3", r"\neq 3"), ("3", "> 3"), ("3", "≤3"), (r"\ge 3", r"\le 3"), (r"\ge 3", "> 3"),
        ("x=0 or y=0", "(0,0)"), ("x=0 or y=0", "x=0, y=0"), ("x>0, y>0", "x>0 or y>0"), ("x>a or x<b", "x>a and x<b"),
        ("x=1, y=2 or x=3, y=4", "x=1, y=4 or x=3, y=2"), ("(1,2),(3,4)", "x=1, y=4; x=3, y=2"),
    ]  # fmt: skip
    for one, other in wrong:
        assert not equal(one, f"\\boxed{{{other}}}"), (one, other)
        assert not equal(other, f"\\boxed{{{one}}}"), (other, one)
    assert not equal("x=1, y=2", r"\boxed{2,1}")
    assert equal("x>3", r"\boxed{y>3}", strict=False)


@pytest.mark.slow
def test_a_number_in_latex_without_delimiters_is_read_as_a_whole() -> None:
    for answer, completion in (
        ("1/2", r"\dfrac{1}{2}"),
        ("1234", r"1.234 \times 10^3"),
        ("32", r"\$32"),
        ("1.5", r"1\frac{1}{2}"),
    ):
        assert equal(answer, f"Answer: {completion}"), completion
        assert not equal(answer + "1", f"Answer: {completion}"), completion


def test_what_is_no_region() -> None:
    for text in ("2x>2", "x>y", "x-3>0", "1<x<y", r"\sin x > 0", "", "x>", "x^2<4", ",".join("x>1" for _ in range(40))):
        assert region(text) is None, text

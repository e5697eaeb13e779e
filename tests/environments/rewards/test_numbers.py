"""Pairs of an answer of the data and one of a completion, right and wrong: numbers of all sizes, as people write them."""

from __future__ import annotations

import pytest

from counterpoint.environments.rewards.worker import compare_mathematics

pytestmark = pytest.mark.slow

RIGHT = {
    "10000": [
        r"\boxed{10\,000}", r"\boxed{10{,}000}", r"\boxed{10,\!000}", r"\boxed{10\;000}", r"\boxed{10\ 000}", r"\boxed{10~000}",
        "\\boxed{10\u202f000}", "\\boxed{10\u00a0000}", r"\boxed{10\text{,}000}", r"\boxed{10{\,}000}", "Answer: 10\u2009000",
        r"Answer: $10\,000$", r"\boxed{10,000}", r"\boxed{10^4}", r"\boxed{1\times10^4}", r"\boxed{10000.0}", "10,000", "10 000",
        r"\boxed{10\thinspace000}", r"\boxed{\,10000\,}", r"\boxed{10\,000\text{ m}}", r"\boxed{\$10\,000}", r"\boxed{10\:000}",
        r"$10\,000$", r"\(10\,000\)", r"\[10\,000\]", "Answer: 1e4", "1.0e4", r"\boxed{x = 10\,000}",
    ],
    r"10\,000": [r"\boxed{10000}", r"\boxed{10\,000}", "10,000"],
    "$10{,}000$": [r"\boxed{10000}", r"\boxed{10\,000}"],
    "1234567": [r"\boxed{1\,234\,567}", r"\boxed{1{,}234{,}567}", r"\boxed{1,234,567}", r"\boxed{1~234~567}", "1 234 567"],
    "3.14159265": [r"\boxed{3.141\,592\,65}", "3.14159265", r"\boxed{\pi - \pi + 3.14159265}"],
    r"1.6\times10^{-19}": [
        r"\boxed{1.6\times10^{-19}}", r"\boxed{1.60\times 10^{-19}}", r"\boxed{0.16\times 10^{-18}}", "Answer: 1.6e-19",
        "Answer: 1.6 \u00d7 10^-19", "Answer: 1.6\u00d710⁻¹⁹", "Answer: 1.6 x 10^-19",
        "Answer: 1.6*10^(-19)", r"\boxed{1.6\cdot10^{-19}}",
        r"\boxed{1.6\,\times\,10^{-19}}", r"\boxed{1.6\,\times\,10^{-19}\,\text{C}}", "Answer: 1.6E-19",
        r"\boxed{\frac{1.6}{10^{19}}}", r"\boxed{\frac{16}{10^{20}}}", r"\boxed{16\times10^{-20}}",
        "Answer: 0.00000000000000000016",
    ],
    "1.6e-19": [r"\boxed{1.6\times10^{-19}}", "1.6e-19", "1.60E-19"],
    r"6.022\times10^{23}": [r"\boxed{602.2\times10^{21}}", r"\boxed{602200000000000000000000}", "6.022e23",
        r"\boxed{6.0220\times10^{23}}"],
    "1/3": ["0.333333", "0.3333333333", r"\boxed{\frac13}", r"\boxed{\dfrac{2}{6}}"],
    "2/3": ["0.666667", "0.6666666667"],
    "0.5": [r"\boxed{\frac12}", ".5", "1/2", "50%", "0.50"],
    "3": ["3.0", "3.00", r"\boxed{\sqrt{9}}", r"\boxed{\frac{6}{2}}", r"\boxed{n=3}"],
    "0.000001": [r"\boxed{10^{-6}}", "1e-6", r"\boxed{\frac{1}{1{,}000{,}000}}"],
    "10^-19": [r"\boxed{10^{-19}}", "1e-19", "10⁻¹⁹"],
    "2^{100}": [r"\boxed{1267650600228229401496703205376}", r"\boxed{4^{50}}", "2^100"],
    "1" + "0" * 400: ["1" + "0" * 400, r"\boxed{10^{400}}"],
    r"\sqrt{2}": [r"\boxed{1.414214}", r"\boxed{\frac{2}{\sqrt2}}", "√2", r"\boxed{1.41421356237}"],
    r"\pi": ["3.141593", r"\boxed{\pi}", "π"],
    r"\sqrt{2}\times10^{-20}": [r"\boxed{\frac{\sqrt{2}}{10^{20}}}", r"\boxed{1.4142136\times10^{-20}}"],
    "5 cm": [r"\boxed{5\,\text{cm}}", r"\boxed{5~\mathrm{cm}}", r"\boxed{5\ \text{cm}}"],
    "50%": [r"\boxed{50\,\%}", r"\boxed{50\%}", "50 %", "50 percent", "1/2"],
    "(1,2)": [r"\boxed{(1,\,2)}", r"\boxed{(1,\;2)}", r"\boxed{\left(1,\ 2\right)}"],
    r"\{1,2\}": [r"\boxed{\{1,\;2\}}", r"\boxed{\{2,\,1\}}"],
    "1,2": [r"\boxed{1,\,2}", r"\boxed{1,~2}"],
    "3x": [r"\boxed{3\,x}", r"\boxed{3\cdot x}"],
    "x^2": ["Answer: x²", r"\boxed{x^2}"],
    "x^10": [r"\boxed{x^{10}}", "x**10"],
    "12 m^2": ["12 m²", r"\boxed{12\,\text{m}^2}"],
    "-5": ["\\boxed{\u22125}", "-5", r"\boxed{-\,5}"],
    "1000000": ["10^6", "1e6", r"\boxed{1\,000\,000}"],
    "$1,000.50": [r"\boxed{\$1{,}000.50}", "1000.5"],
    r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}": [r"\boxed{\begin{pmatrix} 1 \\ 2 \end{pmatrix}}",
        r"\boxed{\begin{pmatrix}1\\2\end{pmatrix}}"],
    "x^2+y^2=1": [r"\boxed{y^2+x^2=1}"],
    r"\frac{x^2}{4}+\frac{y^2}{9}=1": [r"\boxed{\frac{x^2}{4}+\frac{y^2}{9}=1}"],
    "(x-1)^2+(y+2)^2=9": [r"\boxed{(y+2)^2+(x-1)^2=9}"],
    "x^5-x+1=0": [r"\boxed{x^5-x+1=0}"],
    "E=mc^2": [r"\boxed{E = mc^2}"],
    r"0.\overline{3}": [r"\boxed{\frac13}", "1/3", r"\boxed{0.333\ldots}", r"\boxed{33.\overline{3}\%}"],
    "1/6": ["0.166667", r"\boxed{\tfrac{1}{6}}", r"\boxed{0.1\overline{6}}", "0.1666..."],
    r"12\frac{1}{2}\%": [r"\boxed{12.5\%}", r"\boxed{12\frac12\%}"],
    "3.5": [r"\boxed{3{,}5}"],
    "1'234'567": ["1234567", "1_234_567", r"\boxed{1{,}234{,}567}"],
    "50 km/h": [r"\boxed{50}", r"\boxed{50\text{ km/h}}", "50 km/h"],
    "9.8 m/s^2": [r"\boxed{9.8\ \mathrm{m/s^2}}", "9.8 m/s²"],
    r"\text{12 cm}": ["12", r"\boxed{12\text{ cm}}"],
    r"x=\frac{-1 \pm \sqrt{5}}{2}": [r"\boxed{x=\frac{-1\pm\sqrt5}{2}}"],
    r"$\pm 2$": [r"\boxed{2, -2}", r"The answer is $\pm 2$."],
    "1011_2": [r"\boxed{1011_{2}}", r"\boxed{1011}"],
    r"\emptyset": [r"\boxed{\varnothing}", "∅"],
    "-0.5": ["-.5"],
}  # fmt: skip

WRONG = {
    r"0.\overline{12}": [r"\boxed{0.12}", r"\boxed{0.1\overline{2}}"],
    r"12\frac{1}{2}\%": [r"\boxed{12\%}"],
    "5 x/y": [r"\boxed{5}"],
    r"x=\frac{-1 \pm \sqrt{5}}{2}": [r"\boxed{x=\frac{-1+\sqrt5}{2}}"],
    "1011_2": [r"\boxed{1011_3}", r"\boxed{1010_2}"],
    "y^2=4x": [r"\boxed{x^2=4y}"],
    "10000": [r"\boxed{10\,001}", r"\boxed{10\,00}", r"\boxed{1\,000}", r"\boxed{100\,000}", r"\boxed{10,\ 000}",
        r"\boxed{10}", "10.000"],
    "10": [r"\boxed{10\,000}"],
    "12": [r"\boxed{1,\,2}", r"\boxed{1\quad2}", r"\boxed{1\ 2}"],
    r"1.6\times10^{-19}": [
        r"\boxed{3.2\times10^{-19}}", r"\boxed{1.6\times10^{-18}}", r"\boxed{-1.6\times10^{-19}}", r"\boxed{0}", r"\boxed{1.6}",
        r"\boxed{1.61\times10^{-19}}", r"\boxed{1.6\times10^{19}}", "0", "1.7e-19", "-19", r"\boxed{10^{-19}}",
    ],
    "1.6e-19": ["3.2e-19", "1.6e-20", "0.0"],
    "0.0000001": ["0.0000002", "0", "0.00000011"],
    "0": ["0.0000001", "1e-30", r"\boxed{10^{-100}}"],
    "3": ["2.9999999", "3.0000001", r"\boxed{3 + 10^{-30}}", "3.0000000000000000001"],
    "10000000000000000000": ["10000000000000000001", "9999999999999999999"],
    "100000000000000000000": ["100000000000000000001.0", r"\boxed{10^{20}+1}", r"\boxed{\sqrt{10^{40}+1}}"],
    "1" + "0" * 400: ["1" + "0" * 399 + "1", "1" + "0" * 401],
    "2^{100}": [r"\boxed{1267650600228229401496703205377}", r"\boxed{2^{100}+1}", r"\boxed{2^{10}0}"],
    r"10^{-20}": [r"\boxed{2\cdot10^{-20}}", r"\boxed{10^{-21}}", r"\boxed{0}"],
    r"\frac{1}{10^{20}}": [r"\boxed{\frac{2}{10^{20}}}"],
    r"\sqrt{2}\times10^{-20}": [r"\boxed{\sqrt{3}\times10^{-20}}"],
    r"1.6\times10^{-19}x": [r"\boxed{3.2\times10^{-19}x}"],
    r"(1.6\times10^{-19}, 1)": [r"\boxed{(3.2\times10^{-19}, 1)}"],
    r"\{10^{-20}, 1\}": [r"\boxed{\{10^{-21}, 1\}}"],
    r"[10^{-20}, 1]": [r"\boxed{[10^{-21}, 1]}"],
    r"x = 1.6\times10^{-19}": [r"\boxed{x=3.2\times10^{-19}}"],
    r"\begin{pmatrix} 10^{-20} \\ 2 \end{pmatrix}": [r"\boxed{\begin{pmatrix} 10^{-21} \\ 2 \end{pmatrix}}"],
    "0.333333": ["0.333334", "0.33"],
    "1/3": ["0.33", "0.3333", "0.33334"],
    "1234567.89": ["1234567.88", "1234567.9", "1234568"],
    "0.000123456": ["0.000123457", "0.000123", "0"],
    r"6.022\times10^{23}": [r"\boxed{6.023\times10^{23}}", r"\boxed{6.022\times10^{22}}"],
    r"\pi": ["3.14", "22/7", "3.1415"],
    "2/3": ["0.67", "0.66"],
    "5": ["1e999999999", r"\boxed{10^{10^{10}}}", "9**9**9**9", r"\boxed{5\times10^{999999999}}", "5e-999999999"],
    "50%": ["0.05", r"\boxed{5\,\%}"],
    "(1,2)": [r"\boxed{(1\,2)}", r"\boxed{(2,\,1)}"],
    "x^10": [r"\boxed{x^{1}0}", r"\boxed{x^{11}}"],
    "10^-19": [r"\boxed{10^{-1}9}", r"\boxed{10^{19}}"],
    "-5": ["5", r"\boxed{5}"],
}  # fmt: skip


def test_the_table_has_two_hundred_pairs() -> None:
    assert sum(map(len, [*RIGHT.values(), *WRONG.values()])) >= 200


@pytest.mark.parametrize(("table", "equal"), [(RIGHT, True), (WRONG, False)])
def test_right_is_right_and_wrong_is_wrong(table: dict[str, list[str]], equal: bool) -> None:
    pairs = [(answer, text) for answer, texts in table.items() for text in texts]
    assert not [pair for pair in pairs if compare_mathematics(*pair, 6, True).get("equal") != equal]


@pytest.mark.parametrize("digits", [0, 2, 12])
def test_so_many_digits_count(digits: int) -> None:
    written = f"{1 / 7:.{digits or 1}f}"
    assert compare_mathematics("1/7", written, digits, True)["equal"]
    assert not compare_mathematics("1/7", "0.2", digits, True)["equal"]
    assert not compare_mathematics("1.6e-19", "3.2e-19", digits, True)["equal"]


@pytest.mark.parametrize("answer", ["1/0", r"\frac{0}{0}", r"$\frac{1}{0}$", "", "$", r"\text{ }"])
def test_an_answer_that_cannot_be_told_from_a_wrong_one_is_at_fault(answer: str) -> None:
    assert "the expected answer" in str(compare_mathematics(answer, "3", 6, True)["fault"])
    assert "the expected answer" in str(compare_mathematics(answer, answer, 6, True)["fault"])

r"""What an answer of a data set, and the end of a completion, are given to math-verify as.

Left alone, the library looks for the last number of a text without LaTeX: it finds 2 in `2x`, 11 in `11:30`, and nothing in
`p - q`. So an answer is a number, a formula that is read as a whole, or text that is compared as text; it says how a completion
is read.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

_UNIT = (
    r"(?:[kMcmµn]?(?:m|g|s|J|W|N|V|A|L|l|Pa|Hz|mol|eV)|K|C|h|hr|min|mi|ft|in|yd|lb|rad|day|year)"
    r"(?:\^?-?[1-9]|[²³])?(?![A-Za-z])"
)
_NUMBER = re.compile(
    r"(?P<sign>[-+]?)[$€£¥₹₽₪₩₫฿]?(?P<digits>-?(?:\d{1,3}(?:[ ,]\d{3})+|\d+)?(?:\.\d+)?(?:/\d+)?)"
    rf"(?:(?P<percent>\s*(?:\\?%|percent\b))|\s*°[CF]?|\s+(?-i:{_UNIT}(?:[/·*]{_UNIT})+)"
    r"|(?:\s*[cmk]m|\s(?:in|ft|yd|mi))\^[23]\b"
    r"|(?:st|nd|rd|th|[cmk]m|kg|mg|ml|hrs?|min|lbs?|oz|mph)\b|\s(?-i:[mgslhNJWVK])(?:\^?[23])?\b)?"
    r"(?:\s+[^\W\d_]{2,}\.?)*",
    re.IGNORECASE,
)
"""A number with thousands apart, as a fraction, of a currency, in percent, or with a unit; math-verify ignores these, too."""
_TIME = re.compile(r"\d{1,2}(?::\d{2}){0,2}\s*[ap]\.?m\.?|\d{1,2}:\d{2}(?::\d{2})?", re.IGNORECASE)
_OPERATORS = re.compile(r"[+*/^=<>≤≥≠|_(\[{√∞]|(?<!\w)-|-(?!\w)")
_STYLE = r"\\(?:text|textbf|textit|textrm|mathrm|mathbf|boldsymbol|bm|mbox)"
_STYLED = re.compile(rf"{_STYLE}\s*\{{[^{{}}\\]*\}}")
_STYLED_TEXT = re.compile(rf"{_STYLE}\s*\{{([^{{}}\\]*)\}}")

_NAMES = "arcsin|arccos|arctan|sinh|cosh|tanh|sin|cos|tan|cot|sec|csc|log|ln|exp|pi|theta|alpha|beta|gamma|lambda|phi"
_NAME = re.compile(rf"(?<![\\A-Za-z])(?:{_NAMES})(?![A-Za-z])")
_NO_WORD = re.compile(rf"(?<![\\A-Za-z])(?:{_NAMES}|sqrt|inf|infty|infinity|and|or)(?![A-Za-z])")
_SIGNS = {
    "\N{MINUS SIGN}": "-", "\N{EN DASH}": "-", "\N{MULTIPLICATION SIGN}": r"\times ", "·": r"\cdot ", "÷": r"\div ",
    "π": r"\pi ", "∞": r"\infty ", "≤": r"\le ", "≥": r"\ge ", "≠": r"\ne ", "\N{UNION}": r"\cup ", "∩": r"\cap ", "∈": r"\in ",
    "θ": r"\theta ",
}  # fmt: skip
_UNICODE_SPACES = dict.fromkeys(map(ord, "\u00a0\u2002\u2003\u2007\u2008\u2009\u200a\u202f\u205f"), " ")
_THIN = r"(?:\{\\[,!]\}|(?<!\\)\\[,!]|\\(?:neg)?thinspace(?![A-Za-z])|\\text\{,\})"
_WIDE = r"(?:(?<!\\)\\[;:> ]|~|\\(?:q?quad|enspace|space|medspace|thickspace)(?![A-Za-z]))"
_SPACES: list[tuple[re.Pattern[str], str | Callable[[re.Match[str]], str]]] = [
    (re.compile(r"(?<![\w.])\d{1,3}(?:['\u2019_]\d{3})+(?!\w)"), lambda grouped: re.sub(r"\D", "", grouped[0])),
    (re.compile(r"(?<![\d}])(\d+)\{,\}(\d{1,2}|\d{4,})(?![\d{])"), r"\1.\2"),
    (re.compile(r"(\\[dt]?frac)\s*([1-9])([1-9])"), r"\1{\2}{\3}"),
    (re.compile(r"\\f(?:rame)?box(?=\s*\{)"), r"\\boxed"),
    (re.compile(r"\\varnothing(?![A-Za-z])|∅"), r"\\emptyset "),
    (re.compile(r"\\(?:lor|vee)(?![A-Za-z])|\u2228"), r"\\text{ or }"),
    (re.compile(r"\\(?:land|wedge)(?![A-Za-z])|\u2227"), r"\\text{ and }"),
    (re.compile(r"\\(?:mathrm|operatorname)\s*\{([ei])\}"), r"\1"),
    (re.compile(r"\\lg(?![A-Za-z])"), r"\\log_{10}"),
    (re.compile(r"\\colon(?![A-Za-z])"), ":"),
    (re.compile(r"\\log\s*_\s*(?:e(?![A-Za-z])|\{\s*e\s*\})"), r"\\ln "),
    (
        re.compile("[¼-¾⅐-⅞]"),
        lambda fraction: " {}/{}".format(*unicodedata.normalize("NFKC", fraction[0]).split("\u2044")),
    ),
    (re.compile(rf"(?<=\d),?(?:\s*{_THIN})+\s*(?=\d{{3}}(?!\d))|(?<=\d){_THIN}(?=\d)"), ""),
    (re.compile(r"(?<=\d)\{,\}(?=\d{3}(?!\d))"), ""),
    (re.compile(rf"(?<=\d){_WIDE}(?=\d{{3}}(?!\d))"), " "),
    (re.compile(r"(?<!\\)\\!"), ""),
    (re.compile(rf"{_THIN}|{_WIDE}"), " "),
]
"""Spaces of LaTeX: thin ones within a number part its digits, as `10\\,000` does; others are spaces."""
_REPEATING = re.compile(
    r"(?<![\w.])(?P<whole>\d{0,30})\.(?P<once>\d{0,30}?)(?:\\overline\s*(?:\{(?P<line>\d{1,30})\}|(?P<digit>\d))"
    r"|(?P<dots>\d)(?P=dots){2,}\s*(?:\.{3}|…|\\[lc]?dots(?![A-Za-z])))"
)
_FRACTION_IN_PERCENT = re.compile(r"(?<![\w.}])(\d{0,30})\s*\\[dt]?frac\{(\d{1,30})\}\{(\d{1,30})\}\s*\\?%")
_RAISED = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻", "0123456789+-")
_WRITTEN: list[tuple[re.Pattern[str], str | Callable[[re.Match[str]], str]]] = [
    (re.compile("[⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻]+"), lambda raised: f"^{{{raised[0].translate(_RAISED)}}}"),
    (re.compile(r"\^\s*(-?\d+)"), r"^{\1}"),
    (re.compile(r"(?<=\d)\s*[xX]\s*(?=10\s*\^)"), r"\\times "),
    (re.compile(r"(?<=[\w)}])\*\*(?=[\w({\\-])"), r"^"),
    (re.compile(r"√\s*(?:\(([^()]*)\)|(\w+))"), r"\\sqrt{\1\2}"),
    (re.compile(r"(?<![\w.,/^])(\d+) +(\d+)/(\d+)(?![\w/])"), r"(\1+\\frac{\2}{\3})"),
    (re.compile(r"(?<![\w.])(\d+(?:\.\d*)?)[eE]\+?(-?\d+)(?![\w.])"), r"\1 \\cdot 10^{\2}"),
]
"""Raised digits, powers of several digits and as in Python, roots, mixed numbers, numbers with an exponent."""

_SYMBOL = r"[A-Za-z]|\\[a-z]{2,}"
_SAME_AS: list[tuple[re.Pattern[str], str | Callable[[re.Match[str]], str]]] = [
    (
        re.compile(
            r"(?:\\left\s*)?(?:\\\{)?\s*\\begin\{(?P<kind>cases|aligned|gathered|align\*?|array)\}(?:\{[lcr| ]*\})?"
            r"(?P<lines>[^<>]+?)\\end\{(?P=kind)\}\s*(?:\\right\s*\.?)?"
        ),
        lambda system: _lines_of(system["lines"]) or system[0],
    ),
    (re.compile(r"(?:\\left\s*)?\\(?:langle|lang)\s*(.+?)\s*(?:\\right\s*)?\\(?:rangle|rang)"), r"(\1)"),
    (re.compile(rf"(-?[\d.,/]+|-?\\[dt]?frac\{{\d+\}}\{{\d+\}})\s*=\s*({_SYMBOL})"), r"\2=\1"),
    (re.compile(r"[A-Za-z]\((?:-?\d[\d.,/ -]*)\)\s*=\s*([^=<>]+)"), r"\1"),
]
"""Forms of an answer as a whole that the library reads in one order or not at all: lines of a system, angles around a tuple, a
number before its variable, a function's value at a number."""
_LATEX_ALONE = re.compile(
    r"\\\$\s*[\d.,]+|(?=.*\d)(?:[\d\s.,+*/^{}()-]|\\(?:[{}]|(?:[dt]?frac|cdot|times|div|sqrt|pi|left|right)(?![A-Za-z])))+"
)
"""A number as LaTeX without delimiters, of which the library would take the last digits only."""
_AND = re.compile(r"[,;]\s*(?:and\b|\\text\{\s*and\s*\})|[,;]|\\text\{\s*and\s*\}|\band\b")
OR = re.compile(r"(?:,\s*)?(?:\\(?:lor|vee)(?![A-Za-z])|\\text\{\s*or\s*\}|(?<![\\A-Za-z])or(?![A-Za-z]))")
_ELSE = re.compile(rf";|{OR.pattern}")
"""What parts the solutions of several variables, as in `x = 1, y = 2; x = 3, y = 4`."""
_ASSIGNED = re.compile(rf"\s*({_SYMBOL})\s*=\s*([^=,;<>()]+)")
"""One of several variables and its value; together they are a tuple, in which each keeps its own."""
_OF_SEVERAL = re.compile(rf"\((?:(?:{_SYMBOL}),)+(?:{_SYMBOL})\)\s*=\s*\(.+\)")
_LIST = re.compile(r"[^=<>,;()\[\]{}|]+(?:[,;][^=<>,;()\[\]{}|]+)+")
_NUMBERED = re.compile(rf"(?P<name>{_SYMBOL})_\{{?\d\}}?\s*=")
"""A variable of several with one name, as in `x_1 = 2, x_2 = 3`."""

_FORMULA_ALONE = re.compile(
    r"(?:[A-Za-z][:)] +)?"
    r"(?P<formula>[\w(\[{√∞.|\u2212\u2013-](?!>)[\w\s+*/^=<>().,:|\[\]{}√∞\xd7·÷≤≥%°\u2212\u2013-]*)"
)
"""The end of a completion, maybe after a letter as in `A: 5`. No sentence, no exclamation, no arrow before a number."""
_CHOICE = re.compile(
    r"\**(?:\(([A-Za-z])\)|([A-Z])\**[).:])\**\s+(?!(?:or|and)\b)(?!.*\([A-Za-z]\))\S.*", re.IGNORECASE
)
"""A letter that names a choice before the choice's own text. A second letter in parentheses names another."""
_NONE = re.compile(r"(?:not\b(?!\s+(?:more|less|fewer))|between\b)", re.IGNORECASE)
"""Words before a number that is no answer, as in `The answer is not 3`."""
_WITH_UNIT = re.compile(r"[^A-Za-z]*\d[mgslhNJWVK](?:\^?[23])?")
_OPENS_MATH = re.compile(r"(?<!\\)\$[^$]*(?<!\\)\$|\\\(|\\\[|\\boxed")
_MARKER = re.compile(r"\banswer\b(?:\s+is\b)?[\s:=*>]*", re.IGNORECASE)
_FORMULA = re.compile(r"\$([^$]+)\$|\\\(((?:(?!\\\)).)+)\\\)|\\\[((?:(?!\\\]).)+)\\\]")
_IN_BASE = re.compile(r"[\w\s.]+?_\s*(?:(\d+)|\{(?:\\text\{)?(\d+)\}{1,2})")
_LONGEST = 2000
"""Characters of an answer. What is longer is none."""


@dataclass(frozen=True, slots=True)
class ExpectedAnswer:
    """An answer of the data, and how completions are compared with it."""

    kind: Literal["number", "formula", "text"]
    """`number`: by whatever number the library finds in a completion. `formula`: by a formula, which is the end of a completion
    that has no LaTeX. `text`: by the letters of its end, or a choice's letter before its text."""
    text: str
    """The answer for the library; of the kind `text` it is as `plain` returns it."""


def read(answer: str) -> ExpectedAnswer:
    """Returns how an answer is compared. One that has delimiters, such as `$`, is a formula as it is."""
    answer = spaced(answer).strip()
    if (styled := _STYLED_TEXT.fullmatch(answer)) and as_number(styled[1].strip()):
        answer = styled[1].strip()
    answer = re.sub(r"(?<=[\d)}\]])\.\Z", "", answer)
    formula = end_of(answer)
    if (same := rewritten(formula)) != formula:
        number = as_number(same)
        return ExpectedAnswer("formula", f"${in_latex(same)}$") if number is None else ExpectedAnswer("number", number)
    if has_delimiters(answer):
        return ExpectedAnswer("formula", answer)
    if _TIME.fullmatch(answer) or _is_text(answer):
        return ExpectedAnswer("text", plain(answer))
    number = as_number(answer)
    return ExpectedAnswer("formula", f"${in_latex(answer)}$") if number is None else ExpectedAnswer("number", number)


def spaced(text: str) -> str:
    """Returns a text without the spaces of LaTeX and of Unicode that part the digits of a number; others become spaces."""
    text = text.translate(_UNICODE_SPACES)
    for space, plain_text in _SPACES:
        text = space.sub(plain_text, text)
    return _FRACTION_IN_PERCENT.sub(_of_a_hundred, _REPEATING.sub(_repeated, text))


def _repeated(found: re.Match[str]) -> str:
    once = found["whole"] + found["once"]
    again = found["line"] or found["digit"] or found["dots"]
    nines = (10 ** len(again) - 1) * 10 ** len(found["once"])
    return f"\\frac{{{int(once + again) - int(once or 0)}}}{{{nines}}}"


def _of_a_hundred(found: re.Match[str]) -> str:
    whole, above, below = (int(digits or 0) for digits in found.groups())
    return f"\\frac{{{whole * below + above}}}{{{100 * below}}}"


def rewritten(formula: str) -> str:
    """Returns a formula in the form that the library reads in both orders."""
    for form, same in _SAME_AS:
        if (found := form.fullmatch(formula)) is not None:
            formula = form.sub(same, found[0])
    numbered = list(_NUMBERED.finditer(formula))
    if len({each["name"] for each in numbered}) == 1 < len(numbered) == formula.count("="):
        formula = _NUMBERED.sub(r"\g<name>=", formula)
    for solutions in ([formula], _ELSE.split(formula)):
        read = [_assigned(each) for each in solutions]
        names = sorted(read[0])
        if names and all(sorted(each) == names for each in read):
            values = ",".join(f"({','.join(each[name] for name in names)})" for each in read)
            formula = f"({','.join(names)})={values}"
            break
    return both_signs(formula)


def _assigned(formula: str) -> dict[str, str]:
    """Returns the values of several variables by their names, as in `x = 2, y = 1`; empty for anything else."""
    parts = [_ASSIGNED.fullmatch(part) for part in _AND.split(formula)]
    values = {each[1]: each[2].strip() for each in parts if each is not None}
    return values if 1 < len(parts) == len(values) else {}


def _lines_of(lines: str) -> str:
    """Returns the equations of a system, which may be aligned at their signs, beside one another; empty for other lines."""
    parts = [re.sub(r"[,;.]?\s*\Z", "", re.sub(r"&\s*=\s*&?|=\s*&", "=", each)) for each in lines.split(r"\\")]
    parts = list(filter(str.strip, parts))
    return ", ".join(parts) if all("=" in each and "&" not in each for each in parts) else ""


def both_signs(formula: str) -> str:
    r"""Returns a formula with one `\pm` as both that it stands for, since the library reads it in no fraction."""
    if formula.count(r"\pm") != 1 or re.search(r"[,;]", formula) or re.search(r"(?<![\\A-Za-z])[A-Za-z]{3}", formula):
        return formula
    return ", ".join(
        re.sub(r"\\pm(?![A-Za-z])", sign, re.sub(r"\\mp(?![A-Za-z])", other, formula)) for sign, other in ("+-", "-+")
    )


def as_tuple(answer: str, completion: str) -> str | None:
    """Returns a list, such as `2, 1`, as the tuple that it is beside values of several variables; None for anything else."""
    end = rewritten(end_of(answer))
    return f"({end})" if _LIST.fullmatch(end) and _OF_SEVERAL.fullmatch(rewritten(end_of(completion))) else None


def has_delimiters(text: str) -> bool:
    r"""Whether a text has a formula between `$`, `\(` or `\[`, or in `\boxed`. A single `$` is a currency."""
    return _OPENS_MATH.search(text) is not None


def as_number(text: str) -> str | None:
    """Returns the digits of a number, with its sign and `%`; None for what is no number."""
    found = _NUMBER.fullmatch(text)
    if found is None or not any(map(str.isdigit, found["digits"])) or _TIME.fullmatch(text):
        return None
    digits = re.sub(r"^(-?)\.", r"\g<1>0.", found["digits"])
    return found["sign"].replace("+", "") + digits + ("%" if found["percent"] else "")


def in_latex(text: str) -> str:
    """Returns a text whose formulas are LaTeX, for the signs and names that are written without a backslash."""
    for written, latex in _WRITTEN:
        text = written.sub(latex, text)
    for sign, latex in _SIGNS.items():
        text = text.replace(sign, latex)
    return _NAME.sub(r"\\\g<0>", text)


def answer_in(completion: str, kind: Literal["number", "formula"]) -> str:
    """Returns what math-verify is given of a completion: its end, if that is a number or a formula; else the completion.

    A completion with delimiters is given as it is, unless its end is a number with a unit.
    """
    end = end_of(completion)
    if (not end and r"\boxed" in completion) or _NONE.match(end):
        return ""  # the last one is empty or not closed: none before it counts
    styled = _STYLED_TEXT.fullmatch(end)
    if (number := as_number(end if styled is None else styled[1].strip())) is not None:
        return number
    if _TIME.fullmatch(end):
        return f"$\\text{{{end}}}$"
    if not has_delimiters(completion) and "\\" in end and _LATEX_ALONE.fullmatch(end):
        return f"${in_latex(end)}$"
    if (same := rewritten(end)) != end:
        return as_number(same) or f"${in_latex(same)}$"
    if has_delimiters(completion):
        return in_latex(completion)
    alone = _FORMULA_ALONE.fullmatch(end)
    if kind == "number" and (alone is None or _longest_word(end) > 1 or _WITH_UNIT.fullmatch(end)):
        return completion
    return f"${in_latex(end if alone is None else alone['formula'])}$"


def _longest_word(text: str) -> int:
    return max(map(len, re.findall(r"[^\W\d_⁰¹²³⁴-⁹]+", _NO_WORD.sub("", text))), default=0)


def _is_text(answer: str) -> bool:
    """Whether an answer is text: a letter, a word, several, or numbers among words."""
    answer = plain(answer) if _STYLED.fullmatch(answer) else re.sub(r"\A\((\w)\)\Z", r"\1", answer)
    longest = _longest_word(answer)
    if re.fullmatch(r"-?\d+[a-cu-z]{2,3}", answer):  # a product such as 2xy
        return False
    if "\\" in answer or not longest or as_number(answer) is not None:
        return False
    if _OPERATORS.search(answer):
        return longest > 3
    return longest > 1 or len(answer) == 1


def end_of(completion: str) -> str:
    r"""Returns what a completion gives as its answer; empty if there is none.

    It is what the last `\boxed` holds, else what follows the last "answer" of the last line, else the last formula there, else
    that line.
    """
    if (start := completion.rfind(r"\boxed")) >= 0:
        return re.sub(r"(?<=[\d)}\]])\.\Z", "", _braced(completion[start + len(r"\boxed") :]))
    line = completion.rstrip().rpartition("\n")[2].strip()
    line = line.removesuffix("</answer>")
    if len(line) > _LONGEST:
        return ""
    *_, marker = [None, *_MARKER.finditer(line)]
    if marker is not None:
        line = line[marker.end() :]
    elif formulas := list(_FORMULA.finditer(line)):
        line = formulas[-1][0]
    line = line.strip(" \t*_`\"'").removesuffix(".").strip(" \t*_`\"'")
    formula = _FORMULA.fullmatch(line)
    return line if formula is None else next(filter(None, formula.groups())).strip()


def base_of(answer: str) -> str:
    """Returns the base of an integer such as `1011_2`, which the library leaves out; empty if there is none."""
    found = _IN_BASE.fullmatch(end_of(answer))
    return "" if found is None else found[1] or found[2]


def choice_in(end: str) -> str | None:
    """Returns the letter, as `plain` would, of an end such as `(C) 45 degrees`, `C) 45`, `C: 45` or `C. 45`; else None."""
    found = _CHOICE.fullmatch(_STYLED_TEXT.sub(r"\1", end))
    return None if found is None else (found[1] or found[2]).casefold()


def _braced(text: str) -> str:
    """Returns what stands between the braces, or the next character without any."""
    text = text.lstrip()
    if not text.startswith("{"):
        return text[:1]
    depth = 0
    for brace in re.finditer(r"\\.|[{}]", text[:_LONGEST], re.DOTALL):  # a backslash before a brace makes it a sign
        depth += (brace[0] == "{") - (brace[0] == "}")
        if depth == 0:
            return text[1 : brace.start()].strip()
    return ""


def plain(text: str) -> str:
    r"""Returns text as it is compared: without spaces, delimiters, styles such as `\text`, case, parentheses of a letter."""
    text = re.sub(rf"{_STYLE}\b|\\[,;:! ()\[\]]|[$~{{}}]|\s", "", text).casefold()
    text = re.sub(r"\.(?!\d)", "", text)
    return text[1:-1] if re.fullmatch(r"\([^\W\d_]\)", text) else text

"""How two numbers are compared, in place of math-verify's own way.

The library subtracts them, and takes what is below 1e-15 for nothing: 1.6e-19 is then 3.2e-19. Here decimals are what they say
exactly, an integer of the data is compared exactly, and other numbers by digits that both must share.
"""

from __future__ import annotations

from functools import cache
from typing import Any

_PRECISION, _ZERO_PRECISION = 30, 150
_NOTHING = "1e-60"
"""A difference of irrational numbers, as a share of them, that is none."""
_LARGEST_EXPONENT = 40_000
"""Bits of a decimal's exponent up to which it is made an exact fraction."""


@cache
def install() -> None:
    """Has math-verify compare numbers so, also within sets, pairs, intervals and equations."""
    from math_verify import grader

    of_library, symbolic_of_library = grader.sympy_numeric_eq, grader.sympy_symbolic_eq

    def equal(left: Any, right: Any, float_rounding: int, numeric_precision: int) -> bool:
        from sympy import Integer, MatrixBase, MatrixExpr

        if isinstance(left, MatrixBase | MatrixExpr) and isinstance(right, MatrixBase | MatrixExpr):
            return bool(of_library(left, right, float_rounding, numeric_precision))  # which comes back for each element
        if all(grader.is_atomic_or_pct_atomic(each, Integer) for each in (left, right)):
            return bool(of_library(left, right, float_rounding, numeric_precision))  # 9 is also 9%
        try:
            return same(left, right, float_rounding)
        except (TypeError, ValueError, AttributeError, ArithmeticError):
            return False

    def symbolic(left: Any, right: Any) -> bool:
        try:
            apart = _are_apart(left, right)
        except (TypeError, ValueError, AttributeError, ArithmeticError):
            apart = False
        return not apart and bool(symbolic_of_library(left, right))

    grader.sympy_numeric_eq, grader.sympy_symbolic_eq = equal, symbolic


def _are_apart(left: Any, right: Any) -> bool:
    """Whether two numbers are certainly different, which is quickly seen also of those that are too large to be written."""
    from sympy import Abs

    if not (left.is_number and right.is_number):
        return False
    near, far = sorted((left.evalf(_PRECISION), right.evalf(_PRECISION)), key=Abs)
    return bool(far.is_finite and Abs(far - near) > Abs(far) / 1000)


def same(expected: Any, found: Any, digits: int) -> bool:
    """Whether two expressions of sympy are the same number, of which `digits` count; or, with variables, differ by nothing.

    Numbers of which one is written as a decimal must share `digits` decimal places and `digits` significant digits, unless the
    expected one is an integer.
    """
    from sympy import Abs, Float, Rational, floor, log

    left, right = exact(expected), exact(found)
    if left.free_symbols or right.free_symbols or not (left.is_number and right.is_number):
        return bool((left.doit() - right.doit()) == 0)
    near, far = sorted((left.evalf(_PRECISION), right.evalf(_PRECISION)), key=Abs)
    if far == 0 or not far.is_finite:
        return bool(far == 0)
    significant = max(digits, 1) - 1 - floor(log(Abs(far), 10).evalf())
    tolerance = Float(10, _PRECISION) ** -max(digits, significant) / 2
    if Abs(far - near) > 2 * tolerance + Abs(far) * Float("1e-20"):
        return False
    left, right = left.doit(), right.doit()
    if left == right:
        return True
    if left.is_integer or not (expected.has(Float) or found.has(Float)):
        if isinstance(left, Rational) and isinstance(right, Rational):
            return False
        rest = (left - right).evalf(15, maxn=_ZERO_PRECISION)
        return bool(Abs(rest) <= Abs(far) * Float(_NOTHING))
    return bool(Abs(left - right).evalf(_PRECISION) <= tolerance)


def exact(expression: Any) -> Any:
    """Returns the expression with the fractions that its decimals are, and percentages as hundredths."""
    from sympy import Float, Rational, UnevaluatedExpr

    expression = expression.xreplace({each: each.args[0] for each in expression.atoms(UnevaluatedExpr)})
    written = {each: Rational(str(each)) for each in expression.atoms(Float) if abs(each._mpf_[2]) < _LARGEST_EXPONENT}
    return expression.xreplace(written)


def has_value(expected: Any) -> bool:
    """Whether an answer of the data is no division by zero."""
    from sympy import Basic, nan, zoo

    return not (isinstance(expected, Basic) and getattr(expected, "is_number", False) and expected.doit().has(nan, zoo))


def wrong_answers(expected: Any) -> list[Any]:
    """Returns what certainly is not the answer: its double, and each of its numbers changed.

    There is none for what has variables: to solve an equation of changed powers has no end.
    """
    from sympy import Basic, Number, Rational

    if not isinstance(expected, Basic) or expected.free_symbols:
        return []
    changed = expected.xreplace({leaf: 2 * leaf + Rational(17, 19) for leaf in expected.atoms(Number)})
    number = getattr(expected, "is_number", False) and not getattr(expected, "is_zero", True)
    return [each for each in (changed, 2 * expected if number else expected) if each != expected]

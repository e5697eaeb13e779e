#!/usr/bin/env bash
# math-verify 0.9 compares by order: an inequality as the gold answer equals its interval, an interval as gold does not equal the
# inequality, unless allow_set_relation_comp, which is off, and a chain equals none that is written from its other end. The values of
# two variables equal the same numbers exchanged. Exit 0 while that is so, 1 when it has changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check \
    math-verify==0.9.0 'latex2sympy2_extended==1.11.0' sympy==1.14.0 'antlr4-python3-runtime==4.13.2'
"$folder/venv/bin/python" - <<'PYTHON'
import sys
from importlib.metadata import version

from math_verify import parse, verify

print("math-verify", version("math-verify"))
print("expected: two forms of one answer are equal, whichever of them is the gold answer; 2, 1 is not x=1, y=2")
SEEN = {
    ("1<x<2", "(1,2)"): True,
    ("(1,2)", "1<x<2"): False,
    ("1<x<2", "2>x>1"): False,
    (r"x \in [1,2)", r"1 \le x < 2"): False,
    ("x=1, y=2", "2, 1"): True,
}
changed = False
for (gold, answer), before in SEEN.items():
    seen = verify(parse(f"${gold}$"), parse(f"${answer}$"))
    print(f"gold {gold!r}, answer {answer!r}: {seen}")
    changed |= seen != before
sys.exit(changed)
PYTHON

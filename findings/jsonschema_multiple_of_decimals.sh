#!/usr/bin/env bash
# jsonschema 4.26.0: multiples of a decimal are told by floats. Exits 1 if that changes.
#
# One expects 0.02, 0.07, 0.3 and 19.99 to be multiples of 0.01: JSON's numbers are decimals. Seen: 0.07 and 19.99 are refused, since
# 19.99 / 0.01 is 1998.9999999999998 as floats. So a price that a tool's schema allows is refused.
set -euo pipefail
home=$(mktemp -d)
trap 'rm -rf "$home"' EXIT
python3 -m venv "$home/venv"
"$home/venv/bin/pip" install --quiet --disable-pip-version-check 'jsonschema==4.26.0'
"$home/venv/bin/python" - <<'PROGRAM'
import sys
from importlib.metadata import version

from jsonschema import Draft202012Validator

validator = Draft202012Validator({"multipleOf": 0.01})
print("jsonschema", version("jsonschema"))
found = {value: validator.is_valid(value) for value in (0.02, 0.07, 0.3, 19.99)}
for value, is_valid in found.items():
    print(value, "is a multiple of 0.01; jsonschema says", is_valid)
sys.exit(found != {0.02: True, 0.07: False, 0.3: True, 19.99: False})
PROGRAM

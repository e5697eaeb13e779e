#!/usr/bin/env bash
# datasets 5.2.0: rows of a JSON Lines file are not what the file says. Exits 1 if that changes.
#
# One expects of {"answer": 7} the integer 7, also at any depth, and of "2024-01-02" this text. Seen: beside a 2.5 in another row 7
# becomes 7.0, and a column whose texts all look like dates becomes timestamps. Both without a word.
set -euo pipefail
home=$(mktemp -d)
trap 'rm -rf "$home"' EXIT
python3 -m venv "$home/venv"
"$home/venv/bin/pip" install --quiet --disable-pip-version-check 'datasets==5.2.0'
cat > "$home/rows.jsonl" <<'ROWS'
{"answer": 7, "calls": [{"nights": 6}], "day": "2024-01-02"}
{"answer": 2.5, "calls": [{"nights": 7.5}], "day": "2024-12-31"}
ROWS
HF_HOME="$home/cache" HF_HUB_OFFLINE=1 "$home/venv/bin/python" - "$home/rows.jsonl" <<'PROGRAM'
import sys

import datasets

datasets.disable_progress_bars()
row = datasets.load_dataset("json", data_files=sys.argv[1], split="train")[0]
print("datasets", datasets.__version__)
print("the file says ", open(sys.argv[1]).readline().strip())
print("datasets gives", row)
same = isinstance(row["answer"], int) or isinstance(row["calls"][0]["nights"], int) or isinstance(row["day"], str)
print("this has changed: a value is as the file says" if same else "seen: each of the three values is of another type")
sys.exit(same)
PROGRAM

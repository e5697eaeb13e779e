#!/usr/bin/env bash
# Ray 2.60.0: a token file (`ray get-auth-token --generate` makes it) turns token authentication on for `ray start`, and for no
# command that names an address. With RAY_AUTH_MODE unset, the head asks for the token that lies in ~/.ray of its own user;
# `ray.init("auto")` of the same user on the same machine sends it, `ray.init` with the head's address and `ray status` do not. The
# ConnectionError of the former does not name tokens.
#
# Expected: with the same file and the same environment, head and clients agree.
# Seen: `ray start` says that tokens are on; `ray.init("auto")` works, `ray.init("127.0.0.1:6398")` and `ray status` are refused. All
# work with RAY_AUTH_MODE=token.
# Exit code 1 if that has changed.
set -euo pipefail
work=$(mktemp -d)
trap 'pkill -f "$work/venv" || true; rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet ray==2.60.0
unset RAY_AUTH_MODE RAY_AUTH_TOKEN RAY_AUTH_TOKEN_PATH RAY_ADDRESS
export HOME="$work" RAY_TMPDIR="$work" RAY_USAGE_STATS_ENABLED=0 PATH="$work/venv/bin:$PATH"
ray get-auth-token --generate > "$work/token"
ray start --head --num-cpus=1 --port=6398 --include-dashboard=false --object-store-memory=80000000 > "$work/start" 2>&1
grep -o "Token authentication is [a-z]*" "$work/start"
cat > "$work/case.py" <<'PYTHON'
import sys

import ray

try:
    ray.init(sys.argv[1], log_to_driver=False)
except ConnectionError as error:
    sys.exit(f"ConnectionError, which names tokens: {'token' in str(error).lower()}")
print("connected")
PYTHON
tell() { "$@" > "$work/out" 2>&1 && echo accepted || { echo refused; grep -o "InvalidAuthToken\|ConnectionError, which.*" "$work/out" | tail -n 1 >&2; }; }
all() { echo "$(tell python "$work/case.py" auto) $(tell python "$work/case.py" 127.0.0.1:6398) $(tell ray status)"; }
without="$(all)"
export RAY_AUTH_MODE=token
with="$(all)"
echo "ray.init of auto and of an address, ray status; RAY_AUTH_MODE unset: $without; token: $with"
[ "$without; $with" = "accepted refused refused; accepted accepted accepted" ]

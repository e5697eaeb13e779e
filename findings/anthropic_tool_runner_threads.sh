#!/usr/bin/env bash
# anthropic 2.14.0: `tool_runner` keeps the history at the server unless it is told not to. Exits 1 if that changes.
#
# The Messages API has no state, so one expects each request to have the whole history. Seen: the first request
# asks for a thread, and the second has the new messages alone. A server of this API that skips fields it does not know answers
# the second without the task. By the code `thread_unsupported_request` of a refusal the client sends the whole history again.
set -euo pipefail
home=$(mktemp -d)
trap 'rm -rf "$home"' EXIT
python3 -m venv "$home/venv"
"$home/venv/bin/pip" install --quiet --disable-pip-version-check 'anthropic==2.14.0'
"$home/venv/bin/python" - <<'PROGRAM'
import http.server
import json
import sys
import threading

import anthropic

CONTENT = iter([[{"type": "tool_use", "id": "1", "name": "look", "input": {}}], [{"type": "text", "text": "A door."}]])
asked = []


class Server(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
        asked.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        content = next(CONTENT)
        answer = {"id": f"msg_{len(asked)}", "type": "message", "role": "assistant", "model": "m", "content": content}
        answer |= {"stop_reason": "tool_use" if len(asked) == 1 else "end_turn", "stop_sequence": None}
        answer |= {"usage": {"input_tokens": 1, "output_tokens": 1}}
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.end_headers()
        self.wfile.write(json.dumps(answer).encode())

    def log_message(self, *_):
        pass


@anthropic.beta_tool
def look() -> str:
    """Looks."""
    return "a door"


server = http.server.HTTPServer(("127.0.0.1", 0), Server)
threading.Thread(target=server.serve_forever, daemon=True).start()
client = anthropic.Anthropic(base_url=f"http://127.0.0.1:{server.server_port}", api_key="none")
task = {"role": "user", "content": "What is there?"}
client.beta.messages.tool_runner(model="m", max_tokens=9, messages=[task], tools=[look]).until_done()
print("anthropic", anthropic.__version__)
for each in asked:
    print("thread", each.get("thread"), "messages", json.dumps(each["messages"]))
same = len(asked[1]["messages"]) == 3
print("this has changed: the history is whole" if same else "seen: the second request has no task and no call")
sys.exit(same)
PROGRAM

#!/usr/bin/env bash
# smolagents 1.26.0: the history that CodeAgent sends is not what the model answered. Exits 1 if that changes.
#
# One expects of the second request that its assistant's message is the first answer, up to the stop string at most. Seen: smolagents
# writes the stop string back, and after it "Calling tools:" with a call that the model never made, all in the assistant's name. So
# a server that continues what it generated reads another text, and a model that is trained on its history learns to write such notes.
set -euo pipefail
home=$(mktemp -d)
trap 'rm -rf "$home"' EXIT
python3 -m venv "$home/venv"
"$home/venv/bin/pip" install --quiet --disable-pip-version-check 'smolagents==1.26.0' 'openai==3.57.0'
"$home/venv/bin/python" - <<'PROGRAM'
import http.server
import importlib.metadata
import json
import sys
import threading

import smolagents

ANSWERS = iter(["Thought: I count.\n<code>\nprint(1 + 1)\n", "<code>\nfinal_answer(2)\n"])
asked = []


class Server(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
        asked.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        message = {"role": "assistant", "content": next(ANSWERS)}
        choice = {"index": 0, "finish_reason": "stop", "message": message}
        usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
        answer = {"id": "1", "object": "chat.completion", "created": 0, "model": "m", "choices": [choice], "usage": usage}
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.end_headers()
        self.wfile.write(json.dumps(answer).encode())

    def log_message(self, *_):
        pass


server = http.server.HTTPServer(("127.0.0.1", 0), Server)
threading.Thread(target=server.serve_forever, daemon=True).start()
model = smolagents.OpenAIModel("m", api_base=f"http://127.0.0.1:{server.server_port}/v1", api_key="none")
smolagents.CodeAgent(tools=[], model=model, verbosity_level=0).run("Add 1 and 1.")
[text] = [part["text"] for each in asked[1]["messages"] if each["role"] == "assistant" for part in each["content"]]
print("smolagents", importlib.metadata.version("smolagents"), "stop", asked[0]["stop"])
print("answered ", repr("Thought: I count.\n<code>\nprint(1 + 1)\n"))
print("sent back", repr(text))
same = "Calling tools:" not in text
print("this has changed: the answer is sent back as it was" if same else "seen: the answer goes on in the assistant's name")
sys.exit(same)
PROGRAM

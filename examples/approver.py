"""Shows each question of a gateway to the person at this terminal, and sends their answer back, signed with their key.

`python approver.py key` makes a key: the first half is for ANSWER_KEY here, the second for `answer_key` under people:
in ringfence.yaml. QUESTIONS_KEY is the `secret` of the hook, PERSON who answers, GATEWAY the gateway's address.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import os
import queue
import secrets
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

QUESTIONS: queue.Queue[dict[str, Any]] = queue.Queue()


class Receiver(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        signed = f"{self.headers['webhook-id']}.{self.headers['webhook-timestamp']}.".encode() + body
        ours = base64.b64encode(hmac.digest(os.environ["QUESTIONS_KEY"].encode(), signed, hashlib.sha256)).decode()
        fresh = abs(time.time() - int(self.headers["webhook-timestamp"])) < 300
        right = fresh and hmac.compare_digest(self.headers["webhook-signature"], f"v1,{ours}")
        self.send_response(204 if right else 401)
        self.end_headers()
        if right:
            QUESTIONS.put(json.loads(body))


def answer(question: dict[str, Any], said: str) -> str:
    """Sign and send it; what the gateway says of it."""
    given = {
        "approval": question["approval"],
        "asked": question["asked"],
        "answer": said,
        "person": os.environ["PERSON"],
    }
    nonce, at, body = secrets.token_hex(16), str(int(time.time())), json.dumps(given)
    key = Ed25519PrivateKey.from_private_bytes(base64.b64decode(os.environ["ANSWER_KEY"].removeprefix("whsk_")))
    signature = "v1a," + base64.b64encode(key.sign(f"{nonce}.{at}.{body}".encode())).decode()
    headers = {"webhook-id": nonce, "webhook-timestamp": at, "webhook-signature": signature}
    try:
        with urlopen(Request(f"{os.environ['GATEWAY']}/approvals/answer", body.encode(), headers)) as reply:  # noqa: S310
            return str(json.load(reply)["state"])
    except HTTPError as refused:
        return str(json.load(refused)["problem"])


def main() -> None:
    if sys.argv[1:] == ["key"]:
        key = Ed25519PrivateKey.generate()
        print(f"whsk_{base64.b64encode(key.private_bytes_raw()).decode()}")
        print(f"whpk_{base64.b64encode(key.public_key().public_bytes_raw()).decode()}")
        return
    server = ThreadingHTTPServer(("127.0.0.1", int(os.environ.get("PORT", "0"))), Receiver)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    print(f"Questions are taken at http://127.0.0.1:{server.server_address[1]}/", flush=True)
    while True:
        question = QUESTIONS.get()
        print(f"\n{question['type']}: {question['subject']}")
        for label, text in [*question["lines"], *question["sent"]]:
            print(f"  {label}: {text}")
        if not question["whole"]:
            print("  It is too long for here: answer it in the console.", flush=True)
            continue
        said = input(f"{question['approval']}: approve or deny? ")
        print(answer(question, said.strip()), flush=True)


if __name__ == "__main__":
    main()

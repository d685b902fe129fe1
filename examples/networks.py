"""A box with a network: one host and nothing else. The outside is a small server in this program.

python examples/networks.py
"""

from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

from ringfence import Sandbox, run_code


class Outside(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        body = f"you asked for {self.path}".encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Nothing."""


server = ThreadingHTTPServer(("127.0.0.1", 0), Outside)
Thread(target=server.serve_forever, daemon=True).start()
place = f"127.0.0.1:{server.server_port}"

# Programs find the proxy in their environment: urllib, requests, curl, git and pip need nothing more.
fetch = f"import urllib.request\nprint(urllib.request.urlopen('http://{place}/prices').read().decode())"
ran = run_code(fetch, network=[place])
print(ran.text.strip())
print("reached", [(entry["rule"], entry["count"]) for entry in ran.facts["network"]["allowed"]])

# Every other host is refused with 403, however its name is written.
tricks = f"""
import urllib.error, urllib.request
for url in ("http://example.com/", "http://{place}.evil.example/", "http://169.254.169.254/", "http://2130706433:1/"):
    try:
        urllib.request.urlopen(url)
        print("reached")
    except urllib.error.HTTPError as exc:
        print(exc.code, exc.headers["X-Ringfence-Reason"])
"""
ran = run_code(tricks, network=[place])
print(*ran.text.split("\n")[:-1], sep="; ")
print("effect:", ran.facts["effect"])

# A sandbox keeps its network from step to step; each step's facts say what it asked for.
with Sandbox.create(network=[place]) as box:
    print(box.run_code(fetch.replace("prices", "stock")).logs.stdout[0].strip())
    print("this step asked", len(box.run_code("6 * 7").facts["network"]["allowed"]), "times")

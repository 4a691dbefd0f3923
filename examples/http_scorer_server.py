"""A reward server as a starting point for your own. It implements the protocol of `HTTPScorer` with the standard library.

    python examples/http_scorer_server.py --port 8080

    HTTPScorer(url="http://127.0.0.1:8080")               in reward_registry.py

Replace the function `score` by your own. If it raises an exception, the reply contains an `error` for that sample, and
the sample is left out of training.
"""

import argparse
import json
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

PROTOCOL = 1
MAX_BODY_BYTES = 16 * 2**20
# Returns what the reply holds for one sample, given the sample and its images as base64 texts
Score = Callable[[dict[str, Any], list[str]], dict[str, Any]]


def score(sample: dict[str, Any], images: list[str]) -> dict[str, Any]:
    """Return the reward, and any further numbers. This example checks whether the completion ends with the answer.

    >>> score({"prompt": "3+4?", "completion": "It is 7.", "answer": 7}, [])
    {'reward': 1.0, 'length': 8}
    """
    if sample.get("answer") is None:
        return {"abstain": "there is no answer to compare with"}
    completion = sample["completion"]
    right = completion.rstrip(" .\n").endswith(str(sample["answer"]))
    return {"reward": float(right), "length": len(completion)}


def reply_to(request: Any, score: Score) -> dict[str, Any]:
    """Return the reply to one request, one score per sample.

    Raises:
        ValueError: The request does not follow this protocol.
    """
    if not isinstance(request, dict) or request.get("protocol") != PROTOCOL:
        raise ValueError(f"this server speaks protocol {PROTOCOL}")
    samples = request.get("samples")
    if not isinstance(samples, list) or not all(isinstance(sample, dict) for sample in samples):
        raise ValueError("`samples` must be a list of objects")
    images = request.get("images", [[] for _ in samples])
    if not isinstance(images, list) or len(images) != len(samples):
        raise ValueError("`images` must hold one list per sample")
    scores = [_scored(score, *pair) for pair in zip(samples, images, strict=True)]
    answer = {"protocol": PROTOCOL, "scores": scores}
    if "id" in request:
        answer["id"] = request["id"]  # the client checks the id, to recognize a reply to another request
    return answer


def _scored(score: Score, sample: dict[str, Any], images: list[str]) -> dict[str, Any]:
    try:
        return score(sample, images)
    except Exception as error:  # an error with one sample must not affect the other samples
        return {"error": f"{type(error).__name__}: {error}"}


class Handler(BaseHTTPRequestHandler):
    """Answers POST requests to /score."""

    server: "Server"
    protocol_version = "HTTP/1.1"  # keeps connections open, so that the client can reuse them
    timeout = 60  # seconds after which the thread of a silent client ends

    def do_POST(self) -> None:
        length = self.headers.get("Content-Length", "")
        if not length.isdigit() or int(length) > MAX_BODY_BYTES:
            # The rest of the request's body was not read, so the connection cannot be reused
            self.close_connection = True
            return self._answer(413, {"error": f"a body of at most {MAX_BODY_BYTES} bytes is needed"})
        body = self.rfile.read(int(length))
        if self.path != "/score":
            return self._answer(404, {"error": "only /score is here"})
        try:
            return self._answer(200, reply_to(json.loads(body), self.server.score))
        except (ValueError, RecursionError) as error:
            return self._answer(400, {"error": str(error)})

    def _answer(self, status: int, reply: dict[str, Any]) -> None:
        body = json.dumps(reply).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        """Log nothing, because a log would get a line for every sample."""


class Server(ThreadingHTTPServer):
    request_queue_size = 512  # a run opens many connections at once
    daemon_threads = True

    def __init__(self, address: tuple[str, int], score: Score) -> None:
        super().__init__(address, Handler)
        self.score = score


def address_arguments(description: str) -> argparse.ArgumentParser:
    """Return a parser of the server's address."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument(
        "--host", default="127.0.0.1", help="address to listen on; needs a trusted network: there is no key"
    )
    parser.add_argument("--port", type=int, default=8080, help="port to listen on; 0 chooses a free one")
    return parser


def serve(host: str, port: int, score: Score) -> None:
    """Answer requests until the program is interrupted."""
    with Server((host, port), score) as server:
        print(f"scoring on http://{host}:{server.server_port}", flush=True)
        server.serve_forever()


if __name__ == "__main__":
    options = address_arguments("A reward server for HTTPScorer.").parse_args()
    serve(options.host, options.port, score)

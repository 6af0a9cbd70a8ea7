"""A small model server: the standard library only, a model that is really computed, health that means something.

The model guesses the language of a text from its letter pairs; it is fitted at start from the samples below. It stands
for what an inference service does: a slow start (`--load-seconds`), `/healthz` that is 503 until the model is loaded,
requests that take a while (`--work-milliseconds`), counters that an autoscaler can read, and an end that lets running
requests finish.

    python examples/server/serve.py --port 8080
    curl -d 'wo ist der Bahnhof' localhost:8080/v1/predict
"""

import argparse
import json
import math
import os
import signal
import sys
import threading
import time
from collections import Counter
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

MAX_TEXT_BYTES = 64 * 1024
DRAIN_SECONDS = 8.0

SAMPLES = {
    "english": "the quick brown fox jumps over the lazy dog"
    " and where is the station please this is what they would have",
    "german": "der schnelle braune fuchs springt über den faulen hund"
    " und wo ist bitte der bahnhof das ist nicht schlecht",
    "french": "le renard brun saute par dessus le chien paresseux"
    " et où est la gare s'il vous plaît c'est ce que nous avons",
    "spanish": "el rápido zorro marrón salta sobre el perro perezoso"
    " y dónde está la estación por favor esto es lo que hay",
}


class Model:
    """Letter-pair frequencies per language; the language whose pairs make a text most likely wins."""

    def __init__(self, samples: dict[str, str]) -> None:
        self._scores: dict[str, dict[str, float]] = {}
        self._unseen: dict[str, float] = {}
        for language, text in samples.items():
            pairs = Counter(_pairs(text))
            total = sum(pairs.values()) + 1000
            self._scores[language] = {pair: math.log((count + 1) / total) for pair, count in pairs.items()}
            self._unseen[language] = math.log(1 / total)

    def predict(self, text: str) -> dict[str, float]:
        """Probability of each language, most likely first."""
        logs = {
            language: sum(scores.get(pair, self._unseen[language]) for pair in _pairs(text))
            for language, scores in self._scores.items()
        }
        top = max(logs.values())
        weights = {language: math.exp(value - top) for language, value in logs.items()}
        total = sum(weights.values())
        ranked = sorted(weights.items(), key=lambda item: (-item[1], item[0]))
        return {language: round(weight / total, 4) for language, weight in ranked}


def _pairs(text: str) -> list[str]:
    padded = f" {text.lower()} "
    return [padded[index : index + 2] for index in range(len(padded) - 1)]


class Service:
    """State shared by request threads."""

    def __init__(self, version: str, work_seconds: float) -> None:
        self.version = version
        self.work_seconds = work_seconds
        self.model: Model | None = None
        self.is_stopping = False
        self.lock = threading.Lock()
        self.running = 0
        self.served = 0
        self.busy_seconds = 0.0

    def load(self, seconds: float) -> None:
        """Fit the model; `seconds` stands for reading gigabytes of weights."""
        time.sleep(seconds)
        self.model = Model(SAMPLES)
        print(f"model loaded, version {self.version}", flush=True)

    def health(self) -> tuple[HTTPStatus, dict[str, object]]:
        state = "stopping" if self.is_stopping else ("ok" if self.model is not None else "loading")
        status = HTTPStatus.OK if state == "ok" else HTTPStatus.SERVICE_UNAVAILABLE
        return status, {"status": state, "version": self.version}

    def metrics(self) -> str:
        with self.lock:
            return (
                "# TYPE requests_running gauge\n"
                f"requests_running {self.running}\n"
                "# TYPE requests_total counter\n"
                f"requests_total {self.served}\n"
                "# TYPE request_seconds_total counter\n"
                f"request_seconds_total {self.busy_seconds:.6f}\n"
            )

    def predict(self, text: str) -> dict[str, object]:
        assert self.model is not None
        began = time.monotonic()
        with self.lock:
            self.running += 1
        try:
            time.sleep(self.work_seconds)
            return {"languages": self.model.predict(text), "version": self.version}
        finally:
            with self.lock:
                self.running -= 1
                self.served += 1
                self.busy_seconds += time.monotonic() - began


class Handler(BaseHTTPRequestHandler):
    """Routes; `service` is set on the subclass that `main` makes."""

    service: Service
    protocol_version = "HTTP/1.1"
    timeout = 30

    def do_GET(self) -> None:
        if self.path == "/healthz":
            status, page = self.service.health()
            self._answer(status, json.dumps(page))
        elif self.path == "/metrics":
            self._answer(HTTPStatus.OK, self.service.metrics(), kind="text/plain; version=0.0.4")
        else:
            self._answer(HTTPStatus.NOT_FOUND, json.dumps({"error": "try /healthz, /metrics or POST /v1/predict"}))

    def do_POST(self) -> None:
        length = self.headers.get("content-length", "")
        if self.path != "/v1/predict":
            self.close_connection = True
            self._answer(HTTPStatus.NOT_FOUND, json.dumps({"error": "try POST /v1/predict"}))
        elif not length.isdigit() or int(length) > MAX_TEXT_BYTES:
            self.close_connection = True
            self._answer(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, json.dumps({"error": f"at most {MAX_TEXT_BYTES} bytes"}))
        else:
            text = self.rfile.read(int(length)).decode("utf-8", "replace")
            if self.service.model is None:
                self._answer(HTTPStatus.SERVICE_UNAVAILABLE, json.dumps({"error": "loading"}))
            else:
                self._answer(HTTPStatus.OK, json.dumps(self.service.predict(text)))

    def _answer(self, status: HTTPStatus, body: str, *, kind: str = "application/json") -> None:
        data = body.encode()
        self.send_response(status)
        self.send_header("content-type", kind)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: object) -> None:
        """No line per request."""


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description="Serve a small language guesser.")
    parser.add_argument("--host", default=os.environ.get("HOST", "127.0.0.1"))
    parser.add_argument("--port", type=int, default=int(os.environ.get("BERTH_PORT", "0")))
    parser.add_argument("--version", default=os.environ.get("BERTH_MODEL_VERSION", "1"))
    parser.add_argument("--load-seconds", type=float, default=1.0)
    parser.add_argument("--work-milliseconds", type=float, default=5.0)
    options = parser.parse_args(arguments)
    service = Service(options.version, options.work_milliseconds / 1000)
    server = ThreadingHTTPServer((options.host, options.port), type("BoundHandler", (Handler,), {"service": service}))
    server.daemon_threads = True
    print(f"serving on {options.host}:{server.server_port}", flush=True)

    def stop(*_: object) -> None:
        # From another thread: shutdown() waits for the loop that this handler has interrupted.
        service.is_stopping = True
        threading.Thread(target=server.shutdown).start()

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)
    threading.Thread(target=service.load, args=(options.load_seconds,), daemon=True).start()
    server.serve_forever(poll_interval=0.1)
    server.socket.close()
    deadline = time.monotonic() + DRAIN_SECONDS
    while service.running and time.monotonic() < deadline:
        time.sleep(0.02)
    print(f"served {service.served} requests", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""Names of the hub: what is asked, for how long, and what the error says. A server here stands in for the hub."""

import json
import os
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from async_grpo.errors import ConfigurationError
from async_grpo.processes import hub

FILES = {"config.json": b'{"model_type": "qwen2"}', "tokenizer.json": b"{}", "model.bin": b"a pickle"}
COMMIT = "0123456789" * 4


class Hub(BaseHTTPRequestHandler):
    """A hub with the model owner/there, the gated model owner/gated, and no other."""

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        if "owner/slow" in self.path:
            time.sleep(3)
        if self.path.startswith("/api/models/owner/there"):
            listed = []
            for name, content in FILES.items():
                entry = {
                    "rfilename": name,
                    "path": name,
                    "type": "file",
                    "oid": "1" * 40,
                    "size": len(content),
                }
                listed.append(entry)
            info = {"id": "owner/there", "sha": COMMIT, "siblings": listed}
            self.answer(200, json.dumps(listed if "/tree/" in self.path else info).encode())
        elif self.path.startswith("/owner/there/resolve/") and self.path.split("/")[-1] in FILES:
            self.answer(200, FILES[self.path.split("/")[-1]])
        elif "owner/gated" in self.path:
            self.answer(403, b"{}", "GatedRepo")
        else:
            self.answer(404, b"{}", "RepoNotFound")

    def answer(self, status: int, content: bytes, error: str = "") -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.send_header("ETag", '"' + str(len(content)) + '"')
        self.send_header("X-Repo-Commit", COMMIT)
        if error:
            self.send_header("X-Error-Code", error)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)

    def log_message(self, *arguments: object) -> None:
        """Write nothing."""


@contextmanager
def served():
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def asked(name: str, endpoint: str, home: Path, reach_s: float = 20.0, **variables: str) -> str:
    """The folder of a model, or the error, in a process of its own: the hub's library reads its variables once."""
    code = (
        "import sys; from async_grpo.errors import ConfigurationError; from async_grpo.processes import hub\n"
    )
    code += f"hub.REACH_S = {reach_s}\ntry: print(hub.local_model(sys.argv[1]))\n"
    code += "except ConfigurationError as error: print(error)\n"
    environment = {key: value for key, value in os.environ.items() if key not in hub.OFFLINE_VARIABLES}
    environment |= {"HF_ENDPOINT": endpoint, "HF_HOME": str(home), **variables}
    done = subprocess.run(
        [sys.executable, "-c", code, name], capture_output=True, text=True, timeout=60, env=environment
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_a_model_of_the_hub_is_fetched_without_pickles_and_then_there_offline(tmp_path):
    with served() as endpoint:
        folder = Path(asked("owner/there", endpoint, tmp_path))
        assert sorted(file.name for file in folder.iterdir()) == ["config.json", "tokenizer.json"]
    assert asked("owner/there", endpoint, tmp_path, HF_HUB_OFFLINE="1") == str(folder)


def test_what_the_hub_lacks_or_does_not_give_is_said(tmp_path):
    with served() as endpoint:
        assert f"the hub at {endpoint} has no model of this name" in asked("owner/none", endpoint, tmp_path)
        assert "gives this model only to users who accepted its terms" in asked(
            "owner/gated", endpoint, tmp_path
        )
        begin = time.monotonic()
        answer = asked("owner/slow", endpoint, tmp_path, reach_s=0.5)
        assert "cannot be reached" in answer and "hf download owner/slow --local-dir FOLDER" in answer
        assert time.monotonic() - begin < 30


def test_a_hub_that_is_not_there_is_said_at_once(tmp_path):
    answer = asked("owner/there", "http://127.0.0.1:9", tmp_path)
    assert "the hub at http://127.0.0.1:9 cannot be reached" in answer and "give the folder here" in answer


@pytest.mark.parametrize("variable", hub.OFFLINE_VARIABLES)
def test_an_offline_variable_is_respected(monkeypatch, variable):
    for name in hub.OFFLINE_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(variable, "1")
    hub.reach_hub("owner/name", "model")
    assert hub.offline_variable() == variable


@pytest.mark.parametrize("path", ["model", "/no/such/model", "a/b/c", ".", "./model", "~/model", ""])
def test_a_path_that_is_no_name_of_the_hub_stays(path):
    assert hub.local_model(path) == path


def test_a_folder_is_not_looked_for_on_the_hub(tmp_path, monkeypatch):
    (tmp_path / "owner" / "name").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert hub.local_model("owner/name") == "owner/name"


def test_offline_a_model_that_was_not_fetched_is_refused(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ConfigurationError, match="HF_HUB_OFFLINE is set, and it was not fetched before"):
        hub.local_model("owner/name")

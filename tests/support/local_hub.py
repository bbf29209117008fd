"""As much of the Hugging Face hub, on loopback, as an upload needs."""

import base64
import json
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread


class Hub(BaseHTTPRequestHandler):
    """As much of the hub's API as an upload needs; `files` holds what was committed."""

    files: dict
    created: list

    def log_message(self, *_):
        pass

    def answer(self, document, status: int = 200):
        body = json.dumps(document).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def content(self) -> bytes:
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))
        parts = []
        while size := int(self.rfile.readline(), 16):
            parts.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(parts)

    def do_GET(self):
        if self.path == "/api/whoami-v2":
            token = self.headers.get("Authorization", "").removeprefix("Bearer ")
            roles = {"hf_test": "write", "hf_reads": "read"}
            if token not in roles:
                return self.answer({"error": "Invalid username or password."}, 401)
            auth = {"accessToken": {"role": roles[token]}}
            return self.answer(
                {
                    "type": "user",
                    "name": "me",
                    "orgs": [{"name": "lab"}],
                    "auth": auth,
                }
            )
        return self.answer(
            {
                "id": "me/cups",
                "sha": "0" * 40,
                "siblings": [],
                "modelId": "me/cups",
                "tags": [],
            }
        )

    def do_POST(self):
        content, here = self.content(), f"http://{self.headers['Host']}"
        if self.headers.get("Authorization") != "Bearer hf_test":
            self.answer({"error": "Invalid username or password."}, 401)
        elif self.path == "/api/repos/create":
            self.created.append(json.loads(content))
            self.answer({"url": f"{here}/me/cups", "id": "me/cups", "name": "me/cups"})
        elif "/preupload/" in self.path:
            plain = {"shouldIgnore": False, "oid": None, "uploadMode": "regular"}
            self.answer({"files": [{"path": file["path"], **plain} for file in json.loads(content)["files"]]})
        elif "/commit/" in self.path:
            entries = [entry["value"] for entry in map(json.loads, content.splitlines()) if entry["key"] == "file"]
            self.files.update({entry["path"]: base64.b64decode(entry["content"]) for entry in entries})
            self.answer({"commitOid": "1" * 40, "commitUrl": f"{here}/me/cups/commit/1", "success": True})
        else:  # validate-yaml and whatever only warns
            self.answer({"errors": [], "warnings": []})


@contextmanager
def local_hub() -> Iterator[tuple[type[Hub], dict, dict[str, str]]]:
    """A hub of one's own; the constants of huggingface_hub and the variables that lead to it."""
    hub = type("OneHub", (Hub,), {"files": {}, "created": []})
    server = ThreadingHTTPServer(("127.0.0.1", 0), hub)
    Thread(target=server.serve_forever, daemon=True).start()
    here = f"http://127.0.0.1:{server.server_port}"
    yield hub, {"ENDPOINT": here, "HF_HUB_DISABLE_XET": True}, {"HF_ENDPOINT": here, "HF_TOKEN": "hf_test"}
    server.shutdown()

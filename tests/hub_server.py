"""A local Hugging Face Hub over HTTP: enough of its API to push and to pull models with the real client.

Holds one class, `HubServer`. A repository is a folder with one sub-folder per commit, so that its history and what
each commit really contains can be looked at. It never touches the network beyond 127.0.0.1 and knows nothing of RecSA.
Covers model repositories, the branch `main`, files sent inline and by Git LFS; not: pull requests, Xet, access rights
beyond one token. Requests that it does not know are answered with 501 and kept in `HubServer.unknown`.
"""

import base64
import hashlib
import json
import os
import re
import shutil
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

DATE = "2026-01-01T00:00:00.000Z"
# The real hub also decides by content; the names suffice here.
LFS_SUFFIXES = (".safetensors", ".bin", ".pt")
LFS_NAMES = ("tokenizer.json",)


class NotFound(LookupError):
    """A repository, revision or entry is missing; the message is the error code by which the hub says which."""


class HubServer:
    """Serves the repositories under `root` while used as a context manager.

    Args:
        root: a folder for the repositories; created if it is missing.
        user: the name that the token belongs to.
    """

    def __init__(self, root: Path, user: str = "tester"):
        self.root = Path(root)
        self.user = user
        self.token = "hf_local_token"
        self.requests: list[tuple[str, str]] = []
        self.unknown: list[tuple[str, str]] = []
        self.lock = threading.Lock()
        handler = type("Handler", (_Handler,), {"hub": self})
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> "HubServer":
        (self.root / "lfs").mkdir(parents=True, exist_ok=True)
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_) -> None:
        self._server.shutdown()
        self._server.server_close()

    def env(self) -> dict[str, str]:
        """Environment variables of a process that uses this hub."""
        return {
            "HF_ENDPOINT": self.url,
            "HF_TOKEN": self.token,
            "HF_HUB_DISABLE_XET": "1",
            "HF_HUB_DISABLE_TELEMETRY": "1",
        }

    def commits(self, repo_id: str) -> list[str]:
        """Commit ids of a repository, oldest first; a new repository has one empty commit."""
        return (self.root / repo_id / "history").read_text().split()

    def folder(self, repo_id: str, revision: str = "main") -> Path:
        """The files of one commit. Raises `NotFound` if the repository or the revision does not exist."""
        history = self.root / repo_id / "history"
        if not history.exists():
            raise NotFound("RepoNotFound")
        commits = self.commits(repo_id)
        sha = commits[-1] if revision == "main" else revision
        if sha not in commits:
            raise NotFound("RevisionNotFound")
        return self.root / repo_id / sha

    def files(self, repo_id: str, revision: str = "main") -> list[str]:
        """Sorted paths of all files of one commit."""
        folder = self.folder(repo_id, revision)
        return sorted(p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file())

    def create(self, repo_id: str) -> bool:
        """Makes a repository with an empty first commit; False if it is there already."""
        repo = self.root / repo_id
        if (repo / "history").exists():
            return False
        sha = hashlib.sha1(repo_id.encode()).hexdigest()
        (repo / sha).mkdir(parents=True)
        (repo / "history").write_text(sha + "\n")
        return True

    def commit(self, repo_id: str, operations: list[dict]) -> str:
        """Applies the lines of a commit request to a copy of the newest commit and returns the new commit's id."""
        with self.lock:
            parent = self.folder(repo_id)
            digest = hashlib.sha1(parent.name.encode() + json.dumps(operations).encode()).hexdigest()
            folder = parent.parent / digest
            shutil.copytree(parent, folder, copy_function=os.link)
            for operation in operations:
                value = operation["value"]
                if operation["key"] == "header":
                    continue
                target = folder / value["path"]
                if operation["key"] == "deletedFolder":
                    shutil.rmtree(target)
                    continue
                target.unlink(missing_ok=operation["key"] != "deletedFile")  # a link: never write through it
                target.parent.mkdir(parents=True, exist_ok=True)
                if operation["key"] == "file":
                    target.write_bytes(base64.b64decode(value["content"]))
                elif operation["key"] == "lfsFile":
                    os.link(self.root / "lfs" / value["oid"], target)
            with open(parent.parent / "history", "a") as history:
                history.write(digest + "\n")
            return digest


def is_lfs(path: str) -> bool:
    return path.endswith(LFS_SUFFIXES) or path in LFS_NAMES


def object_id(path: str, content: bytes) -> str:
    """The id under which the hub knows a file: sha256 with LFS, else git's blob id."""
    if is_lfs(path):
        return hashlib.sha256(content).hexdigest()
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


REPO = r"(?P<repo>[^/]+/[^/]+)"
ROUTES = [
    ("GET", r"/api/whoami-v2", "whoami"),
    ("POST", r"/api/repos/create", "create"),
    ("POST", r"/api/validate-yaml", "validate_yaml"),
    ("POST", rf"/api/models/{REPO}/preupload/(?P<revision>[^/]+)", "preupload"),
    ("POST", rf"/api/models/{REPO}/commit/(?P<revision>[^/]+)", "commit"),
    ("GET", rf"/api/models/{REPO}/tree/(?P<revision>[^/]+)(?:/(?P<path>.+))?", "tree"),
    ("GET", rf"/api/models/{REPO}(?:/revision/(?P<revision>[^/]+))?", "info"),
    ("POST", rf"/{REPO}\.git/info/lfs/objects/batch", "lfs_batch"),
    ("PUT", r"/lfs/(?P<oid>[0-9a-f]{64})", "lfs_upload"),
    ("HEAD", rf"/{REPO}/resolve/(?P<revision>[^/]+)/(?P<path>.+)", "resolve"),
    ("GET", rf"/{REPO}/resolve/(?P<revision>[^/]+)/(?P<path>.+)", "resolve"),
]


class _Handler(BaseHTTPRequestHandler):
    """One request. The method called for a route gets the named groups of its pattern."""

    hub: HubServer
    protocol_version = "HTTP/1.1"

    def handle_request(self) -> None:
        path = urlsplit(self.path).path
        self.hub.requests.append((self.command, path))
        body = b"".join(self.read_body())
        for method, pattern, name in ROUTES:
            match = re.fullmatch(pattern, path) if method == self.command else None
            if match is None:
                continue
            groups = {key: unquote(value) if value else value for key, value in match.groupdict().items()}
            writes = method in ("POST", "PUT") and name not in ("validate_yaml", "lfs_upload")
            if writes and self.headers.get("Authorization") != f"Bearer {self.hub.token}":
                return self.fail(401, "Unauthorized")
            try:
                return getattr(self, name)(body, **groups)
            except NotFound as error:
                return self.fail(404, str(error))
        self.hub.unknown.append((self.command, path))
        return self.fail(501, "NotImplemented")

    do_GET = do_HEAD = do_POST = do_PUT = handle_request

    def read_body(self) -> Iterator[bytes]:
        if self.headers.get("Transfer-Encoding", "").lower() == "chunked":
            while size := int(self.rfile.readline(), 16):
                yield self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
        else:
            yield self.rfile.read(int(self.headers.get("Content-Length", 0)))

    def reply(self, content: bytes, status: int = 200, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for key, value in {"Content-Length": str(len(content)), **(headers or {})}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def reply_json(self, value, status: int = 200) -> None:
        self.reply(json.dumps(value).encode(), status, {"Content-Type": "application/json"})

    def fail(self, status: int, code: str) -> None:
        headers = {"X-Error-Code": code, "X-Error-Message": code, "Content-Type": "application/json"}
        self.reply(json.dumps({"error": code}).encode(), status, headers)

    def log_message(self, format: str, *args) -> None:
        """Keeps requests out of the tests' output; they are in `HubServer.requests`."""

    def whoami(self, body: bytes) -> None:
        self.reply_json({"type": "user", "name": self.hub.user, "orgs": []})

    def validate_yaml(self, body: bytes) -> None:
        self.reply_json({"errors": [], "warnings": []})

    def create(self, body: bytes) -> None:
        request = json.loads(body)
        repo = f"{request.get('organization') or self.hub.user}/{request['name']}"
        new = self.hub.create(repo)
        self.reply_json({"url": f"{self.hub.url}/{repo}", "name": repo, "id": repo}, 200 if new else 409)

    def preupload(self, body: bytes, repo: str, revision: str) -> None:
        folder = self.hub.folder(repo, revision)
        files = []
        for file in json.loads(body)["files"]:
            path, old = file["path"], folder / file["path"]
            oid = object_id(path, old.read_bytes()) if old.is_file() else None
            mode = "lfs" if is_lfs(path) else "regular"
            files.append({"path": path, "uploadMode": mode, "shouldIgnore": False, "oid": oid})
        self.reply_json({"files": files})

    def lfs_batch(self, body: bytes, repo: str) -> None:
        objects = []
        for item in json.loads(body)["objects"]:
            if not (self.hub.root / "lfs" / item["oid"]).exists():  # without actions: the hub has it already
                item["actions"] = {"upload": {"href": f"{self.hub.url}/lfs/{item['oid']}"}}
            objects.append(item)
        self.reply_json({"transfer": "basic", "objects": objects})

    def lfs_upload(self, body: bytes, oid: str) -> None:
        if hashlib.sha256(body).hexdigest() != oid:
            return self.fail(400, "BadHash")
        (self.hub.root / "lfs" / oid).write_bytes(body)
        self.reply(b"")

    def commit(self, body: bytes, repo: str, revision: str) -> None:
        sha = self.hub.commit(repo, [json.loads(line) for line in body.splitlines()])
        url = f"{self.hub.url}/{repo}/commit/{sha}"
        self.reply_json({"success": True, "commitOid": sha, "commitUrl": url, "hookOutput": ""})

    def tree(self, body: bytes, repo: str, revision: str, path: str | None) -> None:
        folder = self.hub.folder(repo, revision)
        names = [name for name in self.hub.files(repo, revision) if not path or name.startswith(path + "/")]
        if path and not names:
            raise NotFound("EntryNotFound")
        entries = []
        for name in names:
            content = (folder / name).read_bytes()
            oid, size = object_id(name, content), len(content)
            entry = {"type": "file", "path": name, "size": size, "oid": oid}
            entries.append(entry | ({"lfs": {"oid": oid, "size": size, "pointerSize": 134}} if is_lfs(name) else {}))
        self.reply_json(entries)

    def info(self, body: bytes, repo: str, revision: str | None) -> None:
        sha = self.hub.folder(repo, revision or "main").name
        siblings = [{"rfilename": name} for name in self.hub.files(repo, sha)]
        fields = {"id": repo, "modelId": repo, "author": repo.split("/")[0], "sha": sha, "siblings": siblings}
        flags = {"private": False, "gated": False, "disabled": False, "downloads": 0, "likes": 0, "tags": []}
        self.reply_json(fields | flags | {"createdAt": DATE, "lastModified": DATE})

    def resolve(self, body: bytes, repo: str, revision: str, path: str) -> None:
        folder = self.hub.folder(repo, revision)
        file = folder / path
        if not file.is_file():
            headers = {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": folder.name}
            return self.reply(b"", 404, headers)
        content = file.read_bytes()
        headers = {"ETag": f'"{object_id(path, content)}"', "X-Repo-Commit": folder.name, "Accept-Ranges": "bytes"}
        self.reply(content, headers=headers)

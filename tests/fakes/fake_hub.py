"""A Hugging Face hub with one model, for HF_ENDPOINT."""

import hashlib
import json

from tests.fakes.file_server import FileServer

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def publish(server: FileServer, hub_id: str, files: dict[str, bytes], *, revision: str = "main") -> None:
    """Make the server answer for a model repository as a hub does."""
    tree = []
    for name, content in files.items():
        oid = hashlib.sha1(content, usedforsecurity=False).hexdigest()
        path = f"/{hub_id}/resolve/{COMMIT}/{name}"
        server.files[path] = content
        server.headers[path] = {"ETag": f'"{oid}"', "X-Repo-Commit": COMMIT}
        tree.append({"type": "file", "path": name, "size": len(content), "oid": oid})
        for alias in (f"/{hub_id}/resolve/{revision}/{name}",):
            server.files[alias] = content
            server.headers[alias] = server.headers[path]
    info = {"id": hub_id, "sha": COMMIT, "siblings": [{"rfilename": name} for name in files], "tags": []}
    for name in {revision, COMMIT}:
        server.files[f"/api/models/{hub_id}/revision/{name}"] = json.dumps(info).encode()
    server.files[f"/api/models/{hub_id}"] = json.dumps(info).encode()
    server.files[f"/api/models/{hub_id}/tree/{COMMIT}"] = json.dumps(tree).encode()

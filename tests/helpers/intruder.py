"""Another user, or another machine, that tries every port and every file of a run: a program of its own.

It reads what it should try from standard input, {"uid", "targets", "files", "folders", "sockets"}, and prints what it got.
Its libraries are imported before it changes its user.
"""

import json
import os
import socket
import struct
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import grpc

CONNECT_S, REPLY_S = 2.0, 1.0
AT_ONCE = 32  # ports
NOBODY = 65534
HTTP_PATHS = ("/", "/metrics", "/v1/models", "/data?since=0", "/api/version", "/openapi.json")
# c10d's TCPStore: the query VALIDATE with its magic number, then PING with a number that it sends back
TCP_STORE = struct.pack("<BIBI", 0, 0x3C85F7CE, 13, 4711)
HTTP2 = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\x00\x00\x00\x04\x00\x00\x00\x00\x00"
PAYLOADS = {
    **{f"GET {path}": f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n".encode() for path in HTTP_PATHS},
    "TCPStore": TCP_STORE,
    "HTTP/2": HTTP2,
    "nothing": b"\x00" * 64,
    "ZMTP": b"\xff\x00\x00\x00\x00\x00\x00\x00\x01\x7f\x03\x00NULL" + b"\x00" * 47,
}
# One that reads, or changes, something of each of Ray's servers; RayletDriver is Ray Client's
RAY_METHODS = (
    "/ray.rpc.NodeInfoGcsService/GetAllNodeInfo",
    "/ray.rpc.JobInfoGcsService/GetAllJobInfo",
    "/ray.rpc.ActorInfoGcsService/GetAllActorInfo",
    "/ray.rpc.InternalKVGcsService/InternalKVKeys",
    "/ray.rpc.InternalKVGcsService/InternalKVPut",
    "/ray.rpc.NodeManagerService/GetSystemConfig",
    "/ray.rpc.NodeManagerService/RequestWorkerLease",
    "/ray.rpc.NodeManagerService/ShutdownRaylet",
    "/ray.rpc.ObjectManagerService/FreeObjects",
    "/ray.rpc.ObjectManagerService/Pull",
    "/ray.rpc.CoreWorkerService/GetCoreWorkerStats",
    "/ray.rpc.CoreWorkerService/PushTask",
    "/ray.rpc.CoreWorkerService/KillActor",
    "/ray.rpc.RayletDriver/ClusterInfo",
    "/ray.rpc.RayletDriver/Init",
)


def reply_to(target: Sequence, payload: bytes) -> str:
    """Return what a port answers: "refused", "silent", or the bytes as latin-1."""
    try:
        connection = socket.create_connection(tuple(target), CONNECT_S)
    except OSError:
        return "refused"
    with connection:
        connection.settimeout(REPLY_S)
        try:
            connection.sendall(payload)
            return connection.recv(4096).decode("latin-1") or "silent"
        except OSError:
            return "silent"


def status_of(target: Sequence, method: str) -> str:
    """Return the code with which a gRPC server answers a call without a token."""
    with grpc.insecure_channel(f"{target[0]}:{target[1]}") as channel:
        try:
            channel.unary_unary(method)(b"", timeout=CONNECT_S)
        except grpc.RpcError as error:
            return error.code().name
    return "OK"


def tried(target: Sequence) -> dict[str, str]:
    """Return what the port answers to each payload, and each call if it speaks HTTP/2."""
    replies = {name: reply_to(target, payload) for name, payload in PAYLOADS.items()}
    is_grpc = replies["HTTP/2"][3:4] == "\x04"  # a SETTINGS frame
    calls = {method: status_of(target, method) for method in RAY_METHODS} if is_grpc else {}
    return replies | calls


def opened(path: str, flags: int) -> bool:
    with suppress(OSError):
        os.close(os.open(path, flags | os.O_NONBLOCK | os.O_NOFOLLOW))
        return True
    return False


def connects(path: str) -> bool:
    with socket.socket(socket.AF_UNIX) as client, suppress(OSError):
        client.connect(path)
        return True
    return False


def written_into(folder: str) -> bool:
    path = os.path.join(folder, f"intruder-{os.getpid()}")
    with suppress(OSError):
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY))
        os.unlink(path)
        return True
    return False


def main() -> None:
    order = json.load(sys.stdin)
    tried(
        ["localhost", 1]
    )  # nobody listens there; what this needs is read from files that only the user can read
    status_of(["127.0.0.1", 1], RAY_METHODS[0])
    if order["uid"]:
        os.setgroups([])
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.setresuid(order["uid"], order["uid"], order["uid"])
    with ThreadPoolExecutor(AT_ONCE) as pool:  # one that is silent costs a second for each payload
        replies = list(pool.map(tried, order["targets"]))
    seen = {
        "ports": [[*target, reply] for target, reply in zip(order["targets"], replies, strict=True)],
        "read": [path for path in order["files"] if opened(path, os.O_RDONLY)],
        "written": [path for path in order["files"] if opened(path, os.O_WRONLY)],
        "entered": [path for path in order["folders"] if written_into(path)],
        "listed": [path for path in order["folders"] if os.access(path, os.R_OK)],
        "connected": [path for path in order["sockets"] if connects(path)],
    }
    print(json.dumps(seen))


if __name__ == "__main__":
    main()

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
AT_ONCE, MAX_REPLY = 32, 65_536  # ports, bytes
NOBODY = 65534
HTTP_PATHS = ("/", "/metrics", "/v1/models", "/data?since=0", "/api/version", "/openapi.json")
# c10d's TCPStore: the query VALIDATE with its magic number, then PING with a number that it sends back
TCP_STORE = struct.pack("<BIBI", 0, 0x3C85F7CE, 13, 4711)
HTTP2 = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\x00\x00\x00\x04\x00\x00\x00\x00\x00"
PAYLOADS = {
    **{
        f"GET {path}": f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n".encode()
        for path in HTTP_PATHS
    },
    "TCPStore": TCP_STORE,
    "HTTP/2": HTTP2,
    "nothing": b"\x00" * 64,
    "ZMTP": b"\xff\x00\x00\x00\x00\x00\x00\x00\x01\x7f\x03\x00NULL" + b"\x00" * 47,
}
# Of each service of Ray's servers what reads, changes or ends something. Those of Ray Client: RayletDriver, ...Streamer
RAY_SERVICES = {
    "ray.rpc.NodeInfoGcsService": "GetAllNodeInfo GetClusterId CheckAlive RegisterNode UnregisterNode DrainNode",
    "ray.rpc.JobInfoGcsService": "GetAllJobInfo AddJob MarkJobFinished",
    "ray.rpc.ActorInfoGcsService": "GetAllActorInfo ListNamedActors RegisterActor KillActorViaGcs",
    "ray.rpc.WorkerInfoGcsService": "GetAllWorkerInfo ReportWorkerFailure",
    "ray.rpc.InternalKVGcsService": "InternalKVKeys InternalKVGet InternalKVPut InternalKVDel GetInternalConfig",
    "ray.rpc.PlacementGroupInfoGcsService": "GetAllPlacementGroup",
    "ray.rpc.NodeResourceInfoGcsService": "GetAllTotalResources",
    "ray.rpc.TaskInfoGcsService": "GetTaskEvents AddTaskEventData",
    "ray.rpc.ControlPlanePubSubGcsService": "GcsPublish GcsSubscriberPoll",
    "ray.rpc.ObservabilityPubSubService": "GcsPublish ReportJobError",
    "ray.rpc.RuntimeEnvGcsService": "PinRuntimeEnvURI",
    "ray.rpc.autoscaler.AutoscalerStateService": "GetClusterStatus DrainNode",
    "ray.rpc.RayEventExportGcsService": "AddEvents",
    # Not ray.rpc.syncer.RaySyncer/StartSync: without the caller's metadata it ends the raylet (Ray 2.60), before it looks
    # at the token. See "Not protected" in docs/security.md
    "ray.rpc.NodeManagerService": "GetSystemConfig GetNodeStats RequestWorkerLease DrainRaylet ShutdownRaylet GlobalGC",
    "ray.rpc.ObjectManagerService": "Push Pull",
    "ray.rpc.ReporterService": "GetTraceback CpuProfiling ReportOCMetrics",
    "ray.rpc.CoreWorkerService": "GetCoreWorkerStats GetObjectStatus PushTask CancelTask KillActor Exit",
    "ray.rpc.RayletDriver": "Init KVGet KVPut ClusterInfo Schedule",
    "ray.rpc.RayletDataStreamer": "Datapath",
    "ray.rpc.RayletLogStreamer": "Logstream",
}
RAY_METHODS = tuple(f"/{service}/{name}" for service, names in RAY_SERVICES.items() for name in names.split())


def reply_to(target: Sequence, payload: bytes) -> str:
    """Return what a port answers: "refused", "silent", or the bytes as latin-1."""
    try:
        connection = socket.create_connection(tuple(target), CONNECT_S)
    except OSError:
        return "refused"
    reply = b""
    with connection, suppress(OSError):  # a time-out is one
        connection.settimeout(REPLY_S)
        connection.sendall(payload)
        while len(reply) < MAX_REPLY and (part := connection.recv(MAX_REPLY)):
            reply += part
    return reply.decode("latin-1") or "silent"


def statuses_of(target: Sequence, methods: Sequence[str]) -> dict[str, str]:
    """Return the codes with which a gRPC server answers calls without a token."""
    codes = {}
    with grpc.insecure_channel(f"{target[0]}:{target[1]}") as channel:
        for method in methods:
            try:
                channel.unary_unary(method)(b"", timeout=CONNECT_S)
                codes[method] = "OK"
            except grpc.RpcError as error:
                codes[method] = error.code().name
    return codes


def tried(target: Sequence) -> dict[str, str]:
    """Return what the port answers to each payload, and each call if it speaks HTTP/2."""
    replies = {name: reply_to(target, payload) for name, payload in PAYLOADS.items()}
    is_grpc = replies["HTTP/2"][3:4] == "\x04"  # a SETTINGS frame
    return replies | (statuses_of(target, RAY_METHODS) if is_grpc else {})


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
    statuses_of(["127.0.0.1", 1], RAY_METHODS[:1])
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

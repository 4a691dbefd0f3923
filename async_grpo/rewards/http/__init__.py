"""Asking servers that are slow, overloaded, broken or hostile, within limits that hold for the whole cluster.

traffic, meter, limits  permits: concurrency, requests and tokens per minute
http_client             one call: attempts (`retry`), replicas and their `breaker`, `hedging`
endpoint                where and how patiently; the errors
exchange, replies       one request on the wire, and its body
"""

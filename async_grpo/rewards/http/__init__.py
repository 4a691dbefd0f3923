"""Asking servers that are slow, overloaded, broken or hostile, within limits that hold for the whole cluster.

http_client              one call: attempts, permits, hedges
endpoint, deadline       where and how patiently; the errors
exchange                 one request on the wire, and its reply
replicas                 which address is asked; circuit breakers
rate_limiter, limits     permits: concurrency, requests and tokens per minute
"""

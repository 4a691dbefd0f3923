"""Asking servers that are slow, overloaded, broken or hostile, within limits that hold for the whole cluster.

http_client     one call: attempts, permits, hedges          endpoint    where, within which limits, how patiently
exchange        one request on the wire, and its reply       replicas    which address is asked; circuit breakers
rate_limiter    permits: concurrency, requests and tokens per minute
"""

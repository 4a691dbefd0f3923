"""Calls of servers that are slow, overloaded, broken or hostile, within limits that hold for the whole cluster.

http_client     one call: attempts, permits, hedges          endpoint    addresses, limits, deadlines and errors
exchange        one request and its reply                    replicas    choice of an address; circuit breakers
rate_limiter    permits: concurrency, requests and tokens per minute
"""

"""HTTP client for servers that may be slow, overloaded, broken or hostile, with rate limits for the whole cluster.

http_client     one call: retries, permits, hedges          endpoint    addresses, limits, deadlines and errors
exchange        one request and its reply                    replicas    choice of an address; circuit breakers
rate_limiter    permits: concurrency, requests and tokens per minute
"""

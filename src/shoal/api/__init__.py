"""The job service over HTTP: `shoal serve`.

    gate  →  routes (jobs, batch, operate)  →  Session and Catalog

The gate is the outermost layer: nothing of a request reaches a route before its host, token, origin,
type and size were checked. Routes hold no state of their own; what must last is in the frontier, so any
number of these processes may serve one frontier.
"""

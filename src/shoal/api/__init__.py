"""The job service over HTTP: `shoal serve`.

    Gate (middleware.py)  →  routes (jobs, batch, operations, schedules)  →  Session and Catalog

The gate is the outermost layer: a request reaches a route only after its host, token, origin, content type
and size have been checked. Routes hold no state of their own; the frontier holds all that must last, so any
number of these processes may serve one frontier.
"""

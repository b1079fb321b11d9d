"""`headway route`: the router of `headway.routing` as an HTTP proxy.

`prompts.py` (what of a request's body decides), `fleet.py` (replicas, heartbeats, who waits), `passage.py` (one request
on its way), `app.py` (routes), `life.py` (start and stop), `children.py` (replicas of one's own).
"""

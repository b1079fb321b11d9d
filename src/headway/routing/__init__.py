"""Where a request goes: one router for the HTTP proxy and the simulator, pure, with time as an argument.

Read in this order: `request.py` (what is routed), `replica.py` (what is known of a replica), `index.py` (which blocks
are known where), `policies/` (who is chosen, a short file each), `router.py` (queue, retries, draining, health).
"""

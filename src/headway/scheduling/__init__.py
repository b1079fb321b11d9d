"""The scheduler: which rows of a step compute what, so that every request's `computed` catches up with its tokens.

Read in this order: `row.py` and `state.py` (who is where, and the few ways to move), `planning.py` (one step being
planned), `policies/` (in which order its passes run), `commit.py` (a result applied), `scheduler.py` (the door).
Beside it: `queue.py`, `budget.py`, `shape.py`, `run.py` (many equal steps at once), `invariants.py` (the laws).
"""

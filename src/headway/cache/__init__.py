"""The paged key-value cache as bookkeeping: who holds which block, and what the blocks nobody holds still remember.

Read in this order: `pool.py` (blocks of one KV group), `hashing.py` (names of full blocks), `kv.py` (all groups,
prefix lookup), `table.py` (the one owner of blocks), `explain.py` (why a prompt missed).
"""

"""Cache blocks from one engine to another: prompts are computed in a prefill pool, answers in a decode pool.

    router --send TICKET--> prefill engine: computes the prompt, and keeps each block for the ticket as it is done
    router --pull TICKET--> decode engine: asks there for the blocks that it lacks, computes the rest, and answers

`ticket.py` (what the router says, signed), `wire.py` (frames and the handshake), `shared.py` (blocks in shared memory,
on one host), `outbox.py` and `give.py` (the prefill side), `take.py` (the decode side), `peers.py` (between steps).

Blocks are asked for by name: a keyed hash over namespace, adapter and all tokens up to the block's end, so that an
engine gets what it would have computed or nothing. Whatever goes wrong, the decode engine computes the rest: the answer
is the same.
"""

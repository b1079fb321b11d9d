"""Seam two: a model family is written once over `Ops`; backends run or record it. Read `protocol.py` first."""

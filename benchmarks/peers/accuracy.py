"""How far the kernels' answers are from the same file dequantised and computed in float32: `headway quality` on
the text that other engines are measured on.

python benchmarks/peers/accuracy.py [MODEL]        prints {"tokens", "perplexity", "mean", "p99", "percentile_99_9"}
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from headway.measure.quality import quality
from headway.ops.native.backend import NativeBackend
from headway.ops.reference import ReferenceBackend

TEXT = Path(__file__).parents[1] / "data" / "text.txt"


def main() -> None:
    source = sys.argv[1] if len(sys.argv) > 1 else None
    found = quality(source, NativeBackend(), ReferenceBackend(), TEXT.read_text(), worst=0)
    print(
        json.dumps(
            {
                "tokens": found.tokens,
                "perplexity": found.perplexity,
                "mean": found.kl_mean,
                "p99": found.kl_p99,
                "percentile_99_9": found.kl_p999,
            }
        )
    )


if __name__ == "__main__":
    main()

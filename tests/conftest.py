"""One BLAS thread for all tests: two of them beside other work wait for each other more than they compute."""

import os

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

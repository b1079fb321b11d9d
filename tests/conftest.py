"""One BLAS thread for all tests: two of them beside other work wait for each other more than they compute.

And Ctrl-C works, for the commands that tests interrupt: a shell that starts pytest in the background has it ignored.
"""

import os
import signal

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

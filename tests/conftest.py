"""One thread for BLAS and torch in all tests: two beside other work wait for each other more than they compute.

And Ctrl-C works, for the commands that tests interrupt: a shell that starts pytest in the background has it ignored.
"""

import os
import signal

for variable in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS"):
    os.environ.setdefault(variable, "1")
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

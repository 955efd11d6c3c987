"""What a fork server of loader processes imports before it forks them.

Modules, which they then have at once and share, out of the garbage collector's reach.
And deafness: a signal to a whole process group, as mpirun and Slurm send it, is meant
for the training process, which then saves. A server that died of it would take the
loader processes along.
"""

import atexit
import gc
import signal

import common.data  # noqa: F401
from common.launch import Watchdog

for number in Watchdog.SIGNALS:
    signal.signal(number, signal.SIG_IGN)
gc.freeze()
atexit.register(gc.unfreeze)  # or libraries report leaks at the end

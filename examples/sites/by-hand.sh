#!/usr/bin/env bash
# Two machines, started by hand: on each, one worker of the same run.
#
#   on machine A:   ./by-hand.sh 0 10.8.0.1:29500
#   on machine B:   ./by-hand.sh 1 10.8.0.1:29500
#
# The address is worker 0's, that of machine A, as machine B sees it; both give the same. Either may be started first,
# the other within ten minutes.
#
# Before:
#   1. The same version of atoll and of torch on both. Each machine reads the text, data.source, from its own disk; the
#      texts may be equal or different.
#   2. The same run.toml on both. It must say how many workers there are; copy it, do not write it twice:
#          atoll init run.toml            # then set sync.workers = 2 in it
#          scp run.toml B:
#   3. Keys, by which the workers know each other; traffic is encrypted with them. On machine A:
#          atoll keys new runs/run --workers 2
#      and copy runs/run/keys/worker-1, and nothing else of it, to the same path on machine B.
#   4. On machine A, the port open to machine B:
#          sudo ufw allow from B to any port 29500 proto tcp
#      There the workers meet. What they exchange then goes straight between them, on ports that the system picks; so
#      allow those as well, on one machine at least:
#          sudo ufw allow from B proto tcp to any port 32768:60999
#      Where neither reaches the other, put both on an overlay such as WireGuard or Nebula, and use the addresses that
#      they have there.
#
# To see whether B reaches A, with worker 0 running:   nc -vz 10.8.0.1 29500
#
# After an interruption (Ctrl-C, a power cut, a lost line): worker K keeps its state in runs/run/worker-K on its own
# machine. Ctrl-C saves at once; the others notice that one is gone, and stop too. Start all again, in any order, with
# the very same commands: --resume below continues a run that has begun, and begins one that has not.
#
# Exit status: 0 done, 1 failed (a peer died: start all again), 2 wrong settings, 130 interrupted and saved.

set -euo pipefail

if [[ $# -ne 2 || ! $1 =~ ^[0-9]+$ || $2 != *:* ]]; then
    echo "use: $0 WORKER HOST:PORT, such as $0 0 10.8.0.1:29500" >&2
    exit 2
fi
worker=$1 address=$2

# Several GPUs in one machine: they share the worker's batch.
gpus=$(nvidia-smi --list-gpus 2>/dev/null | wc -l) || gpus=0
if ((gpus > 1)); then
    start=(torchrun --nproc-per-node "$gpus" -m atoll)
else
    start=(python3 -m atoll)
fi

# In tmux, or with nohup before it, it outlives the connection that started it.
exec "${start[@]}" train run.toml --worker "$worker" --address "$address" --keys "runs/run/keys/worker-$worker" \
    --resume --view lines

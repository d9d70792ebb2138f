#!/usr/bin/env bash
# One model over the nodes of a Slurm job: sbatch conf/slurm.sh [MODEL] [flags of aserve serve]
# Adapt the lines below; layout.pp * layout.tp must be nodes * ntasks-per-node. Rank 0 is on the
# first node and serves HTTP there, on port 8000.
#SBATCH --job-name=aserve
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=8
#SBATCH --time=08:00:00
#SBATCH --signal=TERM@60

set -euo pipefail

# All tasks prove to each other that they know it. It lives as long as the job.
ASERVE_SECRET=$(head -c 32 /dev/urandom | base64)
export ASERVE_SECRET
# Another job on the same nodes needs a port of its own.
export ASERVE_PORT=$((20000 + SLURM_JOB_ID % 20000))

# When one task fails all end: Slurm starts no single one again, but --requeue would the job.
# SIGTERM (a minute before the end, or by scancel) drains.
exec srun --kill-on-bad-exit=1 \
    aserve serve --config conf/torchrun.toml --ranks cluster \
    --compute.threads "${SLURM_CPUS_PER_TASK:-1}" --server.host 0.0.0.0 "$@"

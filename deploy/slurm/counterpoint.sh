#!/bin/bash
#SBATCH --job-name=job
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=16
#SBATCH --mem=64G
#SBATCH --gpus-per-node=1
#SBATCH --time=720
#SBATCH --output=%x-%j.log
#SBATCH --signal=B:TERM@300
#SBATCH --requeue

# A whole job under Slurm: `sbatch counterpoint.sh` in the directory that holds job.toml and its output_dir, which all nodes share.
#
# Set the options above, and the image in `inside`. With `inside=()` the nodes have `counterpoint` on PATH. On several nodes all roles
# are on one of them, unless the file lets them be apart (docs/operations.md, "On the nodes of a Ray cluster"). A job that Slurm
# requeues or preempts goes on, since every start has --resume. No test runs Slurm or Apptainer.

set -euo pipefail
inside=(apptainer exec --nv --bind "$PWD" docker://registry.example/counterpoint:gpu)
options=()
if (( SLURM_JOB_NUM_NODES > 1 )); then
  # Whoever can reach a port of Ray can run code as this user: use nodes and a network of your own, or Ray's tokens.
  options=(--backend ray)
  mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
  address=$(srun --nodes=1 --ntasks=1 --nodelist="${nodes[0]}" hostname --ip-address)
  address=${address%% *}
  export RAY_ADDRESS="$address:$((20000 + SLURM_JOB_ID % 10000))"
  node=(--num-cpus="$SLURM_CPUS_PER_TASK" --num-gpus="${SLURM_GPUS_ON_NODE:-0}" --disable-usage-stats --block)
  srun --nodes=1 --ntasks=1 --cpus-per-task="$SLURM_CPUS_PER_TASK" --nodelist="${nodes[0]}" \
    "${inside[@]}" ray start --head --node-ip-address="$address" --port="${RAY_ADDRESS##*:}" \
      --include-dashboard=false "${node[@]}" &
  others=$((SLURM_JOB_NUM_NODES - 1))
  srun --nodes="$others" --ntasks="$others" --cpus-per-task="$SLURM_CPUS_PER_TASK" --exclude="${nodes[0]}" \
    "${inside[@]}" ray start --address="$RAY_ADDRESS" "${node[@]}" &
  "${inside[@]}" timeout 300 python -c "import ray, time; ray.init()
while sum(node['Alive'] for node in ray.nodes()) < $SLURM_JOB_NUM_NODES: time.sleep(1)"
fi
# In place of the shell, so that Slurm's SIGTERM reaches the job, which then ends in order and can be resumed.
exec "${inside[@]}" counterpoint run "$PWD/job.toml" --resume "${options[@]}"

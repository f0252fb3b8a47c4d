#!/bin/bash
#HEADER
# The functions that become engines are called by the steps, and the nodes expand what is quoted.
# shellcheck disable=SC2317,SC2016
set -euo pipefail

#SETTINGS
JOURNAL=$RUN/journal
LOGS=$RUN/logs
mkdir -p "$JOURNAL" "$LOGS"
export PYTHON JOURNAL
mapfile -t NODES < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
# Peers dial each other by address, and only a node itself knows which of its addresses is its own.
mapfile -t ADDRESSES < <(
  srun --nodes="${#NODES[@]}" --ntasks="${#NODES[@]}" bash -c 'echo "$SLURM_PROCID $(hostname -I)"' |
    sort -n | awk '{ print $2 }'
)
if [ "${#ADDRESSES[@]}" != "${#NODES[@]}" ]; then
  echo "kvops: ${#NODES[@]} nodes, but ${#ADDRESSES[@]} told their address" >&2
  exit 2
fi

#ENGINES

# What a step runs before it becomes the engine.
prepare() {
  # RDMA locks the memory that it registers.
  ulimit -l unlimited || echo "kvops: locked memory is limited to $(ulimit -l) KiB; set PropagateResourceLimitsExcept=MEMLOCK" >&2
  export POD_NAME=$NAME
  VLLM_NIXL_SIDE_CHANNEL_HOST=$(hostname -I | awk '{ print $1 }')
  export VLLM_NIXL_SIDE_CHANNEL_HOST VLLM_HOST_IP=$VLLM_NIXL_SIDE_CHANNEL_HOST
  "$PYTHON" -m kvops.cli.main doctor --only quick || {
    echo "kvops: $NAME does not start, for KV would not move as planned" >&2
    exit 2
  }
}

STEPS=()
ROUTER=
# engine ROLE NAME FIRST COUNT: start an engine over COUNT nodes from the one numbered FIRST.
engine() {
  local list
  list=$(IFS=,; echo "${NODES[*]:$3:$4}")
  # All ranks share an id that no earlier job had.
  NAME=$2 MASTER=${ADDRESSES[$3]} ENGINE_ID="$2-$SLURM_JOB_ID-${SLURM_RESTART_COUNT:-0}" \
    srun --overlap --nodes="$4" --ntasks="$4" --nodelist="$list" --output="$LOGS/$2.log" \
    bash -c "$(declare -f prepare "$1"); prepare; $1" &
  STEPS+=($!)
}

stop() {
  trap '' TERM INT
  # The router first: it finishes what it serves while the engines still answer.
  if [ -n "$ROUTER" ]; then
    kill -TERM "$ROUTER" 2>/dev/null || true
    wait "$ROUTER" || true
  fi
  kill -TERM "${STEPS[@]}" 2>/dev/null || true
  wait || true
}

trap 'stop; exit 0' TERM INT
#STEPS

srun --overlap --nodes=1 --ntasks=1 --nodelist="${NODES[0]}" --output="$LOGS/router.log" \
  #ROUTER &
ROUTER=$!
echo "kvops: router on ${ADDRESSES[0]}; logs in $LOGS"

# A fleet with a part missing is no fleet: whatever ends first ends the job.
wait -n || true
echo "kvops: a step ended; its log in $LOGS says why" >&2
stop
exit 1

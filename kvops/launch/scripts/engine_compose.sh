# A container learns its address when it starts, and a name would not do: the side channel listens on it.
VLLM_NIXL_SIDE_CHANNEL_HOST=$(python3 -c 'import socket; print(socket.gethostbyname(socket.gethostname()))')
export VLLM_NIXL_SIDE_CHANNEL_HOST VLLM_HOST_IP="$VLLM_NIXL_SIDE_CHANNEL_HOST"
python3 -m kvops.cli.main doctor --only quick || {
  echo "kvops: $POD_NAME does not start, for KV would not move as planned" >&2
  exit 1
}

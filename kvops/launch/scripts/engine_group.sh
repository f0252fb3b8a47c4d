#!/bin/sh
set -eu
# All ranks of a group share one id. The group restarts as a whole, and its first pod then has another address.
until leader=$(python3 -c 'import socket, sys; print(socket.gethostbyname(sys.argv[1]))' "$LWS_LEADER_ADDRESS" 2>/dev/null); do
  sleep 1
done
ENGINE_ID="${LWS_LEADER_ADDRESS%%.*}-$(echo "$leader" | tr . -)"
exec \

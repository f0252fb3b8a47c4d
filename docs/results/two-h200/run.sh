#!/usr/bin/env bash
# Measures on two H200 of one host what docs/results tells of: run.sh [FOLDER], about 40 minutes.
set -euo pipefail
here=$(dirname "$0")
runs=${1:-runs}
status=0

single=(--arrivals constant --output-tokens 128 --seconds 15 --seed 1)
kvops bench sweep -f "$here/sweep.yaml" "${single[@]}" --connectors both --input-tokens 1024,8192 --rates 8 --out "$runs/short" || status=1
kvops bench sweep -f "$here/sweep.yaml" "${single[@]}" --connectors both --input-tokens 16384 --rates 4,6 --out "$runs/long" || status=1
kvops bench sweep -f "$here/pairs.yaml" "${single[@]}" --connectors both --side-by-side --rounds 5 \
  --input-tokens 1024 --rates 8 --out "$runs/instruments" || status=1
kvops bench turns -f "$here/turns.yaml" --start-tokens 5000 --end-tokens 24000 --turns 4 --conversations 5 --rate 0 \
  --think-seconds 0 --output-tokens 64 --seed 1 --out "$runs/turns" || status=1

kvops report "$runs/short" --compare push pull --html "$runs/short.html"
kvops report "$runs/long" --compare push pull --html "$runs/long.html"
kvops report "$runs/instruments" --compare pull pull-stock
kvops report "$runs/instruments" --compare push push-stock --html "$runs/instruments.html"
kvops report "$runs/turns" --compare bidirectional-on bidirectional-off --html "$runs/turns.html"
kvops advise "$runs/turns" || status=1
exit $status
